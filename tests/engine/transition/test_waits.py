"""Waiting without a slot: sleeps and signals, whatever happens to the task meanwhile."""

import asyncio
import json
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.engine.engine import Engine
from lineshaft.errors import (
    BudgetExceededError,
    DependentsRunningError,
    InvalidInputError,
    InvalidTransitionError,
    NotFoundError,
    RateLimitedError,
    StaleClaimError,
)
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.waits import MAX_SIGNAL_BYTES, MAX_SIGNALS, NewSignal, NewSuspension, WaitEnd
from lineshaft.types.work import ClaimedTask, NewStep
from tests.world import World, cost, record_step, ref, spawn_once

DAY = 86_400.0


async def suspend(world: World, task: ClaimedTask, name: str, **options: Any) -> WaitEnd | None:
    (result,) = await world.engine.work.suspend([NewSuspension(ref(task), name, **options)])
    return result.unwrap()


async def sleep(
    world: World, task: ClaimedTask, name: str = "nap", seconds: float = 2 * DAY
) -> WaitEnd | None:
    return await suspend(world, task, name, timeout_sec=seconds)


async def wait_for(
    world: World, task: ClaimedTask, name: str, timeout_sec: float | None = None
) -> WaitEnd | None:
    return await suspend(world, task, name, signal=name, timeout_sec=timeout_sec)


async def signal(world: World, task_id: str, name: str, data: Any = None, **options: Any) -> bool:
    """Whether it is new."""
    new = NewSignal(name, json.dumps(data).encode(), **options)
    return not (await world.engine.waits.signal(task_id, new)).duplicate


def unreceived(world: World, task_id: str) -> list[str]:
    query = "SELECT name FROM lineshaft.signal WHERE task_id = %s AND received_at IS NULL ORDER BY no"
    return [row["name"] for row in world.rows(query, task_id)]


async def reasons(world: World, task_id: str) -> list[str]:
    return [reason.code for reason in (await world.engine.read.why(task_id)).reasons]


async def detail(world: World, task_id: str) -> str:
    (only,) = (await world.engine.read.why(task_id)).reasons
    return only.detail


async def test_a_sleep_holds_nothing_and_uses_no_attempt(world: World) -> None:
    """Slot, lock, money and lease are free for two days; then it is claimed again."""
    agent = await world.agent(max_concurrent_tasks=1, budget_usd=10)
    task_id = await world.one(lock_key="doc", max_cost_usd=5)
    task = await world.take(agent)

    assert await sleep(world, task) is None

    live = world.live(task_id)
    assert (live["status"], live["lease_until"], live["reserved_usd"]) == ("PENDING", None, 0)
    assert (world.lock("doc"), world.agent_row(agent)["held"], world.agent_row(agent)["reserved_usd"]) == (
        None,
        0,
        0,
    )
    assert await reasons(world, task_id) == ["sleeping"]
    assert await detail(world, task_id) == f"Sleeps in step 'nap' until {_in(world, 2 * DAY)}."
    world.age(days=1)
    assert await world.engine.maintenance.reap(10) == {}
    assert await world.engine.maintenance.promote_due(10) == 0
    world.age(days=1)
    assert await world.engine.maintenance.promote_due(10) == 1
    task = await world.take(await world.agent("other"))
    assert await sleep(world, task) == WaitEnd(world.clock.now())
    assert (task.attempts, task.epoch, world.status(task_id)) == (0, 2, "RUNNING")
    assert world.kinds(task_id)[2:] == [
        *("task.claimed", "task.started", "task.waiting", "task.ready", "task.claimed", "task.started")
    ]


