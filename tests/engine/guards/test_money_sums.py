"""Money adds up over any history: exact, nothing lost or promised twice (R-024, R-230 to R-234, R-237).

And what there is money for is handed out: after a top-up, and on the next day.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, LiteralString

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lineshaft.checks.registry import Checks
from lineshaft.checks.verdict import CandidateOutput, Verdict
from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.errors import BudgetExceededError
from lineshaft.model.breaker import BreakerConfig, BreakerPolicy
from lineshaft.model.budget import money
from lineshaft.model.tasks import NewTask, OutputContract, RetrySpec
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimedTask, ClaimRef, Completion, Failure, NewSpawn, Spent
from tests.conftest import TEMPLATE, NewDatabase
from tests.engine.stateful import Histories
from tests.invariants import check_invariants
from tests.world import Actions, release_claims

DAILY = Decimal(12)
BUDGETS = {"rich": None, "poor": Decimal(4), "broke": Decimal("0.000001")}
CEILING = Decimal(5)
SLOTS = 3
SUMS = st.decimals(min_value=0, max_value=3, places=6)
ZERO = Decimal(0)
#: What a run of a gate reserves.
JUDGE = Decimal("0.05")
#: READY tasks that an agent with so much money could be given; parked ones should have been brought back.
AFFORDABLE = """
    WITH task AS (
        SELECT live.id, attempt.limit_usd IS NULL AS open_ended,
            -- After a late report, until its next attempt, a task needs what its lane says.
            greatest(coalesce(attempt.limit_usd, limits.default_max_cost_usd), lane.cost_from_usd, 0) AS cost,
            least(%(money)s::numeric, dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd) AS money
        FROM lineshaft.task_live AS live
        JOIN lineshaft.lane ON lane.id = live.lane_id
        CROSS JOIN LATERAL (
            SELECT least(live.max_cost_usd, live.max_total_cost_usd - live.cost_usd) AS limit_usd
        ) AS attempt
        CROSS JOIN lineshaft.limits
        LEFT JOIN lineshaft.dag ON dag.id = live.dag_id
        WHERE live.status = 'READY'
    )
    SELECT id FROM task WHERE (cost <= money AND (NOT open_ended OR money > 0)) IS NOT FALSE
