"""`on_conflict`: what a submission does whose idempotency key is in use."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.engine.caller import calling
from lineshaft.engine.feed.actor import acting_as
from lineshaft.errors import AlreadyExistsError, ForbiddenError, InvalidInputError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types import Submitted
from lineshaft.types.waits import NewSignal, NewSuspension
from tests.world import World, cost, record_step, ref, save_checkpoint, spawn_children

REPLACE = "replace_waiting"


async def send(world: World, type_: str = "code", **fields: Any) -> Submitted:
    fields = {"idempotency_key": "k", "on_conflict": REPLACE} | fields
    (found,) = await world.engine.submission.submit([NewTask(type_, **fields)])
    return found


async def test_a_waiting_task_becomes_what_the_newest_submission_says(world: World) -> None:
    """Everything but its id, its place and its age; the history says who did it and what changed."""
    first = await send(
        world, spec={"n": 1}, title="one", tags=["a"], max_cost_usd=1, deadline=world.clock.now()
    )
    before = world.live(first.id)
    world.clock.advance(60)

    with acting_as("ann"):
        second = await send(world, spec={"n": 2}, priority=7, title="two", max_cost_usd=2, max_attempts=5)

    assert (first.replaced, first.duplicate) == (False, False)
    assert (second.id, second.replaced, second.duplicate, second.mismatch) == (first.id, True, False, False)
    row, live = world.task(first.id), world.live(first.id)
    assert (row["spec"], row["priority"], row["title"], row["tags"]) == ({"n": 2}, 7, "two", [])
    assert (row["max_attempts"], row["max_cost_usd"], row["deadline"]) == (5, 2, None)
    assert (live["priority"], live["max_cost_usd"], live["deadline"], live["status"]) == (7, 2, None, "READY")
    assert live["ready_at"] == before["ready_at"]
    assert live["lane_id"] != before["lane_id"]
    assert world.kinds(first.id) == ["task.created", "task.ready", "task.replaced", "task.ready"]
    data = world.row("SELECT data FROM lineshaft.events WHERE kind = 'task.replaced'")["data"]
    changed = ["deadline", "max_attempts", "max_cost_usd", "open_limits", "priority", "spec", "tags", "title"]
    assert data == {"actor": "ann", "changed": changed}
    (again,) = await world.engine.submission.submit([NewTask("code", idempotency_key="k", spec={"n": 2})])
    assert (again.duplicate, again.mismatch) == (True, False)


@pytest.mark.parametrize("on_conflict", [None, "return"])
async def test_return_is_what_happens_without_it(world: World, on_conflict: str | None) -> None:
    first = await send(world, on_conflict=on_conflict)

    second = await send(world, on_conflict=on_conflict, spec={"n": 2})

    assert (second.id, second.duplicate, second.mismatch) == (first.id, True, True)
    assert world.task(first.id)["spec"] == {}


@pytest.mark.parametrize("ended", [False, True])
async def test_reject_refuses_a_key_in_use(world: World, *, ended: bool) -> None:
    """All of the call, also with the key of a completed task; one that was cancelled has freed it."""
    first = await send(world, on_conflict="reject")
    if ended:
        await world.finish_all()

    with pytest.raises(AlreadyExistsError, match=f"'k' belongs to task {first.id}"):
        await world.submit(NewTask("other"), NewTask("code", idempotency_key="k", on_conflict="reject"))

    assert len(world.rows("SELECT FROM lineshaft.task")) == 1
    if not ended:
        await world.engine.cancel.cancel(first.id, "no")
        assert not (await send(world, on_conflict="reject")).duplicate


@pytest.mark.parametrize(
    "fields",
    [
        {"on_conflict": "return"},
        {"on_conflict": "replace", "idempotency_key": "k"},
        {"on_conflict": ["reject"], "idempotency_key": "k"},
        {"on_conflict": "reject", "idempotency_key": "k", "debounce_sec": 5},
        {"on_conflict": REPLACE, "idempotency_key": "k", "debounce_sec": -1},
        {"on_conflict": REPLACE, "idempotency_key": "k", "max_wait_sec": 5},
        {"on_conflict": REPLACE, "idempotency_key": "k", "children": [NewTask("x")]},
        {"on_conflict": "cancel_running", "idempotency_key": "k", "children": [NewTask("x")]},
        {"debounce_sec": 5, "idempotency_key": "k"},
    ],
)
async def test_what_makes_no_sense_is_refused(world: World, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"on_conflict|debounce_sec|max_wait_sec"):
        await world.one(**fields)


async def test_debounce_and_a_start_of_its_own_exclude_each_other(world: World) -> None:
    with pytest.raises(InvalidInputError, match="run_at"):
        await send(world, debounce_sec=5, run_at=world.clock.now())


@pytest.mark.parametrize("how", [REPLACE, "cancel_running"])
async def test_a_task_that_others_rely_on_keeps_return_and_reject(world: World, how: str) -> None:
    """In a DAG, and spawned."""
    task = NewTask("code", idempotency_key="k", on_conflict=how)
    with pytest.raises(InvalidInputError, match=r"tasks\[0\]\.on_conflict"):
        await world.dag(task)
    parent = await world.one("parent")
    held = await world.take()
    with pytest.raises(InvalidInputError, match=r"on_conflict"):
        await spawn_children(world.engine, ref(held), [task])

    await world.dag(task.with_options(on_conflict="reject"))
    with pytest.raises(AlreadyExistsError):
        await world.dag(task.with_options(on_conflict="reject"))
    with pytest.raises(AlreadyExistsError):
        await spawn_children(world.engine, ref(held), [task.with_options(on_conflict="reject")])
    assert world.status(parent) == "RUNNING"


@pytest.mark.parametrize("others", [{}, {"on_conflict": REPLACE}])
async def test_two_tasks_of_a_call_can_not_compete_for_a_key(world: World, others: dict[str, Any]) -> None:
    tasks = [NewTask("code", idempotency_key="k", **fields) for fields in (others, {"on_conflict": REPLACE})]

    with pytest.raises(InvalidInputError, match=r"tasks\[1\]\.idempotency_key"):
        await world.submit(*tasks)


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_tasks_of_a_call_are_replaced_cancelled_and_created(world: World, fillers: int) -> None:
    waits = await send(world, idempotency_key="waits")
    runs = await send(world, "run", idempotency_key="runs")
    await world.take(types=["run"])

    found = await world.engine.submission.submit(
        [
            NewTask("code", idempotency_key="waits", on_conflict=REPLACE, spec={"n": 2}),
            NewTask("run", idempotency_key="runs", on_conflict="cancel_running", spec={"n": 2}),
            NewTask("code", idempotency_key="new", on_conflict=REPLACE, debounce_sec=5),
            *[NewTask("code")] * fillers,
        ]
    )

    assert [(one.duplicate, one.replaced) for one in found[:3]] == [
        (False, True),
        (False, False),
        (False, False),
    ]
    assert (found[0].id, world.task(waits.id)["spec"]) == (waits.id, {"n": 2})
    assert found[1].id != runs.id
    assert world.statuses([runs.id, found[1].id, found[2].id]) == ["CANCELLED", "READY", "PENDING"]


# Which tasks wait.


async def test_a_task_that_is_held_or_completed_is_returned(world: World) -> None:
    """A claim that came first wins: the answer says that nothing was replaced."""
    first = await send(world, spec={"n": 1}, output=OutputContract(validation="human"))
    held = await world.take()
    for status in (Status.RUNNING, Status.VALIDATING):
        assert world.status(first.id) == status
        second = await send(world, spec={"n": 2})
        assert (second.id, second.duplicate, second.replaced, second.mismatch) == (
            first.id,
            True,
            False,
            True,
        )
        if status is Status.RUNNING:
            await world.complete(held, "output")
    assert world.task(first.id)["spec"] == {"n": 1}


@pytest.mark.parametrize("how", [REPLACE, "cancel_running"])
async def test_an_ended_task_is_answered_as_with_return(world: World, how: str) -> None:
    """Completed: the key is in use until its window is over; dead-lettered or cancelled: it is free."""
    task: dict[str, Any] = {"on_conflict": how, "idempotency_ttl_sec": 60}
    first = await send(world, **task)
    await world.finish_all()
    second = await send(world, **task)
    world.age(seconds=61)
    third = await send(world, **task)
    await world.kill(await world.agent())
    fourth = await send(world, **task)

    assert (second.id, second.duplicate, second.replaced) == (first.id, True, False)
    assert len({first.id, third.id, fourth.id}) == 3
    assert {(one.duplicate, one.replaced) for one in (third, fourth)} == {(False, False)}


async def test_a_scheduled_task_takes_the_start_of_the_newest(world: World) -> None:
    later = world.clock.now() + timedelta(hours=1)
    first = await send(world, run_at=later)
    await send(world, run_at=later + timedelta(hours=1))
    assert world.live(first.id)["due_at"] == later + timedelta(hours=1)

    await send(world)

    live = world.live(first.id)
    assert (live["status"], live["due_at"]) == ("READY", None)
    assert world.task(first.id)["run_at"] is None


@pytest.mark.parametrize("how", [REPLACE, "cancel_running"])
async def test_a_retry_starts_from_the_beginning(world: World, how: str) -> None:
    """Attempts start at 0, steps, checkpoint and waits are forgotten; cost, failures and the epoch go on."""
    first = await send(world, max_attempts=2, max_total_cost_usd=8)
    held = await world.take()
    await record_step(world.engine, ref(held), "paid", b"1")
    await save_checkpoint(world.engine, ref(held), b"2")
    await world.fail(held, spent=cost("7"))
    assert world.live(first.id)["status"] == "RETRYING"

    second = await send(world, on_conflict=how, max_attempts=2, max_total_cost_usd=8, spec={"n": 2})

    assert (second.id, second.replaced) == (first.id, True)
    live = world.live(first.id)
    assert (live["status"], live["attempts"], live["epoch"], live["cost_usd"]) == ("READY", 0, 1, Decimal(7))
    assert (live["due_at"], live["last_category"], live["revivals"]) == (None, None, 1)
    for table in ("step", "checkpoint", "wait"):
        assert world.rows(f"SELECT FROM lineshaft.{table}") == []
    # What is left of its total decides who may claim it, as after any attempt.
    lane = world.row("SELECT cost_from_usd FROM lineshaft.lane WHERE id = %s", live["lane_id"])
    assert lane["cost_from_usd"] <= 1
    again = await world.take()
    assert (again.id, again.epoch) == (first.id, 2)
    await world.fail(again)
    assert world.live(first.id)["status"] == "RETRYING"
    (shown,) = await world.engine.read.tasks_by_id([first.id])
    assert [(each.revival, each.attempt) for each in shown.failure_history] == [(0, 1), (1, 1)]


async def test_a_task_in_a_wait_starts_from_the_beginning(world: World) -> None:
    first = await send(world)
    held = await world.take()
    (result,) = await world.engine.work.suspend([NewSuspension(ref(held), "nap", timeout_sec=600)])
    assert result.unwrap() is None
    await world.engine.waits.signal(first.id, NewSignal("approved"))

    second = await send(world)

    assert (second.replaced, world.status(first.id)) == (True, "READY")
    assert world.rows("SELECT FROM lineshaft.wait") == []
    assert world.rows("SELECT FROM lineshaft.signal") == [], "it approved something else"


async def test_a_parked_task_waits_for_what_it_needs_now(world: World) -> None:
    """And who waits behind it for what it doesn't need any more goes on."""
    holder = await world.one(lock_key="doc")
    agent = await world.agent()
    held = await world.take(agent)
    first = await send(world, lock_key="doc")
    other = await world.one(lock_key="doc")
    assert await world.claim(agent, limit=5) == []
    assert {world.live(name)["parked"] for name in (first.id, other)} == {"lock"}

    await send(world, lock_key=None)

    assert world.live(first.id)["parked"] is None
    assert [task.id for task in await world.claim(agent, limit=5)] == [first.id]
    assert (held.id, world.status(other)) == (holder, "READY")
    await world.complete(held)
    assert [task.id for task in await world.claim(agent, limit=5)] == [other]


