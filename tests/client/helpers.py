"""Somebody who claims and completes tasks, for tests of those who wait for it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

import msgspec

from lineshaft import Lineshaft
from lineshaft.engine.engine import Engine
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimRef, Completion, Failure

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
    """Complete whatever is READY, and what becomes READY by it."""
    agent = await engine.fleet.register(NewAgent(id="finisher", max_concurrent_tasks=100))
    count = 0
    while tasks := (await engine.claims.claim(agent.id, agent.incarnation, limit=100, start=True)).tasks:
        await engine.lifecycle.complete(
            [Completion(ClaimRef(task.id, task.epoch), output=msgspec.json.encode(output)) for task in tasks]
        )
        count += len(tasks)
    return count


async def kill_one(engine: Engine) -> str:
    """Make a dead letter of the next task."""
    agent = await engine.fleet.register(NewAgent(id="killer"))
    (task,) = (await engine.claims.claim(agent.id, agent.incarnation, start=True)).tasks
    await engine.lifecycle.fail([Failure(ClaimRef(task.id, task.epoch), "no access", "auth_failure")])
    return task.id
