"""A claim that ended elsewhere: every later call with it is stale, whatever status the task has by then."""

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal

import msgspec
import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.errors import StaleClaimError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimedTask, Completion, Failure, HeldTask, Moved, Presence, Release, Spent
from tests.races.helpers import DONE, LIVE_ROW, held, race, running, status, waiting
from tests.world import cost, only, ref

INSTANCE_ROW = "SELECT FROM lineshaft.instance WHERE agent_id = %s FOR UPDATE"

Call = Callable[[Engine, ClaimedTask], Awaitable[list[Moved]]]


def fail(engine: Engine, task: ClaimedTask) -> Awaitable[list[Moved]]:
    return engine.work.fail([Failure(ref(task), "boom")])


def complete(engine: Engine, task: ClaimedTask) -> Awaitable[list[Moved]]:
    return engine.work.complete([Completion(ref(task), DONE)])


def release(engine: Engine, task: ClaimedTask) -> Awaitable[list[Moved]]:
    return engine.work.release([Release(ref(task))])


def postpone(engine: Engine, task: ClaimedTask) -> Awaitable[list[Moved]]:
    return engine.work.release([Release(ref(task), delay_sec=60)])


def without_wait(moved: Moved) -> Moved:
    """Only the first answer to a failure has the time until the next attempt, and the reason."""
    return msgspec.structs.replace(moved, retry_in_sec=None, failure_reason=None)


CALLS = pytest.mark.parametrize("call", [fail, complete, release, postpone])


@CALLS
async def test_the_reaper_ends_a_claim_while_its_holder_calls(
    engines: tuple[Engine, Engine], clock: MovableClock, dsn: str, call: Call
) -> None:
    """R-072: the reaper has the task's row, the call waits for it and is stale."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    clock.advance(7200)
    with held(dsn, INSTANCE_ROW, "a1") as holder, psycopg.connect(dsn, autocommit=True) as look:
        reaping = asyncio.ensure_future(one.maintenance.reap(10))
        await waiting(look, 1)
        _, moved = await asyncio.gather(reaping, race(look, holder, call(two, task), already=1))

        assert isinstance(only(moved[0]).error, StaleClaimError)
        assert status(look, task.id) == Status.RETRYING
        attempts = "SELECT outcome, error FROM lineshaft.attempt WHERE task_id = %s"
        assert look.execute(attempts, [task.id]).fetchall() == [("failed", "heartbeat_timeout")]


async def test_a_failure_wins_against_the_reaper(
    engines: tuple[Engine, Engine], clock: MovableClock, dsn: str
) -> None:
    """The reaper passes over a row that a call has locked; a repeated call has the first one's answer."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    clock.advance(7200)
    with held(dsn, INSTANCE_ROW, "a1") as holder, psycopg.connect(dsn, autocommit=True) as look:
        failing = asyncio.ensure_future(fail(two, task))
        await waiting(look, 1)
        assert await one.maintenance.reap(10) == {}
        holder.rollback()
        first = only(await failing)

    assert first.status is Status.RETRYING
    assert only(await fail(one, task)) == without_wait(first)


@CALLS
async def test_an_agent_registers_again_while_its_old_process_calls(
    engines: tuple[Engine, Engine], dsn: str, call: Call
) -> None:
    """The registration comes first."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    with held(dsn, INSTANCE_ROW, "a1") as holder, psycopg.connect(dsn, autocommit=True) as look:
        registering = asyncio.ensure_future(one.fleet.register(NewAgent(id="a1")))
        await waiting(look, 1)
        _, moved = await asyncio.gather(registering, race(look, holder, call(two, task), already=1))

        assert isinstance(only(moved[0]).error, StaleClaimError)
        assert status(look, task.id) == Status.RETRYING


@CALLS
async def test_a_call_comes_before_the_registration(
    engines: tuple[Engine, Engine], dsn: str, call: Call
) -> None:
    """Its result stands, and a repeated call has the same answer."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    with held(dsn, LIVE_ROW, task.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        calling = asyncio.ensure_future(call(two, task))
        await waiting(look, 1)
        await race(look, holder, one.fleet.register(NewAgent(id="a1")), already=1)
        first = only(await calling)

    assert first.error is None
    assert only(await call(one, task)) == without_wait(first)


@CALLS
async def test_a_zombie_calls_after_the_retry_is_due(
    engines: tuple[Engine, Engine], clock: MovableClock, dsn: str, call: Call
) -> None:
    """The task is READY with the epoch of the ended claim."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    clock.advance(7200)
    await one.maintenance.reap(10)
    clock.advance(600)
    assert await one.maintenance.promote_due(10) == 1

    assert isinstance(only(await call(two, task)).error, StaleClaimError)
    with psycopg.connect(dsn) as look:
        assert status(look, task.id) == Status.READY


@CALLS
async def test_a_zombie_calls_after_its_task_became_a_dead_letter(
    engines: tuple[Engine, Engine], clock: MovableClock, call: Call
) -> None:
    """Also when the lost attempt had cost more than its limit."""
    one, two = engines
    await one.submission.submit([NewTask("code", max_attempts=1), NewTask("code", max_cost_usd=1)])
    tasks = await running(one, 2)
    spent = [HeldTask(task.id, task.epoch, Presence("a1", 1), spent=Spent(Decimal(2))) for task in tasks]
    await one.work.heartbeat([Presence("a1", 1)], spent)
    clock.advance(7200)
    await one.maintenance.reap(10)

    for task in tasks:
        assert isinstance(only(await call(two, task)).error, StaleClaimError)


async def test_a_call_of_another_kind_is_stale(engines: tuple[Engine, Engine]) -> None:
    """Only the call that ended the claim can be repeated."""
    one, two = engines
    for first, others in ((fail, (complete, release, postpone)), (release, (complete, fail))):
        await one.submission.submit([NewTask("code")])
        (task,) = await running(one)
        assert only(await first(one, task)).error is None
        for other in others:
            assert isinstance(only(await other(two, task)).error, StaleClaimError)
        for again in await running(one):
            await complete(one, again)


async def test_repeated_calls_after_a_lost_answer(
    engines: tuple[Engine, Engine], clock: MovableClock
) -> None:
    """As the first time; after the retry or the delay is due, the task is READY."""
    one, two = engines
    for call, first in ((fail, Status.RETRYING), (postpone, Status.PENDING), (release, Status.READY)):
        await one.submission.submit([NewTask("code")])
        (task,) = await running(one)
        assert without_wait(only(await call(one, task))) == Moved(task.id, first)
        assert only(await call(two, task)) == Moved(task.id, first)
        clock.advance(600)
        await one.maintenance.promote_due(10)
        assert only(await call(two, task)) == Moved(task.id, Status.READY)
        await complete(one, *(await running(one)))

    await one.submission.submit([NewTask("code", max_attempts=1), NewTask("code", max_cost_usd=1)])
    failed, costly = await running(one, 2)
    over = [Completion(ref(costly), DONE, spent=cost("2"))]
    for _ in range(2):
        assert without_wait(only(await fail(two, failed))) == Moved(failed.id, Status.DEAD_LETTERED)
        assert without_wait(only(await two.work.complete(over))) == Moved(costly.id, Status.DEAD_LETTERED)
