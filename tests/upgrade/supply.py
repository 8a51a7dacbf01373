"""Work of every kind, while versions change, and what must be true of it in the end."""

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import count
from typing import Any

import psycopg

from lineshaft import Lineshaft, NewTask, RetrySpec
from lineshaft.errors import UnavailableError
from tests.agent.helpers import PATIENCE
from tests.invariants import check_invariants

_AT_ONCE = RetrySpec(strategy="immediate")
#: So many tasks are open at any time, until the end.
_BACKLOG = 30


async def keep_supplied(places: Sequence[str], dsn: str) -> None:
    """Submit until it is cancelled, to one place after the other. A server among them may be killed."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for number in count():
            if _live_tasks(connection) < _BACKLOG:
                with contextlib.suppress(UnavailableError):
                    await submit(places[number % len(places)])
            await asyncio.sleep(0.05)


async def submit(where: str) -> None:
    """Some of everything: retries, children, dependencies. `worker.py` has the handlers."""
    work = [NewTask("work", spec={"number": number}) for number in range(6)]
    async with Lineshaft(where, max_connections=2) as shaft:
        await shaft.submit_many([*work, NewTask("flaky", retry=_AT_ONCE), NewTask("parent")])
        chain = [NewTask("work", key="a", spec={"number": 1})]
        chain += [NewTask("work", key=key, depends_on=["a"], spec={"number": 2}) for key in ("b", "c")]
        await shaft.submit_dag("chain", chain)


async def all_ended(dsn: str) -> None:
    async with asyncio.timeout(2 * PATIENCE):
        with psycopg.connect(dsn, autocommit=True) as connection:
            while _live_tasks(connection):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)


def check_ends(dsn: str) -> None:
    """Every task was completed, and exactly once."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        tasks = _rows(connection, "SELECT 'COMPLETED', count(*), count(*) FROM lineshaft.task")
        ends = "SELECT status, count(*), count(DISTINCT id) FROM lineshaft.task_end GROUP BY status"
        completed = "FROM lineshaft.events WHERE kind = 'task.completed'"
        events = f"SELECT 'COMPLETED', count(*), count(DISTINCT task_id) {completed}"
        assert _rows(connection, ends) == _rows(connection, events) == tasks
        check_invariants(connection)


def _live_tasks(connection: psycopg.Connection) -> int:
    return int(_rows(connection, "SELECT count(*) FROM lineshaft.task_live")[0][0])


def _rows(connection: psycopg.Connection, query: str) -> list[Any]:
    return connection.execute(query.encode()).fetchall()