async def test_a_signal_wakes_its_task_which_receives_it_once(world: World) -> None:
    task_id = await world.one()
    task = await world.take()
    assert await wait_for(world, task, "approved") is None
    assert await reasons(world, task_id) == ["waiting_signal"]
    assert "without a time limit" in await detail(world, task_id)
    assert world.task(task_id)["status"] == "PENDING"
    assert (await world.engine.read.task(task_id)).run_at is None

    assert await signal(world, task_id, "other")
    assert world.status(task_id) == "PENDING"
    assert await signal(world, task_id, "approved", {"by": "ann"})
    assert world.status(task_id) == "READY"
    assert world.kinds(task_id)[-2:] == ["task.signalled", "task.ready"]

    claimed = await world.claims(await world.agent())
    (task,) = claimed.tasks
    came = json.loads(claimed.resumed[task_id].signals or b"")
    assert [(one["name"], one["data"]) for one in came] == [("other", None), ("approved", {"by": "ann"})]
    end = await wait_for(world, task, "approved")
    assert end is not None
    assert end.signal is not None
    assert bytes(end.signal.data) == b'{"by": "ann"}'
    assert unreceived(world, task_id) == ["other"]
    # Asked again, it answers from the step.
    again = await wait_for(world, task, "approved")
    assert again is not None
    assert again.signal is not None
    assert (again.signal.id, again.signal.data) == (end.signal.id, {"by": "ann"})
    assert world.rows("SELECT * FROM lineshaft.wait") == []


async def test_a_signal_that_came_before_is_the_answer_at_once(world: World) -> None:
    """Signals of one name are received in their order, one by each wait."""
    task_id = await world.one()
    for number in (1, 2):
        await signal(world, task_id, "item", number)
    task = await world.take()

    ends = [await suspend(world, task, f"item {n}", signal="item") for n in (1, 2)]

    assert [end and end.signal and bytes(end.signal.data) for end in ends] == [b"1", b"2"]
    assert await suspend(world, task, "item 3", signal="item") is None


async def test_a_timeout_is_durable_and_keeps_its_first_end(world: World) -> None:
    task_id = await world.one()
    task = await world.take()
    await wait_for(world, task, "approved", DAY)
    end = world.clock.now() + timedelta(days=1)
    world.age(hours=1)
    # Claimed early, for whatever reason: the wait doesn't begin again.
    world.connection.execute(
        "UPDATE lineshaft.task_live SET status = 'READY', due_at = NULL, ready_at = now()"
    )
    task = await world.take()
    assert await wait_for(world, task, "approved", DAY) is None
    assert world.live(task_id)["due_at"] == end
    world.age(days=1)
    await world.engine.maintenance.promote_due(10)
    task = await world.take()

    assert await wait_for(world, task, "approved", DAY) == WaitEnd(end)

    # What comes now is too late for this wait, and waits for another one.
    await signal(world, task_id, "approved")
    await world.fail(task)
    world.age(hours=1)
    await world.engine.maintenance.promote_due(10)
    task = await world.take()
    assert await wait_for(world, task, "approved", DAY) == WaitEnd(end)
    assert await suspend(world, task, "again", signal="approved") is not None


async def test_a_repeated_call_answers_as_the_first_time(world: World) -> None:
    task_id = await world.one()
    task = await world.take()

    assert [await sleep(world, task) for _ in range(2)] == [None, None]

    world.age(days=3)
    await world.engine.maintenance.promote_due(10)
    assert await sleep(world, task) is None
    newer = await world.take()
    assert await sleep(world, task) is None, "it ended its claim: the answer is the same"
    with pytest.raises(StaleClaimError):
        await record_step(world.engine, ref(task), "late", b"1")
    await world.complete(newer)
    assert len(world.attempts(task_id)) == 1


async def test_only_the_holder_of_a_running_task_suspends_it(world: World) -> None:
    await world.one()
    agent = await world.agent()
    task = await world.take(agent)
    await world.release(task)
    with pytest.raises(StaleClaimError):
        await suspend(world, task, "nap", timeout_sec=1, spent=cost("0.5"))
    assert world.live(task.id)["cost_usd"] == Decimal("0.5"), "the money is gone"
    claimed = await world.take(agent, start=False)
    with pytest.raises(InvalidTransitionError):
        await sleep(world, claimed)


