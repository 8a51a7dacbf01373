"""Costs by day, type, model and agent: each attempt once, and in all what was booked."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.duties.reaper import Reaper
from lineshaft.engine.engine import Engine
from lineshaft.engine.read.tally import Tally
from lineshaft.errors import InvalidInputError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types import ApprovalDecision, CostLine, Costs
from lineshaft.types.work import Completion, Release, Spent
from tests.factory import Factory
from tests.world import World, cancel_claim, ref, spawn_children

GATED = OutputContract(validation="human")


def by_key(lines: list[CostLine]) -> dict[str, tuple[int, float]]:
    return {line.key: (line.attempts, float(line.cost_usd)) for line in lines}


def usd(*amounts: Decimal | None) -> tuple[float | None, ...]:
    return tuple(None if amount is None else float(amount) for amount in amounts)


async def pay(world: World, type_: str, amount: str, agent: str = "a", **fields: object) -> None:
    """One task that completes at once."""
    await world.one(type_, **fields)
    task = await world.take(await world.agent(agent))
    await world.complete(task, "done", spent=amount)


def at(clock: MovableClock, time: datetime) -> None:
    clock.advance((time - clock.now()).total_seconds())


async def booked(world: World) -> Decimal:
    return Decimal(world.row("SELECT coalesce(sum(spent_usd), 0) AS usd FROM lineshaft.spend")["usd"])


async def test_nothing_yet(world: World, clock: MovableClock) -> None:
    found = await world.engine.read.costs()

    assert (found.as_of, found.since) == (clock.now(), clock.now().date() - timedelta(days=6))
    assert (found.by_day, found.by_type, found.by_model, found.by_agent, found.by_dag) == ([], [], [], [], [])
    assert (found.total.attempts, float(found.total.cost_usd), found.today.forecast) == (0, 0, None)
    assert len(found.today.hours) == clock.now().hour + 1


async def test_every_way_to_end_counts_once_and_sums_up_to_what_was_booked(
    world: World, clock: MovableClock
) -> None:
    """Failures, retries, releases, cancellations, crashes, gates; also one cancelled after it failed."""
    engine = world.engine
    # All of it counts, also the largest of these powers of two.
    await engine.limits.patch({"default_max_cost_usd": 20})
    await pay(world, "plain", "1")
    # Fails, is retried, completes.
    await world.one("retried")
    await world.fail(await world.take(), "it broke", category="transient", spent=Spent(Decimal(2), 10, 20))
    clock.advance(3600)
    await engine.maintenance.promote_due(100)
    await world.complete(await world.take(), "done", spent="4")
    # Fails, and is cancelled while it waits.
    await world.one("cancelled")
    task = await world.take()
    await world.fail(task, "it broke", category="transient", spent=Spent(Decimal(8)))
    await engine.cancel.cancel(task.id, reason="enough")
    # Is released, waits for a child, is cancelled while it runs.
    await world.one("interrupted")
    task = await world.take()
    await engine.work.release([Release(ref(task), spent=Spent(Decimal("0.25")))])
    task = await world.take()
    half = Spent(Decimal("0.5"))
    await spawn_children(engine, ref(task), [NewTask("child")], wait=True, spent=half)
    await world.complete(await world.take(), "done")
    await cancel_claim(engine, ref(await world.take()), "enough", spent=half)
    # Becomes a dead letter.
    await world.one("dead")
    await world.fail(await world.take(), "no access", category="auth_failure", spent=Spent(Decimal(16)))
    # Is rejected at a gate, and accepted there the next time.
    await world.one("gated", output=GATED)
    for amount, approve in (("32", False), ("64", True)):
        task = await world.take()
        await world.complete(task, "draft", spent=amount)
        await engine.approvals.decide(task.id, ApprovalDecision(approve=approve, reviewer="ann"))
        clock.advance(3600)
        await engine.maintenance.promote_due(100)
    # Its process dies after it reported a cost.
    await world.one("lost")
    agent = await world.agent("lost")
    task = await world.take(agent)
    await world.heartbeat("lost", claims=[ref(task)], spent=Spent(Decimal(128)))
    clock.advance(3600)
    await Reaper(engine.maintenance).run_once()

    found = await engine.read.costs()

    total = Decimal("256.25")
    assert by_key(found.by_type) == {
        "plain": (1, 1),
        "retried": (2, 6),
        "cancelled": (1, 8),
        "dead": (1, 16),
        "gated": (2, 96),
        "interrupted": (3, 1.25),
        "child": (1, 0),
        "lost": (1, 128),
    }
    assert found.total.cost_usd == await booked(world) == total
    assert (found.total.attempts, found.total.failed, found.total.retries) == (12, 5, 2)
    assert usd(found.total.failed_cost_usd, found.total.retry_cost_usd) == (2 + 8 + 16 + 32 + 128, 4 + 64)
    assert (found.total.tokens_input, found.total.tokens_output, found.total.unpriced) == (10, 20, 0)
    assert found.by_type[0].key == "lost"
    assert sum(hour.cost_usd for hour in found.today.hours) == total
    # Counted once, however often it is read; and Prometheus gets the same sums.
    again = await engine.read.costs()
    assert again.by_type == found.by_type
    assert sum((await Tally(engine.database).totals()).cost_usd.values()) == total


async def test_by_model_agent_and_day(world: World, clock: MovableClock) -> None:
    at(clock, datetime(2026, 3, 1, 23, 59, tzinfo=UTC))
    for agent, models, amount in (("a", ["x"], "1"), ("b", ["x"], "2"), ("b", ["y"], "4"), ("b", [], "8")):
        await world.one("code", model_preferences=tuple(models))
        task = await world.take(await world.agent(agent))
        await world.complete(task, "done", spent=amount)
        clock.advance(40)

    found = await world.engine.read.costs(days=2)

    assert by_key(found.by_model) == {"": (1, 8), "y": (1, 4), "x": (2, 3)}
    assert by_key(found.by_agent) == {"b": (3, 14), "a": (1, 1)}
    assert [(day.day, *usd(day.spent_usd, day.cost_usd), day.attempts) for day in found.by_day] == [
        (date(2026, 3, 1), 3, 3, 2),
        (date(2026, 3, 2), 12, 12, 2),
    ]
    assert [day.day for day in (await world.engine.read.costs(days=1)).by_day] == [date(2026, 3, 2)]
    only = await world.engine.read.costs(days=2, model="x", agent_id="b")
    assert by_key(only.by_type) == {"code": (1, 2)}
    assert [usd(day.cost_usd, day.spent_usd) for day in only.by_day] == [(2, None)]
    assert by_key((await world.engine.read.costs(days=2, type="unknown")).by_type) == {}


async def test_an_attempt_that_used_tokens_and_has_no_price_is_unknown(world: World) -> None:
    await world.one()
    task = await world.take()
    await world.engine.work.complete([Completion(ref(task), spent=Spent(None, 1_000, 200))])
    await pay(world, "code", "1")

    (line,) = (await world.engine.read.costs()).by_type

    assert (line.attempts, line.unpriced, float(line.cost_usd), line.tokens_input) == (2, 1, 1, 1_000)


async def test_what_runs_is_booked_but_not_yet_the_cost_of_an_attempt(world: World) -> None:
    await world.one()
    agent = await world.agent("a")
    task = await world.take(agent)
    await world.heartbeat("a", claims=[ref(task)], spent=Spent(Decimal(3)))

    (day,) = (await world.engine.read.costs()).by_day

    assert (*usd(day.spent_usd, day.cost_usd), day.attempts) == (3, 0, 0)


async def test_a_batch_is_not_an_attempt(world: World) -> None:
    batch = await world.one("batch", children=[NewTask("one")])
    await world.complete(await world.take(), "done", spent="1")
    assert world.status(batch) == "COMPLETED"

    assert by_key((await world.engine.read.costs()).by_type) == {"one": (1, 1)}


async def test_a_day_has_room_for_some_groups(world: World) -> None:
    """An agent without an id of its own is a new one at each start."""
    tally = Tally(world.engine.database, groups=3)
    for n in range(3):
        await pay(world, "code", "1", f"agent {n}")
    await tally.count()
    for n in range(6):
        await pay(world, "code", str(n + 1), f"agent {n}")
    await tally.count()

    assert world.rows("SELECT agent_id, type, cost_usd FROM lineshaft.cost_day ORDER BY agent_id") == [
        {"agent_id": "*", "type": "*", "cost_usd": 4 + 5 + 6},
        {"agent_id": "agent 0", "type": "code", "cost_usd": 2},
        {"agent_id": "agent 1", "type": "code", "cost_usd": 3},
        {"agent_id": "agent 2", "type": "code", "cost_usd": 4},
    ]


async def test_long_lists_end_with_the_rest(world: World, connection: psycopg.Connection) -> None:
    connection.execute(
        "INSERT INTO lineshaft.cost_day (day, type, agent_id, model, attempts, cost_usd)"
        " SELECT '2026-02-08', 'code', 'agent ' || n, '', 1, n FROM generate_series(1, 150) AS n"
    )

    found = await world.engine.read.costs(days=400)

    assert len(found.by_agent) == 101
    assert by_key(found.by_agent)["*"] == (50, 50 * 51 // 2)
    assert found.by_agent[0].key == "agent 150"
    assert by_key(found.by_type) == {"code": (150, 150 * 151 // 2)}


async def test_the_forecast_needs_ten_attempts_with_a_cost(world: World, clock: MovableClock) -> None:
    at(clock, datetime(2026, 3, 1, 12, 0, tzinfo=UTC))
    for _ in range(9):
        await pay(world, "code", "1")
    assert (await world.engine.read.costs()).today.forecast is None
    await pay(world, "code", "1")

    today = (await world.engine.read.costs()).today

    assert usd(today.spent_usd, today.last_hour_usd) == (10, 10)
    assert today.forecast is not None
    assert today.forecast.expected_usd == 10 + 10 * 12
    clock.advance(2 * 3600)
    later: Costs = await world.engine.read.costs()
    assert later.today.forecast is not None
    assert usd(later.today.last_hour_usd, later.today.forecast.expected_usd) == (0, 10)


async def test_the_most_expensive_dags(world: World, clock: MovableClock) -> None:
    ids = []
    for amount in ("1", "3", "2", "0"):
        dag = await world.dag(NewTask("code"), NewTask("code", required_capabilities=("none",)))
        ids.append(dag.id)
        await world.complete(await world.take(), "done", spent=amount)

    found = await world.engine.read.costs()

    assert [(dag.id, float(dag.spent_usd)) for dag in found.by_dag] == [(ids[1], 3), (ids[2], 2), (ids[0], 1)]
    assert found.by_dag_exact
    clock.advance(86_400 * 2)
    assert (await world.engine.read.costs(days=1)).by_dag == []


async def test_a_late_commit_counts_once_and_on_its_own_day(
    world: World, factory: Factory, clock: MovableClock, dsn: str
) -> None:
    ended_at = clock.now()
    done = factory.task(
        Status.COMPLETED, state={"cost_usd": 3, "epoch": 1, "agent_id": "a", "claimed_at": ended_at}
    )
    clock.advance(86_400)
    with psycopg.connect(dsn) as late:
        for kinds, epoch in (("{task.created}", 0), ("{task.claimed}", 1), ("{task.completed}", 1)):
            late.execute(
                "INSERT INTO lineshaft.event (at, kinds, task_id, epoch) VALUES (%s, %s, %s, %s)",
                [ended_at, kinds, done, epoch],
            )
        await pay(world, "code", "4")
        assert (await world.engine.read.costs()).total.cost_usd == 4
    for _ in range(2):
        found = await world.engine.read.costs()
        assert [(day.day, *usd(day.cost_usd)) for day in found.by_day] == [
            (ended_at.date(), 3),
            (clock.now().date(), 4),
        ]


async def test_old_figures_are_deleted(world: World, clock: MovableClock) -> None:
    await pay(world, "code", "1")
    tally = Tally(world.engine.database)
    await tally.count()
    clock.advance(86_400 * 3)
    assert await tally.forget() == 1
    assert (await world.engine.read.costs()).total.cost_usd == 1
    clock.advance(86_400 * 400)
    assert await tally.forget() == 1


@pytest.mark.parametrize("days", [0, 401, -1])
async def test_an_impossible_number_of_days(engine: Engine, days: int) -> None:
    with pytest.raises(InvalidInputError, match="days: must be a whole number from 1 to 400"):
        await engine.read.costs(days=days)


async def test_throughput_by_minute(world: World, clock: MovableClock) -> None:
    at(clock, datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC))
    await world.one()
    clock.advance(10)
    await world.complete(await world.take())
    clock.advance(60)
    await world.one()
    await world.kill(await world.agent())
    dead = await world.one()
    await world.engine.cancel.cancel(dead, reason="enough")

    found = await world.engine.read.throughput()

    assert len(found.minutes) == 60
    assert found.minutes[-1].at == datetime(2026, 3, 1, 12, 1, tzinfo=UTC)
    last = [(m.completed, m.failed, m.dead_lettered, m.cancelled) for m in found.minutes[-3:]]
    assert last == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 1, 1)]
    assert found.waits.tasks == 2
    assert found.waits.p95_sec == pytest.approx(9.5)
