"""A task joins a DAG while the DAG ends, gets its row, or comes back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidTransitionError
from lineshaft.model.reviews import Resolution, ResolutionRequest
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Completion, Failure
from tests.invariants import check_invariants
from tests.races.helpers import DAG_ROW, DONE, LIVE_ROW, held, race, running, waiting
from tests.world import ref

END_ROW = "SELECT FROM lineshaft.task_end WHERE id = %s FOR UPDATE"


def dag_row(connection: psycopg.Connection, dag_id: str) -> tuple[str, int, int]:
    query = "SELECT status::text, total, dead_lettered FROM lineshaft.dag WHERE id = %s"
    row = connection.execute(query, [dag_id]).fetchone()
    assert row is not None
    return row


@pytest.mark.parametrize("real", [True, False], ids=["real DAG", "virtual DAG"])
async def test_a_task_joins_while_the_last_one_completes(
    engines: tuple[Engine, Engine], dsn: str, real: bool
) -> None:
    """R-012: either the DAG has ended, or the task is in it and keeps it open."""
    one, two = engines
    if real:
        await one.submission.submit_dag("d", [NewTask("last")])
    else:
        await one.submission.submit([NewTask("last")])
    (last,) = await running(one)
    dag_id = (await one.read.task(last.id)).dag_id
    row = (DAG_ROW, dag_id) if real else (LIVE_ROW, last.id)

    with held(dsn, *row) as holder, psycopg.connect(dsn, autocommit=True) as look:
        joined, completed = await race(
            look,
            holder,
            two.submission.submit([NewTask("late", dag_id=dag_id)]),
            one.work.complete([Completion(ref(last), DONE)]),
        )
        assert [moved.status for moved in completed] == [Status.COMPLETED]
        if isinstance(joined, InvalidTransitionError):
            assert (await one.read.dag(dag_id)).status == "completed"
        else:
            assert dag_row(look, dag_id) == ("running", 2, 0)
        check_invariants(look)


async def test_two_tasks_join_the_dag_of_one_standalone_task(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """R-012: it gets one row, which counts both."""
    one, two = engines
    (lone,) = await one.submission.submit([NewTask("lone")])
    dag_id = (await one.read.task(lone.id)).dag_id

    with held(dsn, LIVE_ROW, lone.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        found = await race(
            look,
            holder,
            one.submission.submit([NewTask("a", dag_id=dag_id)]),
            two.submission.submit([NewTask("b", parent_id=lone.id)]),
        )
        assert not any(isinstance(each, Exception) for each in found), found
        assert dag_row(look, dag_id) == ("pending", 3, 0)
        check_invariants(look)


@pytest.mark.parametrize("first", ["join", "decision"])
@pytest.mark.parametrize("decision", ["retry", "cancel", "join"])
async def test_a_task_joins_a_dead_letter_while_it_is_decided_about(
    engines: tuple[Engine, Engine], dsn: str, decision: str, first: str
) -> None:
    """R-012: the row that the joining task makes counts what becomes of the dead letter."""
    one, two = engines
    await one.submission.submit([NewTask("lone")])
    (lone,) = await running(one)
    await one.work.fail([Failure(ref(lone), "no", "auth_failure")])
    dag_id = (await one.read.task(lone.id)).dag_id
    other = {
        "retry": lambda: two.revive.retry(lone.id),
        "cancel": lambda: two.dead_letters.resolve(
            lone.id, ResolutionRequest(resolution=Resolution.CANCEL, reviewer="ann", note="no")
        ),
        "join": lambda: two.submission.submit([NewTask("b", parent_id=lone.id)]),
    }[decision]

    with held(dsn, END_ROW, lone.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        sides: dict[str, Callable[[], Awaitable[Any]]] = {
            "join": lambda: one.submission.submit([NewTask("late", dag_id=dag_id)]),
            "decision": other,
        }
        started: dict[str, asyncio.Future[Any]] = {}
        for name in sorted(sides, key=lambda name: name != first):
            started[name] = asyncio.ensure_future(sides[name]())
            await waiting(look, len(started))
        holder.rollback()
        found: list[Any] = await asyncio.gather(*started.values(), return_exceptions=True)
        outcome = dict(zip(started, found, strict=True))
        joined, decided = outcome["join"], outcome["decision"]
        assert not isinstance(decided, Exception), decided
        if isinstance(joined, Exception):
            assert isinstance(joined, InvalidTransitionError)
            assert decision == "cancel"
        check_invariants(look)
