"""Waiting tasks by reason: as `why` explains each of them, whatever their number."""

from collections import Counter
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.read.stats import Bounds
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types import NewAgent, ReasonCode, Waiting, WaitingReason
from lineshaft.types.work import Spent
from tests.factory import Factory
from tests.world import World

HUMAN = OutputContract(validation="human")


def counts(found: Waiting) -> dict[str | None, int]:
    return {None if reason.code is None else reason.code.value: reason.count for reason in found.reasons}


def of(found: Waiting, code: ReasonCode | None) -> WaitingReason:
    (reason,) = (reason for reason in found.reasons if reason.code is code)
    return reason


async def every_reason(world: World) -> None:
    """At least one task for each reason, and two runnable ones."""
    engine, clock = world.engine, world.clock
    agent = await world.agent("worker", types=["code", "busy", "slow", "rich"], models_available=["m/one"])
    # Below a dead letter, directly and not.
    await world.dag(
        NewTask("code", key="a"),
        NewTask("code", key="b", depends_on=("a",)),
        NewTask("code", depends_on=("b",)),
    )
    await world.kill(agent)
    # A gate, and a person's gate.
    await world.one("code", output=HUMAN)
    await world.complete(await world.take(agent), "draft")
    # A retry.
    await world.one("code")
    await world.fail(await world.take(agent), "it broke", category="transient")
    # A DAG without money.
    await world.dag(NewTask("code", max_cost_usd=5), NewTask("code", max_cost_usd=5), ceiling=6)
    await world.complete(await world.take(agent), "done", spent="5")
    assert await world.claim(agent) == []
    # A lock: one is running, one is parked, one just arrived.
    await world.submit(NewTask("code", lock_key="doc"), NewTask("code", lock_key="doc"))
    await world.take(agent)
    assert await world.claim(agent) == []
    await world.one("code", lock_key="doc")
    # Agents that are full, or too poor; guards.
    await world.agent("full", types=["full"], max_concurrent_tasks=1)
    await world.agent("poor", types=["poor"], budget_usd=1)
    full = await world.submit(NewTask("full"), NewTask("full"))
    await engine.claims.claim("full", 1, limit=1, start=True)
    assert len(full) == 2
    await world.one("poor", max_cost_usd=2)
    await world.one("broken")
    await engine.breakers.open("broken")
    await world.one("stopped")
    await engine.pauses.pause("stopped")
    await world.one("slow", model_preferences=("m/one",))
    await engine.slowdowns.slow_down("provider:m", 600, "429")
    await world.agent("rested", types=["code"])
    # Nobody, a person, later, in its turn.
    await world.one("unknown")
    await world.one("errand", required_capabilities=("human",))
    await world.one("code", run_at=clock.now() + timedelta(hours=2))
    upstream = await world.one("code")
    await world.one("code", depends_on=(upstream,))


EVERY = {
    "upstream_dead_lettered": 2,
    "waiting_approval": 2,
    "waiting_retry": 1,
    "dag_budget": 1,
    "lock_held": 2,
    "agents_full": 1,
    "no_affordable_agent": 1,
    "breaker_open": 1,
    "paused": 1,
    "slowdown": 1,
    "no_capable_agent": 1,
    "scheduled": 1,
    "blocked_by_dependency": 1,
    None: 1,
}


async def test_an_empty_queue(world: World, clock: MovableClock) -> None:
    assert await world.engine.read.waiting() == Waiting(as_of=clock.now(), reasons=[])


@pytest.mark.parametrize("most", [10_000, 5])
async def test_every_reason_and_as_why_explains_each_task(world: World, most: int) -> None:
    """With few tasks by counting all; with many by indexes and a sample, here of all pages."""
    await every_reason(world)
    queries = Queries(world.engine.database, bounds=Bounds(most=most))

    found = await queries.waiting()

    assert counts(found) == EVERY
    explained: Counter[str | None] = Counter()
    for row in world.rows("SELECT id FROM lineshaft.task_live WHERE lease_until IS NULL"):
        why = await queries.why(row["id"])
        codes = [reason.code for reason in why.reasons]
        # A task below a dead letter is blocked by a dependency, too.
        last = ReasonCode.UPSTREAM_DEAD_LETTERED
        code = last if last in codes else next(iter(codes), None)
        explained[None if code is None else code.value] += 1
    assert explained == EVERY
    assert all(reason.exact for reason in found.reasons)


