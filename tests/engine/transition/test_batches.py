"""R-190…R-196: children in order, and what becomes of their batch."""

from datetime import timedelta

import pytest

from lineshaft.errors import (
    InvalidInputError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from tests.world import World


async def test_children_run_in_the_listed_order(world: World) -> None:
    """R-190, R-191, R-192: a chain under a parent that has no work of its own."""
    agent = await world.agent()
    batch = await world.one("batch", children=[NewTask("one"), NewTask("two"), NewTask("three")])
    assert world.status(batch) == "PENDING"
    seen = []

    while claimed := await world.claim(agent, 10):
        (task,) = claimed
        seen.append(task.type)
        assert task.parent_id == batch
        assert world.status(batch) == "PENDING"
        await world.complete(task, {"from": task.type})

    assert seen == ["one", "two", "three"]
    assert world.status(batch) == "COMPLETED"
    assert world.end(batch)["output"] == [{"from": "one"}, {"from": "two"}, {"from": "three"}]
    assert world.kinds(batch)[-1] == "task.completed"
    assert world.dag_row(world.task(batch)["dag_id"])["status"] == "completed"


async def test_children_inherit_what_they_leave_out(world: World) -> None:
    """R-190, U15: document, priority, attempts and preset."""
    batch = await world.one(
        "batch",
        preset="officeplane",
        priority=20,
        lock_key="doc:1",
        max_attempts=2,
        children=[
            NewTask("heir"),
            NewTask("own", preset="loki", priority=5, lock_key="doc:2", max_attempts=7),
        ],
    )

    heir, own = world.rows(
        "SELECT task.*, live.lock_owner FROM lineshaft.task JOIN lineshaft.task_live AS live USING (id)"
        " WHERE parent_id = %s ORDER BY id",
        batch,
    )
    named = ("preset", "priority", "lock_key", "max_attempts", "priority_boost_per_minute")
    assert [heir[name] for name in named] == ["officeplane", 20, "doc:1", 2, 0.0]
    assert [own[name] for name in named] == ["loki", 5, "doc:2", 7, 0.0]
    # Under the batch's lock only if it is the batch's document.
    assert (heir["lock_owner"], own["lock_owner"]) == (batch, None)


async def test_nested_batches_run_in_order_too(world: World) -> None:
    """R-191, R-195: tasks below a later child wait for the earlier one."""
    agent = await world.agent()
    batch = await world.one(
        "batch",
        lock_key="doc:1",
        children=[
            NewTask("one"),
            NewTask("inner", children=[NewTask("two"), NewTask("three")]),
            NewTask("inner", children=[NewTask("innermost", children=[NewTask("four")])]),
            NewTask("five"),
        ],
    )
    seen = []

    while claimed := await world.claim(agent, 10):
        seen.append([task.type for task in claimed])
        for task in claimed:
            await world.complete(task, task.type)

    assert seen == [["one"], ["two"], ["three"], ["four"], ["five"]]
    assert world.end(batch)["output"] == ["one", ["two", "three"], [["four"]], "five"]
    assert world.lock("doc:1") is None


async def test_a_batch_that_depends_on_a_task_waits_with_all_its_children(world: World) -> None:
    """R-191, R-142: in a DAG a batch is one step like any other."""
    agent = await world.agent()
    at = world.clock.now() + timedelta(hours=1)
    dag = await world.dag(
        NewTask("first", key="first"),
        NewTask("batch", key="batch", depends_on=["first"], children=[NewTask("one"), NewTask("two")]),
        NewTask("last", key="last", depends_on=["batch"]),
    )
    later = await world.one("later", run_at=at, children=[NewTask("scheduled")])
    seen = []

    while claimed := await world.claim(agent, 10):
        seen.append([task.type for task in claimed])
        for task in claimed:
            await world.complete(task)

    assert seen == [["first"], ["one"], ["two"], ["last"]]
    assert world.dag_row(dag.id)["status"] == "completed"
    (scheduled,) = world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s", later)
    assert world.live(scheduled["id"])["due_at"] == at


async def test_children_have_dependencies_of_their_own(world: World) -> None:
    """R-190, R-008: a child may wait for an existing task, by id or by reference."""
    agent = await world.agent()
    upstream = await world.one("upstream")
    await world.one(
        "batch",
        children=[
            NewTask("one", spec={"context_refs": [f"task:{upstream}:output"]}),
            NewTask("two", depends_on=[upstream]),
        ],
    )

    (first,) = await world.claim(agent, 10)
    assert first.type == "upstream"
    await world.complete(first, {"n": 7})

    (one,) = (found := await world.claims(agent, 10)).tasks
    assert one.type == "one"
    assert found.inputs == {upstream: b'{"n": 7}'}
    (two,) = world.rows("SELECT * FROM lineshaft.tasks WHERE type = 'two'")
    assert upstream in two["depends_on"]


async def test_children_nest_ten_deep_at_most(world: World) -> None:
    """R-195."""

    def nested(depth: int) -> NewTask:
        return NewTask("code", children=[nested(depth - 1)] if depth else [])

    await world.submit(nested(10))
    with pytest.raises(InvalidInputError, match="nested deeper than 10"):
        await world.submit(nested(11))


async def test_a_child_that_fails_takes_its_batch_along(world: World) -> None:
    """R-193, F-48: siblings cancelled, the parent dead; a retry of the parent redoes only those."""
    agent = await world.agent()
    batch = await world.one(
        "batch", lock_key="doc:1", children=[NewTask("one"), NewTask("two"), NewTask("three")]
    )
    after = await world.one("after", depends_on=[batch])
    one = await world.take(agent)
    await world.complete(one, 1)
    two = await world.take(agent)

    await world.fail(two, category="auth_failure")

    (three,) = world.rows("SELECT * FROM lineshaft.tasks WHERE type = 'three'")
    assert world.statuses([batch, one.id, two.id]) == ["DEAD_LETTERED", "COMPLETED", "DEAD_LETTERED"]
    assert (three["status"], three["cancel_reason"]) == ("CANCELLED", "sibling failed")
    end = world.end(batch)
    assert (end["reason"], end["category"]) == (f"child {two.id} failed", "dependency")
    assert world.status(after) == "PENDING"
    assert world.lock("doc:1") is None

    assert await world.engine.revive.retry(batch) is Status.PENDING
    assert world.statuses([batch, two.id, three["id"]]) == ["PENDING", "READY", "PENDING"]
    for output in (2, 3):
        task = await world.take(agent)
        assert (world.lock("doc:1") or {})["holder_task_id"] == batch
        await world.complete(task, output)
    assert world.end(batch)["output"] == [1, 2, 3]
    assert world.status(after) == "READY"


async def test_a_nested_failure_takes_all_batches_along(world: World) -> None:
    """R-193, R-195: outwards to the parents, and inwards to all tasks below later siblings."""
    agent = await world.agent()
    outer = await world.one(
        "outer",
        children=[
            NewTask("inner", children=[NewTask("bad"), NewTask("next")]),
            NewTask("later", children=[NewTask("deep", children=[NewTask("deepest")])]),
        ],
    )

    await world.fail(await world.take(agent), category="auth_failure")

    found = {row["type"]: row["status"] for row in world.rows("SELECT * FROM lineshaft.tasks")}
    assert found == {
        "outer": "DEAD_LETTERED",
        "inner": "DEAD_LETTERED",
        "bad": "DEAD_LETTERED",
        "next": "CANCELLED",
        "later": "CANCELLED",
        "deep": "CANCELLED",
        "deepest": "CANCELLED",
    }
    assert world.dag_row(world.task(outer)["dag_id"])["status"] == "failed"

    await world.engine.revive.retry(outer)
    seen = []
    while claimed := await world.claim(agent, 10):
        seen += [task.type for task in claimed]
        for task in claimed:
            await world.complete(task)
    assert seen == ["bad", "next", "deepest"]
    assert world.status(outer) == "COMPLETED"


async def test_a_batch_whose_children_were_retried_one_by_one(world: World) -> None:
    """R-193: then it only remains to be completed, and no agent claims a batch."""
    agent = await world.agent()
    batch = await world.one("batch", lock_key="doc:1", children=[NewTask("one"), NewTask("two")])
    await world.fail(await world.take(agent), category="auth_failure")
    for type_ in ("one", "two"):
        (row,) = world.rows("SELECT id FROM lineshaft.task WHERE type = %s", type_)
        await world.engine.revive.retry(row["id"])
        task = await world.take(agent)
        # The batch is over, so the child holds the lock itself.
        assert (world.lock("doc:1") or {})["holder_task_id"] == task.id
        await world.complete(task, type_)
        assert world.lock("doc:1") is None

    assert await world.engine.revive.retry(batch) is Status.COMPLETED

    assert world.end(batch)["output"] == ["one", "two"]
    assert world.dag_row(world.task(batch)["dag_id"])["status"] == "completed"


async def test_outputs_of_children_with_ids_of_their_own(world: World) -> None:
    """R-192: in the order they were listed, not of their names; and only those that were listed."""
    agent = await world.agent()
    batch = await world.one("batch", id="b", children=[NewTask("x", id=name) for name in ("z", "m", "a")])
    await world.one("stranger", parent_id=batch, priority=0)

    while claimed := await world.claim(agent):
        await world.complete(claimed[0], claimed[0].id)

    assert world.end(batch)["output"] == ["z", "m", "a"]
