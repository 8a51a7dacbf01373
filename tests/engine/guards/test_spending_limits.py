"""Attempts, agents, DAGs and days that are over a limit are stopped, and spawning has limits too."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.duties.promoter import Promoter
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.metrics import MetricsReader
from lineshaft.errors import BudgetExceededError, InvalidInputError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo
from lineshaft.types.work import HeldTask, NewSpawn, Presence
from tests.engine.guards.spending_helpers import AT_ONCE, expire, key, late_heartbeat, report, spent_today
from tests.world import World, cost, ref, spawn_children

# Over a limit.


async def test_a_report_over_the_tasks_limit_is_answered_with_cancel(world: World) -> None:
    """R-235: row 4; at the limit is within it, and the heartbeat itself moves nothing."""
    agent = await world.agent()
    await world.one(max_cost_usd=1)
    task = await world.take(agent)
    assert await report(world, agent, task, "1") is None

    assert await report(world, agent, task, "1.000001") == "max_cost"
    assert await report(world, agent, task) == "max_cost", "until it is given up"

    assert world.status(task.id) == "RUNNING"
    assert await world.fail(task, category="budget_exceeded") is Status.DEAD_LETTERED


async def test_all_claims_together_are_limited_at_the_first_report_over_it(world: World) -> None:
    """R-238."""
    agent = await world.agent()
    await world.one(max_total_cost_usd=2, retry=AT_ONCE)
    first = await world.take(agent)
    await world.fail(first, spent=cost("1.5"))
    await world.engine.maintenance.promote_due(10)
    task = await world.take(agent)

    assert await report(world, agent, task, "0.5") is None
    assert await report(world, agent, task, "0.500001") == "max_total_cost"


async def test_a_crashed_attempt_that_cost_too_much_is_not_retried(world: World) -> None:
    """R-024, R-238: row 3; 0.90 each, of 1.50."""
    agent = await world.agent()
    task_id = await world.one(max_total_cost_usd=1.5, max_attempts=9, retry=AT_ONCE)
    for _ in range(2):
        task = await world.take(agent)
        await report(world, agent, task, "0.9")
        world.age(hours=3)
        await world.engine.maintenance.reap(10)
        await world.engine.maintenance.promote_due(10)

    assert world.status(task_id) == "DEAD_LETTERED"
    assert world.task(task_id)["cost_usd"] == Decimal("1.8")


@pytest.mark.parametrize("how", ["fail", "release", "crash", "rate limit"])
async def test_reaching_max_total_cost_is_budget_exceeded_everywhere(world: World, how: str) -> None:
    """R-238, R-242: in task, dead letter, history and metrics."""
    agent = await world.agent()
    metrics = MetricsReader(world.engine.database, world.engine.read, world.engine.fleet)
    task_id = await world.one(max_total_cost_usd=1, max_attempts=9)
    task = await world.take(agent)
    await report(world, agent, task, "1")
    if how == "fail":
        await world.fail(task)
    elif how == "rate limit":
        await world.fail(task, "429 too many requests")
    elif how == "release":
        assert await world.release(task) is Status.DEAD_LETTERED
        assert await world.release(task) is Status.DEAD_LETTERED, "repeated"
    else:
        await expire(world, agent, task)

    assert world.task(task_id)["status"] == "DEAD_LETTERED"
    assert world.end(task_id)["category"] == "budget_exceeded"
    (letter,) = (await world.engine.dead_letters.find()).items
    assert (letter.category, letter.total_cost_usd) == ("budget_exceeded", Decimal(1))
    assert [past.category for past in letter.failure_history] == ["budget_exceeded"]
    failed = (await metrics.read()).totals.failed
    assert {reason: n for reason, n in failed.items() if n} == {"budget": 1}


async def test_releasing_is_no_way_around_the_total(world: World) -> None:
    """R-238: row 7; 0.9 and release, again and again."""
    agent = await world.agent()
    task_id = await world.one(max_total_cost_usd=1)
    rounds = 0
    while tasks := await world.claim(agent):
        await report(world, agent, tasks[0], "0.9")
        await world.release(tasks[0])
        rounds += 1

    assert (rounds, world.status(task_id)) == (2, "DEAD_LETTERED")
    assert world.task(task_id)["cost_usd"] == Decimal("1.8")


async def test_what_is_above_the_reservation_counts_at_once_for_the_agent(world: World) -> None:
    """R-231: row 5; budget 1, 9 reported, nothing more is claimed."""
    agent = await world.agent(budget_usd=1)
    await world.submit(*(NewTask("code") for _ in range(6)))
    task = await world.take(agent)

    assert await report(world, agent, task, "9") == "agent_budget"

    assert world.agent_row(agent)["spent_usd"] == 9
    assert await world.claim(agent, 5) == []
    assert await world.release(task) is Status.READY
    assert world.task(task.id)["attempts"] == 0
    assert await world.claim(agent, 5) == []
    assert world.agent_row(agent)["spent_usd"] == 9


async def test_children_without_a_limit_stop_at_the_dags_ceiling(world: World) -> None:
    """R-232, R-233: row 6; fifteen spawned tasks under a ceiling of 1."""
    agent = await world.agent()
    dag = await world.dag(NewTask("parent", key="p"), NewTask("never", key="n", depends_on=["p"]), ceiling=1)
    parent = await world.take(agent, types=["parent"])
    await spawn_children(world.engine, ref(parent), [NewTask("child") for _ in range(15)])
    spent = Decimal(0)
    while children := await world.claim(agent, types=["child"]):
        over = await report(world, agent, children[0], "0.3")
        spent += Decimal("0.3")
        assert over == (None if spent <= 1 else "dag_budget")

    assert spent == Decimal("1.2"), "one report went over it"
    assert world.dag_row(dag.id)["spent_usd"] == spent


async def test_the_default_cost_is_reserved_for_tasks_without_a_limit(world: World) -> None:
    """R-233: it isn't a limit on the task."""
    await world.engine.limits.patch({"default_max_cost_usd": Decimal("0.4"), "daily_budget_usd": Decimal(1)})
    agent = await world.agent()
    await world.submit(*(NewTask("code") for _ in range(5)))

    tasks = await world.claim(agent, 5)

    assert len(tasks) == 2
    assert (await world.engine.limits.read()).reserved_usd == Decimal("0.8")
    assert await report(world, agent, tasks[0], "0.5") is None
    assert await spent_today(world) == Decimal("0.1"), "only what is above the reservation"
    assert await world.complete(tasks[0], spent="0.55") is Status.COMPLETED
    assert await spent_today(world) == Decimal("0.55")


