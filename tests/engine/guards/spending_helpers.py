"""Reports of spending, and what they add up to."""

from decimal import Decimal
from typing import Any

from lineshaft.model.tasks import RetrySpec
from lineshaft.types import AgentInfo
from lineshaft.types.work import (
    ClaimedTask,
    HeldTask,
    Presence,
    Spent,
)
from tests.world import World, cost, ref

AT_ONCE = RetrySpec(strategy="immediate")
USED = Spent(Decimal("0.9"), 300, 70)


async def report(
    world: World, agent: AgentInfo, task: ClaimedTask, spent: str | Spent | None = None
) -> str | None:
    """A heartbeat; the reason for which the holder must stop, or None."""
    presence = Presence(agent.id, agent.incarnation)
    used = Spent() if spent is None else cost(spent) if isinstance(spent, str) else spent
    answers = await world.engine.work.heartbeat([presence], [HeldTask(*key(task), presence, None, used)])
    assert {ended.answer for ended in answers.over} <= {"cancel"}
    return next((ended.reason for ended in answers.over), None)


def key(task: ClaimedTask) -> tuple[str, int]:
    return task.id, task.epoch


def tokens(row: dict[str, Any]) -> tuple[Decimal, int, int]:
    return row["cost_usd"], row["tokens_input"], row["tokens_output"]


async def spent_today(world: World) -> Decimal:
    return (await world.engine.limits.read()).spent_today_usd


async def expire(world: World, _: AgentInfo, __: ClaimedTask) -> None:
    world.age(hours=3)
    assert await world.engine.maintenance.reap(10)


async def late_heartbeat(world: World, agent: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    answers = await world.heartbeat(agent.id, agent.incarnation, [ref(task)], spent=spent)
    assert answers[task.id] in {"lost", "cancel"}
