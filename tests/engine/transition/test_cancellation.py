"""Cancelling, and what goes down with it."""

from itertools import pairwise

import pytest

from lineshaft.errors import (
    InvalidTransitionError,
    NotFoundError,
    StaleClaimError,
)
from lineshaft.model.tasks import NewTask, OutputContract
from tests.world import World, ref, spawn_children


async def test_cancel_cascades(world: World) -> None:
    """R-172, R-173, R-175, U6: dependents with their direct upstream's name, in whatever state."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("a", key="a", idempotency_key="k"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
        NewTask("other", key="other"),
    )
    ids = {key: found.id for key, found in dag.tasks.items()}
    task = await world.take(agent, types=["a"])

    cancelled = await world.engine.cancel.cancel(ids["a"], "not needed")

    assert cancelled == sorted(ids[key] for key in "abc")
    assert world.end(ids["a"])["reason"] == "not needed"
    assert world.end(ids["b"])["reason"] == f"Parent {ids['a']} cancelled"
    assert world.end(ids["c"])["reason"] == f"Parent {ids['b']} cancelled"
    assert world.status(ids["other"]) == "READY"
    assert world.attempts(ids["a"])[0]["outcome"] == "cancelled"
    assert world.kinds(ids["b"])[-1] == "task.cancelled"
    assert world.rows("SELECT FROM lineshaft.task_key WHERE expires_at IS NULL") == []
    with pytest.raises(StaleClaimError):
        await world.complete(task)


@pytest.mark.parametrize("way", ["PENDING", "READY", "CLAIMED", "RUNNING", "VALIDATING", "RETRYING"])
async def test_cancel_from_every_live_state(world: World, way: str) -> None:
    """R-036, R-206: slot, money and lock come back."""
    agent = await world.agent()
    upstream = [await world.one("up")] if way == "PENDING" else []
    gate = OutputContract(validation="human" if way == "VALIDATING" else "none")
    task_id = await world.one("x", depends_on=upstream, max_cost_usd=1, lock_key="doc:1", output=gate)
    if way not in {"PENDING", "READY"}:
        (task,) = await world.claim(agent, types=["x"], start=way != "CLAIMED")
        if way == "VALIDATING":
            await world.complete(task)
        if way == "RETRYING":
            await world.fail(task)
    assert world.status(task_id) == way

    assert await world.engine.cancel.cancel(task_id, "no") == [task_id]

    assert world.status(task_id) == "CANCELLED"
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"], world.lock("doc:1")) == (0, 0, None)


async def test_cancel_without_cascade(world: World) -> None:
    """R-173: dependents stay, flagged, and the DAG has failed until the task is retried."""
    dag = await world.dag(
        NewTask("a", key="a"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
        NewTask("d", key="d"),
    )
    a, b, c, d = (found.id for found in dag.tasks.values())

    assert await world.engine.cancel.cancel(a, "no", cascade=False) == [a]

    assert world.statuses([a, b]) == ["CANCELLED", "PENDING"]
    assert world.task(b)["blocked_by"] == [a]
    for name in (b, c):
        assert (await world.engine.read.task(name)).blocked_reason == f"Upstream {a} is CANCELLED"
    assert world.dag_row(dag.id)["status"] == "pending", "d can run"
    await world.complete(await world.take(types=["d"]))
    assert (world.status(d), world.dag_row(dag.id)["status"]) == ("COMPLETED", "failed")
    await world.engine.revive.retry(a)
    assert world.dag_row(dag.id)["status"] == "running"
    assert (await world.engine.read.task(b)).blocked_reason is None


async def test_cancelling_again_changes_nothing(world: World) -> None:
    """R-174: 200 for a cancelled one, 409 for what ended otherwise."""
    agent = await world.agent()
    cancelled, done = await world.submit(*(NewTask("code", priority=n) for n in (0, 1)))
    await world.engine.cancel.cancel(cancelled, "no")
    await world.complete(await world.take(agent))
    dead = await world.one()
    await world.kill(agent)
    before = world.everything()

    assert await world.engine.cancel.cancel(cancelled, "again") == []
    for task_id in (done, dead):
        with pytest.raises(InvalidTransitionError, match="already"):
            await world.engine.cancel.cancel(task_id, "no")

    assert world.everything() == before


@pytest.mark.slow("ten thousand tasks")
async def test_a_chain_of_ten_thousand_is_cancelled(world: World) -> None:
    """R-146, R-173, F-13: iteratively, in one transaction."""
    names = [f"{n}" for n in range(10_000)]
    tasks = [NewTask("code", key="0")]
    tasks += [NewTask("code", key=name, depends_on=[before]) for before, name in pairwise(names)]
    dag = await world.dag(*tasks)

    cancelled = await world.engine.cancel.cancel(dag.tasks["0"].id, "no")

    assert len(cancelled) == 10_000
    assert world.dag_row(dag.id)["status"] == "cancelled"
    assert world.end(dag.tasks["9999"].id)["reason"] == f"Parent {dag.tasks['9998'].id} cancelled"


async def test_cancelling_a_parent_cancels_its_children(world: World) -> None:
    """R-177, R-194: of a batch, and of a task that spawned."""
    agent = await world.agent()
    batch = await world.one("batch", children=[NewTask("one"), NewTask("two")])
    await world.take(agent)
    assert len(await world.engine.cancel.cancel(batch, "no")) == 3
    await world.one("parent")
    parent = await world.take(agent)
    (child,) = await spawn_children(world.engine, ref(parent), [NewTask("child")])

    assert await world.engine.cancel.cancel(parent.id, "no") == sorted([parent.id, child.id])
    assert world.end(child.id)["reason"] == f"Parent {parent.id} cancelled"


async def test_cancelling_a_batchs_child_cancels_the_batch(world: World) -> None:
    """R-177, R-190: it can never be whole again."""
    batch = await world.one("batch", children=[NewTask("one"), NewTask("two"), NewTask("three")])
    (two,) = world.rows("SELECT id FROM lineshaft.task WHERE type = 'two'")

    await world.engine.cancel.cancel(two["id"], "no")

    assert {row["status"] for row in world.rows("SELECT * FROM lineshaft.tasks")} == {"CANCELLED"}
    assert world.dag_row(world.task(batch)["dag_id"])["status"] == "cancelled"


async def test_a_cancellation_does_not_reach_what_waits_for_a_dead_letter(world: World) -> None:
    """U6, R-173: dependents of a dead-lettered child wait for it, not for the cancelled parent."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    (child,) = await spawn_children(world.engine, ref(parent), [NewTask("child")])
    waits = await world.one("waits", depends_on=[child.id])
    await world.kill(agent, child.id)

    assert await world.engine.cancel.cancel(parent.id, "no") == [parent.id]

    assert world.statuses([child.id, waits]) == ["DEAD_LETTERED", "PENDING"]


