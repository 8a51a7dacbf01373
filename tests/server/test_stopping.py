"""A server stops when asked to, whatever it waits for."""

import asyncio

import pytest

from lineshaft.server import server
from tests.proxy import proxied
from tests.server.conftest import serving, until


@pytest.mark.slow("waits for time limits")
async def test_a_database_that_went_silent_does_not_keep_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_SEC", 1)
    async with (
        proxied(dsn) as (through, proxy),
        serving(through, duties=True, reaper_interval_sec=0.05) as served,
    ):
        proxy.hold()
        # A call with no answer would be given up after a minute.
        await until(lambda: served.service.engine.database._in_use)

        async with asyncio.timeout(40):
            await served.stop()