async def test_what_is_known_of_a_reason(world: World, clock: MovableClock) -> None:
    engine = world.engine
    started = clock.now()
    await world.submit(NewTask("a"), NewTask("b"), NewTask("b"))
    clock.advance(60)
    await world.one("c", run_at=clock.now() + timedelta(hours=1))
    await world.one("c", run_at=clock.now() + timedelta(hours=2))
    await engine.pauses.pause("*")

    found = await engine.read.waiting()

    paused, scheduled = of(found, ReasonCode.PAUSED), of(found, ReasonCode.SCHEDULED)
    assert (paused.types, paused.statuses, paused.oldest_at) == (["b", "a"], [Status.READY], started)
    assert paused.detail == "Everything is paused manually. Resume it."
    assert (scheduled.statuses, scheduled.oldest_at) == ([Status.PENDING], clock.now())
    assert scheduled.next_at == clock.now() + timedelta(hours=1)
    assert (scheduled.types, scheduled.detail) == (["c"], None)


async def test_the_daily_budget(world: World) -> None:
    await world.engine.limits.patch({"daily_budget_usd": Decimal(3)})
    agent = await world.agent()
    await world.submit(NewTask("code", max_cost_usd=3), NewTask("code", max_cost_usd=3))
    task = await world.take(agent)
    await world.fail(task, "it broke", category="auth_failure", spent=Spent(Decimal(2)))

    assert counts(await world.engine.read.waiting()) == {"daily_budget": 1}


async def test_thousands_of_instances(
    engine: Engine, clock: MovableClock, connection: psycopg.Connection
) -> None:
    await engine.fleet.register(NewAgent(id="worker", types=("code",)))
    connection.execute(
        "INSERT INTO lineshaft.instance (agent_id, incarnation, registered_at, last_heartbeat, held,"
        " busy_since, max_concurrent_tasks, types)"
        " SELECT 'worker', 1 + n, %(now)s, %(now)s, 1, %(now)s, 1, '{other}'"
        " FROM generate_series(1, 3000) AS n",
        {"now": clock.now()},
    )
    await engine.submission.submit([NewTask("code"), NewTask("other")])

    assert counts(await engine.read.waiting()) == {None: 1, "agents_full": 1}


async def test_many_tasks_are_estimated(
    engine: Engine, factory: Factory, connection: psycopg.Connection
) -> None:
    database: Database = engine.database
    lane = factory.lane("code", 0.1)
    connection.execute(
        "INSERT INTO lineshaft.task_live (id, status, lane_id, rank, ready_at, generation)"
        " SELECT 'task_' || n, 'READY', %s, 50, now(), 1 FROM generate_series(1, 20000) AS n",
        [lane],
    )
    factory.task(Status.RETRYING)

    found = await Queries(database, bounds=Bounds(most=100, pages=60)).waiting()

    retrying, ready = of(found, ReasonCode.WAITING_RETRY), of(found, ReasonCode.NO_CAPABLE_AGENT)
    assert (retrying.count, retrying.exact, ready.exact) == (1, True, False)
    # 60 pages of some 500 at random: the number varies by 13 per cent, four times that never happens.
    assert ready.count == pytest.approx(20_000, rel=0.6)


async def test_types_of_more_than_a_hundred_outputs_at_a_gate_have_names(world: World) -> None:
    agent = await world.agent("writer", types=["essay"], max_concurrent_tasks=200)
    await world.submit(*(NewTask("essay", output=HUMAN) for _ in range(101)))
    drafts = [world.completion(task, "draft") for task in await world.claim(agent, 101)]
    await world.engine.work.complete(drafts)

    (reason,) = (await world.engine.read.waiting()).reasons

    assert (reason.code, reason.count, reason.types) == (ReasonCode.WAITING_APPROVAL, 101, ["essay"])
