"""Corrections of what tasks have cost: rows beside the reports, booked today on task, agents, DAG and day."""

from decimal import Decimal
from typing import Any

import pytest

from lineshaft.engine.feed.actor import acting_as
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.model.corrections import ClaimCost, shares
from lineshaft.model.tasks import NewTask
from lineshaft.types import CostCorrection, Disputed
from lineshaft.types.work import Failure
from tests.engine.guards.spending_helpers import late_heartbeat, report, spent_today
from tests.engine.guards.test_disputed_costs import booked, taken
from tests.invariants import check_invariants
from tests.world import World, cost, ref


async def correct(world: World, task_id: str, usd: Any, reason: str = "the bill says so") -> None:
    await world.engine.corrections.correct(task_id, CostCorrection(cost_usd=usd, reason=reason))


def corrections(world: World) -> list[tuple[Any, ...]]:
    rows = world.rows("SELECT epoch, agent_id, amount_usd FROM lineshaft.cost_correction ORDER BY no")
    return [tuple(row.values()) for row in rows]


async def test_a_correction_is_booked_once_on_task_agent_dag_and_day(world: World) -> None:
    agent = await world.agent("ann")
    task = await taken(world, agent)
    await world.complete(task, spent="8")
    world.age(days=2)

    with acting_as("ada"):
        for _ in range(2):
            await correct(world, task.id, 0.31)

    assert booked(world) == {Decimal("0.31")}
    assert await spent_today(world) == Decimal("-7.69")
    event = world.row("SELECT data FROM lineshaft.events WHERE kind = 'cost.corrected'")
    assert event["data"] == {"old": 8.0, "new": 0.31, "actor": "ada", "reason": "the bill says so"}
    row = world.row("SELECT actor, reason FROM lineshaft.cost_correction")
    assert row == {"actor": "ada", "reason": "the bill says so"}
    # Attempts have what was reported.
    (attempt,) = await world.engine.read.attempts(task.id)
    assert attempt.cost_usd == 8
    assert world.row("SELECT cost_usd FROM lineshaft.attempts")["cost_usd"] == 8
    await correct(world, task.id, 9)
    assert booked(world) == {Decimal(9)}
    check_invariants(world.connection)


@pytest.mark.parametrize("ends_as", ["completed", "failed", "dead letter"])
async def test_a_stale_report_that_is_repeated_after_a_correction_books_nothing(
    world: World, ends_as: str
) -> None:
    agent = await world.agent("ann")
    task = await taken(world, agent, max_attempts=1 if ends_as == "dead letter" else 5)
    if ends_as == "completed":
        await world.complete(task, spent="0.2")
    else:
        await world.fail(task, spent=cost("0.2"))
    await late_heartbeat(world, agent, task, cost("7"))
    assert booked(world) == {Decimal(7)}

    await correct(world, task.id, "0.31")
    await late_heartbeat(world, agent, task, cost("7"))
    await world.engine.work.fail([Failure(ref(task), "x", spent=cost("6"))])
    assert booked(world) == {Decimal("0.31")}

    # What is new is booked: the difference to the reports.
    await late_heartbeat(world, agent, task, cost("7.5"))
    assert booked(world) == {Decimal("0.81")}
    if ends_as == "dead letter":
        (letter,) = (await world.engine.dead_letters.find()).items
        assert letter.total_cost_usd == Decimal("0.81")
    check_invariants(world.connection)


async def test_a_running_task_is_corrected(world: World) -> None:
    """Within its reservation nothing is booked yet: the end of the attempt books all of it."""
    for budget, limit in ((None, None), (50, None), (50, Decimal(9))):
        agent = await world.agent(budget_usd=budget)
        task = await taken(world, agent, max_cost_usd=limit)
        await report(world, agent, task, "5")

        await correct(world, task.id, "0.31")
        assert (await world.engine.read.task(task.id)).cost_usd == Decimal("0.31")
        check_invariants(world.connection)

        await report(world, agent, task, "5")
        await report(world, agent, task, "6")
        await world.complete(task, spent="6.5")
        assert world.task(task.id)["cost_usd"] == Decimal("1.81")
        row = world.agent_row(agent)
        assert (row["spent_usd"], row["reserved_usd"]) == (Decimal("1.81"), 0)
    assert booked(world) == {3 * Decimal("1.81")}
    check_invariants(world.connection)


async def test_a_correction_is_divided_among_the_agents_that_were_charged(world: World) -> None:
    """No agent gets back more than it was charged: its budget would grow."""
    ann, bob = await world.agent("ann"), await world.agent("bob")
    task = await taken(world, ann, max_attempts=9)
    await world.fail(task, spent=cost("5"))
    await world.engine.maintenance.promote_due(10)
    second = await world.take(bob)
    await world.complete(second, spent="0.2")

    await correct(world, task.id, 3)
    assert corrections(world) == [(2, "bob", Decimal("-0.2")), (1, "ann", Decimal(-2))]
    assert (world.agent_row(bob)["spent_usd"], world.agent_row(ann)["spent_usd"]) == (0, 3)
    await correct(world, task.id, 0)
    await correct(world, task.id, 1)
    assert corrections(world)[2:] == [(1, "ann", Decimal(-3)), (2, "bob", Decimal(1))]
    assert (world.agent_row(bob)["spent_usd"], world.agent_row(ann)["spent_usd"]) == (1, 0)
    assert booked(world) == {Decimal(1)}