async def test_the_best_waiter_for_a_lock_that_needs_it_no_more_lets_the_next_one_go(world: World) -> None:
    await world.one(lock_key="doc")
    agent = await world.agent()
    held = await world.take(agent)
    first, other = await send(world, lock_key="doc", priority=1), await world.one(lock_key="doc")
    assert await world.claim(agent, limit=5) == []
    await world.complete(held)
    assert [world.live(name)["parked"] for name in (first.id, other)] == [None, "lock"]

    await send(world, lock_key=None, run_at=world.clock.now() + timedelta(hours=1))

    assert [task.id for task in await world.claim(agent, limit=5)] == [other]


async def test_a_blocked_task_keeps_its_dependencies(world: World) -> None:
    upstream = await world.one("upstream")
    first = await send(world, depends_on=[upstream], spec={"n": 1})

    await send(world, depends_on=[upstream], spec={"n": 2})
    await send(world, inputs={"what": upstream}, spec={"n": 3})
    with pytest.raises(AlreadyExistsError, match="doesn't depend on"):
        await send(world, depends_on=[await world.one("later", run_at=world.clock.now() + timedelta(days=1))])

    assert world.status(first.id) == "PENDING"
    await world.complete(await world.take(types=["upstream"]), "output")
    task = await world.take()
    row = world.row("SELECT spec, inputs FROM lineshaft.task WHERE id = %s", first.id)
    assert (task.id, row["spec"], row["inputs"]) == (first.id, {"n": 3}, {"what": upstream})


