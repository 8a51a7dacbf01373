"""Connections on which the database no longer answers."""

import gc

import pytest

from lineshaft import Lineshaft, NewTask
from lineshaft.engine.heartbeats import Heartbeats
from lineshaft.engine.postgres.database import ANSWER_WITHIN_SEC, Database
from lineshaft.errors import UnavailableError
from tests.proxy import proxied


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
