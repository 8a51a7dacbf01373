"""Children that a running task makes, and waits for or not."""

from decimal import Decimal
from typing import Any

import pytest

from lineshaft.errors import (
    CycleError,
    DependencyNotFoundError,
    InvalidInputError,
    InvalidTransitionError,
)
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import ClaimRef
from tests.world import World, cost, decoded, ref, spawn_children, spawn_once


async def test_spawn_and_go_on(world: World) -> None:
    """R-145, R-012, R-221: children in the parent's DAG, which becomes a real one; the parent runs on."""
    agent = await world.agent()
    await world.one("parent", max_cost_usd=1)
    await world.fail(await world.take(agent), spent=cost("0.25"))
    (waiting,) = world.rows("SELECT id FROM lineshaft.task_live")
    await world.engine.revive.retry(waiting["id"])
    parent = await world.take(agent)
    dag_id = world.task(parent.id)["dag_id"]
    assert world.rows("SELECT * FROM lineshaft.dag") == []

    a, b = await spawn_children(
        world.engine, ref(parent), [NewTask("a", key="a"), NewTask("b", depends_on=["a"])]
    )

    assert world.statuses([parent.id, a.id, b.id]) == ["RUNNING", "READY", "PENDING"]
    assert {world.task(found.id)["parent_id"] for found in (a, b)} == {parent.id}
    assert {world.task(found.id)["dag_id"] for found in (a, b)} == {dag_id}
    row = world.dag_row(dag_id)
    assert (row["status"], row["total"], row["reserved_usd"], row["spent_usd"]) == (
        "running",
        3,
        1,
        Decimal("0.25"),
    )
    await world.complete(parent, spent="0.5")
    row = world.dag_row(dag_id)
    assert (row["status"], row["reserved_usd"], row["spent_usd"]) == ("running", 0, Decimal("0.75"))
    for _ in range(2):
        await world.complete(await world.take(agent))
    assert world.dag_row(dag_id)["status"] == "completed"


@pytest.mark.parametrize("virtual", [True, False], ids=["virtual DAG", "real DAG"])
async def test_spawn_and_wait(world: World, virtual: bool) -> None:
    """R-145, F-36: slot, lock and money are free, no attempt used; then it resumes with its children."""
    agent = await world.agent(max_concurrent_tasks=1)
    new = NewTask("parent", key="p", max_cost_usd=1, lock_key="doc:1", priority=1)
    if virtual:
        await world.submit(new)
    else:
        await world.dag(new)
    parent = await world.take(agent)
    await world.heartbeat(agent.id, 1, [ref(parent)], spent=cost("0.1"))

    one, two = await spawn_children(world.engine, ref(parent), [NewTask("x"), NewTask("x")], wait=True)

    live = world.live(parent.id)
    assert (live["status"], live["blocked"], live["attempts"]) == ("PENDING", 2, 0)
    assert world.lock("doc:1") is None
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"], row["spent_usd"]) == (0, 0, Decimal("0.1"))
    assert world.kinds(parent.id)[-1] == "task.waiting"
    assert world.attempts(parent.id)[0]["outcome"] == "waiting"
    await world.complete(await world.take(agent), "first")
    assert world.status(parent.id) == "PENDING"
    await world.complete(await world.take(agent), "second")
    assert world.status(parent.id) == "READY"

    found = await world.claims(agent)

    (again,) = found.tasks
    assert (again.id, again.epoch, again.resume, again.attempts) == (parent.id, 2, True, 0)
    assert decoded(found.resumed[parent.id].children) == {
        one.id: {"status": "COMPLETED", "output": "first"},
        two.id: {"status": "COMPLETED", "output": "second"},
    }
    await world.complete(again, spent="0.2")
    assert world.end(parent.id)["cost_usd"] == Decimal("0.3")