async def test_a_completion_within_the_tasks_own_limits_is_accepted(world: World) -> None:
    """Whatever the agent, the DAG and the day are over."""
    await world.engine.limits.patch({"daily_budget_usd": Decimal(1)})
    agent = await world.agent(budget_usd=1)
    await world.dag(NewTask("code"), NewTask("code", max_cost_usd=1), ceiling=1)
    priced = await world.take(agent)
    assert priced.max_cost_usd == 1 or priced.max_cost_usd is None
    if priced.max_cost_usd is None:
        assert await report(world, agent, priced, "7") == "agent_budget"
    assert await world.complete(priced, spent="7" if priced.max_cost_usd is None else "1") is Status.COMPLETED


async def test_others_overspending_doesnt_stop_a_task_within_its_reservation(world: World) -> None:
    """R-234: what was reserved for it is there."""
    await world.engine.limits.patch({"daily_budget_usd": Decimal(10)})
    agent = await world.agent(budget_usd=10)
    await world.dag(NewTask("priced", max_cost_usd=4), NewTask("free"), ceiling=10)
    priced = await world.take(agent, types=["priced"])
    free = await world.take(agent, types=["free"])
    assert await report(world, agent, priced, "1") is None

    assert await report(world, agent, free, "500") == "agent_budget"

    assert await report(world, agent, priced, "4") is None
    assert await world.complete(priced) is Status.COMPLETED


async def _lower_agent(world: World, agent: AgentInfo, _: str, usd: Decimal) -> str:
    await world.engine.fleet.patch(agent.id, budget_usd=usd)
    return "agent_budget"


async def _lower_dag(world: World, _: AgentInfo, dag: str, usd: Decimal) -> str:
    await world.engine.budgets.set_dag_budget(dag, usd)
    return "dag_budget"


async def _lower_day(world: World, _: AgentInfo, __: str, usd: Decimal) -> str:
    await world.engine.limits.patch({"daily_budget_usd": usd})
    return "daily_budget"


Lower = Callable[[World, AgentInfo, str, Decimal], Awaitable[str]]


@pytest.mark.parametrize("lower", [_lower_agent, _lower_dag, _lower_day])
@pytest.mark.parametrize("own", [None, 8])
async def test_a_lowered_limit_stops_running_attempts(world: World, lower: Lower, own: int | None) -> None:
    """Below what has been spent, within reservations too; raised again, they go on."""
    await world.engine.limits.patch({"daily_budget_usd": Decimal(10)})
    agent = await world.agent(budget_usd=10)
    dag = await world.dag(NewTask("code", max_cost_usd=own), NewTask("other"), ceiling=10)
    task = await world.take(agent, types=["code"])
    assert await report(world, agent, task, "5") is None
    reason = await lower(world, agent, dag.id, Decimal(6))
    assert await report(world, agent, task, "5") is None, "not below what has been spent"

    await lower(world, agent, dag.id, Decimal(4))

    assert await report(world, agent, task) == reason
    await lower(world, agent, dag.id, Decimal(10))
    assert await report(world, agent, task) is None


