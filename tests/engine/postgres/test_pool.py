"""The pool: calls that follow each other share a connection, and no caller waits for an idle one."""

import asyncio

import pytest

from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.errors import UnavailableError
from tests.proxy import proxied


async def pid_of(connection: Connection) -> int:
    cursor = await connection.execute("SELECT pg_backend_pid()")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def used(database: Database) -> int:
    async with database.connection() as connection:
        return await pid_of(connection)


async def test_calls_that_follow_each_other_use_the_same_connection(dsn: str) -> None:
    async with Database(dsn, max_connections=3) as database:
        async with database.connection() as first, database.connection() as second:
            pids = {await pid_of(first), await pid_of(second)}
        assert len(pids) == 2
        kept = await used(database)
        assert [await used(database) for _ in range(5)] == [kept] * 5


async def test_a_call_beside_the_preferred_connection_does_not_replace_it(dsn: str) -> None:
    async with Database(dsn, max_connections=3) as database:
        preferred = await used(database)
        for _ in range(3):
            async with database.connection() as first:
                beside = await used(database)
                assert (await pid_of(first), beside != preferred) == (preferred, True)
                assert await used(database) == beside, "while it is in use, the other one stays at hand"
            assert await used(database) == preferred


async def test_the_pool_looks_at_the_preferred_connection_again_after_a_while(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Database(dsn, max_connections=3) as database:
        preferred = await used(database)
        async with database.connection():
            beside = await used(database)
        monkeypatch.setattr(database._pool, "_preferred_until", 0.0)
        assert [await used(database) for _ in range(4)] == [preferred, beside, beside, beside]


async def test_a_connection_goes_to_a_caller_that_waits(dsn: str) -> None:
    async with Database(dsn, max_connections=1) as database:
        await used(database)
        async with database.connection() as held:
            waiter = asyncio.create_task(used(database))
            while not database._pool.waiting:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0)
            pid = await pid_of(held)
        assert await waiter == pid


async def test_a_connection_that_the_server_closed_is_replaced(dsn: str) -> None:
    async with Database(dsn, max_connections=2) as database, Database(dsn, max_connections=1) as other:
        await used(database)
        kept = await used(database)
        async with other.connection() as connection:
            await connection.execute("SELECT pg_terminate_backend(%s, 10000)", [kept])
        with pytest.raises(UnavailableError):
            await used(database)
        assert await used(database) != kept


async def test_a_closed_database_has_no_connection_left(dsn: str) -> None:
    async with Database(dsn, max_connections=1) as other, other.connection() as watcher:
        async with Database(dsn, max_connections=1) as database:
            await used(database)
            kept = await used(database)
        async with asyncio.timeout(60):
            while True:
                found = await watcher.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [kept])
                if await found.fetchone() is None:
                    break


async def test_a_session_that_ends_right_after_a_commit_is_an_outage(dsn: str) -> None:
    """The driver finds two results of one command, which it calls an internal error."""
    async with proxied(dsn) as (through, proxy), Database(through, max_connections=1) as database:
        await used(database)
        proxy.terminated_after = b"COMMIT\0"
        with pytest.raises(UnavailableError, match="The database is unavailable"):
            await database.run(pid_of, pipeline=False)
        proxy.terminated_after = None
        await used(database)
