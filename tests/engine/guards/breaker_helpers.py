"""Breakers that open after two failures, and short ways to make them do so."""

from types import MappingProxyType
from typing import Any

from lineshaft.model.breaker import BreakerConfig, BreakerPolicy
from lineshaft.model.tasks import RetrySpec
from lineshaft.types import AgentInfo, Breaker
from lineshaft.types.work import ClaimedTask
from tests.world import World

#: Short, so that a test needs two failures to open one.
POLICY = BreakerPolicy(
    BreakerConfig(failure_threshold=2),
    MappingProxyType(
        {"tough": BreakerConfig(failure_threshold=4), "model:x": BreakerConfig(failure_threshold=2)}
    ),
)
AGAIN: dict[str, Any] = {"max_attempts": 100, "retry": RetrySpec(strategy="immediate")}


async def breaker(world: World, key: str = "code") -> Breaker | None:
    found = (await world.engine.read.breakers(limit=100)).items
    return next((item for item in found if item.key == key), None)


async def state(world: World, key: str = "code") -> tuple[str, int]:
    found = await breaker(world, key)
    return ("none", 0) if found is None else (found.state, found.failures)


def event_kinds(world: World) -> list[str]:
    return [
        row["kind"]
        for row in world.rows(
            "SELECT kind FROM lineshaft.events WHERE kind LIKE 'breaker%%' OR kind = 'alert' ORDER BY seq, n"
        )
    ]


async def opened(world: World, agent: AgentInfo, type_: str = "code", n: int = 2) -> None:
    for _ in range(n):
        task_id = await world.one(type_)
        await world.fail(await world.take(agent))
        # Its retry would be claimed once it is due.
        await world.engine.cancel.cancel(task_id, "only its failure is of interest")
    assert (await state(world, type_))[0] == "open"


async def probing(world: World, agent: AgentInfo) -> ClaimedTask:
    """A breaker that was opened, and whose probe is out."""
    await opened(world, agent)
    await world.one()
    world.age(seconds=61)
    task = await world.take(agent)
    assert (await state(world))[0] == "half_open"
    return task
