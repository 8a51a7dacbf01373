"""Money adds up over any history: exact decimals, nothing lost or promised twice (R-230 to R-234, R-237).

And what there is money for is handed out: after a top-up, and on the next day.
"""

import asyncio
from collections import Counter
from decimal import Decimal
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lineshaft.checks.registry import Checks
from lineshaft.checks.verdict import CandidateOutput, Verdict
from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.model.breaker import BreakerConfig, BreakerPolicy
from lineshaft.model.tasks import NewTask, OutputContract, RetrySpec
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimedTask, ClaimRef, Completion, Failure, Spent
from tests.conftest import TEMPLATE, NewDatabase
from tests.engine.stateful import Histories
from tests.invariants import check_invariants
from tests.world import Actions, release_claims

DAILY = Decimal(12)
BUDGETS = {"rich": None, "poor": Decimal(4), "broke": Decimal("0.000001")}
CEILING = Decimal(5)
SLOTS = 3
SUMS = st.decimals(min_value=0, max_value=3, places=6)
#: READY tasks that an agent with so much money could be given; parked ones should have been brought back.
AFFORDABLE = """
    SELECT live.id FROM lineshaft.task_live AS live
    JOIN lineshaft.lane ON lane.id = live.lane_id
    LEFT JOIN lineshaft.dag ON dag.id = live.dag_id
    WHERE live.status = 'READY' AND coalesce(lane.max_cost_usd, 0) <= %(money)s
      AND coalesce(lane.max_cost_usd, 0)
        <= coalesce(dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd, 'infinity')
"""


async def judged(_: Any, __: CandidateOutput) -> bool:
    raise AssertionError("the judges of this test say what they want")


