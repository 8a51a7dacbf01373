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
from lineshaft.types.work import ClaimedTask, Completion, Moved, Spent
from tests.races.helpers import DONE, running, status
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


async def test_a_heartbeat_does_not_change_what_an_output_has_cost(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """The cost reported with the output is final: a heartbeat that reports more must not change it."""
    one, two = engines
    async with checking(one) as (task, completing):
        answers = await Actions(two).heartbeat("a1", 1, [ref(task)], spent=Spent(TOO_MUCH))
        assert answers == {task.id: "continue"}

    (moved,) = completing.result()
    assert (moved.status, status(connection, task.id)) == (Status.COMPLETED, Status.COMPLETED)
    row = connection.execute("SELECT cost_usd FROM lineshaft.task_end WHERE id = %s", [task.id]).fetchone()
    assert row == (REPORTED,)


async def test_an_accepted_output_that_does_not_complete_its_task_is_not_dropped(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """No call returns COMPLETED for a task that isn't: it keeps its output."""
    one, _ = engines
    async with checking(one) as (task, completing):
        # No statement of ours does this any more.
        connection.execute("UPDATE lineshaft.task_live SET attempt_cost_usd = %s", [TOO_MUCH])
        connection.commit()

    with pytest.raises(LineshaftError, match=f"Task {task.id} passed its gates but didn't complete"):
        completing.result()
    row = connection.execute("SELECT outcome, output->'data' FROM lineshaft.attempt").fetchone()
    assert (status(connection, task.id), row) == (Status.VALIDATING, ("validating", True))
