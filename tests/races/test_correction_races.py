"""Corrections that meet reports, ends of claims, and each other: every ledger has the same sum."""

import asyncio
from collections.abc import Awaitable
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from lineshaft.types import CostCorrection, Disputed
from lineshaft.types.work import Completion, Failure, HeldTask, Presence
from tests.invariants import check_invariants
from tests.races.helpers import DONE, LIVE_ROW, held, race, running, waiting
from tests.world import cost, ref

A1 = Presence("a1", 1)
END_ROW = "SELECT FROM lineshaft.task_end WHERE id = %s FOR UPDATE"
DISPUTE_ROW = "SELECT FROM lineshaft.cost_dispute WHERE task_id = %s FOR UPDATE"
SPEND = """
    SELECT (SELECT sum(spent_usd) FROM lineshaft.agent), (SELECT sum(spent_usd) FROM lineshaft.spend),
        (SELECT sum(cost_usd) FROM lineshaft.tasks)
"""


def booked(connection: psycopg.Connection) -> Decimal:
    """What agents, days and tasks have cost: one figure."""
    row = connection.execute(SPEND.encode()).fetchone()
    assert row is not None
    (figure,) = set(row)
    return Decimal(figure)


def correct(engine: Engine, task_id: str, usd: str) -> Awaitable[None]:
    return engine.corrections.correct(task_id, CostCorrection(cost_usd=Decimal(usd), reason="the bill"))


async def in_turn(
    connection: psycopg.Connection, holder: psycopg.Connection, first: Awaitable[Any], second: Awaitable[Any]
) -> None:
    """Both wait for the row that is held, and get it in this order."""
    ahead = asyncio.ensure_future(first)
    await waiting(connection, 1)
    (ended,) = await race(connection, holder, second, already=1)
    assert not isinstance(ended, BaseException), ended
    await ahead


@pytest.mark.parametrize("correction_first", [True, False])
async def test_a_correction_meets_a_late_report_of_a_completed_task(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, correction_first: bool
) -> None:
    """R-024: the claim has no row of its own. What it had reported is known without what was corrected."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    await one.work.complete([Completion(ref(task), DONE, spent=cost("1"))])

    def late(engine: Engine, usd: str) -> Awaitable[Any]:
        return engine.work.fail([Failure(ref(task), "late", spent=cost(usd))])

    calls = [correct(one, task.id, "0.31"), late(two, "3")]
    with held(dsn, END_ROW, task.id) as holder:
        await in_turn(connection, holder, *(calls if correction_first else reversed(calls)))

    # Corrected to 0.31 and then 2 more, or 2 more and then corrected.
    expected = Decimal("2.31") if correction_first else Decimal("0.31")
    assert booked(connection) == expected
    await late(one, "3")
    assert booked(connection) == expected
    await late(one, "4")
    assert booked(connection) == expected + 1
    check_invariants(connection)


@pytest.mark.parametrize("correction_first", [True, False])
async def test_a_correction_meets_the_end_of_the_claim(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, correction_first: bool
) -> None:
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    await one.work.heartbeat([A1], [HeldTask(task.id, task.epoch, A1, None, cost("1"))])

    calls = [correct(one, task.id, "0.31"), two.work.complete([Completion(ref(task), DONE, spent=cost("3"))])]
    with held(dsn, LIVE_ROW, task.id) as holder:
        await in_turn(connection, holder, *(calls if correction_first else reversed(calls)))

    assert booked(connection) == (Decimal("2.31") if correction_first else Decimal("0.31"))
    check_invariants(connection)


async def test_two_people_correct_a_cost_at_once(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    await one.work.complete([Completion(ref(task), DONE, spent=cost("1"))])

    with held(dsn, END_ROW, task.id) as holder:
        await race(connection, holder, correct(one, task.id, "0.31"), correct(two, task.id, "0.31"))

    assert booked(connection) == Decimal("0.31")
    rows = connection.execute("SELECT amount_usd FROM lineshaft.cost_correction").fetchall()
    assert rows == [(Decimal("-0.69"),)]


async def test_a_decision_meets_a_higher_report(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """What the person has not seen stays disputed."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    await one.work.complete([Completion(ref(task), DONE, spent=cost("110"))])

    accept = one.corrections.correct(task.id, CostCorrection(disputed=Disputed.ACCEPT, reason="the bill"))
    more = two.work.fail([Failure(ref(task), "late", spent=cost("150"))])
    with held(dsn, DISPUTE_ROW, task.id) as holder:
        await in_turn(connection, holder, accept, more)

    assert (booked(connection), (await one.read.task(task.id)).disputed_usd) == (Decimal(110), Decimal(40))
    check_invariants(connection)
