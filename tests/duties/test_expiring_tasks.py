"""F-34: a task with `expire_at_deadline` is cancelled when its deadline passes."""

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from lineshaft.duties.promoter import Promoter
from lineshaft.errors import InvalidInputError, InvalidTransitionError
from lineshaft.model.tasks import NewTask, RetrySpec
from lineshaft.types.changes import TaskChange
from tests.races.helpers import LIVE_ROW, held, waiting
from tests.world import World, ref


def expiring(world: World, **fields: Any) -> dict[str, Any]:
    return {"deadline": world.clock.now() + timedelta(seconds=30), "expire_at_deadline": True, **fields}


async def promote(world: World) -> dict[str, int]:
    return dict(await Promoter(world.engine.maintenance).run_once())


@pytest.mark.parametrize("others", [0, 60], ids=["by INSERT", "by COPY"])
@pytest.mark.parametrize("status", ["READY", "PENDING", "RETRYING", "CLAIMED", "RUNNING"])
async def test_a_task_is_cancelled_in_every_state_when_its_deadline_passes(
    world: World, status: str, others: int
) -> None:
    agent = await world.agent()
    fields = expiring(world)
    if status == "PENDING":
        fields["run_at"] = world.clock.now() + timedelta(hours=1)
    if status == "RETRYING":
        fields["retry"] = RetrySpec(strategy="fixed", initial_delay_sec=3_600)
    task_id, *_ = await world.submit(NewTask("code", **fields), *[NewTask("other")] * others)
    task = None
    if status in {"RETRYING", "CLAIMED", "RUNNING"}:
        task = await world.take(agent, types=["code"], start=status != "CLAIMED")
        if status == "RETRYING":
            await world.fail(task)
    assert world.status(task_id) == status
    await promote(world)
    world.age(seconds=30)

    assert (await promote(world))["deadlines missed"] == 1

    assert (world.status(task_id), world.end(task_id)["reason"]) == ("CANCELLED", "deadline missed")
    assert world.kinds(task_id)[-2:] == ["task.deadline_missed", "task.cancelled"]
    if status == "RUNNING":
        assert task is not None
        assert await world.heartbeat(agent.id, agent.incarnation, [ref(task)]) == {task_id: "cancel"}
    assert (await promote(world)).get("deadlines missed", 0) == 0


async def test_a_missed_deadline_cancels_dependents_too(world: World) -> None:
    dag = await world.dag(
        NewTask("up", key="up", **expiring(world)), NewTask("down", key="down", depends_on=["up"])
    )
    world.age(seconds=31)
    await promote(world)
    assert world.dag_row(dag.id)["status"] == "cancelled"
    assert world.end(dag.tasks["down"].id)["reason"] == f"Parent {dag.tasks['up'].id} cancelled"
    assert "task.deadline_missed" not in world.kinds(dag.tasks["down"].id)


@pytest.mark.parametrize("weighing", [False, True])
async def test_a_claim_passes_over_a_task_past_its_deadline(world: World, weighing: bool) -> None:
    if weighing:
        await world.engine.pauses.pause("something else")
    agent = await world.agent()
    late = await world.one(priority=0, **expiring(world))
    merely_late = await world.one(priority=1, deadline=world.clock.now() + timedelta(seconds=30))
    world.age(seconds=30)

    assert [task.id for task in await world.claim(agent, 5)] == [merely_late]
    assert not (await world.engine.read.why(late)).runnable
    with pytest.raises(InvalidTransitionError, match="CANCELLED"):
        await world.engine.claims.claim_task(agent.id, agent.incarnation, late)


async def test_a_task_that_missed_its_deadline_needs_a_new_one_to_be_retried(world: World) -> None:
    agent = await world.agent()
    task_id = await world.one(**expiring(world))
    world.age(seconds=31)
    await promote(world)

    with pytest.raises(InvalidTransitionError, match="deadline"):
        await world.engine.revive.retry(task_id)
    with pytest.raises(InvalidTransitionError, match="priority"):
        await world.engine.edit.edit(task_id, TaskChange(priority=1))
    later = world.clock.now() + timedelta(seconds=60)
    await world.engine.edit.edit(task_id, TaskChange(deadline=later))
    assert await world.engine.revive.retry(task_id) == "READY"
    assert (await world.engine.read.task(task_id)).expire_at_deadline

    assert [task.id for task in await world.claim(agent)] == [task_id]
    world.age(seconds=61)
    await promote(world)
    assert world.status(task_id) == "CANCELLED"


async def test_without_its_deadline_a_task_never_expires(world: World) -> None:
    task_id = await world.one(**expiring(world))
    await world.engine.edit.edit(task_id, TaskChange(deadline=None))
    world.age(days=1)
    await promote(world)
    assert (await world.take()).id == task_id


async def test_expire_at_deadline_needs_a_deadline(world: World) -> None:
    with pytest.raises(InvalidInputError, match="expire_at_deadline"):
        await world.one(expire_at_deadline=True)


async def test_a_deadline_is_moved_while_its_task_expires(world: World, dsn: str) -> None:
    """F-34: the new deadline counts."""
    task_id = await world.one(**expiring(world))
    world.age(seconds=31)
    with held(dsn, LIVE_ROW, task_id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        expires = asyncio.ensure_future(promote(world))
        await waiting(look, 1)
        holder.execute(
            "UPDATE lineshaft.task_live SET deadline = deadline + interval '1 hour',"
            " rekey_at = rekey_at + interval '1 hour' WHERE id = %s",
            [task_id],
        )
        holder.execute("UPDATE lineshaft.task SET deadline = deadline + interval '1 hour'")
        holder.commit()
        await expires
    assert world.status(task_id) == "READY"
