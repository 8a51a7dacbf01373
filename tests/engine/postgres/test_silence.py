"""Connections on which the database no longer answers."""

import asyncio
import contextlib
import gc
import logging

import pytest
from psycopg import AsyncConnection

from lineshaft import Lineshaft, NewTask
from lineshaft.engine.heartbeats import Heartbeats
from lineshaft.engine.postgres.database import ANSWER_WITHIN_SEC, Database
from lineshaft.errors import UnavailableError
from tests.proxy import Proxy, proxied


async def test_a_heartbeat_that_was_given_up_leaves_no_error_behind(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise asyncio logs an unretrieved exception for each lost heartbeat."""
    async with proxied(dsn) as (through, proxy):
        heartbeats = Heartbeats(through)
        await heartbeats.beat([], [], answer_within_sec=10)
        proxy.swallow()
        with pytest.raises(UnavailableError, match=r"within 0\.1 s"):
            await heartbeats.beat([], [], answer_within_sec=0.1)
        await heartbeats.close()

    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


async def test_a_clients_call_on_a_silent_connection_ends(dsn: str) -> None:
    """Found by chaos: only agents had a limit; submissions of other clients, and servers, waited forever."""
    async with proxied(dsn) as (through, proxy), Lineshaft(through, max_connections=1) as shaft:
        assert Database(dsn).answer_within_sec == ANSWER_WITHIN_SEC
        shaft.backend.expect_answers_within(0.3)
        await shaft.submit(NewTask("t"))
        proxy.swallow()

        with pytest.raises(UnavailableError, match="unavailable"):
            await shaft.submit(NewTask("t"))

        await shaft.submit(NewTask("t"))


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