async def test_a_task_of_a_dag_stays_in_it(world: World) -> None:
    dag = await world.dag(NewTask("code", key="a", idempotency_key="k"), NewTask("other", key="b"))

    second = await send(world, spec={"n": 2})
    third = await send(world, spec={"n": 3}, dag_id=dag.id)
    with pytest.raises(AlreadyExistsError, match=dag.id):
        await send(world, dag_id=(await world.dag(NewTask("x"))).id)

    assert (second.id, third.id) == (dag.tasks["a"].id,) * 2
    assert (world.task(second.id)["dag_id"], world.dag_row(dag.id)["total"]) == (dag.id, 2)
    assert await world.finish_all() == 3
    assert world.dag_row(dag.id)["status"] == "completed"


async def test_another_type_is_another_task(world: World) -> None:
    await send(world)

    with pytest.raises(AlreadyExistsError, match="of type 'code', not 'other'"):
        await send(world, "other")
    await world.take()
    with pytest.raises(AlreadyExistsError, match="of type 'code', not 'other'"):
        await send(world, "other", on_conflict="cancel_running")


# Running tasks.


async def test_cancel_running_cancels_what_runs_and_submits(world: World) -> None:
    agent = await world.agent()
    first = await send(world, on_conflict="cancel_running", spec={"n": 1})
    held = await world.take(agent)
    children = await spawn_children(world.engine, ref(held), [NewTask("child")])

    with acting_as("ann"):
        second = await send(world, on_conflict="cancel_running", spec={"n": 2})

    assert (second.duplicate, second.replaced) == (False, False)
    assert world.statuses([first.id, children[0].id, second.id]) == ["CANCELLED", "CANCELLED", "READY"]
    assert world.end(first.id)["reason"] == "replaced"
    event = world.row(
        "SELECT data FROM lineshaft.events WHERE kind = 'task.cancelled' AND task_id = %s", first.id
    )
    assert event["data"] == {"reason": "replaced", "actor": "ann"}
    why = await world.engine.read.why(first.id)
    assert "replaced" in why.reasons[0].detail
    assert (await send(world, on_conflict=None)).id == second.id
    answer = await world.heartbeat(agent.id, agent.incarnation, [ref(held)])
    assert answer == {first.id: "cancel"}


