"""Two servers, one of which is killed in every window of a tick: the other fires it, exactly once."""

import asyncio
import signal
import sys

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from tests.engine.sources.helpers import outcomes, put, schedule
from tests.engine.sources.scheduler_program import WINDOWS


@pytest.mark.slow("starts and kills a process for every window of a tick")
async def test_a_tick_fires_once_whenever_its_server_is_killed(dsn: str) -> None:
    async with Engine(dsn) as other:
        for window in WINDOWS:
            await put(other, schedule("s", every_sec=3600.0, catch_up="all"))
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(
                    "UPDATE lineshaft.source SET next_tick = now() - interval '1 s',"
                    " next_at = now() - interval '1 s', created_at = now() - interval '3601 s'"
                )
                server = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.engine.sources.scheduler_program", dsn, window,
                    stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
                assert server.stdout is not None
                async with asyncio.timeout(60):
                    assert await server.stdout.readline() == b"stopped\n", window
                assert await other.schedules.fire_due() is None, "it is locked by the one that works on it"

                server.send_signal(signal.SIGKILL)
                await server.wait()
                # Waits until the database has noticed.
                await asyncio.to_thread(connection.execute, "SELECT FROM lineshaft.source FOR UPDATE")
                assert connection.execute("SELECT count(*) FROM lineshaft.task").fetchone() == (0,), window

                assert await other.schedules.fire_due() == {"created": 1}, window
                assert await other.schedules.fire_due() is None, window
                assert await outcomes(other) == ["created"], window
                assert connection.execute("SELECT count(*) FROM lineshaft.task").fetchone() == (1,), window
                connection.execute("TRUNCATE lineshaft.task, lineshaft.task_live, lineshaft.source_work")
            await other.sources.delete("s")
