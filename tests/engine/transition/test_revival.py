"""Manual retries: dead-lettered and cancelled tasks start again."""

from decimal import Decimal

import pytest

from lineshaft.errors import (
    AlreadyExistsError,
    InvalidTransitionError,
    StaleClaimError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from tests.world import World, cost, ref, spawn_children


async def test_retry_starts_anew_but_the_epoch_goes_on(world: World) -> None:
    """R-122, R-133, F-30: counters at zero, history and cost kept, no zombie matches."""
    agent = await world.agent()
    task_id = await world.one(max_attempts=1)
    old = await world.take(agent)
    await world.fail(old, spent=cost("0.5"))
    world.age(minutes=10)

    assert await world.engine.revive.retry(task_id) is Status.READY

    live = world.live(task_id)
    assert (live["attempts"], live["epoch"], live["revivals"], live["rate_limits"]) == (0, 1, 1, 0)
    assert (live["cost_usd"], live["ready_at"]) == (Decimal("0.5"), world.clock.now())
    assert world.kinds(task_id)[-2:] == ["task.resolved", "task.ready"]
    letter = world.row("SELECT * FROM lineshaft.dead_letter")
    assert (letter["reviewed"], letter["resolution"]) == (True, "retry")
    with pytest.raises(StaleClaimError):
        await world.complete(old)
    new = await world.take(agent)
    assert (new.epoch, new.resume) == (2, True)
    await world.fail(new)
    assert [(a["number"], a["revival"]) for a in world.attempts(task_id)] == [(1, 0), (1, 1)]


async def test_retry_of_a_cancelled_task_waits_for_what_is_open(world: World) -> None:
    """R-122: PENDING while an upstream is not done, READY once it is."""
    agent = await world.agent()
    dag = await world.dag(NewTask("a", key="a"), NewTask("b", key="b", depends_on=["a"]))
    a, b = (found.id for found in dag.tasks.values())
    await world.engine.cancel.cancel(a, "no")
    assert world.dag_row(dag.id)["status"] == "cancelled"

    assert await world.engine.revive.retry(b) is Status.PENDING
    assert await world.engine.revive.retry(a) is Status.READY
    assert world.dag_row(dag.id)["cancelled"] == 0
    await world.complete(await world.take(agent))

    assert world.status(b) == "READY"


async def test_retry_later(world: World) -> None:
    """R-132: wait and retry."""
    agent = await world.agent()
    task_id = await world.one()
    await world.kill(agent)

    assert await world.engine.revive.retry(task_id, delay_sec=60) is Status.PENDING

    assert world.waits(task_id) == 60
    assert await world.claim(agent) == []


async def test_retry_of_a_batch_later(world: World) -> None:
    """R-132, R-193: it is its children that wait."""
    agent = await world.agent()
    batch = await world.one("batch", children=[NewTask("one"), NewTask("two")])
    await world.kill(agent)

    assert await world.engine.revive.retry(batch, delay_sec=60) is Status.PENDING

    assert await world.claim(agent) == []
    world.age(seconds=60)
    await world.engine.maintenance.promote_due(10)
    for _ in range(2):
        await world.complete(await world.take(agent))
    assert world.status(batch) == "COMPLETED"


async def test_retry_of_a_retrying_task_is_now(world: World) -> None:
    """R-122, F-51: due at once, counters kept."""
    agent = await world.agent()
    task_id = await world.one()
    await world.fail(await world.take(agent))

    assert await world.engine.revive.retry(task_id) is Status.READY

    assert world.live(task_id)["attempts"] == 1
    assert world.kinds(task_id)[-1] == "task.ready"
    with pytest.raises(InvalidTransitionError, match="it is READY"):
        await world.engine.revive.retry(task_id)


async def test_a_completed_or_running_task_can_not_be_retried(world: World) -> None:
    """R-122, F-49: that would run it twice."""
    agent = await world.agent()
    task_id = await world.one()
    task = await world.take(agent)
    with pytest.raises(InvalidTransitionError, match="it is RUNNING"):
        await world.engine.revive.retry(task_id)
    await world.complete(task)
    with pytest.raises(InvalidTransitionError, match="it is COMPLETED"):
        await world.engine.revive.retry(task_id)


async def test_a_revived_task_takes_its_key_back(world: World) -> None:
    """U8: or is refused if a newer task has it."""
    agent = await world.agent()
    submit = world.engine.submission.submit
    new = NewTask("code", idempotency_key="k", spec={"n": 1})
    (first,) = await submit([new])
    await world.engine.cancel.cancel(first.id, "no")
    await world.engine.revive.retry(first.id)
    (again,) = await submit([new])
    assert (again.id, again.duplicate, again.mismatch) == (first.id, True, False)

    await world.engine.cancel.cancel(first.id, "no")
    (second,) = await submit([new])
    assert not second.duplicate
    before = world.everything()
    with pytest.raises(AlreadyExistsError, match="'k' is in use"):
        await world.engine.revive.retry(first.id)
    assert world.everything() == before
    assert (await world.take(agent)).id == second.id


async def test_a_revived_child_that_was_spawned_locks_for_itself(world: World) -> None:
    """R-206: its parent is not a batch and holds no lock for it."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    await spawn_children(world.engine, ref(parent), [NewTask("child", lock_key="doc:1")])
    child = await world.kill(agent)
    await world.engine.revive.retry(child)

    await world.complete(await world.take(agent))

    assert world.lock("doc:1") is None