async def test_an_output_that_is_checked_runs_too(world: World) -> None:
    first = await send(world, output=OutputContract(validation="human"))
    await world.complete(await world.take(), "output")

    second = await send(world, on_conflict="cancel_running")

    assert (world.status(first.id), second.id != first.id) == ("CANCELLED", True)


# Starts.


async def test_debounce_moves_the_start_up_to_the_longest_wait(world: World) -> None:
    """The start is never later than max_wait_sec after the first submission, however often it moves."""
    begin = world.clock.now()
    options: dict[str, Any] = {"debounce_sec": 10, "max_wait_sec": 25}
    first = await send(world, **options)
    starts = [world.live(first.id)["due_at"]]
    for n in range(2, 5):
        world.clock.advance(8)
        assert (await send(world, spec={"n": n}, **options)).replaced
        starts.append(world.live(first.id)["due_at"])

    assert [(start - begin).total_seconds() for start in starts] == [10, 18, 25, 25]
    assert world.task(first.id)["run_at"] == starts[-1]
    (reason,) = (await world.engine.read.why(first.id)).reasons
    assert (reason.code, "replaced it at" in reason.detail) == ("scheduled", True)
    world.clock.advance(2)
    late = await send(world, spec={"n": 5}, **options)
    assert (late.replaced, world.status(first.id)) == (True, "READY")


@pytest.mark.parametrize(
    ("options", "status"), [({"debounce_sec": 0}, "READY"), ({"debounce_sec": 9}, "PENDING")]
)
async def test_a_task_that_was_due_waits_again(world: World, options: dict[str, Any], status: str) -> None:
    first = await send(world)
    assert world.status(first.id) == "READY"

    await send(world, **options)

    assert world.status(first.id) == status
    data = world.row("SELECT data FROM lineshaft.events WHERE kind = 'task.replaced'")["data"]
    assert ("run_at" in data) is (status == "PENDING")


async def test_the_first_wait_may_be_shorter_than_debounce(world: World) -> None:
    first = await send(world, debounce_sec=60, max_wait_sec=5)

    assert world.live(first.id)["due_at"] == world.clock.now() + timedelta(seconds=5)


# Limits.


