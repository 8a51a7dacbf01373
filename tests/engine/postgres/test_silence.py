"""Connections on which the database no longer answers."""

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import socket
from collections.abc import Callable

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.conninfo import make_conninfo
from psycopg_pool import PoolTimeout

from lineshaft import Lineshaft, NewTask
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.engine.caller import Caller, calling, set_caller
from lineshaft.engine.heartbeats import Heartbeats
from lineshaft.engine.postgres import migrate, session
from lineshaft.engine.postgres.caller_transaction import adapted, outside
from lineshaft.engine.postgres.database import ANSWER_WITHIN_SEC, Database
from lineshaft.engine.postgres.rows import fetch_value
from lineshaft.errors import UnavailableError
from tests.proxy import STATEMENTS, Proxy, proxied


@pytest.mark.slow("waits for a connection")
async def test_a_heartbeat_that_was_given_up_leaves_no_error_behind(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise asyncio logs an unretrieved exception for each lost heartbeat."""
    # What earlier tests have left is logged now.
    gc.collect()
    caplog.clear()
    async with proxied(dsn) as (through, proxy):
        heartbeats = Heartbeats(through)
        await heartbeats.beat([], [], answer_within_sec=60)
        proxy.swallow()
        with pytest.raises(UnavailableError, match=r"within 0\.1 s"):
            await heartbeats.beat([], [], answer_within_sec=0.1)
        await heartbeats.close()

    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


async def test_a_clients_call_on_a_silent_connection_ends(dsn: str) -> None:
    """Found by chaos: only agents had a limit; submissions of other clients, and servers, waited forever."""
    async with proxied(dsn) as (through, proxy), Lineshaft(through, max_connections=1) as shaft:
        assert isinstance(shaft.backend, DatabaseBackend)
        database = shaft.backend.engine.database
        assert database.answer_within_sec == ANSWER_WITHIN_SEC
        await shaft.submit(NewTask("t"))
        proxy.swallow()

        shaft.backend.expect_answers_within(0.3)
        with pytest.raises(UnavailableError, match=r"has not answered within 0\.3 s"):
            await shaft.submit(NewTask("t"))

        # Only a connection that is silent may be slow.
        database.answer_within_sec = ANSWER_WITHIN_SEC
        await shaft.submit(NewTask("t"))


async def test_a_connection_that_goes_silent_while_it_is_set_up_is_given_up(dsn: str) -> None:
    async with proxied(dsn) as (through, proxy), Database(dsn, max_connections=1) as database:
        database.answer_within_sec = 0.1
        async with await AsyncConnection.connect(through, autocommit=True) as silent:
            proxy.swallow()
            with pytest.raises(psycopg.OperationalError):
                await database._configure(silent)


async def test_a_call_that_is_cancelled_while_its_connection_breaks_is_cancelled(
    dsn: str, connection: psycopg.Connection
) -> None:
    """Found by chaos: with another error, loops that try again went on, and the canceller waited forever."""
    async with proxied(dsn) as (through, proxy), Database(through, max_connections=1) as database:

        async def call() -> None:
            async with database.connection() as own:
                await own.execute("SELECT pg_sleep(60)")

        calling = asyncio.create_task(call())
        running = (
            "SELECT FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' AND state = 'active'"
            " AND datname = current_database()"
        )
        while not connection.execute(running).fetchall():  # noqa: ASYNC110 - the server has no event
            await asyncio.sleep(0.01)
        # The driver asks the server to cancel the statement, and waits for its end: here, that of the line.
        calling.cancel()
        proxy.cut()
        await asyncio.wait({calling})

        assert calling.cancelled()


async def test_a_caller_that_is_cancelled_when_there_is_no_connection_is_cancelled(dsn: str) -> None:
    """Both at once: `wait_for` of Python 3.11, which the pool uses, loses the cancellation."""
    async with Database(dsn, max_connections=1) as database, database.connection():
        waiting = asyncio.create_task(database.connection().__aenter__())
        pool = database._pool._connections
        while not pool._waiting:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0)
        # As the end of its patience does.
        await pool._waiting[0].fail(PoolTimeout())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

        assert waiting.cancelled()


async def test_a_session_that_was_cut_off_in_a_transaction_gives_its_rows_back(
    dsn: str, connection: psycopg.Connection
) -> None:
    """Its process is gone without a word; the server must not wait for it as long as TCP would."""
    connection.execute("INSERT INTO lineshaft.pause (type, since) VALUES ('t', now())")
    row = "SELECT type FROM lineshaft.pause FOR UPDATE"
    async with (
        proxied(dsn) as (through, proxy),
        Database(through, max_connections=1, idle_in_transaction_sec=0.3) as database,
        database.connection() as lost,
    ):
        # In one call: between two, a busy machine may take longer than the limit.
        await lost.execute(f"BEGIN; {row}".encode(), prepare=False)
        proxy.swallow()
        # The connection stays open on this side: nothing that it does reaches the server.
        connection.execute("SET lock_timeout = '60s'")
        assert connection.execute(row).fetchall() == [("t",)]
        lost.pgconn.finish()


async def test_every_connection_that_can_hold_locks_limits_idle_transactions(dsn: str) -> None:
    show = "SHOW idle_in_transaction_session_timeout"
    heartbeats = Heartbeats(dsn)
    await heartbeats.beat([], [], answer_within_sec=60)
    own = heartbeats._connection
    assert own is not None
    async with Database(dsn, max_connections=1, read_connections=1) as database:
        found = [await (await own.execute(show)).fetchone()]
        for reads in (False, True):
            with calling(only_reads=reads):
                async with database.connection() as pooled:
                    found.append(await (await pooled.execute(show)).fetchone())
        with psycopg.connect(dsn) as callers:
            async with adapted(callers) as given:
                assert given is not None
                async with outside(given, database) as beside:
                    found.append(await (await beside.execute(show)).fetchone())
    await heartbeats.close()

    assert found == [("30s",)] * 4


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="other systems have other names")
async def test_connections_detect_a_dead_peer_unless_the_url_says_otherwise(dsn: str) -> None:
    async with proxied(dsn) as (through, _):
        for url, idle in ((through, 30), (make_conninfo(through, keepalives_idle=77), 77)):
            async with Database(url, max_connections=1) as database, database.connection() as opened:
                with socket.socket(fileno=os.dup(opened.fileno())) as same:
                    assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


async def lose_connections(through: str, proxy: Proxy) -> None:
    async with Database(through, max_connections=2) as database:
        proxy.reset()
        with pytest.raises(UnavailableError):
            await database.run(lambda connection: connection.execute("SELECT 1"))
        proxy.cut()
        attempt = asyncio.ensure_future(database.run(lambda connection: connection.execute("SELECT 1")))
        await proxy.refuses(3)
        proxy.restore()
        with contextlib.suppress(UnavailableError):
            await attempt


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG])
async def test_the_drivers_reports_about_our_connections_stay_at_debug(
    dsn: str, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    """The error that is raised says it once; the pool's warnings are for those who debug it."""
    async with proxied(dsn) as (through, proxy):
        with caplog.at_level(level, "psycopg"), caplog.at_level(level, "psycopg.pool"):
            await lose_connections(through, proxy)

    found = [record for record in caplog.records if record.name.startswith("psycopg")]
    assert [record.message for record in found if record.levelno > logging.INFO] == []
    expected = {"error connecting in 'lineshaft'", "discarding closed connection"} if level else set()
    assert {text for text in expected if any(text in record.message for record in found)} == expected


async def test_the_drivers_reports_about_other_connections_are_left_alone(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with await AsyncConnection.connect(dsn) as theirs:
        logging.getLogger("psycopg.pool").warning("discarding closed connection: %s", theirs)
    logging.getLogger("psycopg.pool").warning("error connecting in %r: %s", "pool-1", "refused")

    assert [record.levelname for record in caplog.records if record.name == "psycopg.pool"] == ["WARNING"] * 2


@pytest.mark.parametrize("check", [migrate.check_ready, migrate.check_server, migrate.status, migrate.up])
async def test_a_proxy_that_accepts_connections_and_answers_no_statement_is_reported(
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    check: Callable[[str], object],
) -> None:
    """Every command began with a statement that had no limit, and waited without a word."""
    async with proxied(dsn) as (through, proxy):
        await asyncio.to_thread(check, through)
        proxy.drops = STATEMENTS
        monkeypatch.setattr(session, "FIRST_ANSWER_SEC", 0.2)

        with pytest.raises(UnavailableError, match=r"accepted a connection, but has not answered .* 0\.2 s"):
            await asyncio.to_thread(check, through)

    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_read_fails_soon_while_the_database_is_silent_and_a_write_waits(dsn: str) -> None:
    async def ask(answer: str) -> object:
        async with database.connection() as connection:
            return await fetch_value(connection, "SELECT %(answer)s::text", {"answer": answer})

    def read(answer: str) -> "asyncio.Task[object]":
        context = contextvars.copy_context()
        context.run(set_caller, Caller(only_reads=True))
        return asyncio.create_task(ask(answer), context=context)

    async with (
        proxied(dsn) as (through, proxy),
        Database(through, max_connections=1, read_connections=1, fail_within_sec=60) as database,
    ):
        assert await read("before") == "before"
        proxy.hold()
        # Short only while nothing is answered: otherwise a busy machine may take longer.
        database._fail_within_sec = 0.3
        write = asyncio.create_task(ask("written"))
        with pytest.raises(UnavailableError, match=r"has not answered within 0\.3 s.*LINESHAFT_READ_TIMEOUT"):
            await read("lost")
        with pytest.raises(UnavailableError, match=r"No connection .* within 0\.3 s"):
            await read("never sent")
        assert not write.done()

        database._fail_within_sec = 60
        proxy.restore()
        assert await write == "written"
        # The answer to the lost read arrives now, on a connection that is not used again.
        assert await read("after") == "after"


async def test_an_answer_that_arrives_as_the_limit_ends_leaves_no_dead_connection_behind(dsn: str) -> None:
    async with Database(dsn, max_connections=1) as database:
        pooled = database.connection()
        async with pooled:
            pooled._give_up()

        async with database.connection() as connection:
            await connection.execute("SELECT 1")


async def test_a_read_that_takes_too_long_is_cancelled_by_the_server(
    dsn: str, connection: psycopg.Connection
) -> None:
    """A connection that is only shut down would leave the statement running."""
    set_caller(Caller(only_reads=True))
    async with Database(dsn, max_connections=1, read_connections=1, fail_within_sec=60) as database:
        async with database.connection() as pooled:
            backend = pooled.info.backend_pid
            assert await fetch_value(pooled, "SHOW statement_timeout", {}) == "54s"
            # The server's time is over long before that of this side, however busy the machine is.
            await pooled.execute("SET statement_timeout = '100ms'")
        with pytest.raises(UnavailableError, match="has not answered within 60 s"):
            async with database.connection() as pooled:
                await pooled.execute("SELECT pg_sleep(60)")
        busy = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND state <> 'idle'"
        assert connection.execute(busy, [backend]).fetchall() == [(0,)]
        async with database.connection() as pooled:
            assert pooled.info.backend_pid == backend
    set_caller(Caller())
    async with (
        Database(dsn, max_connections=1, read_connections=1) as database,
        database.connection() as pooled,
    ):
        assert await fetch_value(pooled, "SHOW statement_timeout", {}) == "0"
