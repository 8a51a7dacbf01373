"""Spending while attempts run: reports count at once, and never go down."""

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo
from lineshaft.types.work import (
    ClaimedTask,
    HeldTask,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Presence,
    Release,
    Spent,
)
from tests.engine.guards.spending_helpers import USED, expire, key, report, spent_today, tokens
from tests.world import World, cancel_claim, cost, ref, spawn_children

# What is reported stays reported.


async def test_a_completion_cant_take_back_what_a_heartbeat_reported(world: World) -> None:
    """R-235: row 2, a limit of 1, a report of 5,000, of which 10 count, and an end that says 0."""
    agent = await world.agent()
    await world.one(max_cost_usd=1)
    task = await world.take(agent)
    assert await report(world, agent, task, "5000") == "max_cost"

    assert await world.complete(task, spent="0") is Status.DEAD_LETTERED

    assert world.end(task.id)["category"] == "budget_exceeded"
    assert world.task(task.id)["cost_usd"] == world.agent_row(agent)["spent_usd"] == 10


Exit = Callable[[World, AgentInfo, ClaimedTask], Awaitable[Any]]


async def _complete(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.complete(task, spent="0.1")


async def _fail(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.fail(task, spent=Spent(Decimal("0.1"), 1, 1))


async def _release(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.engine.work.release([Release(ref(task), spent=cost("0.1"))])


async def _cancel_own(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await cancel_claim(world.engine, ref(task), "no", spent=cost("0.1"))


async def _cancel(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.engine.cancel.cancel(task.id, "no")


async def _restart(world: World, agent: AgentInfo, _: ClaimedTask) -> None:
    await world.agent(agent.id)


async def _wait_for_children(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await spawn_children(world.engine, ref(task), [NewTask("child")], wait=True)


EXITS = (_complete, _fail, _release, _cancel_own, _cancel, expire, _restart, _wait_for_children)


@pytest.mark.parametrize("exit_", EXITS)
@pytest.mark.parametrize("limits", [{}, {"max_cost_usd": 1}])
async def test_cost_and_tokens_survive_every_exit(world: World, exit_: Exit, limits: dict[str, Any]) -> None:
    """R-024: reported by a heartbeat, a lower report at the end changes nothing."""
    agent = await world.agent(budget_usd=5)
    await world.one(**limits)
    task = await world.take(agent)
    await report(world, agent, task, USED)
    await report(world, agent, task, Spent(Decimal("0.2"), 5, 500))
    assert tokens(world.task(task.id)) == (Decimal("0.9"), 300, 500)

    await exit_(world, agent, task)

    assert tokens(world.task(task.id)) == (Decimal("0.9"), 300, 500)
    (attempt, *_) = await world.engine.read.attempts(task.id)
    assert (attempt.cost_usd, attempt.tokens_used.input, attempt.tokens_used.output) == (
        Decimal("0.9"),
        300,
        500,
    )
    assert world.row("SELECT spent_usd FROM lineshaft.agent WHERE id = %s", agent.id)["spent_usd"] == Decimal(
        "0.9"
    )
    assert await spent_today(world) == Decimal("0.9")


@pytest.mark.parametrize("call", ["step", "checkpoint", "subtasks"])
async def test_every_call_with_a_claim_reports_spending(world: World, call: str) -> None:
    """R-230: at once, above the reservation."""
    agent = await world.agent()
    await world.one()
    task = await world.take(agent)
    work = world.engine.work
    if call == "step":
        await work.record_steps([NewStep(ref(task), "a", b"1", spent=USED)])
    elif call == "checkpoint":
        await work.save_checkpoints([NewCheckpoint(ref(task), b"1", USED)])
    else:
        await work.spawn([NewSpawn(ref(task), [NewTask("child")], spent=USED)])

    assert tokens(world.task(task.id)) == (Decimal("0.9"), 300, 70)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("0.9")


async def test_an_agent_shows_what_its_running_tasks_reported(world: World) -> None:
    """R-230: without a reservation it is booked when it is reported; within one it is reserved."""
    agent = await world.agent(budget_usd=10)
    await world.submit(NewTask("free"), NewTask("limited", max_cost_usd=3))
    await report(world, agent, await world.take(agent, types=["free"]), "0.26")
    await report(world, agent, await world.take(agent, types=["limited"]), "2")

    view = await world.engine.fleet.read(agent.id)

    assert view.spent_usd == Decimal("0.26")
    assert view.reserved_usd == 3


# Large amounts.


def test_a_single_cost_has_a_limit() -> None:
    """Row 9."""
    assert Spent(Decimal(1_000_000)).cost_usd == 1_000_000
    with pytest.raises(InvalidInputError, match=r"at most 1000000 US dollars, got 1000000\.000001"):
        Spent(Decimal("1000000.000001"))


async def test_huge_reports_stop_neither_the_reaper_nor_an_operator(world: World) -> None:
    """R-072: row 9; 230 reports, then silence. The default is high, and so is the ceiling of reports."""
    await world.engine.limits.patch({"default_max_cost_usd": 100_000})
    agent = await world.agent(max_concurrent_tasks=300)
    dag = await world.dag(*(NewTask("code", max_attempts=1) for _ in range(231)))
    tasks = await world.claim(agent, 231)
    presence = Presence(agent.id, agent.incarnation)
    held = [HeldTask(*key(task), presence, None, cost("999999")) for task in tasks[:230]]
    await world.engine.work.heartbeat([presence], held)
    assert await spent_today(world) == 999_999 * 230

    await world.engine.cancel.cancel(tasks[0].id, "no")
    world.age(hours=3)
    assert sum((await world.engine.maintenance.reap(500)).values()) == 230

    assert world.dag_row(dag.id)["spent_usd"] == world.agent_row(agent)["spent_usd"] == 999_999 * 230
    assert world.status(tasks[-1].id) == "DEAD_LETTERED"