async def test_a_whole_dag_is_cancelled_with_what_depends_on_it_elsewhere(world: World) -> None:
    """R-172, R-173, U7: whatever has not ended ends, each with the reason; what is done stays done."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("code", key="done", priority=1),
        NewTask("code", key="running", priority=20),
        NewTask("code", key="waiting", depends_on=["running"]),
    )
    outside = await world.one(depends_on=[dag.tasks["waiting"].id])
    await world.complete(await world.take(agent))
    running = await world.take(agent)

    cancelled = await world.engine.cancel.cancel_dag(dag.id, "no longer wanted")

    assert cancelled == sorted([dag.tasks["running"].id, dag.tasks["waiting"].id, outside])
    assert world.end(dag.tasks["running"].id)["reason"] == "no longer wanted"
    assert world.end(outside)["reason"] == f"Parent {dag.tasks['waiting'].id} cancelled"
    assert world.dag_row(dag.id)["status"] == "completed", "one of its tasks was completed (U7)"
    assert running.id in cancelled
    assert await world.engine.cancel.cancel_dag(dag.id, "again") == []


async def test_a_standalone_tasks_dag_can_be_cancelled_too(world: World) -> None:
    """R-013: every task has a DAG, and every DAG call answers for it."""
    task_id = await world.one()
    assert await world.engine.cancel.cancel_dag(world.task(task_id)["dag_id"], "x") == [task_id]
    with pytest.raises(NotFoundError, match="dag_nowhere"):
        await world.engine.cancel.cancel_dag("dag_nowhere", "x")


async def test_what_is_paused_is_not_handed_out(world: World) -> None:
    agent = await world.agent()
    code, review = await world.one("code"), await world.one("review")
    pauses = world.engine.pauses
    await pauses.pause("code")
    await pauses.pause("code")
    assert [task.id for task in await world.claim(agent, 10)] == [review]
    assert await pauses.resume("code")
    assert not await pauses.resume("code")
    await pauses.pause()
    assert await world.claim(agent, 10) == []
    await pauses.resume()
    assert [task.id for task in await world.claim(agent, 10)] == [code]