async def test_what_it_has_spent_is_booked(world: World) -> None:
    agent = await world.agent(budget_usd=10)
    task_id = await world.one(max_total_cost_usd=3)
    task = await world.take(agent)
    await suspend(world, task, "nap", timeout_sec=1, spent=cost("1"), checkpoint=b'{"page": 7}')
    assert (world.live(task_id)["cost_usd"], world.agent_row(agent)["spent_usd"]) == (1, 1)
    world.age(seconds=1)
    await world.engine.maintenance.promote_due(1)
    claimed = await world.claims(agent)
    assert claimed.resumed[task_id].checkpoint == b'{"page": 7}'
    (task,) = claimed.tasks
    await suspend(world, task, "nap", timeout_sec=1, spent=cost("0.5"))
    with pytest.raises(BudgetExceededError, match="max_total_cost_usd"):
        await suspend(world, task, "more", timeout_sec=1, spent=cost("2"))
    assert world.status(task_id) == "RUNNING"
    assert world.live(task_id)["attempt_cost_usd"] == 2


async def test_a_signal_has_an_idempotency_key(world: World) -> None:
    """Also after it was received."""
    task_id = await world.one()
    assert await signal(world, task_id, "item", 1, idempotency_key="k")
    assert not await signal(world, task_id, "item", 2, idempotency_key="k")
    task = await world.take()
    end = await wait_for(world, task, "item")
    assert end is not None
    assert end.signal is not None
    assert bytes(end.signal.data) == b"1"
    assert not await signal(world, task_id, "item", 1, idempotency_key="k")
    assert unreceived(world, task_id) == []
    await world.complete(task)
    assert not await signal(world, task_id, "item", 1, idempotency_key="k"), "as before, though it has ended"


async def test_what_has_ended_or_never_was_gets_no_signal(world: World) -> None:
    task_id = await world.one()
    await world.complete(await world.take())
    with pytest.raises(InvalidTransitionError, match="COMPLETED"):
        await signal(world, task_id, "late")
    with pytest.raises(NotFoundError):
        await signal(world, "task_nope", "x")


async def test_signals_have_limits(world: World) -> None:
    task_id = await world.one()
    await signal(world, task_id, "large", "x" * (MAX_SIGNAL_BYTES - 2))
    with pytest.raises(InvalidInputError, match="65536"):
        await signal(world, task_id, "large", "x" * (MAX_SIGNAL_BYTES - 1))
    world.connection.execute(
        "INSERT INTO lineshaft.signal (task_id, id, name, at)"
        " SELECT %s, 's' || n, 'many', now() FROM generate_series(1, %s) AS n",
        [task_id, MAX_SIGNALS - 2],
    )
    await signal(world, task_id, "many")
    with pytest.raises(RateLimitedError, match="1000 signals wait"):
        await signal(world, task_id, "many")
    await wait_for(world, await world.take(), "large")
    await signal(world, task_id, "many")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "needs an end"),
        ({"timeout_sec": -1.0}, "timeout_sec"),
        ({"timeout_sec": 400 * DAY}, "timeout_sec"),
        ({"signal": ""}, "signal"),
    ],
)
async def test_a_wait_that_makes_no_sense_is_refused(world: World, options: Any, fault: str) -> None:
    await world.one()
    task = await world.take()
    with pytest.raises(InvalidInputError, match=fault):
        await suspend(world, task, "nap", **options)
    await record_step(world.engine, ref(task), "done", b"1")
    with pytest.raises(InvalidInputError, match="not by a wait"):
        await sleep(world, task, "done")


async def test_a_holder_may_record_the_step_of_its_wait_itself(world: World) -> None:
    """As agents in other languages do: their claim has the signal."""
    task_id = await world.one()
    await wait_for(world, await world.take(), "approved")
    await signal(world, task_id, "approved", 1)
    await signal(world, task_id, "approved", 2)
    await signal(world, task_id, "other", 3)
    claimed = await world.claims(await world.agent())
    (task,) = claimed.tasks
    other = json.loads(claimed.resumed[task_id].signals or b"")[2]["id"]

    await record_step(world.engine, ref(task), "approved", b"1")
    assert unreceived(world, task_id) == ["approved", "other"]
    await world.engine.work.record_steps([NewStep(ref(task), "more", b"1", received=(other,))])

    assert unreceived(world, task_id) == ["approved"]
    assert world.rows("SELECT * FROM lineshaft.wait") == []


