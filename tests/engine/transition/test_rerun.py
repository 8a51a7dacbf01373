"""Running completed tasks again: alone, or with everything below them."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.engine.read.tally import Tally
from lineshaft.errors import (
    AlreadyExistsError,
    CycleError,
    DependentsRunningError,
    InvalidTransitionError,
    NotFoundError,
    StaleClaimError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types import AgentInfo, TaskChange
from lineshaft.types.assignments import Assignment, assignments
from lineshaft.types.work import ClaimedTask
from tests.engine.feed.test_virtual_dags import read
from tests.world import World, cost, decoded, record_step, ref, save_checkpoint, spawn_children


async def finish(world: World, agent: AgentInfo, type_: str, output: Any = "old") -> ClaimedTask:
    task = await world.take(agent, types=[type_])
    assert await world.complete(task, output) is Status.COMPLETED
    return task


async def assigned(world: World, agent: AgentInfo, **options: Any) -> Assignment[ClaimedTask]:
    """The only task that is available, with what an agent gets with it."""
    (assignment,) = assignments(await world.claims(agent, **options))
    return assignment


async def chain(world: World, *types: str) -> tuple[str, list[str]]:
    """A DAG in which each task depends on the one before."""
    tasks = [
        NewTask(name, key=name, depends_on=[types[number - 1]] if number else [])
        for number, name in enumerate(types)
    ]
    dag = await world.dag(*tasks)
    return dag.id, [dag.tasks[name].id for name in types]


async def test_a_completed_task_runs_again_under_a_new_epoch(world: World) -> None:
    """Its completed attempt is kept with its output, attempts start at 0, and cost adds up."""
    agent = await world.agent()
    task_id = await world.one()
    await world.fail(await world.take(agent), spent=cost("0.1"))
    await world.engine.revive.retry(task_id)
    assignment = await assigned(world, agent)
    old = assignment.task
    assert assignment.last_error is not None
    await record_step(world.engine, ref(old), "fetch", b'"page"')
    await save_checkpoint(world.engine, ref(old), b'{"page": 1}')
    await world.complete(old, {"n": 1}, "0.5")
    with pytest.raises(InvalidTransitionError, match=f"lineshaft task rerun {task_id}"):
        await world.engine.revive.retry(task_id)

    assert await world.engine.rerun.rerun(task_id, reason="the parser was fixed") is Status.READY

    live = world.live(task_id)
    assert (live["attempts"], live["epoch"], live["revivals"]) == (0, 2, 1)
    assert live["cost_usd"] == Decimal("0.6")
    (event,) = world.rows("SELECT data FROM lineshaft.events WHERE kind = 'task.resolved'")
    assert event["data"] == {
        "resolution": "rerun",
        "reason": "the parser was fixed",
        "forget_steps": "all",
    }
    # A repeated call has the first one's answer, and completes nothing.
    assert await world.complete(old, {"n": 1}, "0.5") is Status.COMPLETED
    assert world.status(task_id) == "READY"
    assignment = await assigned(world, agent)
    new = assignment.task
    assert (new.epoch, assignment.steps, assignment.checkpoint, assignment.last_error) == (3, {}, None, None)
    assert await world.complete(old, {"n": 1}, "0.7") is Status.COMPLETED
    with pytest.raises(StaleClaimError):
        await world.fail(old)
    assert world.status(task_id) == "RUNNING"
    await world.complete(new, {"n": 2}, "0.25")
    assert (world.end(task_id)["output"], world.end(task_id)["cost_usd"]) == ({"n": 2}, Decimal("1.05"))
    attempts = await world.engine.read.attempts(task_id)
    assert [(attempt.outcome, attempt.cost_usd) for attempt in attempts] == [
        ("failed", Decimal("0.1")),
        ("completed", Decimal("0.7")),
        ("completed", Decimal("0.25")),
    ]
    assert [decoded(attempt.output_json) for attempt in attempts[1:]] == [
        {"data": {"n": n}, "artifacts": None, "decision_report": None} for n in (1, 2)
    ]
    # And once more.
    assert await world.engine.rerun.rerun(task_id) is Status.READY
    assert len(await world.engine.read.attempts(task_id)) == 3


async def test_what_can_not_be_rerun(world: World) -> None:
    agent = await world.agent()
    task_id = await world.one()
    with pytest.raises(NotFoundError):
        await world.engine.rerun.rerun("task_nowhere")
    with pytest.raises(InvalidTransitionError, match=r"it is READY\. Only a COMPLETED task"):
        await world.engine.rerun.rerun(task_id)
    await world.kill(agent)
    with pytest.raises(InvalidTransitionError, match=f"DEAD_LETTERED.* 'lineshaft task retry {task_id}'"):
        await world.engine.rerun.rerun(task_id)


async def test_dependents_that_have_not_begun_wait_again(world: World) -> None:
    """READY and RETRYING ones; those that ended stay as they are, and the DAG opens again."""
    agent = await world.agent()
    names = ("ready", "retrying", "done")
    dag = await world.dag(
        NewTask("first", key="first"), *(NewTask(name, key=name, depends_on=["first"]) for name in names)
    )
    first, ready, retrying, done = (dag.tasks[name].id for name in ("first", *names))
    await finish(world, agent, "first")
    await finish(world, agent, "done")
    await world.fail(await world.take(agent, types=["retrying"]))

    assert await world.engine.rerun.rerun(first) is Status.READY

    assert world.statuses([ready, retrying, done]) == ["PENDING", "PENDING", "COMPLETED"]
    assert world.kinds(ready)[-1] == world.kinds(retrying)[-1] == "task.waiting"
    assert world.live(retrying)["attempts"] == 1
    assert world.dag_row(dag.id)["completed"] == 1
    await finish(world, agent, "first", "new")
    assert world.statuses([ready, retrying]) == ["READY", "PENDING"], "a retry still waits for its time"
    assert (await assigned(world, agent, types=["ready"])).inputs["first"] == "new"
    world.age(minutes=10)
    await world.engine.maintenance.promote_due(10)
    assert world.status(retrying) == "READY"


async def test_downstream_runs_again_in_order(world: World) -> None:
    """Completed, dead-lettered and cancelled dependents; the later dag.completed says that it is a rerun."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("a", key="a"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
        NewTask("dead", key="dead", depends_on=["a"]),
        NewTask("gone", key="gone", depends_on=["a"]),
        NewTask("other", key="other"),
    )
    ids = {key: task.id for key, task in dag.tasks.items()}
    for type_ in ("a", "b", "c", "other"):
        await finish(world, agent, type_)
    await world.fail(await world.take(agent, types=["dead"]), category="invalid_input")
    await world.engine.cancel.cancel(ids["gone"], "no")
    assert world.dag_row(dag.id)["status"] == "failed"

    assert await world.engine.rerun.rerun(ids["a"], downstream=True) is Status.READY

    assert world.statuses([*ids.values()]) == ["READY", *["PENDING"] * 4, "COMPLETED"]
    assert world.dag_row(dag.id)["status"] == "running"
    letter = world.row("SELECT reviewed, resolution FROM lineshaft.dead_letter")
    assert letter == {"reviewed": True, "resolution": "retry"}
    for types in (["a"], ["b", "dead", "gone"], ["c"]):
        claimed = await world.claim(agent, 10)
        assert sorted(task.type for task in claimed) == types
        for task in claimed:
            await world.complete(task, "new")
    assert [event.data for event in await read(world, kinds=["dag.completed"])] == [{"rerun": True}]
    assert world.dag_row(dag.id)["completed"] == 6