async def test_a_corrected_task_runs_again(world: World) -> None:
    """The kept attempt has what it reported, so that a repeated report books nothing."""
    agent = await world.agent("ann")
    first = await taken(world, agent)
    await world.complete(first, spent="8")
    await correct(world, first.id, "0.31")
    await world.engine.rerun.rerun(first.id)
    await late_heartbeat(world, agent, first, cost("8"))
    assert booked(world) == {Decimal("0.31")}

    await world.complete(await world.take(agent), spent="1")

    assert booked(world) == {Decimal("1.31")}
    await correct(world, first.id, 0)
    assert booked(world) == {Decimal(0)}
    check_invariants(world.connection)


async def test_money_that_comes_back_wakes_what_waits_for_it(world: World) -> None:
    agent = await world.agent("ann", budget_usd=10)
    await world.engine.limits.patch({"daily_budget_usd": 10})
    dag = await world.dag(
        NewTask("code", key="a"), NewTask("code", key="b", max_cost_usd=Decimal(2), priority=90), ceiling=9
    )
    task = await world.take(agent)
    await world.complete(task, spent="9")
    assert await world.claim(agent) == []

    async with world.engine.database.connection() as listener:
        await listener.execute("LISTEN task_ready")
        await correct(world, task.id, "0.5")
        notices = listener.notifies(timeout=30, stop_after=1)
        assert [notice.channel async for notice in notices] == ["task_ready"]

    assert (await world.take(agent)).id == dag.tasks["b"].id
    check_invariants(world.connection)


async def test_a_correction_is_no_speed_of_spending(world: World) -> None:
    agent = await world.agent("ann")
    await world.engine.limits.patch({"velocity_usd": 20, "velocity_window_sec": 3600})
    task = await taken(world, agent)
    await world.engine.budgets.watch()
    await world.complete(task, spent="400")
    await world.engine.budgets.watch()

    await world.engine.corrections.correct(task.id, CostCorrection(disputed=Disputed.ACCEPT, reason="billed"))
    world.age(minutes=1)
    await world.engine.budgets.watch()

    assert booked(world) == {Decimal(400)}
    assert await world.engine.read.pauses() == []


async def test_what_cannot_be_corrected(world: World) -> None:
    task_id = await world.one()
    faulty: list[dict[str, Any]] = [
        {"cost_usd": -1},
        {"cost_usd": 1_000_001},
        {"cost_usd": float("nan")},
        {"cost_usd": "much"},
        {},
        {"cost_usd": 1, "disputed": Disputed.ACCEPT},
        {"cost_usd": 1, "reason": ""},
        {"cost_usd": 1, "reason": "x" * 2_001},
    ]
    for fields in faulty:
        with pytest.raises(InvalidInputError):
            await world.engine.corrections.correct(task_id, CostCorrection(**{"reason": "r", **fields}))
    for unknown in ("task_unknown", "a\0b"):
        with pytest.raises(NotFoundError):
            await correct(world, unknown, 1)
    assert world.rows("SELECT * FROM lineshaft.cost_correction") == []


async def test_a_task_without_a_claim_is_corrected(world: World) -> None:
    """What it has cost was reported nowhere, for example because a person did it."""
    task_id = await world.one()
    await correct(world, task_id, "0.5")
    assert world.task(task_id)["cost_usd"] == await spent_today(world) == Decimal("0.5")
    assert corrections(world) == [(0, None, Decimal("0.5"))]
    await correct(world, task_id, 0)
    assert world.task(task_id)["cost_usd"] == await spent_today(world) == 0


def test_shares() -> None:
    def claim(epoch: int, cost: str, disputed: str = "0") -> ClaimCost:
        return ClaimCost(epoch, f"a{epoch}", Decimal(cost), Decimal(disputed))

    def parts(claims: list[ClaimCost], difference: str) -> list[tuple[int, Decimal]]:
        return [(claim.epoch, amount) for claim, amount in shares(claims, Decimal(difference))]

    claims = [claim(3, "1"), claim(2, "0", "7"), claim(1, "4")]
    assert parts(claims, "0") == []
    assert parts(claims, "-3") == [(3, Decimal(-1)), (1, Decimal(-2))]
    assert parts(claims, "5") == [(2, Decimal(5))]
    assert parts(claims, "8") == [(2, Decimal(7)), (3, Decimal(1))]
    assert parts([], "2") == [(0, Decimal(2))]