async def test_a_suspended_task_expires_at_its_deadline(world: World) -> None:
    deadline = world.clock.now() + timedelta(hours=1)
    task_id = await world.one(deadline=deadline, expire_at_deadline=True)
    await sleep(world, await world.take())
    world.age(hours=2)
    await world.engine.maintenance.expire_tasks(10)
    assert world.status(task_id) == "CANCELLED"


async def test_a_wait_begins_again_when_its_task_is_revived(world: World) -> None:
    """Signals that weren't received are kept, as recorded steps are; `forget_steps` forgets both."""
    task_id = await world.one()
    task = await world.take()
    await record_step(world.engine, ref(task), "first", b"1")
    await wait_for(world, task, "approved", DAY)
    await signal(world, task_id, "later", 7)
    await world.engine.cancel.cancel(task_id, "no")
    world.age(days=2)
    await world.engine.revive.retry(task_id, delay_sec=60)
    assert await reasons(world, task_id) == ["scheduled"]
    await signal(world, task_id, "unrelated")
    assert world.status(task_id) == "PENDING"
    world.age(minutes=1)
    await world.engine.maintenance.promote_due(1)
    task = await world.take()
    assert await wait_for(world, task, "approved", DAY) is None, "it hasn't timed out"
    await signal(world, task_id, "approved")
    task = await world.take()
    assert await wait_for(world, task, "later") is not None
    await world.fail(task, category="auth_failure")
    again = ResolutionRequest(resolution="retry", reviewer="ann", forget_steps="all")
    await world.engine.dead_letters.resolve(task_id, again)
    assert world.rows("SELECT * FROM lineshaft.step") == world.rows("SELECT * FROM lineshaft.signal") == []


async def test_a_rerun_forgets_signals_with_the_steps(world: World) -> None:
    task_id = await world.one()
    await signal(world, task_id, "approved", 1, idempotency_key="k")
    task = await world.take()
    assert await wait_for(world, task, "approved") is not None
    await signal(world, task_id, "rest")
    await world.complete(task)

    await world.engine.rerun.rerun(task_id)

    assert await wait_for(world, await world.take(), "approved") is None
    assert unreceived(world, task_id) == []
    assert await signal(world, task_id, "approved", 1, idempotency_key="k")


@pytest.mark.parametrize("keep", [False, True])
async def test_a_rerun_above_a_suspended_task_counts_it_as_running(world: World, keep: bool) -> None:
    """It has begun with the output that is replaced. Without its steps it begins again, after the rerun."""
    up = await world.one("up")
    down = await world.one("down", depends_on=[up])
    await world.complete(await world.take(types=["up"]))
    await sleep(world, await world.take(types=["down"]))
    with pytest.raises(DependentsRunningError):
        await world.engine.rerun.rerun(up)

    await world.engine.rerun.rerun(up, cancel_running=True, forget_steps=not keep)

    expected = ["blocked_by_dependency", "sleeping"] if keep else ["blocked_by_dependency"]
    assert await reasons(world, down) == expected
    await world.complete(await world.take(types=["up"]))
    await world.engine.maintenance.promote_due(10)
    assert world.status(down) == ("PENDING" if keep else "READY")
    world.age(days=2)
    await world.engine.maintenance.promote_due(10)
    assert world.status(down) == "READY"


async def test_a_suspended_task_may_get_a_dependency(world: World) -> None:
    other = await world.one("other")
    task_id = await world.one("waits")
    await wait_for(world, await world.take(types=["waits"]), "approved")
    await world.engine.dependencies.add(task_id, [other])
    await signal(world, task_id, "approved")
    assert world.status(task_id) == "PENDING"
    await world.complete(await world.take(types=["other"]))
    assert await wait_for(world, await world.take(types=["waits"]), "approved") is not None