async def test_the_first_completion_of_a_dag_is_not_one_after_a_rerun(world: World) -> None:
    agent = await world.agent()
    dag_id, (a, _) = await chain(world, "a", "b")
    for type_ in ("a", "b"):
        await finish(world, agent, type_)
    await world.engine.rerun.rerun(a)
    await finish(world, agent, "a")

    query = "SELECT data FROM lineshaft.events WHERE kind = 'dag.completed' ORDER BY seq"
    assert [row["data"] for row in world.rows(query)] == [None, {"rerun": True}]
    assert [event.data for event in await read(world, kinds=["dag.completed"])] == [None, {"rerun": True}]
    assert world.dag_kinds(dag_id)[-3:] == ["dag.completed", "dag.running", "dag.completed"]


async def test_the_dag_of_a_lone_task_opens_again(world: World) -> None:
    agent = await world.agent()
    task_id = await world.one()
    await finish(world, agent, "code")
    await world.engine.rerun.rerun(task_id)
    dag_id = world.task(task_id)["dag_id"]
    assert (await world.engine.read.dag(dag_id)).status == "running"

    await finish(world, agent, "code")

    completed = await read(world, dag_id=dag_id, kinds=["dag.completed"])
    assert [event.data for event in completed] == [{"single": True}, {"single": True, "rerun": True}]
    query = "SELECT data FROM lineshaft.events WHERE kind = 'dag.completed' ORDER BY seq"
    assert [row["data"] for row in world.rows(query)] == [event.data for event in completed]


