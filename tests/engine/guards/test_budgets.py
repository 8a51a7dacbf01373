"""Budgets: DAGs, the day, unaffordable tasks, cost velocity (R-230 to R-238)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.duties.promoter import Promoter
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.wakeups import Wakeups
from lineshaft.engine.guards.rules import Rules
from lineshaft.errors import BudgetExceededError, InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Failure
from tests.invariants import check_invariants
from tests.world import World, cost, ref

DAILY = Rules(limits={"daily_budget_usd": Decimal(10)})
FAST = Rules(limits={"velocity_usd": Decimal(5), "velocity_window_sec": 600.0})


@asynccontextmanager
async def ruled(
    dsn: str, connection: psycopg.Connection, clock: MovableClock, rules: Rules
) -> AsyncIterator[World]:
    async with Engine(dsn, clock=clock, max_connections=4, rules=rules) as engine:
        yield World(engine, connection, clock)
    check_invariants(dsn)


def alerts(world: World) -> list[dict[str, Any]]:
    return [row["data"] for row in world.rows("SELECT data FROM lineshaft.events WHERE kind = 'alert'")]


def blocked(world: World) -> list[tuple[str, str]]:
    rows = world.rows("SELECT task_id, data FROM lineshaft.events WHERE kind = 'budget.blocked' ORDER BY seq")
    return [(row["task_id"], row["data"]["purse"]) for row in rows]


# EndedClaim all attempts.


async def test_attempts_together_may_cost_so_much(world: World) -> None:
    """R-238: reached is enough."""
    agent = await world.agent()
    await world.one(max_total_cost_usd=1, max_attempts=9)
    assert await world.fail(await world.take(agent), spent=cost("0.4")) is Status.RETRYING
    world.age(hours=1)
    await world.engine.maintenance.promote_due(10)

    task = await world.take(agent)
    assert await world.fail(task, spent=cost("0.6")) is Status.DEAD_LETTERED
    assert world.task(task.id)["cost_usd"] == 1


async def test_waits_for_a_rate_limit_are_no_way_around_it(world: World) -> None:
    """R-238: they use no attempts, but they use money."""
    agent = await world.agent()
    await world.one(max_total_cost_usd=1)

    task = await world.take(agent)

    assert await world.fail(task, "429", spent=cost("1")) is Status.DEAD_LETTERED


@pytest.mark.parametrize("error", ["it broke", "429 too many requests"])
async def test_a_failure_that_cost_too_much_is_not_retried(world: World, error: str) -> None:
    """R-235: whatever it failed of."""
    agent = await world.agent()
    await world.one(max_cost_usd=1, max_attempts=9)
    task = await world.take(agent)

    assert await world.fail(task, error, spent=cost("1.000001")) is Status.DEAD_LETTERED

    end = world.end(task.id)
    assert end["category"] == "budget_exceeded"
    assert end["reason"] == f"cost 1.000001 USD, more than max_cost_usd 1.000000; and: {error}"
    assert world.agent_row(agent)["spent_usd"] == Decimal("1.000001")


# DAGs.


async def test_a_higher_ceiling_frees_parked_work_at_once(world: World) -> None:
    """R-232, F-27: with a wake-up, and best first while it fits."""
    agent = await world.agent()
    dag = await world.dag(*(NewTask("code", max_cost_usd=2, priority=n) for n in (1, 2, 3)), ceiling=1)
    assert await world.claim(agent, 3) == []
    assert {row["parked"] for row in world.rows("SELECT parked FROM lineshaft.task_live")} == {"dag_budget"}

    async with Wakeups(world.engine.database.dsn) as wakeups:
        with wakeups.waiter(None) as waiter:
            await waiter.wait(0)
            await world.engine.budgets.add_dag_budget(dag.id, 3)
            assert await waiter.wait(20)

    assert world.dag_row(dag.id)["budget_ceiling_usd"] == 4
    assert [task.max_cost_usd for task in await world.claim(agent, 3)] == [2, 2]
    await world.engine.budgets.set_dag_budget(dag.id, None)
    assert len(await world.claim(agent, 3)) == 1
    changed = [
        row["data"] for row in world.rows("SELECT data FROM lineshaft.events WHERE kind = 'dag.changed'")
    ]
    assert changed[0] == {"budget_ceiling_usd": {"from": 1.0, "to": 4.0}}
    assert len(changed) == 2


async def test_a_lower_ceiling_holds_back(world: World) -> None:
    agent = await world.agent()
    dag = await world.dag(NewTask("code", max_cost_usd=2), NewTask("code", max_cost_usd=2), ceiling=9)
    await world.take(agent)
    await world.engine.budgets.set_dag_budget(dag.id, 1)

    assert await world.claim(agent) == []


@pytest.mark.parametrize("claimed", [False, True])
async def test_a_standalone_task_gets_a_ceiling(world: World, claimed: bool) -> None:
    """Its DAG is virtual until then."""
    agent = await world.agent()
    task_id = await world.one(max_cost_usd=2, max_attempts=9)
    if claimed:
        await world.fail(await world.take(agent), spent=cost("1.5"))
        world.age(hours=1)
        await world.engine.maintenance.promote_due(10)
    dag_id = world.task(task_id)["dag_id"]

    await world.engine.budgets.set_dag_budget(dag_id, 3)

    row = world.dag_row(dag_id)
    assert (row["spent_usd"], row["status"]) == ((Decimal("1.5"), "running") if claimed else (0, "pending"))
    assert len(await world.claim(agent)) == (0 if claimed else 1)
    await world.engine.budgets.add_dag_budget(dag_id, 1)
    assert len(await world.claim(agent)) == (1 if claimed else 0)


async def test_ceilings_that_make_no_sense(world: World) -> None:
    task_id = await world.one()
    await world.complete(await world.take())
    dag_id = world.task(task_id)["dag_id"]

    with pytest.raises(InvalidTransitionError, match="with its only task"):
        await world.engine.budgets.set_dag_budget(dag_id, 1)
    for name in ("dag_none", "a\0b"):
        with pytest.raises(NotFoundError):
            await world.engine.budgets.set_dag_budget(name, 1)
    for sum_ in (-1, float("nan"), 1e9):
        with pytest.raises(InvalidInputError, match="must be an amount in US dollars"):
            await world.engine.budgets.add_dag_budget(dag_id, sum_)
    assert world.rows("SELECT FROM lineshaft.dag") == []


async def test_a_ceiling_ends_at_the_largest_sum(world: World) -> None:
    dag = await world.dag(NewTask("a"), NewTask("b"), ceiling=99_999_999)
    await world.engine.budgets.add_dag_budget(dag.id, 99_999_999)

    assert world.dag_row(dag.id)["budget_ceiling_usd"] == Decimal("99999999.999999")


async def test_topping_up_an_agent_wakes_who_waits(world: World) -> None:
    """R-231."""
    agent = await world.agent(budget_usd=1)
    await world.one(max_cost_usd=2)
    assert await world.claim(agent) == []

    async with Wakeups(world.engine.database.dsn) as wakeups:
        with wakeups.waiter(None) as waiter:
            await waiter.wait(0)
            await world.engine.fleet.patch(agent.id, add_budget_usd=1)
            assert await waiter.wait(20)

    assert len(await world.claim(agent)) == 1


# Unaffordable tasks.


async def test_a_task_over_its_dag_budget_is_reported_once(world: World) -> None:
    """R-236; and again when it is so again."""
    agent = await world.agent()
    dag = await world.dag(NewTask("code", max_cost_usd=2, key="a"), NewTask("x", key="b"), ceiling=1)
    assert await world.claim(agent, types=["code"]) == []
    promoter = Promoter(world.engine.maintenance)

    counts = [(await promoter.run_once())["unaffordable tasks"] for _ in range(3)]

    assert counts == [1, 0, 0]
    assert blocked(world) == [(dag.tasks["a"].id, "dag")]
    await world.engine.budgets.set_dag_budget(dag.id, 5)
    await world.engine.budgets.set_dag_budget(dag.id, 1)
    assert await world.claim(agent, types=["code"]) == []
    assert await world.engine.budgets.report_unaffordable(10) == 1


async def test_a_task_that_waits_for_reservations_is_not_reported(world: World) -> None:
    """R-236: somebody can afford it when they are settled."""
    agent = await world.agent()
    await world.dag(NewTask("code", max_cost_usd=2), NewTask("code", max_cost_usd=2), ceiling=3)
    task = await world.take(agent)
    assert await world.claim(agent) == []

    assert await world.engine.budgets.report_unaffordable(10) == 0
    await world.complete(task, spent="2")
    assert await world.claim(agent) == []
    assert await world.engine.budgets.report_unaffordable(10) == 1


async def test_a_task_that_no_agent_can_afford_is_reported_once(world: World) -> None:
    """R-236: only of capable agents; and not if no agent is capable."""
    poor = await world.agent(budget_usd=1)
    await world.agent(budget_usd=100, types=("other",))
    (expensive, *_) = await world.submit(
        NewTask("code", max_cost_usd=2),
        NewTask("code", max_cost_usd=1),
        NewTask("code"),
        NewTask("code", max_cost_usd=2, required_capabilities=["rust"]),
    )

    assert [await world.engine.budgets.report_unaffordable(10) for _ in range(2)] == [1, 0]
    assert blocked(world) == [(expensive, "agent")]
    await world.engine.fleet.patch(poor.id, add_budget_usd=1)
    task = next(task for task in await world.claim(poor) if task.id == expensive)
    await world.release(task)
    await world.complete(await world.take(poor, types=["code"]), spent="2")
    assert world.status(expensive) == "COMPLETED"


async def test_a_task_without_a_limit_that_nobody_can_afford_is_reported_once(world: World) -> None:
    """R-233, R-236: it needs what a claim would reserve for it."""
    await world.engine.limits.patch({"default_max_cost_usd": 2})
    poor = await world.agent(budget_usd=1)
    alone = await world.one("code")
    rich = await world.agent(types=("x",))
    dag = await world.dag(NewTask("x", key="a"), NewTask("x", key="b"), ceiling=1)
    assert await world.claim(poor) == await world.claim(rich) == []

    assert [await world.engine.budgets.report_unaffordable(10) for _ in range(2)] == [3, 0]
    assert sorted(blocked(world)) == sorted(
        [(alone, "agent"), (dag.tasks["a"].id, "dag"), (dag.tasks["b"].id, "dag")]
    )
    await world.engine.limits.patch({"default_max_cost_usd": None})
    await world.engine.maintenance.recheck_parked(10)
    assert [task.id for task in await world.claim(poor)] == [alone]
    assert len(await world.claim(rich, 2)) == 2


async def test_telling_is_bounded(world: World) -> None:
    await world.agent(budget_usd=1)
    await world.submit(*(NewTask("code", max_cost_usd=2) for _ in range(5)))

    assert [await world.engine.budgets.report_unaffordable(3) for _ in range(2)] == [3, 0]


# The day.


@pytest.mark.parametrize("rules", [DAILY, Rules()])
async def test_waiters_know_when_the_new_day_begins(
    dsn: str, connection: psycopg.Connection, clock: MovableClock, rules: Rules
) -> None:
    """R-237: at midnight UTC; without a daily budget nothing opens then."""
    async with ruled(dsn, connection, clock, rules) as world:
        before = await world.engine.upcoming.openings()
        midnight = (datetime(2026, 2, 9, tzinfo=UTC) - clock.now()).total_seconds()
        clock.advance(midnight)
        after = await world.engine.upcoming.openings(before.now)
        again = await world.engine.upcoming.openings(after.now)

    daily = rules is DAILY
    assert (before.guard_sec, before.opened) == (midnight if daily else None, False)
    assert (after.guard_sec, after.opened) == (86_400 if daily else None, daily)
    assert not again.opened


async def test_the_day_has_a_ceiling_for_all(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-237: reservations of all agents count; the rest is returned when they are settled."""
    async with ruled(dsn, connection, clock, DAILY) as world:
        ann, bob = await world.agent("ann"), await world.agent("bob")
        await world.submit(*(NewTask("code", max_cost_usd=4) for _ in range(5)))
        (first,) = await world.claim(ann)
        (second,) = await world.claim(bob, 5)
        assert await world.claim(ann) == []

        await world.complete(first, spent="1")

        day = await world.engine.budgets.day()
        assert (day.day, day.spent_usd, day.reserved_usd) == (date(2026, 2, 8), Decimal(1), Decimal(4))
        (third,) = await world.claim(ann, 5)
        await world.complete(second, spent="4")
        await world.fail(third, spent=cost("3"))
        assert await world.claim(ann) == []
        assert (await world.engine.budgets.day()).spent_usd == 8


