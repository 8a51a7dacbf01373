"""Spending while attempts run: reports count at once, never go down, and stop what is over a limit."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.checks.verdict import CandidateOutput, Verdict
from lineshaft.clock import MovableClock
from lineshaft.duties.promoter import Promoter
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.read.metrics import MetricsReader
from lineshaft.errors import BudgetExceededError, InvalidInputError, StaleClaimError
from lineshaft.model.retry import SystemReason
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract, RetrySpec
from lineshaft.types import AgentInfo
from lineshaft.types.work import (
    ClaimedTask,
    Completion,
    Failure,
    HeldTask,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Presence,
    Release,
    Spent,
)
from tests.world import World, cancel_claim, cost, ref, spawn_children

AT_ONCE = RetrySpec(strategy="immediate")
USED = Spent(Decimal("0.9"), 300, 70)


async def report(
    world: World, agent: AgentInfo, task: ClaimedTask, spent: str | Spent | None = None
) -> str | None:
    """A heartbeat; the reason for which the holder must stop, or None."""
    presence = Presence(agent.id, agent.incarnation)
    used = Spent() if spent is None else cost(spent) if isinstance(spent, str) else spent
    answers = await world.engine.work.heartbeat([presence], [HeldTask(*_key(task), presence, None, used)])
    assert {ended.answer for ended in answers.over} <= {"cancel"}
    return next((ended.reason for ended in answers.over), None)


def _key(task: ClaimedTask) -> tuple[str, int]:
    return task.id, task.epoch


def tokens(row: dict[str, Any]) -> tuple[Decimal, int, int]:
    return row["cost_usd"], row["tokens_input"], row["tokens_output"]


async def spent_today(world: World) -> Decimal:
    return (await world.engine.limits.read()).spent_today_usd


# What is reported stays reported.


async def test_a_completion_cant_take_back_what_a_heartbeat_reported(world: World) -> None:
    """R-235: row 2, a limit of 1, a report of 5,000 and an end that says 0."""
    agent = await world.agent()
    await world.one(max_cost_usd=1)
    task = await world.take(agent)
    assert await report(world, agent, task, "5000") == "max_cost"

    assert await world.complete(task, spent="0") is Status.DEAD_LETTERED

    assert world.end(task.id)["category"] == "budget_exceeded"
    assert world.task(task.id)["cost_usd"] == world.agent_row(agent)["spent_usd"] == 5000


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
    await world.engine.operations.cancel(task.id, "no")


async def _expire(world: World, _: AgentInfo, __: ClaimedTask) -> None:
    world.age(hours=3)
    assert await world.engine.maintenance.reap(10)


async def _restart(world: World, agent: AgentInfo, _: ClaimedTask) -> None:
    await world.agent(agent.id)


async def _wait_for_children(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await spawn_children(world.engine, ref(task), [NewTask("child")], wait=True)


EXITS = (_complete, _fail, _release, _cancel_own, _cancel, _expire, _restart, _wait_for_children)


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
        await _expire(world, agent, task)

    assert world.task(task_id)["status"] == "DEAD_LETTERED"
    assert world.end(task_id)["category"] == "budget_exceeded"
    (letter,) = (await world.engine.dead_letters.find()).items
    assert (letter.category, letter.total_cost_usd) == ("budget_exceeded", Decimal(1))
    assert [past.category for past in letter.failure_history] == ["budget_exceeded"]
    failed = (await metrics.read()).totals.failed
    assert {reason: n for reason, n in failed.items() if n} == {"budget": 1}


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
            held = HeldTask(*_key(other), presence, None, cost(str(number)))
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


async def test_a_task_that_a_late_report_took_over_its_total_stops_at_its_first_heartbeat(
    world: World,
) -> None:
    """R-024: also if its next attempt has reported nothing yet."""
    agent = await world.agent()
    await world.one(max_total_cost_usd=1, max_attempts=9)
    lost = await world.take(agent)
    await world.release(lost)
    await _late_heartbeat(world, agent, lost, cost("1"))
    at_the_limit = await world.take(agent)
    assert await report(world, agent, at_the_limit) is None
    await _late_heartbeat(world, agent, lost, cost("1.5"))

    assert await report(world, agent, at_the_limit) == "max_total_cost"


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
    """R-231: row 5; budget 1, 25 reported, nothing more is claimed."""
    agent = await world.agent(budget_usd=1)
    await world.submit(*(NewTask("code") for _ in range(6)))
    task = await world.take(agent)

    assert await report(world, agent, task, "25") == "agent_budget"

    assert world.agent_row(agent)["spent_usd"] == 25
    assert await world.claim(agent, 5) == []
    assert await world.release(task) is Status.READY
    assert world.task(task.id)["attempts"] == 0
    assert await world.claim(agent, 5) == []
    assert world.agent_row(agent)["spent_usd"] == 25


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
    await world.engine.operations.resume()
    assert [await report(world, agent, task) for task in tasks] == [None] * 2


# Stale claims.


async def _lost(world: World, agent: AgentInfo, spent: str = "0.5") -> ClaimedTask:
    task = await world.take(agent)
    await report(world, agent, task, spent)
    await _expire(world, agent, task)
    return task


Late = Callable[[World, AgentInfo, ClaimedTask, Spent], Awaitable[Any]]


async def _late_heartbeat(world: World, agent: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    answers = await world.heartbeat(agent.id, agent.incarnation, [ref(task)], spent=spent)
    assert answers[task.id] in {"lost", "cancel"}


def _stale(error: Exception | None) -> None:
    assert isinstance(error, StaleClaimError), error


async def _late_complete(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.complete([Completion(ref(task), b"1", spent=spent)]))[0].error)


async def _late_fail(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.fail([Failure(ref(task), "x", spent=spent)]))[0].error)


async def _late_release(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.release([Release(ref(task), spent=spent)]))[0].error)


async def _late_cancel(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    with pytest.raises(StaleClaimError):
        await cancel_claim(world.engine, ref(task), "no", spent=spent)


async def _late_step(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.record_steps([NewStep(ref(task), "a", b"1", spent=spent)]))[0].error)


async def _late_checkpoint(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.save_checkpoints([NewCheckpoint(ref(task), b"1", spent)]))[0].error)


async def _late_spawn(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.spawn([NewSpawn(ref(task), [NewTask("c")], spent=spent)]))[0].error)


LATE = (
    _late_heartbeat,
    _late_complete,
    _late_fail,
    _late_release,
    _late_cancel,
    _late_step,
    _late_checkpoint,
    _late_spawn,
)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("max_attempts", [1, 5])
async def test_what_a_stale_claim_reports_is_booked_once(world: World, late: Late, max_attempts: int) -> None:
    """R-024: the difference to what it had reported, whether its task waits, runs or has ended."""
    agent = await world.agent(budget_usd=10)
    task_id = (
        (await world.dag(NewTask("code", key="a", max_attempts=max_attempts), NewTask("x"))).tasks["a"].id
    )
    task = await _lost(world, agent)
    assert task.id == task_id

    for _ in range(2):
        await late(world, agent, task, Spent(Decimal("0.8"), 10, 3))

    assert tokens(world.task(task_id)) == (Decimal("0.8"), 10, 3)
    (attempt,) = world.attempts(task_id)
    assert tokens(attempt) == (Decimal("0.8"), 10, 3)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("0.8")
    assert world.dag_row(world.task(task_id)["dag_id"])["spent_usd"] == Decimal("0.8")
    if max_attempts == 1:
        (letter,) = (await world.engine.dead_letters.find()).items
        assert letter.total_cost_usd == Decimal("0.8")


@pytest.mark.parametrize("late", [_late_heartbeat, _late_fail, _late_release])
async def test_what_is_reported_after_the_completion_is_booked_once(world: World, late: Late) -> None:
    agent = await world.agent()
    task_id = await world.one(retry=AT_ONCE)
    await world.fail(await world.take(agent), spent=cost("2"))
    await world.engine.maintenance.promote_due(10)
    task = await world.take(agent)
    await world.complete(task, spent="0.5")

    for _ in range(2):
        await late(world, agent, task, Spent(Decimal("0.8"), 10, 3))

    assert tokens(world.task(task_id)) == (Decimal("2.8"), 10, 3)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("2.8")


async def _checked_late_heartbeat(world: World, agent: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    await world.heartbeat(agent.id, agent.incarnation, [ref(task)], spent=spent)


async def _checked_late_release(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    (moved,) = await world.engine.work.release([Release(ref(task), spent=spent)])
    assert moved.error is not None


@pytest.mark.parametrize("late", [_checked_late_heartbeat, _checked_late_release])
@pytest.mark.parametrize("passed", [True, False])
async def test_what_is_reported_while_an_output_is_checked_is_booked_once(
    world: World, late: Late, passed: bool
) -> None:
    """R-024: beside what its gates cost, before and after the verdict."""

    async def judged(_: Any, __: CandidateOutput) -> bool:
        raise AssertionError("the test is the validator")

    world.engine.checks.register("judged", judged)
    agent = await world.agent(budget_usd=10)
    task_id = await world.one(output=OutputContract(validation="judged"), max_attempts=1)
    task = await world.take(agent)
    assert await world.complete(task, spent="0.5") is Status.VALIDATING
    (output,) = await world.engine.gates.take(limit=1, lease_sec=60)

    await world.engine.gates.postpone(output, "away", delay_sec=0, cost_usd=Decimal(3))
    for _ in range(2):
        await late(world, agent, task, Spent(Decimal("0.8"), 10, 3))
    assert tokens(world.task(task_id)) == (Decimal("3.8"), 10, 3)
    (output,) = await world.engine.gates.take(limit=1, lease_sec=60)
    await world.engine.gates.settle(output, Verdict(passed=passed, cost_usd=Decimal(1)))
    for _ in range(2):
        await late(world, agent, task, Spent(Decimal("0.9"), 10, 3))

    assert tokens(world.task(task_id)) == (Decimal("4.9"), 10, 3)
    (attempt,) = world.attempts(task_id)
    assert tokens(attempt) == (Decimal("4.9"), 10, 3)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("4.9")


async def _cancel_checked(world: World, task: ClaimedTask, spent: Spent) -> None:
    await cancel_claim(world.engine, ref(task), "no", spent=spent)


async def _fail_checked(world: World, task: ClaimedTask, spent: Spent) -> None:
    (moved,) = await world.engine.work.fail([Failure(ref(task), "x", spent=spent)])
    assert moved.unwrap() is Status.DEAD_LETTERED


@pytest.mark.parametrize("end", [_cancel_checked, _fail_checked])
@pytest.mark.parametrize("reported", [None, "0.7"])
async def test_an_attempt_that_ends_while_its_output_is_checked_is_booked_once(
    world: World, end: Callable[[World, ClaimedTask, Spent], Awaitable[None]], reported: str | None
) -> None:
    """R-024: its holder takes the output back; what it had cost was settled when the check began."""
    agent = await world.agent(budget_usd=10)
    task_id = await world.one(output=OutputContract(validation="human"), max_attempts=1)
    task = await world.take(agent)
    await report(world, agent, task, Spent(Decimal("0.2"), 4))
    assert await world.complete(task, spent="0.5") is Status.VALIDATING
    if reported is not None:
        await _checked_late_heartbeat(world, agent, task, cost(reported))

    await end(world, task, Spent(Decimal("0.8"), 10, 3))

    assert tokens(world.task(task_id)) == (Decimal("0.8"), 10, 3)
    (attempt,) = world.attempts(task_id)
    assert tokens(attempt) == (Decimal("0.8"), 10, 3)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("0.8")
    if end is _fail_checked:
        (letter,) = (await world.engine.dead_letters.find()).items
        assert letter.total_cost_usd == Decimal("0.8")


async def test_two_lost_claims_of_one_task_report_in_one_heartbeat(world: World) -> None:
    """Two agents of one process lost it, one after the other."""
    agent = await world.agent()
    task_id = await world.one(retry=AT_ONCE, max_attempts=9)
    lost = []
    for _ in range(2):
        lost.append(await _lost(world, agent, "0.1"))
        await world.engine.maintenance.promote_due(10)
    claims = [ref(task) for task in lost]

    await world.heartbeat(agent.id, agent.incarnation, claims, spent=Spent(Decimal("1.1"), 5))

    assert tokens(world.task(task_id)) == (Decimal("2.2"), 10, 0)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("2.2")


async def test_a_crash_costs_a_share_of_the_reservation(world: World) -> None:
    """The larger of it and of what was reported; what the lost process reports later is the difference."""
    await world.engine.limits.patch({"crash_cost_fraction": 0.5})
    agent = await world.agent(budget_usd=10)
    await world.submit(*(NewTask("code", max_cost_usd=2, retry=AT_ONCE) for _ in range(2)))
    little, much = await world.claim(agent, 2)
    await report(world, agent, little, "0.3")
    await report(world, agent, much, "1.3")
    await _expire(world, agent, little)

    assert [world.task(task.id)["cost_usd"] for task in (little, much)] == [1, Decimal("1.3")]
    assert {row["error"] for row in world.attempts(little.id)} == {SystemReason.HEARTBEAT_TIMEOUT.value}
    await _late_fail(world, agent, little, cost("1.25"))
    assert world.task(little.id)["cost_usd"] == Decimal("1.25")
    assert world.agent_row(agent)["spent_usd"] == Decimal("2.55")


# Large amounts.


def test_a_single_cost_has_a_limit() -> None:
    """Row 9."""
    assert Spent(Decimal(1_000_000)).cost_usd == 1_000_000
    with pytest.raises(InvalidInputError, match=r"at most 1000000 US dollars, got 1000000\.000001"):
        Spent(Decimal("1000000.000001"))


async def test_huge_reports_stop_neither_the_reaper_nor_an_operator(world: World) -> None:
    """R-072: row 9; 230 reports, then silence."""
    agent = await world.agent(max_concurrent_tasks=300)
    dag = await world.dag(*(NewTask("code", max_attempts=1) for _ in range(231)))
    tasks = await world.claim(agent, 231)
    presence = Presence(agent.id, agent.incarnation)
    held = [HeldTask(*_key(task), presence, None, cost("999999")) for task in tasks[:230]]
    await world.engine.work.heartbeat([presence], held)
    assert await spent_today(world) == 999_999 * 230

    await world.engine.operations.cancel(tasks[0].id, "no")
    world.age(hours=3)
    assert sum((await world.engine.maintenance.reap(500)).values()) == 230

    assert world.dag_row(dag.id)["spent_usd"] == world.agent_row(agent)["spent_usd"] == 999_999 * 230
    assert world.status(tasks[-1].id) == "DEAD_LETTERED"


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