async def test_a_waiting_parent_resumes_however_its_children_end(world: World) -> None:
    """R-145, R-173: dead, cancelled or done; each counts down once, however often it is revived."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    names = ("done", "dead", "cancelled")
    children = await spawn_children(world.engine, ref(parent), [NewTask(name) for name in names], wait=True)
    done, dead, cancelled = (found.id for found in children)
    await world.fail(await world.take(agent, types=["dead"]), category="auth_failure")
    await world.engine.revive.retry(dead)
    await world.fail(await world.take(agent, types=["dead"]), category="auth_failure")
    await world.engine.cancel.cancel(cancelled, "no")
    assert world.live(parent.id)["blocked"] == 1

    await world.complete(await world.take(agent, types=["done"]))

    found = await world.claims(agent)
    assert [task.id for task in found.tasks] == [parent.id]
    ends = decoded(found.resumed[parent.id].children)
    assert {name: child["status"] for name, child in ends.items()} == {
        done: "COMPLETED",
        dead: "DEAD_LETTERED",
        cancelled: "CANCELLED",
    }


async def test_a_parent_may_wait_for_the_same_child_again(world: World) -> None:
    """R-145, U8: a resumed handler runs from the top and spawns with the same keys."""
    agent = await world.agent()
    await world.one("parent")
    new = [NewTask("child", idempotency_key="c")]
    parent = await world.take(agent)
    (child,) = await spawn_children(world.engine, ref(parent), new, wait=True)
    await world.complete(await world.take(agent))
    parent = await world.take(agent)

    (same,) = await spawn_children(world.engine, ref(parent), new, wait=True)

    assert (same.id, same.duplicate) == (child.id, True)
    # All have ended already: it is READY at once.
    assert world.status(parent.id) == "READY"
    assert world.kinds(parent.id)[-2:] == ["task.waiting", "task.ready"]
    assert world.dag_row(world.task(parent.id)["dag_id"])["total"] == 2


async def test_waiting_in_circles_is_refused(world: World) -> None:
    """R-143: a child, new or known, that needs its parent first could never end."""
    agent = await world.agent()
    await world.one("parent", idempotency_key="parent")
    parent = await world.take(agent)
    await world.one("after", depends_on=[parent.id], idempotency_key="after")
    indirect = await world.one("indirect", depends_on=[parent.id])
    before = world.everything()

    for child in (
        NewTask("child", depends_on=[parent.id]),
        NewTask("child", depends_on=[indirect]),
        NewTask("after", idempotency_key="after"),
        NewTask("parent", idempotency_key="parent"),
    ):
        with pytest.raises(CycleError, match=parent.id):
            await spawn_children(world.engine, ref(parent), [child], wait=True)

    assert world.everything() == before
    # Without waiting there is no circle: the child comes after its parent.
    refs = {"context_refs": [f"task:{parent.id}:output"]}
    (after,) = await spawn_children(world.engine, ref(parent), [NewTask("child", spec=refs)])
    await world.complete(parent, "mine")
    found = await world.claims(agent, 10)
    assert after.id in {task.id for task in found.tasks}
    assert found.inputs == {parent.id: b'"mine"'}


async def test_what_can_not_be_spawned(world: World) -> None:
    """R-142, R-145: all or nothing, and nothing from a task that isn't running."""
    agent = await world.agent()
    await world.one("parent")
    (claimed,) = await world.claim(agent, start=False)

    async def spawn(claim: ClaimRef, tasks: list[NewTask], **options: Any) -> None:
        await spawn_children(world.engine, claim, tasks, **options)

    with pytest.raises(InvalidTransitionError):
        await spawn(ref(claimed), [NewTask("x")])
    await world.engine.work.start([ref(claimed)])
    before = world.everything()

    with pytest.raises(InvalidInputError, match="at least one"):
        await spawn(ref(claimed), [])
    with pytest.raises(CycleError):
        await spawn(
            ref(claimed), [NewTask("x", key="a", depends_on=["b"]), NewTask("x", key="b", depends_on=["a"])]
        )
    with pytest.raises(InvalidInputError, match="used twice"):
        await spawn(ref(claimed), [NewTask("x", key="a"), NewTask("x", key="a")])
    with pytest.raises(DependencyNotFoundError):
        await spawn(ref(claimed), [NewTask("x", depends_on=["nope"])], wait=True)
    with pytest.raises(InvalidInputError, match="at most 10000"):
        await spawn(ref(claimed), [NewTask("x")] * 10_001)

    assert world.everything() == before


