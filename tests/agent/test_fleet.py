"""A fleet with everything that can happen at once: every task ends as planned, and the money adds up."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lineshaft import Agent, Cancel, DagHandle, Fail, Lineshaft, NewTask, RetrySpec, Snooze, Task, TaskContext
from lineshaft.model.states import Status
from lineshaft.settings import Settings
from tests.agent.helpers import PATIENCE, at_work, engine_of
from tests.client.helpers import engine_beside
from tests.invariants import check_invariants

#: How many tasks; FLEET_TASKS=5000 for the full size.
AGENTS, SLOTS, TASKS = 20, 8, int(os.environ.get("FLEET_TASKS", "300"))
#: Each slows down alone when one of its tasks meets a rate limit.
MODELS = [f"model-{number}" for number in range(8)]
LIMITED_SEC = 0.02
#: A third of how long a busy machine may be silent.
HEARTBEAT_SEC = 30.0
CENT = Decimal("0.01")

#: So many tasks of one kind fail on purpose that every breaker would open.
NO_BREAKERS = "defaults: {failureThreshold: 1000000}"

#: What may happen before the end; each is one run of the handler.
DETOURS = ("crash", "rate_limit", "snooze", "spawn")
ENDS = {
    "ok": Status.COMPLETED,
    "spawn ok": Status.COMPLETED,
    "die": Status.DEAD_LETTERED,
    "over": Status.DEAD_LETTERED,
    "cancel": Status.CANCELLED,
    "be cancelled": Status.CANCELLED,
}


@dataclass
class Plan:
    """What the handler does, run by run, and the expected end."""

    detours: list[str]
    end: str
    runs: int = 0
    spent: Decimal = Decimal(0)
    tokens: int = 0
    crashes: int = field(init=False)

    def __post_init__(self) -> None:
        self.crashes = self.detours.count("crash")

    @property
    def next(self) -> str:
        self.runs += 1
        return self.detours[self.runs - 1] if self.runs <= len(self.detours) else self.end


def plan(rng: random.Random) -> Plan:
    detours = rng.choices(DETOURS, k=rng.choice((0, 0, 1, 2, 3)))
    # Three failed attempts would be the end.
    while detours.count("crash") > 2:
        detours.remove("crash")
    return Plan(detours, rng.choices(list(ENDS), weights=(8, 2, 1, 1, 1, 1))[0])


class Theatre:
    """Handlers that follow their plans."""

    def __init__(self, shaft: Lineshaft, plans: dict[str, Plan]) -> None:
        self.plans = plans
        self.children: Counter[str] = Counter()
        self._shaft = shaft

    def agent(self, number: int) -> Agent:
        agent = Agent(
            f"agent-{number}",
            models=MODELS,
            max_concurrent_tasks=SLOTS,
            budget_usd=10_000,
            heartbeat_interval_sec=HEARTBEAT_SEC,
            grace_sec=10,
        )

        @agent.task("act")
        async def act(ctx: TaskContext, name: str) -> Any:
            own = self.plans[name]
            self._spend(ctx, own, 3 * CENT)
            # Those of earlier runs are remembered, and paid for.
            for run in range(own.runs + 1):
                # The plan changes from run to run, so it must not be an argument of a step.
                await ctx.step(f"run {run}", lambda: self._paid(ctx, own))
            return await self._do(ctx, own, own.next)

        @agent.task("child")
        async def child(ctx: TaskContext) -> str:
            ctx.spend(CENT)
            assert ctx.parent_id is not None
            self.children[ctx.parent_id] += 1
            return "grown"

        return agent

    @staticmethod
    def _spend(ctx: TaskContext, own: Plan, amount: Decimal) -> None:
        # Before: spending more than the task may cost raises, and is paid for.
        own.spent += amount
        own.tokens += 11
        ctx.spend(amount, tokens_input=10, tokens_output=1)

    def _paid(self, ctx: TaskContext, own: Plan) -> None:
        self._spend(ctx, own, 7 * CENT)

    async def _do(self, ctx: TaskContext, own: Plan, action: str) -> Any:
        if action == "crash":
            raise RuntimeError("an accident")
        if action == "rate_limit":
            raise Fail("HTTP 429", "rate_limit", retry_after_sec=LIMITED_SEC)
        if action == "snooze":
            return Snooze(0.01)
        if action == "spawn":
            # When they have ended, the next run goes on with the plan.
            await ctx.spawn(f"kids {own.runs}", [NewTask("child"), NewTask("child")], wait=True)
        if action == "spawn ok":
            await ctx.spawn("left behind", [NewTask("child")])
        if action == "die":
            raise Fail("no access", "auth_failure")
        if action == "over":
            self._spend(ctx, own, Decimal(2))
            return "too expensive"
        if action == "cancel":
            raise Cancel("not wanted")
        if action == "be cancelled":
            canceller = asyncio.create_task(self._shaft.cancel(ctx.id, "from outside"))
            await asyncio.shield(canceller)
            # Sends a heartbeat soon, whose answer is the cancellation.
            ctx.progress("cancelled")
            await asyncio.Event().wait()
        return {"runs": own.runs}


@pytest.fixture
async def shaft(dsn: str, tmp_path: Path) -> AsyncIterator[Lineshaft]:
    breakers = tmp_path / "breakers.yaml"
    breakers.write_text(NO_BREAKERS)
    settings = Settings(database_url=dsn, circuit_breakers=breakers)
    async with Lineshaft(settings=settings, max_connections=AGENTS) as opened, engine_beside(opened, dsn):
        yield opened
    check_invariants(dsn)


@pytest.mark.slow("a fleet for ten seconds")
@pytest.mark.timeout(120 + TASKS)
async def test_every_task_ends_as_planned_and_money_adds_up(
    shaft: Lineshaft, connection: psycopg.Connection
) -> None:
    rng = random.Random(20261116)
    theatre = Theatre(shaft, {f"t{n}": plan(rng) for n in range(TASKS)})
    dags = await _submit(shaft, list(theatre.plans), rng)

    async with at_work(*(theatre.agent(number) for number in range(AGENTS)), shaft=shaft):
        # Includes children without a waiting parent.
        await asyncio.gather(*(shaft.wait(dag, PATIENCE + TASKS) for dag in dags))

    for dag in dags:
        for name, task_id in dag.tasks.items():
            _check(await shaft.get(task_id), name, theatre.plans[name])
    _check_sums(connection, theatre)
    agents = await engine_of(shaft).fleet.read_all()
    assert sum(agent.spent_usd for agent in agents) == _total(connection)
    assert {(agent.current_tasks, agent.reserved_usd) for agent in agents} == {(0, Decimal(0))}


async def _submit(shaft: Lineshaft, names: list[str], rng: random.Random) -> list[DagHandle]:
    at_once = RetrySpec(strategy="fixed", initial_delay_sec=0.01, jitter=False)
    tasks = [
        NewTask(
            "act",
            key=name,
            spec={"name": name},
            retry=at_once,
            max_cost_usd=1,
            model_preferences=[rng.choice(MODELS)],
            priority=rng.randrange(100),
        )
        for name in names
    ]
    return [
        await shaft.submit_dag(f"DAG {start}", tasks[start : start + 50], budget_ceiling_usd=10_000)
        for start in range(0, len(tasks), 50)
    ]


def _check(task: Task, name: str, own: Plan) -> None:
    assert task.status is ENDS[own.end], (name, own, task.failure_history)
    assert task.cost_usd == own.spent, (name, own, task)
    if own.end != "be cancelled":  # whose agent had no chance to tell
        assert task.tokens_used.input + task.tokens_used.output == own.tokens, (name, own, task)
    if task.status is Status.COMPLETED:
        assert task.attempts == own.crashes, (name, own, task.failure_history)


def _total(connection: psycopg.Connection) -> Decimal:
    row = connection.execute("SELECT sum(cost_usd) FROM lineshaft.task_end").fetchone()
    assert row is not None
    total: Decimal = row[0]
    return total


def _check_sums(connection: psycopg.Connection, theatre: Theatre) -> None:
    """The sums over tasks, DAGs and plans are equal."""
    children = CENT * sum(theatre.children.values())
    assert _total(connection) == children + sum(own.spent for own in theatre.plans.values())
    wrong = connection.execute(
        "SELECT dag.id, dag.spent_usd FROM lineshaft.dag JOIN lineshaft.task ON task.dag_id = dag.id"
        " JOIN lineshaft.task_end ON task_end.id = task.id GROUP BY dag.id, dag.spent_usd"
        " HAVING dag.spent_usd <> sum(task_end.cost_usd)"
    ).fetchall()
    assert wrong == []
