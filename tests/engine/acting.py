"""Short ways to do what tests are about."""

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import msgspec

from lineshaft.engine.agents import AgentInfo, NewAgent
from lineshaft.engine.claim.claims import ClaimedTask
from lineshaft.engine.engine import Engine
from lineshaft.engine.read.reading import Page
from lineshaft.engine.transition.changes import Spent
from lineshaft.engine.transition.outcomes import ClaimRef, Completion, Failure
from lineshaft.model.tasks import NewTask


async def submit(engine: Engine, type_: str = "code", **fields: Any) -> str:
    (found,) = await engine.submission.submit([NewTask(type_, **fields)])
    return found.id


async def register(engine: Engine, agent_id: str = "ann", **fields: Any) -> AgentInfo:
    return await engine.fleet.register(NewAgent(id=agent_id, **fields))


async def take(engine: Engine, agent: AgentInfo, *, start: bool = True) -> ClaimedTask:
    (task,) = (await engine.claims.claim(agent.id, agent.incarnation, start=start)).tasks
    return task


def ref(task: ClaimedTask) -> ClaimRef:
    return ClaimRef(task.id, task.epoch)


async def fail(engine: Engine, task: ClaimedTask, error: str = "it broke", **details: Any) -> None:
    (moved,) = await engine.lifecycle.fail([Failure(ref(task), error, **details)])
    moved.unwrap()


async def complete(engine: Engine, task: ClaimedTask, output: Any = None, cost: str | None = None) -> None:
    spent = Spent(None if cost is None else Decimal(cost))
    (moved,) = await engine.lifecycle.complete(
        [Completion(ref(task), output=msgspec.json.encode(output), spent=spent)]
    )
    moved.unwrap()


async def kill(engine: Engine, agent: AgentInfo) -> str:
    """Claim what is to be had and make it a dead letter."""
    task = await take(engine, agent)
    await fail(engine, task, "no access", category="auth_failure")
    return task.id


def shown(value: bytes | None) -> Any:
    return None if value is None else msgspec.json.decode(value)


async def every(read: Callable[[str | None], Awaitable[Page[Any]]], limit: int) -> list[str]:
    """All ids of a list, page by page, past short pages."""
    found: list[str] = []
    cursor = None
    for _ in range(1_000):
        page = await read(cursor)
        assert len(page.items) <= limit
        found += [item.id for item in page.items]
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor
    raise AssertionError("the list has no end")
