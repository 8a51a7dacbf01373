"""F-43, U9: a claim whose document lock was taken away can't complete."""

import asyncio

import psycopg
import pytest

from lineshaft.errors import StaleClaimError
from lineshaft.model.tasks import NewTask, OutputContract
from tests.races.helpers import LIVE_ROW, held, waiting
from tests.world import World, cost, ref


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("gated", [False, True])
async def test_after_a_forced_release_the_old_holder_can_not_complete(
    world: World, taken: bool, gated: bool
) -> None:
    """U9, F-43: whether another task has the document by now or not; what it cost is booked."""
    agent = await world.agent()
    output = OutputContract(validation="json-schema", validation_schema={}) if gated else OutputContract()
    await world.submit(*[NewTask("edit", lock_key="lost:1", output=output)] * 2)
    old = await world.take(agent)
    await world.engine.locks.release("lost:1")
    if taken:
        assert (await world.take(agent)).id != old.id

    with pytest.raises(StaleClaimError, match="'lost:1'"):
        await world.complete(old, {"n": 1}, spent="0.5")

    assert world.status(old.id) == "RUNNING"
    assert world.live(old.id)["attempt_cost_usd"] == cost("0.5").cost_usd
    assert world.kinds(old.id)[-1] == "task.late_result"


async def test_after_a_forced_release_a_child_of_a_batch_can_not_complete(world: World) -> None:
    """U9, F-43: the lock is its batch's, and its claim was given it."""
    await world.one("batch", lock_key="lost:1", children=[NewTask("one"), NewTask("two")])
    child = await world.take()
    await world.engine.locks.release("lost:1")
    with pytest.raises(StaleClaimError, match="'lost:1'"):
        await world.complete(child)

    # The same child, claimed again, gets a lock of its own.
    await world.fail(child)
    world.age(minutes=10)
    await world.complete(await world.take())
    assert (await world.take()).type == "two"


async def test_a_heartbeat_of_a_claim_without_its_lock_is_lost(world: World) -> None:
    """F-43: its lease isn't renewed, so that the task is tried again."""
    agent = await world.agent()
    task_id = await world.one(lock_key="lost:1")
    task = await world.take(agent)
    assert await world.heartbeat(agent.id, agent.incarnation, [ref(task)]) == {task_id: "continue"}
    await world.engine.locks.release("lost:1")
    lease = world.live(task_id)["lease_until"]
    world.age(seconds=10)

    assert await world.heartbeat(agent.id, agent.incarnation, [ref(task)]) == {task_id: "lost"}

    assert world.live(task_id)["lease_until"] == lease
    world.age(minutes=2)
    await world.engine.maintenance.reap(10)
    assert world.status(task_id) == "RETRYING"


@pytest.mark.parametrize("kind", ["own", "batch"])
async def test_a_lock_is_taken_away_while_its_holder_completes(world: World, dsn: str, kind: str) -> None:
    """F-43: the completion began before the release, but ends after it."""
    if kind == "own":
        await world.one(lock_key="lost:1")
    else:
        await world.one("batch", lock_key="lost:1", children=[NewTask("one"), NewTask("two")])
    task = await world.take()
    with held(dsn, LIVE_ROW, task.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        completing = asyncio.ensure_future(world.complete(task))
        await waiting(look, 1)
        await world.engine.locks.release("lost:1")
        holder.rollback()
        with pytest.raises(StaleClaimError, match="'lost:1'"):
            await completing
    assert world.status(task.id) == "RUNNING"