async def test_a_new_day_begins_at_midnight_utc(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    async with ruled(dsn, connection, clock, DAILY) as world:
        ann, bob = await world.agent("ann"), await world.agent("bob")
        await world.submit(*(NewTask("code", max_cost_usd=8) for _ in range(3)))
        await world.complete(await world.take(ann), spent="8")
        assert await world.claim(bob) == []
        clock.advance(timedelta(hours=14, minutes=59, seconds=59).total_seconds())
        assert await world.claim(bob) == []

        clock.advance(1)

        task = await world.take(bob)
        assert await world.claim(ann) == [], "it is reserved today"
        await world.complete(task, spent="1.5")
        assert (await world.engine.budgets.day()).spent_usd == Decimal("1.5")
        assert len(await world.claim(ann)) == 1


async def test_what_was_claimed_yesterday_is_paid_today(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    async with ruled(dsn, connection, clock, DAILY) as world:
        agent = await world.agent(heartbeat_interval_sec=80_000)
        await world.one(max_cost_usd=8, max_duration_sec=80_000)
        task = await world.take(agent)
        clock.advance(60_000)

        assert (await world.engine.budgets.day()).reserved_usd == 8
        await world.complete(task, spent="7")
        assert (await world.engine.budgets.day()).spent_usd == 7


async def test_costs_without_a_maximum_count_too(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-233: nothing is reserved for them, and none is claimable once the day's money is spent."""
    async with ruled(dsn, connection, clock, DAILY) as world:
        agent = await world.agent()
        await world.submit(*(NewTask("code") for _ in range(3)))
        await world.complete(await world.take(agent), spent="9.999999")
        await world.complete(await world.take(agent), spent="0.000001")

        assert await world.claim(agent) == []


async def test_the_end_of_the_daily_budget_is_reported_once(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    async with ruled(dsn, connection, clock, DAILY) as world:
        agent = await world.agent()
        first, second = await world.submit(*(NewTask("code", max_cost_usd=6) for _ in range(2)))
        await world.complete(await world.take(agent), spent="5")
        assert [await world.engine.budgets.watch() for _ in range(2)] == [1, 0]

        (alert,) = alerts(world)
        assert alert["message"].startswith("5 USD of the 10 USD for 2026-02-08 (UTC) are spent")
        why = await world.engine.read.why(second)
        assert [reason.code for reason in why.reasons] == ["daily_budget"]
        with pytest.raises(BudgetExceededError, match="5 USD of the daily budget is neither"):
            await world.engine.claims.claim_task(agent.id, agent.incarnation, second)
        clock.advance(86_400)
        await world.heartbeat(agent.id, agent.incarnation)
        assert (await world.engine.read.why(second)).runnable
        assert await world.engine.budgets.watch() == 0
        assert world.status(first) == "COMPLETED"


async def test_tasks_without_a_limit_reach_the_end_of_the_daily_budget_with_what_they_reserve(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-233."""
    async with ruled(dsn, connection, clock, DAILY) as world:
        await world.engine.limits.patch({"default_max_cost_usd": 6})
        agent = await world.agent()
        _, second = await world.submit(NewTask("code"), NewTask("code"))
        await world.complete(await world.take(agent), spent="5")

        assert await world.engine.budgets.watch() == 1
        why = await world.engine.read.why(second)
        assert [reason.code for reason in why.reasons] == ["daily_budget"]
        assert await world.claim(agent) == []


# Too fast.


async def test_money_that_goes_too_fast_stops_everything(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    async with ruled(dsn, connection, clock, FAST) as world:
        agent = await world.agent()
        await world.submit(*(NewTask("code") for _ in range(9)))
        promoter = Promoter(world.engine.maintenance)
        await promoter.run_once()
        for spent in ("2", "3"):
            clock.advance(60)
            await world.complete(await world.take(agent), spent=spent)
            assert (await promoter.run_once())["money alerts"] == 0
        running = await world.take(agent)
        clock.advance(60)
        await world.heartbeat(agent.id, agent.incarnation, [ref(running)], spent=cost("0.01"))

        (alert,) = alerts(world)
        assert (await promoter.run_once())["money alerts"] == 0, "the report has stopped it"
        assert alert["message"].startswith("5.01 USD were spent within 10 minutes, more than 5 USD")
        assert await world.claim(agent) == []
        (task_id,) = {row["id"] for row in world.rows("SELECT min(id) AS id FROM lineshaft.tasks")}
        ready = world.row("SELECT id FROM lineshaft.task_live WHERE status = 'READY' LIMIT 1")["id"]
        (reason,) = (await world.engine.read.why(ready)).reasons
        assert "Everything is paused: 5.01 USD were spent" in reason.detail
        assert task_id

        assert await world.engine.pauses.resume()
        assert (await promoter.run_once())["money alerts"] == 0, (
            "what was spent before is not held against it"
        )
        await world.complete(running, spent="2")
        assert (await promoter.run_once())["money alerts"] == 0


async def test_slow_spending_goes_on(dsn: str, connection: psycopg.Connection, clock: MovableClock) -> None:
    """Only the last ten minutes count, and their samples are all that is kept."""
    async with ruled(dsn, connection, clock, FAST) as world:
        agent = await world.agent(heartbeat_interval_sec=3600)
        await world.submit(*(NewTask("code") for _ in range(20)))
        for _ in range(20):
            await world.complete(await world.take(agent), spent="2")
            assert await world.engine.budgets.watch() == 0
            clock.advance(300)

        assert world.row("SELECT count(*) FROM lineshaft.spend_sample")["count"] <= 3


async def test_a_failure_is_paid_for_by_its_agent_on_that_day(world: World) -> None:
    agent = await world.agent()
    await world.submit(*(NewTask("code") for _ in range(2)))
    first, second = await world.claim(agent, 2)
    await world.engine.work.fail([Failure(ref(first), "x", spent=cost("0.5"))])
    await world.complete(second, spent="0.25")

    assert world.agent_row(agent)["spent_usd"] == Decimal("0.75")
    day = world.row("SELECT * FROM lineshaft.spend")
    assert (day["spent_usd"], day["day"]) == (Decimal("0.75"), date(2026, 2, 8))