@pytest.mark.parametrize("downstream", [False, True])
async def test_running_dependents_stop_a_rerun_unless_they_are_cancelled(
    world: World, *, downstream: bool
) -> None:
    """Whatever holds one: an agent, a person who checks its output, or children that it waits for."""
    agent = await world.agent()
    person = OutputContract(validation="human")
    dag = await world.dag(
        NewTask("first", key="first"),
        NewTask("held", key="held", depends_on=["first"]),
        NewTask("checked", key="checked", depends_on=["first"], output=person),
        NewTask("parent", key="parent", depends_on=["first"]),
        NewTask("last", key="last", depends_on=["held"]),
    )
    ids = {key: task.id for key, task in dag.tasks.items()}
    await finish(world, agent, "first")
    held = await world.take(agent, types=["held"])
    await record_step(world.engine, ref(held), "fetch", b"1")
    await world.complete(await world.take(agent, types=["checked"]), "old")
    parent = await world.take(agent, types=["parent"])
    (child,) = await spawn_children(world.engine, ref(parent), [NewTask("child")], wait=True)
    before = world.everything()

    with pytest.raises(DependentsRunningError, match=r"running: .*--cancel-running") as refused:
        await world.engine.rerun.rerun(ids["first"], downstream=downstream)
    assert all(ids[name] in str(refused.value) for name in ("held", "checked", "parent"))
    assert world.everything() == before
    await world.engine.rerun.rerun(ids["first"], downstream=downstream, cancel_running=True)

    assert world.statuses([*ids.values(), child.id]) == ["READY", *["PENDING"] * 4, "CANCELLED"]
    assert await world.heartbeat(agent.id, 1, [ref(held)]) == {ids["held"]: "lost"}
    with pytest.raises(StaleClaimError):
        await world.complete(held, "old")
    assert world.attempts(ids["held"])[-1]["outcome"] == "released"
    assert world.rows("SELECT * FROM lineshaft.step") == []
    await finish(world, agent, "first", "new")
    again = await assigned(world, agent, types=["held"])
    assert (again.inputs["first"], again.task.attempts) == ("new", 0)
    assert world.status(ids["parent"]) == "READY"