async def test_defaults_of_the_type_apply_to_the_newest(world: World) -> None:
    """Also those that were set since, and not to limits that it names."""
    first = await send(world, max_cost_usd=1)
    await world.engine.task_types.set("code", {"max_cost_usd": 0.5, "max_attempts": 7})

    await send(world)
    row, live = world.task(first.id), world.live(first.id)
    assert (row["max_cost_usd"], live["max_cost_usd"], row["max_attempts"]) == (Decimal("0.5"),) * 2 + (7,)

    await send(world, max_cost_usd=3)
    assert world.live(first.id)["max_cost_usd"] == 3


async def test_what_is_too_large_or_wrong_replaces_nothing(world: World) -> None:
    first = await send(world, spec={"n": 1})
    before = world.everything()

    with pytest.raises(InvalidInputError):
        await send(world, max_cost_usd=-1)
    with pytest.raises(InvalidInputError, match="artifact"):
        await send(world, spec={"context_refs": ["artifact:artifact_none"]})

    assert world.everything() == before
    assert world.task(first.id)["spec"] == {"n": 1}


# Rights.


@pytest.mark.parametrize("how", [REPLACE, "cancel_running"])
@pytest.mark.parametrize("runs", [False, True])
async def test_only_the_same_token_changes_a_task(world: World, how: str, *, runs: bool) -> None:
    """R-234: what steers a task needs more than the scope to submit."""
    with calling(token_id="token_1", name="one"):
        first = await send(world, on_conflict="cancel_running")
    if runs:
        await world.take()
    before = world.everything()

    with calling(token_id="token_2", name="two"):
        if runs and how == REPLACE:
            assert (await send(world, on_conflict=how)).duplicate
        else:
            with pytest.raises(
                ForbiddenError, match="with the token 'one', and this call has the token 'two'"
            ):
                await send(world, on_conflict=how)
            assert world.everything() == before
        assert (await send(world, on_conflict=None)).duplicate

    if not runs:
        with pytest.raises(ForbiddenError, match="this call has no token"):
            await send(world, on_conflict=how)
    with calling(token_id="token_1", name="one"):
        found = await send(world, on_conflict="cancel_running")
    assert (found.id != first.id) is runs


@pytest.mark.parametrize("how", [REPLACE, "cancel_running"])
@pytest.mark.parametrize("runs", [False, True])
async def test_a_task_with_dependents_is_not_changed(world: World, how: str, *, runs: bool) -> None:
    first = await send(world)
    below = await world.one("below", depends_on=[first.id])
    if runs:
        await world.take()
        if how == REPLACE:
            assert (await send(world)).duplicate
            return

    with pytest.raises(ForbiddenError, match="other tasks wait for it"):
        await send(world, on_conflict=how)

    await world.engine.cancel.cancel(below, "no")
    assert (await send(world, on_conflict=how)).duplicate is False


async def test_a_parent_whose_children_have_not_ended_is_not_replaced(world: World) -> None:
    first = await send(world)
    held = await world.take()
    (child,) = await spawn_children(world.engine, ref(held), [NewTask("child")], wait=True)
    assert world.status(first.id) == "PENDING"

    with pytest.raises(ForbiddenError, match="subtasks"):
        await send(world)
    with pytest.raises(ForbiddenError, match="subtasks"):
        await send(world, on_conflict="cancel_running")

    await world.complete(await world.take(types=["child"]))
    assert world.status(child.id) == "COMPLETED"
    assert (await send(world)).replaced


async def test_a_batch_is_not_replaced(world: World) -> None:
    await world.one("code", idempotency_key="k", children=[NewTask("child")])

    with pytest.raises(ForbiddenError, match="subtasks"):
        await send(world)


# In a transaction of the caller.


async def test_in_the_callers_transaction(world: World) -> None:
    """A replacement counts when the caller commits; what would hold up an agent until then is refused."""
    first = await send(world, spec={"n": 1})
    shaft = world.engine.submission
    task = NewTask("code", idempotency_key="k", on_conflict=REPLACE, spec={"n": 2})
    async with await psycopg.AsyncConnection.connect(world.engine.database.dsn) as theirs:
        (second,) = await shaft.submit([task], connection=theirs)
        assert second.replaced
        assert await world.claim(await world.agent()) == []
        await theirs.rollback()
        assert world.task(first.id)["spec"] == {"n": 1}
        await shaft.submit([task], connection=theirs)
        await theirs.commit()
        with pytest.raises(InvalidInputError, match="your own transaction"):
            await shaft.submit([task.with_options(on_conflict="cancel_running")], connection=theirs)
    assert world.task(first.id)["spec"] == {"n": 2}
    assert (await world.take()).id == first.id