async def test_a_batch_gives_its_lock_back_while_a_part_of_it_waits(world: World) -> None:
    await world.submit(NewTask("batch", lock_key="doc", children=[NewTask("a"), NewTask("b")]))
    part = await world.take(types=["a"])
    await sleep(world, part)
    assert world.lock("doc") is None


async def test_a_parent_waits_for_children_and_signals_in_turn(world: World) -> None:
    task_id = await world.one("parent")
    parent = await world.take(types=["parent"])
    await spawn_once(world.engine, ref(parent), "k", [NewTask("kid")], wait=True)
    # A signal is not a child.
    await signal(world, task_id, "approved")
    assert world.status(task_id) == "PENDING"
    await world.complete(await world.take(types=["kid"]))
    parent = await world.take(types=["parent"])
    assert await wait_for(world, parent, "approved") is not None
    assert world.status(task_id) == Status.RUNNING


async def test_a_thousand_sleeps_leave_no_thousand_attempts(world: World) -> None:
    """Every claim reads what earlier attempts left behind. Attempts that cost something stay."""
    agent = await world.agent()
    task_id = await world.one()
    task = await world.take(agent)
    for number in range(40):
        spent = cost("0.1" if number == 3 else "0")
        assert await suspend(world, task, f"nap {number}", timeout_sec=1, spent=spent) is None
        world.age(seconds=1)
        await world.engine.maintenance.promote_due(1)
        task = await world.take(agent)
        assert await suspend(world, task, f"nap {number}", timeout_sec=1) is not None

    attempts = world.attempts(task_id)
    assert [attempt["epoch"] for attempt in attempts] == [4, *range(21, 41)]
    assert world.rows("SELECT * FROM lineshaft.wait") == []
    assert world.live(task_id)["cost_usd"] == Decimal("0.1")


async def test_retention_deletes_waits_and_signals_with_the_task(world: World) -> None:
    task_id = await world.one()
    await sleep(world, await world.take())
    await signal(world, task_id, "x")
    await world.engine.cancel.cancel(task_id, "no")
    world.age(days=400)
    await world.engine.maintenance.delete_finished(DAY, 100)
    for table in ("task", "wait", "signal"):
        assert world.rows(f"SELECT * FROM lineshaft.{table}") == []


async def test_what_waits_is_counted_by_reason(world: World) -> None:
    await world.submit(*(NewTask("t") for _ in range(3)))
    agent = await world.agent()
    await sleep(world, await world.take(agent))
    for _ in range(2):
        await wait_for(world, await world.take(agent), "approved")
    found = {
        reason.code: (reason.count, reason.next_at) for reason in (await world.engine.read.waiting()).reasons
    }
    assert found == {
        "sleeping": (1, world.clock.now() + timedelta(days=2)),
        "waiting_signal": (2, None),
    }


@pytest.mark.parametrize("first", ["signal", "suspend"])
async def test_a_signal_and_a_suspension_at_once_lose_nothing(
    world: World, engine: Engine, first: str
) -> None:
    """Two connections, many times, whichever the database serves first."""
    agent = await world.agent()
    for number in range(20):
        task_id = await world.one()
        task = await world.take(agent)
        calls = [engine.waits.signal(task_id, NewSignal("go")), wait_for(world, task, "go")]
        results = await asyncio.gather(*(calls if first == "signal" else reversed(calls)))
        end = results[1 if first == "signal" else 0]
        if end is None:
            assert world.status(task_id) == "READY", number
            task = await world.take(agent)
            end = await wait_for(world, task, "go")
        assert isinstance(end, WaitEnd)
        assert end.signal is not None
        assert unreceived(world, task_id) == []
        await world.complete(task)


def _in(world: World, seconds: float) -> str:
    at = world.clock.now() + timedelta(seconds=seconds)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
