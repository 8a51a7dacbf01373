"""Somebody who claims and completes tasks, for tests of those who wait for it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from lineshaft import Lineshaft
from lineshaft.engine.engine import Engine
from tests.world import Actions

_engines: "WeakKeyDictionary[Lineshaft, Engine]" = WeakKeyDictionary()


@asynccontextmanager
async def engine_beside(shaft: Lineshaft, dsn: str) -> AsyncIterator[None]:
    """For what a test looks at or does behind the client's back, however that reaches the database."""
    async with Engine(dsn, max_connections=3) as engine:
        _engines[shaft] = engine
        yield


def engine_of(shaft: Lineshaft) -> Engine:
    return _engines[shaft]


async def finish_all(engine: Engine, output: object = "done") -> int:
    return await Actions(engine).finish_all(output)


async def kill_one(engine: Engine) -> str:
    """Make a dead letter of the next task."""
    actions = Actions(engine)
    return await actions.kill(await actions.agent("killer"))
