"""Agents that complete and fail tasks, for tests of clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from lineshaft import Lineshaft
from lineshaft.engine.engine import Engine
from tests.world import Actions

_engines: "WeakKeyDictionary[Lineshaft, Engine]" = WeakKeyDictionary()


@asynccontextmanager
async def engine_beside(shaft: Lineshaft, dsn: str) -> AsyncIterator[None]:
    """An engine on the client's database, over whatever transport the client uses."""
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
