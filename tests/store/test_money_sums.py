"""Money adds up over any history: exact decimals, nothing lost or promised twice (R-230 to R-234, R-237)."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lineshaft.clock import MovableClock
from lineshaft.embedded import EmbeddedServer
from lineshaft.model.breaker import BreakerConfig, BreakerPolicy
from lineshaft.model.tasks import NewTask, RetrySpec
from lineshaft.store.changes import Spent
from lineshaft.store.claims import ClaimedTask
from lineshaft.store.engine import Engine
from lineshaft.store.fleet import NewAgent
from lineshaft.store.outcomes import Beat, ClaimRef, Completion, Failure
from lineshaft.store.rules import Rules
from tests.conftest import TEMPLATE, clone
from tests.store.invariants import check_invariants

DAILY = Decimal(12)
BUDGETS = {"rich": None, "poor": Decimal(4), "broke": Decimal("0.000001")}
CEILING = Decimal(5)
SUMS = st.decimals(min_value=0, max_value=3, places=6)


class Money(RuleBasedStateMachine):
    """The model is three columns of numbers: what each agent, each DAG and each day has spent."""

    server: EmbeddedServer

    @initialize()
    def start(self) -> None:
        self.clock = MovableClock()
        self.databases: Iterator[str] = clone(self.server, "money", TEMPLATE)
        self.dsn = next(self.databases)
        self.runner = asyncio.Runner()
        # Breakers are not what this is about.
        rules = Rules(BreakerPolicy(BreakerConfig(failure_threshold=10_000)), daily_budget_usd=DAILY)
        self.engine = Engine(self.dsn, clock=self.clock, max_connections=2, rules=rules)
        self.runner.run(self.engine.database.open())
        self.look = psycopg.connect(self.dsn, autocommit=True)
        for agent, budget in BUDGETS.items():
            new = NewAgent(id=agent, max_concurrent_tasks=3, budget_usd=budget)
            self.runner.run(self.engine.fleet.register(new))
        self.by_agent: Counter[str] = Counter()
        self.by_dag: Counter[str] = Counter()
        self.by_day: Counter[str] = Counter()
        self.held: dict[str, tuple[str, ClaimedTask, Decimal]] = {}

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.look.close()
            self.runner.run(self.engine.database.close())
            self.runner.close()
            next(self.databases, None)

    @rule(costs=st.lists(st.none() | SUMS, min_size=1, max_size=4), ceiling=st.booleans())
    def submit(self, costs: list[Decimal | None], ceiling: bool) -> None:
        tasks = [
            NewTask("t", max_cost_usd=cost, max_attempts=3, retry=RetrySpec(strategy="immediate"))
            for cost in costs
        ]
        self.runner.run(
            self.engine.submission.submit_dag("a DAG", tasks, budget_ceiling_usd=CEILING if ceiling else None)
        )

    @rule(agent=st.sampled_from(sorted(BUDGETS)), limit=st.integers(1, 3))
    def claim(self, agent: str, limit: int) -> None:
        for task in self.runner.run(self.engine.claims.claim(agent, 1, limit=limit, start=True)).tasks:
            self.held[task.id] = (agent, task, Decimal(0))
            priced = task.reserved_usd
            assert self.left(agent, "agent") is None or self.left(agent, "agent") >= 0
            assert self.left(task.dag_id, "dag") is None or self.left(task.dag_id, "dag") >= 0
            assert not priced or self.day_left() >= 0

    def left(self, name: str, table: str) -> Decimal:
        column = "budget_usd" if table == "agent" else "budget_ceiling_usd"
        query = f"SELECT {column} - spent_usd - reserved_usd FROM lineshaft.{table} WHERE id = %s"
        row = self.look.execute(query.encode(), [name]).fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]

    def day_left(self) -> Decimal:
        reserved = sum((task.reserved_usd for _, task, _ in self.held.values()), Decimal(0))
        return DAILY - self.by_day[self.today] - reserved

    @property
    def today(self) -> str:
        return f"{self.clock.now():%Y-%m-%d}"

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.held)))

    def pay(self, name: str, cost: Decimal | None) -> None:
        """The claim is over, and cost this; None: what its heartbeats said."""
        agent, task, reported = self.held.pop(name)
        actual = reported if cost is None else cost
        self.by_agent[agent] += actual  # type: ignore[assignment]  # a Counter of decimals
        self.by_dag[task.dag_id] += actual  # type: ignore[assignment]
        self.by_day[self.today] += actual  # type: ignore[assignment]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cost=st.none() | SUMS)
    def complete(self, data: st.DataObject, cost: Decimal | None) -> None:
        name = self.pick(data)
        _, task, _ = self.held[name]
        done = Completion(ClaimRef(name, task.epoch), b"1", spent=Spent(cost))
        for _ in range(2):  # the answer may have been lost on the way
            (moved,) = self.runner.run(self.engine.lifecycle.complete([done]))
            assert moved.unwrap() in {"COMPLETED", "DEAD_LETTERED"}
        self.pay(name, cost)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cost=st.none() | SUMS, limited=st.booleans())
    def fail(self, data: st.DataObject, cost: Decimal | None, limited: bool) -> None:
        name = self.pick(data)
        failure = Failure(
            ClaimRef(name, self.held[name][1].epoch),
            "429" if limited else "x",
            retry_after_sec=0,
            spent=Spent(cost),
        )
        self.runner.run(self.engine.lifecycle.fail([failure]))
        self.pay(name, cost)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cost=SUMS)
    def beat(self, data: st.DataObject, cost: Decimal) -> None:
        name = self.pick(data)
        agent, task, reported = self.held[name]
        beat = Beat(ClaimRef(name, task.epoch), spent=Spent(cost))
        assert self.runner.run(self.engine.lifecycle.heartbeat(agent, 1, [beat])) == {name: "continue"}
        self.held[name] = (agent, task, max(reported, cost))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self.pick(data)
        self.runner.run(self.engine.lifecycle.release([ClaimRef(name, self.held[name][1].epoch)]))
        self.pay(name, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = self.pick(data)
        self.runner.run(self.engine.operations.cancel(name, "no"))
        self.pay(name, None)

    @rule()
    def tomorrow(self) -> None:
        """Whoever holds something falls silent overnight."""
        self.clock.advance(86_400)
        self.runner.run(self.engine.upkeep.reap(100))
        for name in list(self.held):
            self.pay(name, None)
        self.runner.run(self.engine.upkeep.promote_due(100))

    @rule()
    def promote(self) -> None:
        self.clock.advance(1)
        self.runner.run(self.engine.upkeep.promote_due(100))

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "look"):
            return
        spent: dict[str, Decimal]
        spent = dict(self.look.execute("SELECT id, spent_usd FROM lineshaft.agent").fetchall())
        assert spent == {agent: self.by_agent[agent] for agent in BUDGETS}
        spent = dict(self.look.execute("SELECT id, spent_usd FROM lineshaft.dag").fetchall())
        assert spent == {dag: self.by_dag[dag] for dag in spent}
        (tasks,) = self.look.execute(
            "SELECT coalesce(sum(cost_usd), 0) FROM (SELECT cost_usd FROM lineshaft.task_live"
            " UNION ALL SELECT cost_usd FROM lineshaft.task_end) AS task"
        ).fetchone() or (None,)
        assert tasks == sum(self.by_agent.values()), "what tasks cost is what agents paid"
        day = self.runner.run(self.engine.budgets.day())
        assert day.spent_usd == self.by_day[self.today]
        assert day.reserved_usd == sum((task.reserved_usd for _, task, _ in self.held.values()), Decimal(0))
        check_invariants(self.dsn)


@pytest.mark.timeout(300)
def test_money_adds_up_over_any_history(postgres: EmbeddedServer) -> None:
    Money.server = postgres
    run_state_machine_as_test(
        Money,
        settings=settings(
            max_examples=6,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
