"""A call of the database that is cancelled, at whatever instant: it ends, and is known to have been."""

import asyncio

from lineshaft.engine.engine import Engine


async def test_cancelled_just_as_it_gets_its_connection(dsn: str) -> None:
    """A caller that waits for its end must not wait forever."""
    async with Engine(dsn, max_connections=1) as engine:
        got = asyncio.Event()

        async def call() -> None:
            async with engine.database.connection():
                got.set()

        async with engine.database.connection():
            waiting = asyncio.create_task(call())
            # Until it waits for a connection, which the pool does not report.
            while not engine.database._pool.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

        assert waiting.cancelled()
        assert not got.is_set()
        await engine.upcoming.openings()


async def test_one_that_is_cancelled_already_can_still_clean_up(dsn: str) -> None:
    async with Engine(dsn, max_connections=1) as engine:
        cleaned = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await engine.upcoming.openings()
                cleaned.set()

        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        working.cancel()
        await asyncio.wait({working})

        assert working.cancelled()
        assert cleaned.is_set()