async def test_a_parent_that_waits_for_its_children_waits_again(world: World) -> None:
    """A parent that has gone on with the child's output is running."""
    agent = await world.agent()
    parent_id = await world.one("parent")
    parent = await world.take(agent)
    children = await spawn_children(world.engine, ref(parent), [NewTask("one"), NewTask("two")], wait=True)
    one, two = (child.id for child in children)
    await finish(world, agent, "one")

    await world.engine.rerun.rerun(one)

    assert world.live(parent_id)["blocked"] == 2
    for type_ in ("one", "two"):
        await finish(world, agent, type_, "new")
    parent = await world.take(agent, types=["parent"])
    with pytest.raises(DependentsRunningError):
        await world.engine.rerun.rerun(two)
    await world.complete(parent)
    await world.engine.rerun.rerun(two)
    assert world.statuses([parent_id, two]) == ["COMPLETED", "READY"]
    await finish(world, agent, "two")
    await world.engine.rerun.rerun(two, downstream=True)
    assert world.status(parent_id) == "PENDING"
    await finish(world, agent, "two", "newest")
    assert (await assigned(world, agent, types=["parent"])).children[two].output == "newest"


async def test_a_batch_runs_again_with_its_children(world: World) -> None:
    """And a child of it alone, or with what follows."""
    agent = await world.agent()
    batch = await world.one(
        "batch", lock_key="doc", children=[NewTask("one"), NewTask("two"), NewTask("three")]
    )
    for type_ in ("one", "two", "three"):
        await finish(world, agent, type_)
    children = [
        row["id"]
        for row in world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s ORDER BY type", batch)
    ]
    one, three, two = children

    assert await world.engine.rerun.rerun(batch) is Status.PENDING
    assert world.statuses([one, two, three]) == ["READY", "PENDING", "PENDING"]
    for type_ in ("one", "two", "three"):
        await finish(world, agent, type_, "new")
    assert world.end(batch)["output"] == ["new"] * 3

    await world.engine.rerun.rerun(two)
    assert world.statuses([batch, one, two, three]) == ["COMPLETED", "COMPLETED", "READY", "COMPLETED"]
    await finish(world, agent, "two", "newer")
    await world.engine.rerun.rerun(two, downstream=True)
    assert world.statuses([batch, one, two, three]) == ["PENDING", "COMPLETED", "READY", "PENDING"]
    for type_ in ("two", "three"):
        await finish(world, agent, type_, "newest")
    assert world.end(batch)["output"] == ["new", "newest", "newest"]


