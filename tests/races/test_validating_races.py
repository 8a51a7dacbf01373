"""Costs that an agent reports while its output is being validated."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.checks.verdict import CandidateOutput
from lineshaft.engine.engine import Engine
from lineshaft.errors import LineshaftError
from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, NewTask, OutputContract
from lineshaft.types import ApprovalDecision
from lineshaft.types.work import ClaimedTask, Completion, Moved, Release, Spent
from tests.invariants import check_invariants
from tests.races.helpers import DONE, LIVE_ROW, held, running, status, waiting
from tests.world import Actions, ref

REPORTED = Decimal("0.5")
#: More than the task may cost.
TOO_MUCH = Decimal("1.5")


@asynccontextmanager
async def checking(engine: Engine) -> "AsyncIterator[tuple[ClaimedTask, asyncio.Future[list[Moved]]]]":
    """A task whose output is being looked at while the block runs, and its completion."""
    begun, done = threading.Event(), threading.Event()

    def look(_: Any, __: CandidateOutput) -> bool:
        begun.set()
        return done.wait(60)

    engine.checks.register("look", look)
    output = OutputContract(validation=(Gate("look"),))
    await engine.submission.submit([NewTask("code", max_cost_usd=1, output=output)])
    (task,) = await running(engine)
    completion = Completion(ref(task), DONE, spent=Spent(REPORTED))
    completing = asyncio.ensure_future(engine.work.complete([completion]))
    try:
        await asyncio.to_thread(begun.wait, 60)
        yield task, completing
    finally:
        done.set()
        await asyncio.wait({completing})


async def test_what_a_heartbeat_reports_while_an_output_is_checked_is_booked_once(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """R-024: the money is spent. It doesn't take back that the output was within the limit."""
    one, two = engines
    async with checking(one) as (task, completing):
        for _ in range(2):
            answers = await Actions(two).heartbeat("a1", 1, [ref(task)], spent=Spent(TOO_MUCH, 7))
            assert answers == {task.id: "continue"}

    (moved,) = completing.result()
    assert (moved.status, status(connection, task.id)) == (Status.COMPLETED, Status.COMPLETED)
    row = connection.execute(
        "SELECT ended.cost_usd, ended.tokens_input, attempt.cost_usd, attempt.tokens_input,"
        " (SELECT spent_usd FROM lineshaft.agent WHERE id = 'a1'),"
        " (SELECT sum(spent_usd) FROM lineshaft.spend)"
        " FROM lineshaft.task_end AS ended JOIN lineshaft.attempt ON attempt.task_id = ended.id"
        " WHERE ended.id = %s",
        [task.id],
    ).fetchone()
    assert row == (TOO_MUCH, 7, TOO_MUCH, 7, TOO_MUCH, TOO_MUCH)
    check_invariants(connection)


async def test_a_late_report_meets_the_end_of_the_validation(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """R-024: while it waits, the task moves to another table; its cost is there too."""
    one, two = engines
    await one.submission.submit([NewTask("code", output=OutputContract(validation="human"))])
    (task,) = await running(one)
    (moved,) = await one.work.complete([Completion(ref(task), DONE, spent=Spent(REPORTED))])
    assert moved.status is Status.VALIDATING

    with held(dsn, LIVE_ROW, task.id) as holder:
        deciding = asyncio.ensure_future(
            one.approvals.decide(task.id, ApprovalDecision(approve=True, reviewer="ann"))
        )
        await waiting(connection, 1)
        late = two.work.release([Release(ref(task), spent=Spent(TOO_MUCH))])
        reporting = asyncio.ensure_future(late)
        await waiting(connection, 2)
        holder.rollback()
        await deciding
        await reporting

    row = connection.execute(
        "SELECT ended.status::text, ended.cost_usd, attempt.cost_usd,"
        " (SELECT spent_usd FROM lineshaft.agent WHERE id = 'a1')"
        " FROM lineshaft.task_end AS ended JOIN lineshaft.attempt ON attempt.task_id = ended.id"
    ).fetchone()
    assert row == ("COMPLETED", TOO_MUCH, TOO_MUCH, TOO_MUCH)
    check_invariants(connection)


async def test_an_accepted_output_that_does_not_complete_its_task_is_not_dropped(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """No call returns COMPLETED for a task that isn't: it keeps its output."""
    one, _ = engines
    async with checking(one) as (task, completing):
        # No statement of ours does this.
        connection.execute("UPDATE lineshaft.task_live SET dag_id = 'dag_unknown'")
        connection.commit()

    with pytest.raises(LineshaftError, match=f"Task {task.id} passed its gates but didn't complete"):
        completing.result()
    row = connection.execute("SELECT outcome, output->'data' FROM lineshaft.attempt").fetchone()
    assert (status(connection, task.id), row) == (Status.VALIDATING, ("validating", True))
    connection.execute("UPDATE lineshaft.task_live SET dag_id = NULL")
    connection.commit()