"""


async def judged(_: Any, __: CandidateOutput) -> bool:
    raise AssertionError("the judges of this test say what they want")


@dataclass
class Held:
    """A claim, and what it has reported so far."""

    agent: str
    task: ClaimedTask
    #: By ledger: the agent's, the DAG's and the day's.
    reserved: tuple[Decimal, Decimal, Decimal]
    cost: Decimal = ZERO


class Ledger(Counter[str]):
    """What each agent, DAG or day has spent."""

    def book(self, name: str, usd: Decimal) -> None:
        self[name] += usd  # type: ignore[assignment]  # a Counter of decimals


class Money(RuleBasedStateMachine):
    """The model has three ledgers, and for each claim the highest cost that it has reported."""

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
        checks.register("judged", judged, is_paid=True)
        # As two servers have: each call goes to the next one.
        self.engines = [
            Engine(self.dsn, clock=self.clock, max_connections=2, rules=rules, checks=checks)
            for _ in range(2)
        ]
        for engine in self.engines:
            self.runner.run(engine.__aenter__())
        self.turns = itertools.cycle(self.engines)
        self.look = psycopg.connect(self.dsn, autocommit=True)
        for agent, budget in BUDGETS.items():
            new = NewAgent(id=agent, max_concurrent_tasks=SLOTS, budget_usd=budget)
            self.runner.run(self.engine.fleet.register(new))
        self.by_agent, self.by_dag, self.by_day = Ledger(), Ledger(), Ledger()
        self.held: dict[str, Held] = {}
        #: Whose output waits for a judge.
        self.handed_in: dict[str, Held] = {}
        #: Claims that ended; their processes may not know.
        self.zombies: list[Held] = []
        #: What all claims and judges have cost.
        self.total = ZERO
        self.dags: list[str] = []
        #: By limited agent, DAG or "day": what was spent and reserved when its limit last changed, and
        #: what has been spent above reservations since.
        self.bounds: dict[str, Decimal] = {}
        self.excess = Ledger()

    @property
    def engine(self) -> Engine:
        return next(self.turns)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.look.close()
            for engine in self.engines:
                self.runner.run(engine.database.close())
            self.runner.close()
            self.database.__exit__(None, None, None)

    @rule(
        costs=st.lists(st.none() | SUMS, min_size=1, max_size=4),
        ceiling=st.booleans(),
        judged=st.booleans(),
        total=st.none() | SUMS,
    )
    def submit(self, costs: list[Decimal | None], ceiling: bool, judged: bool, total: Decimal | None) -> None:
        tasks = [
            NewTask(
                "t",
                max_cost_usd=cost,
                max_total_cost_usd=total,
                max_attempts=3,
                retry=RetrySpec(strategy="immediate"),
                output=OutputContract(validation="judged") if judged else None,
            )
            for cost in costs
        ]
        if len(tasks) == 1:
            # Its DAG has no row until it spawns.
            self.runner.run(self.engine.submission.submit(tasks))
            return
        dag = self.runner.run(
            self.engine.submission.submit_dag("a DAG", tasks, budget_ceiling_usd=CEILING if ceiling else None)
        )
        self.dags.append(dag.id)

    @rule(agent=st.sampled_from(sorted(BUDGETS)), limit=st.integers(1, 3))
    def claim(self, agent: str, limit: int) -> None:
        money, day = self.left(agent, "agent"), self.day_left()
        claimed = self.runner.run(self.engine.claims.claim(agent, 1, limit=limit, start=True)).tasks
        if not claimed and sum(held.agent == agent for held in self.held.values()) < SLOTS:
            assert self.affordable(agent) == []
        for task in claimed:
            assert money is None or money >= 0
            of_agent, of_day, reserved, is_limited, left_of_total = self.look.execute(
                "SELECT agent_reserved, day_reserved, reserved_usd,"
                " max_cost_usd IS NOT NULL OR max_total_cost_usd IS NOT NULL, max_total_cost_usd - cost_usd"
                " FROM lineshaft.task_live WHERE id = %s",
                [task.id],
            ).fetchone() or (False, False, ZERO, False, None)
            assert is_limited or money is None or money > 0
            assert is_limited or day is None or day > 0
            assert left_of_total is None or reserved <= max(left_of_total, ZERO)
            assert of_agent is (money is not None)
            assert of_day is (day is not None)
            shares = (reserved if of_agent else ZERO, reserved, reserved if of_day else ZERO)
            self.held[task.id] = Held(agent, task, shares)
            if reserved:
                assert (self.left(agent, "agent") or 0) >= 0
                assert (self.left(task.dag_id, "dag") or 0) >= 0
                assert (self.day_left() or 0) >= 0

    def affordable(self, agent: str) -> list[str]:
        limits = [left for left in (self.left(agent, "agent"), self.day_left()) if left is not None]
        rows = self.look.execute(AFFORDABLE, {"money": min(limits, default=None)}).fetchall()
        return [row[0] for row in rows]

    # Limits.

    @rule(agent=st.sampled_from(["poor", "broke"]), usd=SUMS, add=st.booleans())
    def change_an_agents_budget(self, agent: str, usd: Decimal, add: bool) -> None:
        fleet = self.engine.fleet
        change = fleet.patch(agent, add_budget_usd=usd) if add else fleet.patch(agent, budget_usd=usd * 2)
        self.runner.run(change)
        self.changed(agent)

    @precondition(lambda self: self.dags)
    @rule(data=st.data(), usd=st.none() | SUMS, add=st.booleans())
    def change_a_dags_budget(self, data: st.DataObject, usd: Decimal | None, add: bool) -> None:
        dag = data.draw(st.sampled_from(self.dags))
        if usd is None or not add:
            self.runner.run(self.engine.budgets.set_dag_budget(dag, usd))
        else:
            self.runner.run(self.engine.budgets.add_dag_budget(dag, usd))
        self.changed(dag)

    @rule(usd=st.none() | SUMS, default=st.none() | SUMS, fraction=st.sampled_from([0, 0.5, 1]))
    def change_limits(self, usd: Decimal | None, default: Decimal | None, fraction: float) -> None:
        changes = {
            "daily_budget_usd": None if usd is None else usd * 5,
            "default_max_cost_usd": default,
            "crash_cost_fraction": fraction,
        }
        self.runner.run(self.engine.limits.patch(changes))
        self.changed("day")

    def changed(self, name: str) -> None:
        self.bounds.pop(name, None)
        self.excess[name] = 0

    def left(self, name: str, table: str) -> Decimal | None:
        column = "budget_usd" if table == "agent" else "budget_ceiling_usd"
        query = f"SELECT {column} - spent_usd - reserved_usd FROM lineshaft.{table} WHERE id = %s"
        row = self.look.execute(query.encode(), [name]).fetchone()
        # A DAG of one task may have no row.
        return None if row is None else row[0]

    def day_left(self) -> Decimal | None:
        row = self.look.execute("SELECT daily_budget_usd - reserved_usd FROM lineshaft.limits").fetchone()
        assert row is not None
        return None if row[0] is None else row[0] - self.by_day[self.today]

    @property
    def today(self) -> str:
        return f"{self.clock.now():%Y-%m-%d}"

    # Spending.

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.held)))

    def report(self, held: Held, cost: Decimal | None) -> None:
        """What is above the reservation is booked at once."""
        before, held.cost = held.cost, max(held.cost, cost or ZERO)
        self.total += held.cost - before
        self.book(
            held, *(max(held.cost - usd, ZERO) - max(before - usd, ZERO) for usd in held.reserved), above=True
        )

    def end(self, name: str, cost: Decimal | None, *, zombie: bool = True) -> Held:
        """The claim is over: what was within the reservation is booked too."""
        held = self.held.pop(name)
        self.report(held, cost)
        self.book(held, *(min(held.cost, usd) for usd in held.reserved))
        held.reserved = (ZERO, ZERO, ZERO)
        if zombie:
            self.zombies.append(held)
        return held

    def book(
        self, held: Held, of_agent: Decimal, of_dag: Decimal, of_day: Decimal, *, above: bool = False
    ) -> None:
        self.by_agent.book(held.agent, of_agent)
        self.by_dag.book(held.task.dag_id, of_dag)
        self.by_day.book(self.today, of_day)
        if above:
            self.excess.book(held.agent, of_agent)
            self.excess.book(held.task.dag_id, of_dag)
            self.excess.book("day", of_day)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cost=st.none() | SUMS)
    def complete(self, data: st.DataObject, cost: Decimal | None) -> None:
        name = self.pick(data)
        done = Completion(ClaimRef(name, self.held[name].task.epoch), b"1", spent=Spent(cost))
        (moved,) = self.runner.run(self.engine.work.complete([done]))
        assert moved.unwrap() in {"COMPLETED", "DEAD_LETTERED", "VALIDATING"}
        # The answer may have been lost on the way.
        (again,) = self.runner.run(self.engine.work.complete([done]))
        assert again.unwrap() == moved.unwrap()
        validating = moved.unwrap() == "VALIDATING"
        held = self.end(name, cost)
        if validating:
            self.handed_in[name] = held

    @precondition(lambda self: self.handed_in)
    @rule(verdict=st.none() | st.booleans(), reported=st.none() | SUMS, lost=st.booleans())
    def judge(self, verdict: bool | None, reported: Decimal | None, lost: bool) -> None:
        """It is the agent's money whose output it looks at, also when it comes to no verdict."""
        gates = self.engine.gates
        outputs = self.runner.run(gates.take(limit=1, lease_sec=60))
        if not outputs:
            # There is no money for any of them, or there was none some seconds ago.
            waiting = "SELECT count(*) FROM lineshaft.attempt WHERE gate_blocked_by IS NOT NULL"
            assert self.value(waiting) == len(self.handed_in)
            return
        (output,) = outputs
        cost = JUDGE if reported is None or lost else reported
        paid = min(cost, JUDGE)
        self.book(self.handed_in[output.id], paid, paid, paid)
        above = cost - paid
        self.book(self.handed_in[output.id], above, above, above, above=True)
        self.total += cost
        if lost:
            # Its validator dies: the next one books what was reserved.
            self.clock.advance(61)
            self.runner.run(self.engine.gates.take(limit=0, lease_sec=60))
            return
        if verdict is None:
            assert self.runner.run(gates.postpone(output, "away", delay_sec=0, cost_usd=reported))
            return
        moved = self.runner.run(gates.settle(output, Verdict(passed=verdict, cost_usd=reported)))
        assert (moved.unwrap() == "COMPLETED") is verdict
        del self.handed_in[output.id]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cost=st.none() | SUMS, limited=st.booleans())
    def fail(self, data: st.DataObject, cost: Decimal | None, limited: bool) -> None:
        name = self.pick(data)
        failure = Failure(
            ClaimRef(name, self.held[name].task.epoch),
            "429" if limited else "x",
            category=None if limited else "validation_failed",
            retry_after_sec=0,
            spent=Spent(cost),
        )
        self.runner.run(self.engine.work.fail([failure]))
        self.end(name, cost)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cost=SUMS)
    def beat(self, data: st.DataObject, cost: Decimal) -> None:
        name = self.pick(data)
        held = self.held[name]
        claim = ClaimRef(name, held.task.epoch)
        answers = self.runner.run(Actions(self.engine).heartbeat(held.agent, 1, [claim], spent=Spent(cost)))
        self.report(held, cost)
        most = held.task.max_cost_usd
        assert most is None or held.cost <= most or answers == {name: "cancel"}

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), cost=SUMS)
    def report_late(self, data: st.DataObject, cost: Decimal) -> None:
        """A lost process reports what its claim has cost, twice."""
        zombie = data.draw(st.sampled_from(self.zombies))
        claim = ClaimRef(zombie.task.id, zombie.task.epoch)
        for _ in range(2):
            beat = Actions(self.engine).heartbeat(zombie.agent, 1, [claim], spent=Spent(cost))
            assert self.runner.run(beat)[claim.id] in {"lost", "cancel"}
        self.report(zombie, cost)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        costs=st.lists(st.none() | SUMS, min_size=1, max_size=2),
        spent=SUMS,
        wait=st.booleans(),
    )
    def spawn(self, data: st.DataObject, costs: list[Decimal | None], spent: Decimal, wait: bool) -> None:
        name = self.pick(data)
        held = self.held[name]
        children = [NewTask("t", max_cost_usd=cost, max_attempts=2) for cost in costs]
        new = NewSpawn(ClaimRef(name, held.task.epoch), children, wait=wait, spent=Spent(spent))
        (spawned,) = self.runner.run(self.engine.work.spawn([new]))
        if isinstance(spawned.error, BudgetExceededError):
            # It can't wait for its children: there would be no money for its next claim.
            assert wait
            self.report(held, spent)
        elif spawned.unwrap().paused:
            self.end(name, spent)
        else:
            self.report(held, spent)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self.pick(data)
        self.runner.run(release_claims(self.engine, [ClaimRef(name, self.held[name].task.epoch)]))
        self.end(name, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """With the tasks that it has spawned."""
        cancelled = self.runner.run(self.engine.cancel.cancel(self.pick(data), "no"))
        for name in cancelled:
            if name in self.held:
                self.end(name, None)
            self.handed_in.pop(name, None)

    @rule(seconds=st.sampled_from([200, 86_400]))
    def crash(self, seconds: int) -> None:
        """All agents that hold tasks stop heartbeats, for some minutes or overnight."""
        self.clock.advance(seconds)
        self.runner.run(self.engine.maintenance.reap(100))
        if seconds > 3600:
            self.changed("day")
        row = self.look.execute("SELECT crash_cost_fraction FROM lineshaft.limits").fetchone()
        assert row is not None
        for name, held in list(self.held.items()):
            past = self.look.execute(
                "SELECT error FROM lineshaft.attempt WHERE task_id = %s AND epoch = %s",
                [name, held.task.epoch],
            ).fetchone()
            assert past is not None
            crashed = "Timed out after" not in past[0]
            self.end(name, money(held.reserved[1] * row[0], "cost") if crashed else None)
        self.runner.run(self.engine.maintenance.promote_due(100))

    @rule()
    def promote(self) -> None:
        self.clock.advance(1)
        self.runner.run(self.engine.maintenance.promote_due(100))

    def value(self, query: LiteralString) -> Decimal:
        row = self.look.execute(query).fetchone()
        assert row is not None
        return row[0] or ZERO

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "look"):
            return
        spent: dict[str, Decimal]
        spent = dict(self.look.execute("SELECT id, spent_usd FROM lineshaft.agent").fetchall())
        assert spent == {agent: self.by_agent[agent] for agent in BUDGETS}
        spent = dict(self.look.execute("SELECT id, spent_usd FROM lineshaft.dag").fetchall())
        assert spent == {dag: self.by_dag[dag] for dag in spent}
        spent = dict(self.look.execute("SELECT day::text, spent_usd FROM lineshaft.spend").fetchall())
        assert spent == {day: usd for day, usd in self.by_day.items() if usd}
        assert self.value("SELECT sum(cost_usd) FROM lineshaft.tasks") == self.total, "each dollar once"
        assert self.value("SELECT sum(cost_usd) FROM lineshaft.attempts") == self.total
        day = self.runner.run(self.engine.budgets.day())
        assert day.spent_usd == self.by_day[self.today]
        assert day.reserved_usd == sum((held.reserved[2] for held in self.held.values()), ZERO)
        check_invariants(self.look)

    @invariant()
    def limits_hold(self) -> None:
        """Spent and reserved: at most the limit, and what was spent above reservations."""
        if not hasattr(self, "look"):
            return
        rows = self.look.execute(
            "SELECT id, budget_usd, spent_usd + reserved_usd FROM lineshaft.agent UNION ALL"
            " SELECT id, budget_ceiling_usd, spent_usd + reserved_usd FROM lineshaft.dag UNION ALL"
            " SELECT 'day', daily_budget_usd, reserved_usd FROM lineshaft.limits"
        ).fetchall()
        for name, limit, known in rows:
            committed = known + (self.by_day[self.today] if name == "day" else ZERO)
            if limit is not None:
                bound = self.bounds.setdefault(name, max(limit, committed))
                assert committed <= bound + self.excess[name], name


@pytest.mark.timeout(0)
def test_money_adds_up_over_any_history(new_database: NewDatabase, histories: Histories) -> None:
    Money.new_database = new_database
    histories.run(Money, few=10, steps=40)
