"""Why a task is not running: each reason with what to do, and `runnable` just when a claim would get it."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.duties.promoter import Promoter
from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres import catalog
from lineshaft.errors import InvalidTransitionError
from lineshaft.model.admission import LockKey
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.operations.quotas import NewRate, SetQuota
from lineshaft.types import AgentInfo, ReasonCode
from lineshaft.types.work import ClaimRef, Completion, HeldTask, Presence
from tests.factory import Factory
from tests.world import Actions, World


@pytest.fixture
async def engine(dsn: str, clock: MovableClock) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, max_connections=3) as opened:
        yield opened


async def reasons(engine: Engine, task_id: str) -> dict[str, str]:
    why = await engine.read.why(task_id)
    assert why.runnable is (why.status is Status.READY and not why.reasons)
    return {reason.code.value: reason.detail for reason in why.reasons}


# What it waits for.


async def test_dependencies_are_named_with_their_states(world: World) -> None:
    upstream = [await world.one() for _ in range(5)]
    task_id = await world.one(depends_on=upstream)

    detail = (await reasons(world.engine, task_id))["blocked_by_dependency"]

    assert f"{upstream[0]} (READY)" in detail
    assert "and 2 more" in detail


async def test_a_dead_letter_is_found_through_others(world: World) -> None:
    ann = await world.agent("ann")
    first = await world.one()
    second = await world.one(depends_on=[first])
    third = await world.one(depends_on=[second])
    (task,) = await world.claim(ann)
    await world.fail(task, category="auth_failure")

    found = await reasons(world.engine, third)

    assert list(found) == ["blocked_by_dependency", "upstream_dead_lettered"]
    assert first in found["upstream_dead_lettered"]
    assert second in found["blocked_by_dependency"]


async def test_a_cancelled_upstream_is_pointed_out(world: World) -> None:
    first = await world.one()
    second = await world.one(depends_on=[first])
    await world.engine.cancel.cancel(first, "x", cascade=False)

    assert f"{first} will never complete" in (await reasons(world.engine, second))["blocked_by_dependency"]


async def test_a_schedule_names_the_time(world: World, clock: MovableClock) -> None:
    task_id = await world.one(run_at=clock.now() + timedelta(hours=1))

    assert "2026-02-08T10:00:00Z" in (await reasons(world.engine, task_id))["scheduled"]
    clock.advance(3600)
    assert "which is past: the promoter" in (await reasons(world.engine, task_id))["scheduled"]


async def test_a_retry_names_the_time_and_the_failure(world: World) -> None:
    ann = await world.agent("ann")
    await world.one()
    (task,) = await world.claim(ann)
    await world.fail(task, category="timeout")

    found = await reasons(world.engine, task.id)

    assert list(found) == ["waiting_retry"]
    assert found["waiting_retry"].startswith("Waits after timeout until ")
    assert "1 of 3 attempts are used" in found["waiting_retry"]


async def test_what_is_held_says_by_whom_since_when_and_until_when(world: World) -> None:
    ann = await world.agent("ann")
    await world.one(max_duration_sec=120)
    (task,) = await world.claim(ann, start=False)

    (claimed,) = (await world.engine.read.why(task.id)).reasons
    await world.engine.work.start([ClaimRef(task.id, task.epoch)])
    me = Presence(ann.id, ann.incarnation)
    await world.engine.work.heartbeat([me], [HeldTask(task.id, task.epoch, me, b'{"percent": 50}')])
    why = await world.engine.read.why(task.id)

    assert claimed.code == "claimed"
    assert "Agent ann claimed it at" in claimed.detail
    assert (why.status, why.runnable, [reason.code for reason in why.reasons]) == (
        Status.RUNNING,
        False,
        ["running"],
    )
    (running,) = why.reasons
    for words in (
        "Agent ann has worked on it since 20",
        "try 1 of 3",
        'Progress: {"percent": 50}.',
        "Last heartbeat 0.0 s ago",
        "the lease expires at 20",
        "The time limit of the attempt is 120 s, until 20",
    ):
        assert words in running.detail, running.detail


async def test_what_has_ended_says_how(world: World) -> None:
    ann = await world.agent("ann")
    ids = [await world.one(), await world.one(), await world.one()]
    first, second, third = await world.claim(ann, limit=3)
    await world.complete(first)
    await world.engine.cancel.cancel(second.id, "no longer needed")
    await world.fail(third, "no access", category="auth_failure")

    found = {name: await reasons(world.engine, name) for name in ids}

    assert [list(each) for each in found.values()] == [["completed"], ["cancelled"], ["dead_lettered"]]
    assert "Completed by agent ann at 20" in found[first.id]["completed"]
    assert ": no longer needed. Retry it to run it." in found[second.id]["cancelled"]
    assert "auth_failure: no access" in found[third.id]["dead_lettered"]


# Who could take it.


async def test_without_agents(world: World) -> None:
    found = await reasons(world.engine, await world.one())

    assert list(found) == ["no_capable_agent"]
    assert "No agent is active" in found["no_capable_agent"]


async def test_what_agents_lack_is_named_closest_first(world: World) -> None:
    await world.agent("ann", capabilities=("python", "sql"))
    await world.agent("bob", capabilities=("python",), types=("review",))
    await world.agent("cid", capabilities=("python", "sql", "rust"), models_available=("haiku",))
    task_id = await world.one(
        required_capabilities=["python", "rust", "sql"], model_preferences=["opus", "sonnet"]
    )

    detail = (await reasons(world.engine, task_id))["no_capable_agent"]

    assert "capabilities python, rust, sql" in detail
    assert "one of the models opus, sonnet" in detail
    assert detail.endswith("Active: ann lacks rust; cid lacks such a model; bob takes only review.")


async def test_an_able_agent_that_is_not_active_is_named(world: World) -> None:
    await world.agent("ann")
    await world.engine.fleet.patch("ann", status="draining")

    detail = (await reasons(world.engine, await world.one()))["no_capable_agent"]

    assert "Capable, but not active: ann (draining)" in detail


async def test_money_and_slots_of_those_who_could(world: World) -> None:
    """Neither the free one has the money, nor is the rich one free."""
    await world.agent("poor", budget_usd=0.5)
    rich = await world.agent("rich", max_concurrent_tasks=1)
    await world.agent("wrong", types=("review",))
    await world.one(priority=0)
    assert len(await world.claim(rich)) == 1
    task_id = await world.one(max_cost_usd=0.75)

    found = await reasons(world.engine, task_id)

    assert list(found) == ["no_affordable_agent", "agents_full"]
    assert "may cost 0.75 USD; poor has 0.5 USD left" in found["no_affordable_agent"]
    assert "rich 1 of 1" in found["agents_full"]
    await world.engine.fleet.patch("poor", add_budget_usd=Decimal("0.25"))
    assert await reasons(world.engine, task_id) == {}


async def test_models_that_are_held_back(world: World, factory: Factory, clock: MovableClock) -> None:
    await world.agent("ann", models_available=("opus", "haiku"))
    task_id = await world.one(model_preferences=["opus", "haiku"])
    until = clock.now() + timedelta(minutes=1)
    factory.insert("slowdown", {"key": "model:opus", "signalled_at": clock.now(), "until": until})
    assert await reasons(world.engine, task_id) == {}, "the other model will do"
    factory.insert("breaker", {"key": "model:haiku", "state": "open", "opened_at": clock.now()})

    found = await reasons(world.engine, task_id)

    assert list(found) == ["slowdown", "breaker_open"]
    assert "opus until 2026-02-08T09:01:00Z" in found["slowdown"]
    assert "model:haiku" in found["breaker_open"]
    clock.advance(60)
    assert await reasons(world.engine, task_id) == {}


# Reasons that are independent of the agent.


async def test_pauses_breakers_and_slowdowns(world: World, factory: Factory, clock: MovableClock) -> None:
    await world.agent("ann")
    task_id = await world.one()
    now = clock.now()
    for type_ in ("*", "code", "review"):
        factory.insert("pause", {"type": type_, "since": now})
    factory.insert("breaker", {"key": "code", "state": "open", "opened_at": now, "failures": 5})
    factory.insert(
        "slowdown", {"key": "*", "signalled_at": now, "until": now + timedelta(seconds=1), "reason": "429"}
    )

    why = await world.engine.read.why(task_id)

    assert [reason.code for reason in why.reasons] == ["paused", "paused", "breaker_open", "slowdown"]
    details = " ".join(reason.detail for reason in why.reasons)
    assert "Everything is paused" in details
    assert "Type 'code' is paused" in details
    assert "open since 2026-02-08T09:00:00Z, after 5 failures" in details
    assert "until 2026-02-08T09:00:01Z after a rate limit (429)" in details
    clock.advance(1)
    assert "slowdown" not in await reasons(world.engine, task_id)


@pytest.mark.parametrize(
    ("breaker", "detail"),
    [
        ({"state": "open", "forced": True}, "opened manually. Reset it."),
        ({"state": "half_open", "probe_task_id": "task_p"}, "task task_p is its probe"),
    ],
)
async def test_breakers_say_what_they_wait_for(
    engine: Engine, factory: Factory, clock: MovableClock, breaker: dict[str, Any], detail: str
) -> None:
    await Actions(engine).agent("ann")
    at = {"opened_at": clock.now(), "half_open_at": clock.now()}
    factory.insert("breaker", {"key": "code", **at, **breaker})

    assert detail in (await reasons(engine, await Actions(engine).one()))["breaker_open"]


async def test_a_lock_names_its_holder(world: World, clock: MovableClock) -> None:
    ann = await world.agent("ann")
    await world.one(lock_key="lost:doc")
    (holder,) = await world.claim(ann)
    task_id = await world.one(lock_key="lost:doc")

    detail = (await reasons(world.engine, task_id))["lock_held"]
    assert f"held by task {holder.id} with agent ann" in detail
    assert "2026-02-08T09:10:00Z" in detail

    assert await world.claim(ann) == []
    assert list(await reasons(world.engine, task_id)) == ["lock_held"], (
        "parked by the claim, the reason stays"
    )
    clock.advance(601)
    await world.heartbeat(ann.id, ann.incarnation)
    assert "is free now: the promoter" in (await reasons(world.engine, task_id))["lock_held"]
    await world.engine.maintenance.expire_locks()
    assert await reasons(world.engine, task_id) == {}


async def test_a_dag_without_money(world: World) -> None:
    ann = await world.agent("ann")
    tasks = [NewTask("code", key="a", max_cost_usd=2), NewTask("code", key="b", max_cost_usd=2)]
    dag = await world.engine.submission.submit_dag("a DAG", tasks, budget_ceiling_usd=3)
    (task,) = await world.claim(ann)
    (other,) = {found.id for found in dag.tasks.values()} - {task.id}

    detail = (await reasons(world.engine, other))["dag_budget"]
    assert f"DAG {dag.id} has 1 USD left of 3 USD (0 USD spent, 2 USD reserved)" in detail
    assert "may cost 2 USD" in detail
    assert await world.claim(ann) == []
    assert list(await reasons(world.engine, other)) == ["dag_budget"]


# The property.


class Chaos:
    """Agents, guards and READY tasks at random, so that each test of a claim is failed by some."""

    def __init__(self, engine: Engine, factory: Factory, clock: MovableClock, seed: int) -> None:
        self.engine = engine
        self.factory = factory
        self.clock = clock
        self.rng = random.Random(seed)
        self.agents: list[AgentInfo] = []

    def maybe(self, chance: float) -> bool:
        return self.rng.random() < chance

    def some(self, values: list[str], least: int = 0) -> list[str]:
        return self.rng.sample(values, self.rng.randint(least, len(values)))

    async def make(self) -> None:
        await self.engine.limits.patch(
            {
                "default_max_cost_usd": self.rng.choice([None, None, 0, *COSTS]),
                "daily_budget_usd": self.rng.choice([None, None, None, *COSTS]),
            }
        )
        for match in ("type:code", "model:gpt", "agent:agent0", "tag:slow", "customer:*"):
            if self.maybe(0.15):
                await self.engine.quotas.set(
                    SetQuota(
                        name=match.strip(":*").replace(":", "-"),
                        match=match,
                        max_running=self.rng.choice([None, 0, 1, 2]),
                        rate=self.rng.choice([None, NewRate(amount=1, unit="tasks", per_sec=60)]),
                    )
                )
        # Few agents with few differences: each obstacle must be the only one now and then.
        for n in range(self.rng.choice([1, 1, 2, 3])):
            agent = await Actions(self.engine).agent(
                f"agent{n}",
                capabilities=("python", "sql") if self.maybe(0.7) else tuple(self.some(["python", "sql"])),
                types=tuple(self.some(["code", "review"])) if self.maybe(0.2) else None,
                models_available=tuple(self.some(MODELS)) if self.maybe(0.7) else (),
                max_concurrent_tasks=self.rng.choice([1, 3, 9]),
                budget_usd=self.rng.choice([None, None, *COSTS]),
                accounts=tuple(self.some(ACCOUNTS)) if self.maybe(0.3) else (),
            )
            self.agents.append(agent)
        if self.maybe(0.6):
            # Slots, money, locks and DAGs are taken, and claims have parked what they found taken.
            await self.tasks(4)
            await self.work()
        await self.tasks(5)
        self.guards()
        await self.changes()

    async def work(self) -> None:
        for agent in self.agents:
            tasks = await Actions(self.engine).claim(agent, self.rng.randint(1, 3))
            done = [Completion(ClaimRef(task.id, task.epoch), b"1") for task in tasks if self.maybe(0.5)]
            if done:
                await self.engine.work.complete(done)

    async def tasks(self, n: int) -> None:
        for _ in range(n):
            fields: dict[str, Any] = {
                "priority": self.rng.randrange(100),
                "required_capabilities": self.some(["python", "sql"]) if self.maybe(0.5) else [],
                "model_preferences": self.some(MODELS) if self.maybe(0.5) else [],
                "max_cost_usd": self.rng.choice([None, None, *COSTS]),
                "max_total_cost_usd": self.rng.choice([None, None, None, *COSTS]),
                "tags": ["slow"] if self.maybe(0.2) else [],
                "quota_keys": [f"customer:{self.rng.randrange(2)}"] if self.maybe(0.3) else [],
            }
            locks = self.locks()
            fields |= locks
            type_ = self.rng.choice(["code", "review"])
            kind = self.rng.randrange(3)
            if kind == 0:
                tasks = [NewTask(type_, **fields), NewTask(type_, **fields)]
                await self.engine.submission.submit_dag(
                    "a DAG", tasks, budget_ceiling_usd=self.rng.choice([None, *COSTS])
                )
            elif kind == 1 and locks:
                children = [NewTask(type_, **fields), NewTask(type_, **fields)]
                await Actions(self.engine).one(type_, **locks, children=children)
            else:
                await Actions(self.engine).one(type_, **fields)

    def locks(self) -> dict[str, Any]:
        keys = self.rng.sample(["doc:1", "doc:2"], self.rng.choice([0, 0, 1, 1, 2]))
        if len(keys) == 1 and self.maybe(0.5):
            return {"lock_key": keys[0]}
        return {"lock_keys": [LockKey(key, shared=self.maybe(0.6)) for key in keys]} if keys else {}

    def guards(self) -> None:
        now = self.clock.now()
        for model in MODELS:
            if self.maybe(0.3):
                until = self.rng.choice([now, now + timedelta(days=1)])
                self.factory.insert(
                    "slowdown", {"key": f"model:{model}", "signalled_at": now, "until": until}
                )
        later = now + timedelta(days=1)
        for key, chance in {
            "*": 0.05,
            "agent:agent0": 0.1,
            **dict.fromkeys(map(OF_ACCOUNT, ACCOUNTS), 0.4),
        }.items():
            if self.maybe(chance):
                self.factory.insert("slowdown", {"key": key, "signalled_at": now, "until": later})
        for key in ("model:gpt", "code", "review", *map(OF_ACCOUNT, ACCOUNTS)):
            if self.maybe(0.1):
                state = self.rng.choice(["closed", "open"])
                self.factory.insert("breaker", {"key": key, "state": state, "opened_at": now})
        for type_ in ("*", "code"):
            if self.maybe(0.05):
                self.factory.insert("pause", {"type": type_, "since": now})

    async def changes(self) -> None:
        for agent in self.agents:
            if self.maybe(0.1):
                status = self.rng.choice(["draining", "offline"])
                await self.engine.fleet.patch(agent.id, status=status)
        if self.maybe(0.3):
            # Locks run out, except those of batches.
            self.clock.advance(700)
            # The agents are alive.
            present = [Presence(agent.id, agent.incarnation) for agent in self.agents]
            await self.engine.work.heartbeat(present, [])


MODELS = ["opus", "haiku", "gpt"]
ACCOUNTS = ["team-1", "team-2"]
OF_ACCOUNT = "account:{}".format
COSTS = [0.4, 1, 2]


def would_be_claimed(
    connection: psycopg.Connection, clock: MovableClock, task_id: str, agent: AgentInfo
) -> bool:
    """Whether a claim of this agent gets the task in its turn: there are no other claimable tasks.

    Those that wait for locks are there: a writer keeps readers out.
    """
    with connection.transaction(force_rollback=True):
        connection.execute(
            "UPDATE lineshaft.task_live SET status = 'PENDING', parked = NULL, parked_key = NULL,"
            " due_at = now() WHERE status = 'READY' AND id <> %s AND parked IS DISTINCT FROM 'lock'",
            [task_id],
        )
        rows = connection.execute(
            catalog.load("lineshaft.engine.claim.claims")["claim_tasks"],
            {
                "now": clock.now(),
                "agent_id": agent.id,
                "incarnation": agent.incarnation,
                "limit": 1,
                "types": None,
                "start": True,
                "task_id": None,
                "lock_ttl": 600.0,
                "probing": None,
                "follows": None,
                "follows_epoch": None,
                "ahead": 0,
                "passed_over": [],
                "turns": False,
                "idle_lanes": [],
                "daily_budget": None,
            },
        ).fetchall()
    return task_id in {row[0] for row in rows}


@pytest.mark.slow("many random worlds")
async def test_runnable_means_that_some_claim_would_get_it(
    engine: Engine, factory: Factory, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """Of every READY task in random worlds, which have all the obstacles that one can meet."""
    met: Counter[str] = Counter()
    connection.prepare_threshold = 0  # the claim takes longer to plan than to run
    for seed in range(45):
        connection.execute(
            "TRUNCATE lineshaft.task, lineshaft.task_live, lineshaft.task_end, lineshaft.edge, lineshaft.dag,"
            " lineshaft.agent, lineshaft.instance, lineshaft.lock, lineshaft.lock_share, lineshaft.breaker,"
            " lineshaft.slowdown, lineshaft.pause, lineshaft.spend, lineshaft.quota, lineshaft.slot,"
            " lineshaft.quota_use, lineshaft.quota_wake"
        )
        connection.execute(
            "UPDATE lineshaft.limits SET reserved_usd = 0, quota_kinds = 0, quota_lanes = '{}'"
        )
        chaos = Chaos(engine, factory, clock, seed)
        await chaos.make()
        ready = connection.execute("SELECT id FROM lineshaft.task_live WHERE status = 'READY'").fetchall()
        for (task_id,) in ready:
            expected = any(would_be_claimed(connection, clock, task_id, agent) for agent in chaos.agents)
            why = await engine.read.why(task_id)
            assert why.runnable is expected, (seed, why)
            assert why.runnable is not bool(why.reasons)
            met.update(reason.code for reason in why.reasons)
            met["runnable"] += why.runnable

    assert met.keys() >= {"runnable", *ReasonCode} - {
        "blocked_by_dependency",
        "upstream_dead_lettered",
        "waiting_retry",
        "waiting_gate",
        "gate_budget",
        "waiting_approval",
        "scheduled",
        *("sleeping", "waiting_signal"),
        "deadline_missed",
        *("claimed", "running", "completed", "cancelled", "dead_lettered"),
    }


# Deadlines.


@pytest.mark.parametrize("status", ["READY", "PENDING", "RETRYING"])
@pytest.mark.parametrize("expires", [False, True])
async def test_a_missed_deadline_is_a_reason_and_only_an_expiring_task_can_not_run(
    world: World, expires: bool, status: str
) -> None:
    """F-34: a task that is merely late is runnable; one that expires is about to be cancelled."""
    agent = await world.agent("ann")
    deadline = world.clock.now() + timedelta(seconds=30)
    later = world.clock.now() + timedelta(hours=1)
    task_id = await world.one(
        deadline=deadline, expire_at_deadline=expires, run_at=later if status == "PENDING" else None
    )
    if status == "RETRYING":
        await world.fail(await world.take(agent))
    assert not [r for r in (await world.engine.read.why(task_id)).reasons if r.code == "deadline_missed"]
    world.clock.advance(31)
    await world.heartbeat(agent.id)

    why = await world.engine.read.why(task_id)

    assert why.status == status
    detail = next(reason.detail for reason in why.reasons if reason.code == "deadline_missed")
    assert ("expire_at_deadline" in detail) is expires
    assert why.runnable is (status == "READY" and not expires)
    claimed = await world.claim(agent) if status == "READY" else []
    assert bool(claimed) is why.runnable


async def test_a_task_that_expired_says_so_after_it_was_cancelled(world: World) -> None:
    """F-34."""
    deadline = world.clock.now() + timedelta(seconds=30)
    task_id = await world.one(deadline=deadline, expire_at_deadline=True)
    world.clock.advance(31)
    await Promoter(world.engine.maintenance).run_once()

    why = await world.engine.read.why(task_id)

    assert (why.status, why.runnable) == (Status.CANCELLED, False)
    (reason,) = why.reasons
    assert reason.code is ReasonCode.DEADLINE_MISSED
    assert "was cancelled" in reason.detail


async def test_a_claim_by_id_of_an_expired_task_is_refused_with_the_reason(world: World) -> None:
    agent = await world.agent("ann")
    deadline = world.clock.now() + timedelta(seconds=30)
    task_id = await world.one(deadline=deadline, expire_at_deadline=True)
    world.clock.advance(31)

    with pytest.raises(InvalidTransitionError, match=r"CANCELLED, not READY\. Its deadline .* has passed"):
        await world.engine.claims.claim_task(agent.id, agent.incarnation, task_id)
