"""R-116: a claim takes what is due, whether the promoter has seen it or not."""

import asyncio
from datetime import timedelta

import psycopg
import pytest

from lineshaft.model.tasks import NewTask, RetrySpec
from tests.world import World, ref, release_claims


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("weighing", [False, True])
async def test_an_immediate_retry_is_claimable_at_once(world: World, by_id: bool, weighing: bool) -> None:
    if weighing:
        # The fast path is closed.
        await world.engine.pauses.pause("something else")
    agent = await world.agent()
    task_id = await world.one(retry=RetrySpec(strategy="immediate"))
    assert await world.fail(await world.take(agent)) == "RETRYING"

    if by_id:
        claim = await world.engine.claims.claim_task(agent.id, agent.incarnation, task_id, start=True)
        (task,) = claim.tasks
    else:
        task = await world.take(agent)

    assert (task.id, task.attempts) == (task_id, 1)
    assert world.kinds(task_id)[-3:] == ["task.ready", "task.claimed", "task.started"]


async def test_a_passed_delay_fills_up_a_claim(world: World) -> None:
    agent = await world.agent()
    later = await world.one(run_at=world.clock.now() + timedelta(seconds=60))
    snoozed = await world.one(priority=1)
    await release_claims(world.engine, [ref(await world.take(agent))], delay_sec=30)
    ready = await world.one()

    assert [task.id for task in await world.claim(agent, 3)] == [ready]
    world.age(seconds=30)
    assert [task.id for task in await world.claim(agent, 3)] == [snoozed]
    world.age(seconds=30)
    assert [task.id for task in await world.claim(agent, 3)] == [later]


async def test_a_due_task_that_is_blocked_stays_pending(world: World) -> None:
    """R-116, F-21: promoting by a claim counts the open dependencies too."""
    dag = await world.dag(
        NewTask("up", key="up"),
        NewTask("down", depends_on=["up"], run_at=world.clock.now() + timedelta(seconds=5)),
    )
    world.age(seconds=6)
    assert [task.id for task in await world.claim(await world.agent(), 5)] == [dag.tasks["up"].id]
    assert world.status(next(t.id for key, t in dag.tasks.items() if key != "up")) == "PENDING"


async def test_two_claims_promote_the_same_task_once(world: World) -> None:
    agents = [await world.agent(), await world.agent()]
    task_id = await world.one(retry=RetrySpec(strategy="immediate"))
    await world.fail(await world.take(agents[0]))

    claims = await asyncio.gather(*(world.claim(agent) for agent in agents))

    assert sorted(len(tasks) for tasks in claims) == [0, 1]
    assert world.kinds(task_id).count("task.claimed") == 2


async def test_a_claim_passes_over_a_due_task_that_another_transaction_holds(world: World, dsn: str) -> None:
    agent = await world.agent()
    task_id = await world.one(retry=RetrySpec(strategy="immediate"))
    await world.fail(await world.take(agent))
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM lineshaft.task_live WHERE id = %s FOR UPDATE", [task_id])
        assert await world.claim(agent) == []
        holder.rollback()
    assert (await world.take(agent)).id == task_id
