"""Somebody who claims and completes tasks, for tests of those who wait for it."""

import msgspec

from lineshaft import Lineshaft
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.store.engine import Engine
from lineshaft.store.fleet import NewAgent
from lineshaft.store.outcomes import ClaimRef, Completion, Failure


def engine_of(shaft: Lineshaft) -> Engine:
    assert isinstance(shaft.backend, DatabaseBackend)
    return shaft.backend.engine


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