async def test_a_batch_below_that_holds_the_lock_gives_it_up(world: World) -> None:
    """Otherwise the task above would wait for the lock for ever."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("first", key="first", lock_key="doc"),
        NewTask(
            "batch",
            key="batch",
            depends_on=["first"],
            lock_key="doc",
            children=[NewTask("one"), NewTask("two")],
        ),
    )
    for type_ in ("first", "one"):
        await finish(world, agent, type_)
    await world.take(agent, types=["two"])

    await world.engine.rerun.rerun(dag.tasks["first"].id, downstream=True, cancel_running=True)

    for type_ in ("first", "one", "two"):
        await finish(world, agent, type_)
    assert world.dag_row(dag.id)["status"] == "completed"


async def test_a_dependent_that_is_revived_later_waits_for_what_is_rerun(world: World) -> None:
    """By a retry, or by a rerun of its own."""
    agent = await world.agent()
    first = await world.one("first")
    await finish(world, agent, "first")
    done, dead = await world.submit(*(NewTask(name, depends_on=[first]) for name in ("done", "dead")))
    await finish(world, agent, "done")
    await world.fail(await world.take(agent, types=["dead"]), category="invalid_input")
    await world.engine.rerun.rerun(first)

    assert await world.engine.revive.retry(dead) is Status.PENDING
    assert await world.engine.rerun.rerun(done) is Status.PENDING

    await finish(world, agent, "first", "new")
    for type_ in ("done", "dead"):
        assert (await assigned(world, agent, types=[type_])).inputs[first] == "new"


async def test_a_rerun_closes_no_cycle(world: World) -> None:
    agent = await world.agent()
    first = await world.one("first")
    second = await world.one("second", depends_on=[first])
    for type_ in ("first", "second"):
        await finish(world, agent, type_)
    await world.engine.rerun.rerun(first)
    await world.engine.dependencies.add(first, [second])

    before = world.everything()
    with pytest.raises(CycleError):
        await world.engine.rerun.rerun(second)
    assert world.everything() == before


async def test_an_output_that_a_gate_checked_is_kept_too(world: World) -> None:
    agent = await world.agent()
    schema = OutputContract(validation="json-schema", validation_schema={"type": "object"})
    task_id = await world.one(output=schema)
    await world.complete(await world.take(agent), {"n": 1}, "0.5")
    await world.engine.rerun.rerun(task_id)
    await world.complete(await world.take(agent), {"n": 2}, "0.25")

    attempts = await world.engine.read.attempts(task_id)

    assert [(decoded(attempt.output_json)["data"], attempt.cost_usd) for attempt in attempts] == [
        ({"n": 1}, Decimal("0.5")),
        ({"n": 2}, Decimal("0.25")),
    ]


async def test_keys_deadlines_and_deleted_upstream(world: World) -> None:
    agent = await world.agent()
    soon = world.clock.now() + timedelta(hours=1)
    keyed = NewTask("keyed", idempotency_key="k", idempotency_ttl_sec=60)
    (task_id,) = await world.submit(keyed)
    timed = await world.one("timed", deadline=soon, expire_at_deadline=True)
    upstream = await world.one("upstream")
    await finish(world, agent, "upstream")
    world.age(minutes=30)
    below = await world.one("below", depends_on=[upstream])
    for type_ in ("keyed", "timed", "below"):
        await finish(world, agent, type_)
    # The key is still the task's.
    await world.engine.rerun.rerun(task_id)
    assert await world.submit(keyed) == [task_id]
    await finish(world, agent, "keyed")
    world.age(hours=1)
    (other,) = await world.submit(keyed)
    assert other != task_id
    with pytest.raises(AlreadyExistsError, match="Can't rerun task"):
        await world.engine.rerun.rerun(task_id)
    # The advice of the error can be followed.
    with pytest.raises(InvalidTransitionError, match=r"Can't rerun task .* Change its deadline first"):
        await world.engine.rerun.rerun(timed)
    await world.engine.edit.edit(timed, TaskChange(deadline=world.clock.now() + timedelta(hours=1)))
    assert await world.engine.rerun.rerun(timed) is Status.READY
    # Retention has deleted an input.
    assert await world.engine.maintenance.delete_finished(5_000, 1) == 1
    with pytest.raises(InvalidTransitionError, match=f"retention has deleted .*{upstream}"):
        await world.engine.rerun.rerun(below)


async def test_figures_count_both_runs(world: World) -> None:
    """Also a completion that is counted only after the rerun."""
    agent = await world.agent("ann")
    task_id = await world.one()
    await world.complete(await world.take(agent), None, "0.5")
    await world.engine.rerun.rerun(task_id)
    tally = Tally(world.engine.database)
    await tally.count()
    await world.complete(await world.take(agent), None, "0.25")
    await tally.count()

    (day,) = world.rows("SELECT attempts, cost_usd FROM lineshaft.cost_day")
    assert day == {"attempts": 2, "cost_usd": Decimal("0.75")}
    assert world.agent_row(agent)["spent_usd"] == Decimal("0.75")
    assert world.row("SELECT spent_usd FROM lineshaft.spend")["spent_usd"] == Decimal("0.75")


async def test_a_thousand_dependents(world: World) -> None:
    """Half of them completed, half of them waiting."""
    agent = await world.agent(max_concurrent_tasks=2_000)
    first = await world.one("first")
    await finish(world, agent, "first")
    ids = await world.submit(*(NewTask("below", depends_on=[first]) for _ in range(1_000)))
    done = await world.claim(agent, 500, types=["below"])
    await world.engine.work.complete([world.completion(task) for task in done])

    await world.engine.rerun.rerun(first, downstream=True)

    count = "SELECT count(*) AS n FROM lineshaft.task_live WHERE id = ANY(%s) AND status = %s"
    assert world.row(count, ids, "PENDING")["n"] == 1_000
    await finish(world, agent, "first")
    assert world.row(count, ids, "READY")["n"] == 1_000