class Money(RuleBasedStateMachine):
    """The model is three columns of numbers: what each agent, each DAG and each day has spent."""

    #: Set by the test: Hypothesis makes the instances.
    new_database: ClassVar[NewDatabase]

    @initialize()
    def start(self) -> None:
        self.clock = MovableClock()
        self.database = type(self).new_database(TEMPLATE)
        self.dsn = self.database.__enter__()
        self.runner = asyncio.Runner()
        # Breakers are not what this is about.
        rules = Rules(BreakerPolicy(BreakerConfig(failure_threshold=10_000)), {"daily_budget_usd": DAILY})
        checks = Checks()
        checks.register("judged", judged)
        self.engine = Engine(self.dsn, clock=self.clock, max_connections=2, rules=rules, checks=checks)
        self.runner.run(self.engine.__aenter__())
        self.look = psycopg.connect(self.dsn, autocommit=True)
        for agent, budget in BUDGETS.items():
            new = NewAgent(id=agent, max_concurrent_tasks=SLOTS, budget_usd=budget)
            self.runner.run(self.engine.fleet.register(new))
        self.by_agent: Counter[str] = Counter()
        self.by_dag: Counter[str] = Counter()
        self.by_day: Counter[str] = Counter()
        self.held: dict[str, tuple[str, ClaimedTask, Decimal]] = {}
        #: Whose output waits for a judge.
        self.handed_in: dict[str, tuple[str, str]] = {}
        self.dags: list[str] = []

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.look.close()
            self.runner.run(self.engine.database.close())
            self.runner.close()
            self.database.__exit__(None, None, None)

    @rule(
        costs=st.lists(st.none() | SUMS, min_size=1, max_size=4), ceiling=st.booleans(), judged=st.booleans()
    )
    def submit(self, costs: list[Decimal | None], ceiling: bool, judged: bool) -> None:
        tasks = [
            NewTask(
                "t",
                max_cost_usd=cost,
                max_attempts=3,
                retry=RetrySpec(strategy="immediate"),
                output=OutputContract(validation="judged") if judged else None,
            )
            for cost in costs
        ]
        dag = self.runner.run(
            self.engine.submission.submit_dag("a DAG", tasks, budget_ceiling_usd=CEILING if ceiling else None)
        )
        self.dags.append(dag.id)

    @rule(agent=st.sampled_from(sorted(BUDGETS)), limit=st.integers(1, 3))
    def claim(self, agent: str, limit: int) -> None:
        claimed = self.runner.run(self.engine.claims.claim(agent, 1, limit=limit, start=True)).tasks
        if not claimed and sum(holder == agent for holder, _, _ in self.held.values()) < SLOTS:
            assert self.affordable(agent) == []
        for task in claimed:
            self.held[task.id] = (agent, task, Decimal(0))
            priced = task.reserved_usd
            assert (self.left(agent, "agent") or 0) >= 0
            assert (self.left(task.dag_id, "dag") or 0) >= 0
            assert not priced or self.day_left() >= 0

    def affordable(self, agent: str) -> list[str]:
        left = self.left(agent, "agent")
        money = self.day_left() if left is None else min(left, self.day_left())
        rows = self.look.execute(AFFORDABLE, {"money": money}).fetchall()
        return [row[0] for row in rows]

    @rule(agent=st.sampled_from(["poor", "broke"]), usd=SUMS)
    def top_up_an_agent(self, agent: str, usd: Decimal) -> None:
        self.runner.run(self.engine.fleet.patch(agent, add_budget_usd=usd))

    @precondition(lambda self: self.dags)
    @rule(data=st.data(), usd=st.none() | SUMS)
    def top_up_a_dag(self, data: st.DataObject, usd: Decimal | None) -> None:
        dag = data.draw(st.sampled_from(self.dags))
        if usd is None:
            self.runner.run(self.engine.budgets.set_dag_budget(dag, None))
        else:
            self.runner.run(self.engine.budgets.add_dag_budget(dag, usd))

    def left(self, name: str, table: str) -> Decimal | None:
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
        self.book(agent, task.dag_id, reported if cost is None else cost)

    def book(self, agent: str, dag: str, usd: Decimal) -> None:
        self.by_agent[agent] += usd  # type: ignore[assignment]  # a Counter of decimals
        self.by_dag[dag] += usd  # type: ignore[assignment]
        self.by_day[self.today] += usd  # type: ignore[assignment]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cost=st.none() | SUMS)
    def complete(self, data: st.DataObject, cost: Decimal | None) -> None:
        name = self.pick(data)
        agent, task, _ = self.held[name]
        done = Completion(ClaimRef(name, task.epoch), b"1", spent=Spent(cost))
        (moved,) = self.runner.run(self.engine.work.complete([done]))
        assert moved.unwrap() in {"COMPLETED", "DEAD_LETTERED", "VALIDATING"}
        # The answer may have been lost on the way.
        (again,) = self.runner.run(self.engine.work.complete([done]))
        assert again.unwrap() == moved.unwrap()
        self.pay(name, cost)
        if moved.unwrap() == "VALIDATING":
            self.handed_in[name] = (agent, task.dag_id)

    @precondition(lambda self: self.handed_in)
    @rule(verdict=st.none() | st.booleans(), cost=SUMS)
    def judge(self, verdict: bool | None, cost: Decimal) -> None:
        """It is the agent's money whose output it looks at, also when it comes to no verdict."""
        gates = self.engine.gates
        (output,) = self.runner.run(gates.take(limit=1, lease_sec=60))
        self.book(*self.handed_in[output.id], cost)
        if verdict is None:
            assert self.runner.run(gates.postpone(output, "away", delay_sec=0, cost_usd=cost))
            return
        moved = self.runner.run(gates.settle(output, Verdict(passed=verdict, cost_usd=cost)))
        assert (moved.unwrap() == "COMPLETED") is verdict
        del self.handed_in[output.id]

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
        self.runner.run(self.engine.work.fail([failure]))
        self.pay(name, cost)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cost=SUMS)
    def beat(self, data: st.DataObject, cost: Decimal) -> None:
        name = self.pick(data)
        agent, task, reported = self.held[name]
        claim = ClaimRef(name, task.epoch)
        answers = self.runner.run(Actions(self.engine).heartbeat(agent, 1, [claim], spent=Spent(cost)))
        assert answers == {name: "continue"}
        self.held[name] = (agent, task, max(reported, cost))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self.pick(data)
        self.runner.run(release_claims(self.engine, [ClaimRef(name, self.held[name][1].epoch)]))
        self.pay(name, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = self.pick(data)
        self.runner.run(self.engine.operations.cancel(name, "no"))
        self.pay(name, None)

    @rule()
    def tomorrow(self) -> None:
        """All agents that hold tasks stop heartbeats overnight."""
        self.clock.advance(86_400)
        self.runner.run(self.engine.maintenance.reap(100))
        for name in list(self.held):
            self.pay(name, None)
        self.runner.run(self.engine.maintenance.promote_due(100))

    @rule()
    def promote(self) -> None:
        self.clock.advance(1)
        self.runner.run(self.engine.maintenance.promote_due(100))

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
        check_invariants(self.look)


@pytest.mark.timeout(0)
def test_money_adds_up_over_any_history(new_database: NewDatabase, histories: Histories) -> None:
    Money.new_database = new_database
    histories.run(Money, few=6, steps=30)
