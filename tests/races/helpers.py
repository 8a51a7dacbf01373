"""Two connections that meet where the test wants them to: a third holds a row until both are there."""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from lineshaft.engine.engine import Engine
from lineshaft.types.work import ClaimedTask

DONE = b"true"


def patient(dsn: str) -> str:
    """For sessions that wait for locks as long as a busy machine takes, not for 10 s."""
    return make_conninfo(dsn, options="-c lock_timeout=60s")


async def running(engine: Engine, n: int = 1, agent: str = "a1") -> list[ClaimedTask]:
    return (await engine.claims.claim(agent, 1, limit=n, start=True)).tasks


async def claimed(engine: Engine, limit: int = 1) -> list[str]:
    return [task.id for task in await running(engine, limit, "ann")]


def status(connection: psycopg.Connection, task_id: str) -> str | None:
    row = connection.execute("SELECT status::text FROM lineshaft.tasks WHERE id = %s", [task_id]).fetchone()
    return None if row is None else str(row[0])


@contextmanager
def held(dsn: str, statement: str, *values: str | list[str]) -> Iterator[psycopg.Connection]:
    """Rows that a third connection keeps locked while the block runs."""
    with psycopg.connect(dsn) as holder:
        holder.execute(statement.encode(), values)
        yield holder


async def waiting(connection: psycopg.Connection, n: int) -> None:
    """Until so many clients of this database wait for a lock; the test's time limit is the deadline.

    Commits with notifications wait for each other, across all databases (`object`), and so do writers that
    extend a table: such a client isn't where the test wants it yet.
    """
    while True:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND backend_type = 'client backend'"
            " AND wait_event_type = 'Lock' AND wait_event NOT IN ('object', 'extend')"
        ).fetchone()
        if row is not None and row[0] >= n:
            return
        await asyncio.sleep(0)


async def blocked_by(connection: psycopg.Connection, holder: psycopg.Connection) -> None:
    """Until a session waits for what the holder has locked."""
    while True:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND %s = ANY (pg_blocking_pids(pid))",
            [holder.info.backend_pid],
        ).fetchone()
        if row is not None and row[0] > 0:
            return
        await asyncio.sleep(0)


async def passes_or_waits(connection: psycopg.Connection, side: "asyncio.Future[Any]", n: int) -> None:
    """Until a side is through, or so many sessions wait for a lock, its own among them."""
    held_up = asyncio.ensure_future(waiting(connection, n))
    await asyncio.wait({side, held_up}, return_when=asyncio.FIRST_COMPLETED)
    held_up.cancel()
    await asyncio.wait({held_up})


async def race(
    connection: psycopg.Connection, holder: psycopg.Connection, *sides: Awaitable[Any], already: int = 0
) -> list[Any]:
    """Start all sides against a held row, and release it once all of them, and `already` others, wait for it.

    Fails if a side ends without waiting, e.g. with an error.
    """
    started = [asyncio.ensure_future(side) for side in sides]
    all_wait = asyncio.ensure_future(waiting(connection, len(started) + already))
    await asyncio.wait({*started, all_wait}, return_when=asyncio.FIRST_COMPLETED)
    if not all_wait.done():
        all_wait.cancel()
        ended_early = [side for side in started if side.done()]
        raise AssertionError(
            f"ended without waiting: {[side.exception() or side.result() for side in ended_early]}"
        )
    holder.rollback()
    return await asyncio.gather(*started, return_exceptions=True)


LIVE_ROW = "SELECT FROM lineshaft.task_live WHERE id = %s FOR UPDATE"
INSTANCE_ROW = "SELECT FROM lineshaft.instance WHERE agent_id = 'a1' FOR UPDATE"
DAG_ROW = "SELECT FROM lineshaft.dag WHERE id = %s FOR UPDATE"