async def test_a_daily_budget_that_was_lowered_is_forgotten_the_next_day(world: World) -> None:
    """R-237: the new day's overspending by others stops no task within its reservation."""
    await world.engine.limits.patch({"daily_budget_usd": Decimal(10)})
    agent = await world.agent(heartbeat_interval_sec=80_000)
    await world.submit(NewTask("free"), NewTask("priced", max_cost_usd=4))
    await report(world, agent, await world.take(agent, types=["free"]), "9")
    await world.engine.limits.patch({"daily_budget_usd": Decimal(5)})
    world.age(days=1)
    await world.engine.maintenance.reap(10)
    agent = await world.agent(agent.id)
    await world.one("free", max_attempts=1)
    priced = await world.take(agent, types=["priced"])

    await report(world, agent, await world.take(agent, types=["free"]), "9")

    assert await report(world, agent, priced, "4") is None


async def test_a_day_changes_during_an_attempt(world: World) -> None:
    """R-237: what is above the reservation counts on the day of its report, the rest on that of the end."""
    await world.engine.limits.patch({"daily_budget_usd": Decimal(10)})
    agent = await world.agent(heartbeat_interval_sec=80_000)
    await world.submit(
        NewTask("free", max_duration_sec=80_000), NewTask("priced", max_cost_usd=4, max_duration_sec=80_000)
    )
    free, priced = await world.take(agent, types=["free"]), await world.take(agent, types=["priced"])
    midnight = datetime(2026, 2, 9, tzinfo=UTC)
    world.clock.advance((midnight - world.clock.now()).total_seconds() - 1)
    for task in (free, priced):
        await report(world, agent, task, "3")
    assert (await spent_today(world), (await world.engine.limits.read()).reserved_usd) == (
        Decimal(3),
        Decimal(4),
    )

    world.clock.advance(1)

    assert (await spent_today(world), (await world.engine.limits.read()).reserved_usd) == (
        Decimal(0),
        Decimal(4),
    )
    assert await report(world, agent, free, "3.5") is None
    assert await world.complete(free, spent="3.75") is Status.COMPLETED
    assert await world.complete(priced) is Status.COMPLETED
    rows = world.rows("SELECT day, spent_usd FROM lineshaft.spend ORDER BY day")
    assert [(row["day"].day, row["spent_usd"]) for row in rows] == [(8, 3), (9, Decimal("3.75"))]
    assert (await world.engine.limits.read()).reserved_usd == 0


async def test_a_report_over_yesterdays_budget_is_within_todays(world: World) -> None:
    """R-237."""
    await world.engine.limits.patch({"daily_budget_usd": Decimal(1)})
    agent = await world.agent(heartbeat_interval_sec=80_000)
    await world.one(max_duration_sec=80_000)
    task = await world.take(agent)
    assert await report(world, agent, task, "1.5") == "daily_budget"

    world.clock.advance((datetime(2026, 2, 9, tzinfo=UTC) - world.clock.now()).total_seconds())

    assert await report(world, agent, task, "1.6") is None
    assert await spent_today(world) == Decimal("0.1")


# Velocity.


@pytest.mark.parametrize("action", ["stop", "pause"])
async def test_velocity_stops_claims_and_running_attempts(world: World, action: str) -> None:
    """Row 8: with `stop` they are cancelled and released, with `pause` they go on."""
    await world.engine.limits.patch({"velocity_usd": Decimal(5), "velocity_action": action})
    agent = await world.agent()
    await world.submit(NewTask("code"), NewTask("code", max_cost_usd=50), NewTask("code"))
    promoter = Promoter(world.engine.maintenance)
    await promoter.run_once()
    tasks = await world.claim(agent, 2)
    world.age(seconds=5)
    for task in tasks:
        await report(world, agent, task, "6")

    await promoter.run_once()

    assert await world.claim(agent) == []
    expected = "velocity" if action == "stop" else None
    assert [await report(world, agent, task) for task in tasks] == [expected] * 2
    await world.engine.pauses.resume()
    assert [await report(world, agent, task) for task in tasks] == [None] * 2


# Spawn trees.


