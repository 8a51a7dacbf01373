"""Reports of spending that meet each other, and the ends of their claims: each dollar is booked once."""

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask, RetrySpec
from lineshaft.types.work import (
    ClaimedTask,
    Completion,
    Failure,
    HeartbeatAnswers,
    HeldTask,
    Presence,
    Release,
)
from tests.invariants import check_invariants
from tests.races.helpers import DONE, LIVE_ROW, held, passes_or_waits, race, running, waiting
from tests.world import cost, ref

A1 = Presence("a1", 1)
AGENT_ROW = "SELECT FROM lineshaft.agent WHERE id = %s FOR UPDATE"
SPEND = """
    SELECT (SELECT sum(spent_usd) FROM lineshaft.agent), (SELECT sum(spent_usd) FROM lineshaft.spend),
        (SELECT sum(cost_usd) FROM lineshaft.tasks), (SELECT sum(cost_usd) FROM lineshaft.attempts)
"""


def report(engine: Engine, task: ClaimedTask, usd: str) -> Awaitable[HeartbeatAnswers]:
    return engine.work.heartbeat([A1], [HeldTask(task.id, task.epoch, A1, None, cost(usd))])


def booked(connection: psycopg.Connection) -> set[Decimal]:
    """What agents, days, tasks and attempts have cost: one figure."""
    row = connection.execute(SPEND.encode()).fetchone()
    assert row is not None
    return {figure or Decimal(0) for figure in row}


async def test_two_zombies_report_at_once(
    engines: tuple[Engine, Engine], clock: MovableClock, dsn: str, connection: psycopg.Connection
) -> None:
    """R-024: the same claim, over two servers: the difference is booked once."""
    one, two = engines
    await one.submission.submit([NewTask("code", retry=RetrySpec(strategy="immediate"))])
    (task,) = await running(one)
    await report(one, task, "0.5")
    clock.advance(7200)
    await one.maintenance.reap(10)

    def late(engine: Engine) -> Awaitable[Any]:
        return engine.work.fail([Failure(ref(task), "late", spent=cost("2"))])

    with held(dsn, LIVE_ROW, task.id) as holder:
        await race(connection, holder, late(one), late(two))

    assert booked(connection) == {Decimal(2)}
    check_invariants(connection)


async def test_two_zombies_report_an_ended_task_at_once(
    engines: tuple[Engine, Engine], clock: MovableClock, dsn: str, connection: psycopg.Connection
) -> None:
    """There is no live row to wait for: the attempt's row makes them take turns."""
    one, two = engines
    await one.submission.submit([NewTask("code", max_attempts=1)])
    (task,) = await running(one)
    clock.advance(7200)
    await one.maintenance.reap(10)
    attempt = "SELECT FROM lineshaft.attempt WHERE task_id = %s FOR UPDATE"

    def late(engine: Engine, usd: str) -> Awaitable[Any]:
        return engine.work.fail([Failure(ref(task), "late", spent=cost(usd))])

    with held(dsn, attempt, task.id) as holder:
        await race(connection, holder, late(one, "2"), late(two, "3"))

    assert booked(connection) == {Decimal(3)}
    check_invariants(connection)


async def test_two_late_reports_of_a_completed_task_at_once(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    await one.work.complete([Completion(ref(task), DONE, spent=cost("1"))])
    ended = "SELECT FROM lineshaft.task_end WHERE id = %s FOR UPDATE"

    def late(engine: Engine, usd: str) -> Awaitable[Any]:
        return engine.work.fail([Failure(ref(task), "late", spent=cost(usd))])

    with held(dsn, ended, task.id) as holder:
        await race(connection, holder, late(one, "2"), late(two, "3"))

    assert booked(connection) == {Decimal(3)}


End = Callable[[Engine, ClaimedTask], Awaitable[Any]]


def _complete(engine: Engine, task: ClaimedTask) -> Awaitable[Any]:
    return engine.work.complete([Completion(ref(task), DONE, spent=cost("0.7"))])


def _fail(engine: Engine, task: ClaimedTask) -> Awaitable[Any]:
    return engine.work.fail([Failure(ref(task), "x", spent=cost("0.7"))])


def _release(engine: Engine, task: ClaimedTask) -> Awaitable[Any]:
    return engine.work.release([Release(ref(task), spent=cost("0.7"))])


def _cancel(engine: Engine, task: ClaimedTask) -> Awaitable[Any]:
    return engine.cancel.cancel(task.id, "no")


@pytest.mark.parametrize("end", [_complete, _fail, _release, _cancel])
@pytest.mark.parametrize("limit", [None, 1])
async def test_a_report_meets_the_end_of_its_claim(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, end: End, limit: float | None
) -> None:
    """Whichever is first: the larger figure is booked, once."""
    one, two = engines
    await one.fleet.patch("a1", budget_usd=10)
    await one.submission.submit([NewTask("code", max_cost_usd=limit)])
    (task,) = await running(one)
    await report(one, task, "0.4")
    with held(dsn, LIVE_ROW, task.id) as holder:
        ending = asyncio.ensure_future(end(one, task))
        await waiting(connection, 1)
        # The heartbeat waits for a second only, which may be over before it is seen to; then it is repeated.
        reporting = asyncio.ensure_future(report(two, task, "0.9"))
        await passes_or_waits(connection, reporting, 2)
        holder.rollback()
        await ending
        answers = await reporting
    if answers.spent_later:
        await report(two, task, "0.9")

    assert booked(connection) == {Decimal("0.9")}
    check_invariants(connection)


async def test_a_report_doesnt_wait_for_a_locked_task(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """After a second it asks for the report again; the lease isn't concerned."""
    one, _ = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    with held(dsn, LIVE_ROW, task.id):
        answers = await report(one, task, "0.4")

    assert (answers.spent_later, answers.over) == (True, [])
    assert not (await report(one, task, "0.4")).spent_later
    assert booked(connection) == {Decimal("0.4")}


async def test_a_late_report_doesnt_wait_for_a_locked_task(
    engines: tuple[Engine, Engine], clock: MovableClock, dsn: str
) -> None:
    """A heartbeat with a lost claim is answered after a second."""
    one, _ = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    clock.advance(7200)
    await one.maintenance.reap(10)
    with held(dsn, LIVE_ROW, task.id):
        answers = await report(one, task, "0.4")

    assert answers.spent_later
    assert [over.answer for over in answers.over] == ["lost"]


async def test_many_reports_and_ends_of_one_agent_at_once(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """R-231, R-234: no deadlock, and sums that agree."""
    one, two = engines
    await one.fleet.patch("a1", budget_usd=1000)
    await one.submission.submit_dag("a DAG", [NewTask("code", max_cost_usd=n % 2) for n in range(40)])
    tasks = await running(one, 40)

    async def spend(engine: Engine, some: list[ClaimedTask]) -> None:
        for usd in ("0.3", "0.6", "0.9"):
            items = [HeldTask(task.id, task.epoch, A1, None, cost(usd)) for task in some]
            while (await engine.work.heartbeat([A1], items)).spent_later:
                pass

    async def finish(engine: Engine, some: list[ClaimedTask]) -> None:
        for task in some:
            await engine.work.release([Release(ref(task), spent=cost("0.9"))])

    await asyncio.gather(
        spend(one, tasks), spend(two, tasks[::-1]), finish(one, tasks[::2]), finish(two, tasks[1::2])
    )

    assert booked(connection) == {Decimal(36)}
    check_invariants(connection)