async def test_many_children_go_by_copy(world: World) -> None:
    """R-146: the parent waits for all of them."""
    agent = await world.agent(max_concurrent_tasks=1_000)
    await world.one("parent")
    parent = await world.take(agent)

    children = await spawn_children(world.engine, ref(parent), [NewTask("x")] * 200, wait=True)

    assert world.live(parent.id)["blocked"] == len(children) == 200
    tasks = await world.claim(agent, 200)
    await world.engine.work.complete([world.completion(task) for task in tasks])
    assert (await world.take(agent)).id == parent.id


async def test_a_spawned_batch_is_waited_for_as_a_whole(world: World) -> None:
    """R-145, R-192."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    (batch,) = await spawn_children(
        world.engine, ref(parent), [NewTask("batch", children=[NewTask("one"), NewTask("two")])], wait=True
    )
    for n in (1, 2):
        await world.complete(await world.take(agent), n)

    found = await world.claims(agent)

    assert [task.id for task in found.tasks] == [parent.id]
    assert decoded(found.resumed[parent.id].children) == {batch.id: {"status": "COMPLETED", "output": [1, 2]}}


async def test_what_an_agent_spawns_is_created_by_it(world: World) -> None:
    """R-023, R-221: and children of a batch by the creator of the batch."""
    agent = await world.agent("coder-1")
    await world.one("parent", created_by="human:ann")
    parent = await world.take(agent)
    batch = NewTask("batch", children=[NewTask("x"), NewTask("y", created_by="human:bob")])

    spawned = await spawn_children(
        world.engine, ref(parent), [NewTask("a"), batch, NewTask("c", created_by="system:audit")]
    )

    creators = [world.task(found.id)["created_by"] for found in spawned]
    assert creators == ["agent:coder-1", "agent:coder-1", "system:audit"]
    below = world.rows(
        "SELECT created_by FROM lineshaft.task WHERE parent_id = %s ORDER BY type", spawned[1].id
    )
    assert [row["created_by"] for row in below] == ["agent:coder-1", "human:bob"]


async def test_children_of_a_batch_inherit_its_creator(world: World) -> None:
    """R-023."""
    batch = await world.one("batch", created_by="human:ann", children=[NewTask("x", children=[NewTask("y")])])

    found = world.rows("SELECT DISTINCT created_by FROM lineshaft.task WHERE id <> %s", batch)
    assert found == [{"created_by": "human:ann"}]


async def test_the_creator_of_a_dag_has_a_known_prefix(world: World) -> None:
    """R-023."""
    with pytest.raises(InvalidInputError, match="created_by"):
        await world.engine.submission.submit_dag("d", [NewTask("x")], created_by="ann")


async def test_children_have_the_status_that_they_have(world: World) -> None:
    """READY, not PENDING, unless they wait; also for a parent that is claimed again while one is rerun."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    tasks = [NewTask("a", key="a"), NewTask("b", key="b", depends_on=["a"])]

    spawned = await spawn_once(world.engine, ref(parent), "k", tasks)

    assert [(child.status, child.ended) for child in spawned.children] == [
        ("READY", False),
        ("PENDING", False),
    ]
    await world.complete(await world.take(agent, types=["a"]), "done")
    again = await spawn_once(world.engine, ref(parent), "k", tasks)
    assert [(child.status, child.ended) for child in again.children] == [
        ("COMPLETED", True),
        ("READY", False),
    ]
    paused = await spawn_once(world.engine, ref(parent), "k", tasks, wait=True)
    assert (paused.paused, [child.status for child in paused.children]) == (True, ["COMPLETED", "READY"])