async def test_the_depth_of_spawned_tasks_is_limited(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """Row 10."""
    async with Engine(dsn, clock=clock, rules=Rules(max_spawn_depth=3)) as engine:
        world = World(engine, connection, clock)
        agent = await world.agent()
        await world.one()
        for _ in range(3):
            await spawn_children(engine, ref(await world.take(agent)), [NewTask("code")])

        with pytest.raises(
            InvalidInputError, match=r"at most 3 levels are allowed.*LINESHAFT_MAX_SPAWN_DEPTH"
        ):
            await spawn_children(engine, ref(await world.take(agent)), [NewTask("code")])
        assert world.row("SELECT count(*) AS n FROM lineshaft.task")["n"] == 4


async def test_the_number_of_spawned_tasks_is_limited(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """Row 10: a repeated call creates nothing, so it is answered."""
    async with Engine(dsn, clock=clock, rules=Rules(max_spawned_tasks=3)) as engine:
        world = World(engine, connection, clock)
        await world.one()
        parent = ref(await world.take())
        for _ in range(2):
            assert len(await spawn_children(engine, parent, [NewTask("a"), NewTask("b"), NewTask("c")])) == 3

        with pytest.raises(InvalidInputError, match="LINESHAFT_MAX_SPAWNED_TASKS"):
            await spawn_children(engine, parent, [NewTask("d")])
        assert world.row("SELECT count(*) AS n FROM lineshaft.task")["n"] == 4


@pytest.mark.parametrize("spent", ["1", "1.5"])
async def test_waiting_for_children_is_no_way_around_the_total(world: World, spent: str) -> None:
    """R-024: no children, and the holder ends the attempt; what the call reports is booked."""
    agent = await world.agent()
    task_id = await world.one(max_total_cost_usd=1)
    task = await world.take(agent)
    new = NewSpawn(ref(task), [NewTask("child")], key="plan", wait=True, spent=cost(spent))

    (spawned,) = await world.engine.work.spawn([new])

    assert isinstance(spawned.error, BudgetExceededError)
    assert world.status(task_id) == "RUNNING"
    assert world.task(task_id)["cost_usd"] == Decimal(spent)
    assert world.rows("SELECT FROM lineshaft.task WHERE type = 'child'") == []
    assert await world.fail(task, "no money", category="budget_exceeded") is Status.DEAD_LETTERED


async def test_a_refused_call_doesnt_stop_the_reports_of_others(world: World, dsn: str) -> None:
    """R-235: a rollback drops the prepared statements of its connection, which serves the next call too."""
    agent = await world.agent()
    await world.submit(NewTask("code", max_total_cost_usd=1), NewTask("code"))
    poor, other = await world.claim(agent, 2)
    presence = Presence(agent.id, agent.incarnation)

    async with Engine(dsn, clock=world.clock, max_connections=1) as engine:
        for number in range(1, 4):
            refused = NewSpawn(ref(poor), [NewTask("child")], wait=True, spent=cost(str(number)))
            assert isinstance((await engine.work.spawn([refused]))[0].error, BudgetExceededError)
            held = HeldTask(*key(other), presence, None, cost(str(number)))
            assert (await engine.work.heartbeat([presence], [held])).over == []

    assert world.task(other.id)["cost_usd"] == 3


async def test_at_the_total_children_that_are_not_waited_for_can_be_spawned(world: World) -> None:
    agent = await world.agent()
    await world.one(max_total_cost_usd=1)
    task = await world.take(agent)
    new = NewSpawn(ref(task), [NewTask("child")], key="plan", spent=cost("1"))

    (spawned,) = await world.engine.work.spawn([new])

    assert not spawned.unwrap().paused
    assert await world.complete(task) is Status.COMPLETED


async def test_a_task_at_its_total_is_not_claimed(world: World) -> None:
    """R-024, R-238: a late report took it there; it is a dead letter, and the claim goes on without it."""
    agent = await world.agent()
    over = await world.one(max_total_cost_usd=1, max_attempts=9)
    lost = await world.take(agent)
    await world.release(lost)
    await late_heartbeat(world, agent, lost, cost("1"))
    other = await world.one()

    assert [task.id for task in await world.claim(agent, 2)] == [other]

    assert world.status(over) == "DEAD_LETTERED"
    assert (await world.engine.dead_letters.get(over)).category == "budget_exceeded"


async def test_a_task_over_its_total_stops_at_its_next_heartbeat(world: World) -> None:
    """R-024: also if this attempt has reported nothing yet."""
    agent = await world.agent()
    await world.one(max_total_cost_usd=1, max_attempts=9)
    lost = await world.take(agent)
    await world.release(lost)
    held = await world.take(agent)
    assert await report(world, agent, held) is None

    await late_heartbeat(world, agent, lost, cost("1.5"))

    assert await report(world, agent, held) == "max_total_cost"
