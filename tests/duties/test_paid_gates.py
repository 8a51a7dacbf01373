"""Gates that cost money reserve it like attempts: while an output is VALIDATING, no limit is passed."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest

from lineshaft.checks.judge import Judgement
from lineshaft.checks.registry import Checks
from lineshaft.checks.verdict import CandidateOutput, NoVerdict, Verdict
from lineshaft.clock import MovableClock
from lineshaft.duties.validator import Validator
from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidInputError
from lineshaft.model.tasks import Gate, NewTask, OutputContract
from lineshaft.types import CostCorrection, NewAgent
from lineshaft.types.changes import TaskChange
from lineshaft.types.costs import Disputed
from lineshaft.types.work import ClaimedTask, Completion, Spent
from tests.invariants import check_invariants
from tests.llm_server import LLMServer, Reply, llm_server
from tests.world import ref

ROOT = Path(__file__).parents[2]
COST = Decimal("0.04")
JUDGED = OutputContract(validation=(Gate("llm-judge", {"criteria": "Is it fun?"}),))
ZERO = Decimal(0)


@dataclass
class Judge:
    """Costs 0.04 USD each time. Without a score, it reaches no verdict."""

    score: float | None = None
    cost: Decimal | None = COST
    calls: int = 0
    #: It judges until this is set.
    leave: asyncio.Event | None = None

    async def judge(self, criteria: str, candidate: CandidateOutput) -> Judgement:  # noqa: ARG002
        self.calls += 1
        if self.leave is not None:
            await self.leave.wait()
        if self.score is None:
            raise NoVerdict("mumbled", cost_usd=self.cost)
        return Judgement(self.score, cost_usd=self.cost)


@asynccontextmanager
async def node(dsn: str, clock: MovableClock, judge: Judge) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, max_connections=4, checks=Checks(judge=judge)) as engine:
        yield engine
    check_invariants(dsn)


async def handed_in(
    engine: Engine, tasks: Sequence[NewTask], *, ceiling: float | None = None, budget: str | None = None
) -> list[ClaimedTask]:
    """Outputs that wait for the judge, in a DAG."""
    await engine.submission.submit_dag("a DAG", tasks, budget_ceiling_usd=ceiling)
    agent = await engine.fleet.register(
        NewAgent(id="ann", max_concurrent_tasks=100, budget_usd=None if budget is None else Decimal(budget))
    )
    claimed = (await engine.claims.claim(agent.id, 1, limit=len(tasks), start=True)).tasks
    assert len(claimed) == len(tasks)
    await engine.work.complete([Completion(ref(task), b'"joke"') for task in claimed])
    return claimed


def validator(engine: Engine, **options: Any) -> Validator:
    return Validator(engine.gates, engine.approvals, **options)


async def why(engine: Engine, task: ClaimedTask) -> dict[str, str]:
    return {str(reason.code): reason.detail for reason in (await engine.read.why(task.id)).reasons}


def ledgers(connection: psycopg.Connection) -> dict[str, Decimal]:
    """What is reserved of the agent, the DAG and the day, and what each has spent."""
    row = connection.execute(
        """
        SELECT (SELECT sum(reserved_usd) FROM lineshaft.agent), (SELECT sum(reserved_usd) FROM lineshaft.dag),
            (SELECT reserved_usd FROM lineshaft.limits), (SELECT sum(spent_usd) FROM lineshaft.agent),
            (SELECT sum(spent_usd) FROM lineshaft.dag),
            (SELECT coalesce(sum(spent_usd), 0) FROM lineshaft.spend),
            (SELECT sum(cost_usd) FROM lineshaft.tasks)
        """
    ).fetchone()
    assert row is not None
    names = ("agent reserved", "dag reserved", "day reserved", "agent", "dag", "day", "tasks")
    return dict(zip(names, row, strict=True))


@pytest.mark.parametrize("limit", ["max_total_cost", "agent_budget", "dag_budget", "daily_budget"])
async def test_a_judge_that_fails_again_and_again_stops_at_each_limit(
    dsn: str, clock: MovableClock, connection: psycopg.Connection, limit: str
) -> None:
    """Of 0.20 USD; then the gate waits, and `why` says for what. With more money it goes on."""
    judge = Judge()
    async with node(dsn, clock, judge) as engine:
        total = Decimal("0.2") if limit == "max_total_cost" else None
        if limit == "daily_budget":
            await engine.limits.patch({"daily_budget_usd": Decimal("0.2")})
        (task,) = await handed_in(
            engine,
            [NewTask("code", output=JUDGED, max_total_cost_usd=total)],
            ceiling=0.2 if limit == "dag_budget" else None,
            budget="0.2" if limit == "agent_budget" else None,
        )
        for _ in range(8):
            await validator(engine).run_once()
            clock.advance(700)

        money = ledgers(connection)
        assert judge.calls == 4, "0.04 of 0.20 are left, and a run reserves 0.05"
        assert {money[name] for name in ("agent", "dag", "day", "tasks")} == {4 * COST}
        assert {money[f"{name} reserved"] for name in ("agent", "dag", "day")} == {ZERO}
        (reason,) = (await why(engine, task)).items()
        assert reason[0] == "gate_budget"
        assert "may cost 0.05 USD (judge_max_cost_usd), and 0.04 USD is left of" in reason[1]
        assert {each.code: each.count for each in (await engine.read.waiting()).reasons} == {"gate_budget": 1}
        blocked = connection.execute(
            "SELECT data ->> 'purse' FROM lineshaft.events WHERE kind = 'budget.blocked'"
        ).fetchall()
        assert blocked == [(limit,)], "once"

        judge.score = 1.0
        match limit:
            case "max_total_cost":
                await engine.edit.edit(task.id, TaskChange(max_total_cost_usd=Decimal("0.21")))
            case "agent_budget":
                await engine.fleet.patch("ann", add_budget_usd=Decimal("0.01"))
            case "dag_budget":
                dag_id = (await engine.read.task(task.id)).dag_id
                await engine.budgets.add_dag_budget(dag_id, Decimal("0.01"))
            case "daily_budget":
                await engine.limits.patch({"judge_max_cost_usd": COST})
        clock.advance(60)
        assert (await validator(engine).run_once())["passed"] == 1
        assert (await engine.read.task(task.id)).cost_usd == 5 * COST


async def test_a_stop_of_spending_stops_judges_too(dsn: str, clock: MovableClock) -> None:
    judge = Judge(1.0)
    async with node(dsn, clock, judge) as engine:
        (task,) = await handed_in(engine, [NewTask("code", output=JUDGED)])
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("INSERT INTO lineshaft.pause (type, since, stops) VALUES ('*', now(), true)")
            await validator(engine).run_once()
            assert (judge.calls, list(await why(engine, task))) == (0, ["gate_budget"])
            connection.execute("DELETE FROM lineshaft.pause")
        clock.advance(60)
        assert (await validator(engine).run_once())["passed"] == 1


async def test_two_servers_share_what_is_left(
    dsn: str, clock: MovableClock, connection: psycopg.Connection
) -> None:
    """Six outputs, 0.12 USD: two runs fit, whichever server takes them."""
    leave = asyncio.Event()
    judge = Judge(1.0, leave=leave)
    async with node(dsn, clock, judge) as one, node(dsn, clock, judge) as other:
        tasks = [NewTask("code", output=JUDGED) for _ in range(6)]
        await handed_in(one, tasks, ceiling=0.12)
        running = [
            asyncio.create_task(validator(engine, interval_sec=0.01).run_once()) for engine in (one, other)
        ]
        waiting = "SELECT count(*) FROM lineshaft.attempt WHERE gate_blocked_by IS NOT NULL"
        while judge.calls < 2 or connection.execute(waiting).fetchone() != (4,):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert judge.calls == 2
        money = ledgers(connection)
        assert (money["dag reserved"], money["dag"]) == (Decimal("0.1"), ZERO)
        leave.set()
        await asyncio.wait_for(asyncio.gather(*running), 60)

        clock.advance(60)
        await asyncio.gather(*(validator(engine).run_once() for engine in (one, other)))
        assert judge.calls == 2, "0.04 are left"
        assert ledgers(connection)["dag"] == 2 * COST


async def test_a_run_that_is_lost_has_cost_its_reservation(
    dsn: str, clock: MovableClock, connection: psycopg.Connection
) -> None:
    """A server dies between the judge's answer and its settlement, each time: the limit holds."""
    judge = Judge(1.0)
    async with node(dsn, clock, judge) as engine:
        new = NewTask("code", output=JUDGED, max_total_cost_usd=0.12)
        (task,) = await handed_in(engine, [new], ceiling=9)
        runs = 0
        late = None
        for _ in range(5):
            outputs = await engine.gates.take(limit=4, lease_sec=60)
            late = outputs[0] if outputs else late
            runs += len(outputs)
            assert ledgers(connection)["dag reserved"] == Decimal("0.05") * len(outputs)
            assert await engine.gates.take(limit=4, lease_sec=60) == [], "under a lease"
            check_invariants(connection)
            clock.advance(61)
        assert runs == 2
        assert {name: usd for name, usd in ledgers(connection).items() if usd} == dict.fromkeys(
            ("agent", "dag", "day", "tasks"), Decimal("0.1")
        )
        assert list(await why(engine, task)) == ["gate_budget"]

        assert late is not None
        moved = await engine.gates.settle(late, Verdict(passed=True, cost_usd=COST))
        assert moved.unwrap() == "COMPLETED", "its validator lives: its verdict counts, but no second cost"
        assert ledgers(connection)["dag"] == Decimal("0.1")


@pytest.mark.slow("starts processes")
async def test_a_server_that_is_killed_while_it_waits_for_a_judge(
    dsn: str, connection: psycopg.Connection
) -> None:
    """Each time; nobody knows what the judge has cost. The limit holds, and every reservation comes back."""
    clock = MovableClock(datetime.now(UTC))
    hang_up = Event()

    with llm_server(LLMServer(reply=Reply(hold=hang_up))) as server, ExitStack() as at_end:
        at_end.callback(hang_up.set)
        async with node(dsn, clock, Judge(1.0)) as engine:
            new = NewTask("code", output=JUDGED, max_total_cost_usd=0.12)
            (task,) = await handed_in(engine, [new], ceiling=9, budget="9")
            for number in (1, 2):
                doomed = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.duties.validator_program", dsn, server.url, cwd=ROOT
                )
                await asyncio.to_thread(server.wait_for, number)
                doomed.kill()
                await doomed.wait()
                assert ledgers(connection)["dag reserved"] == Decimal("0.05")
                # As if the lease were over: the other process lives by the database's clock.
                connection.execute("UPDATE lineshaft.gate_run SET until = now()")
                connection.execute("UPDATE lineshaft.attempt SET gate_due_at = now()")
            clock.advance(60)
            await validator(engine).run_once()

            assert {name: usd for name, usd in ledgers(connection).items() if usd} == dict.fromkeys(
                ("agent", "dag", "day", "tasks"), Decimal("0.1")
            )
            assert list(await why(engine, task)) == ["gate_budget"]


async def test_what_a_run_has_cost_is_booked_once_whatever_became_of_its_task(
    dsn: str, clock: MovableClock, connection: psycopg.Connection
) -> None:
    """Cancelled in the meantime; without saying what it cost; not reached at all; nobody knows."""
    judge = Judge(1.0)
    async with node(dsn, clock, judge) as engine:
        tasks = [NewTask("code", output=JUDGED, title=str(n)) for n in range(5)]
        await engine.limits.patch({"daily_budget_usd": 9})
        await handed_in(engine, tasks, ceiling=9, budget="9")
        outputs = await engine.gates.take(limit=9, lease_sec=60)
        reserved = {f"{name} reserved": Decimal("0.25") for name in ("agent", "dag", "day")}
        assert {name: usd for name, usd in ledgers(connection).items() if usd} == reserved

        cancelled, unknown, unreached, broken, plain = outputs
        await engine.cancel.cancel(cancelled.id, "not needed")
        assert (await engine.gates.settle(cancelled, Verdict(passed=True, cost_usd=COST))).error is not None
        await engine.gates.settle(unknown, Verdict(passed=True, cost_usd=None))
        assert await engine.gates.postpone(unreached, "no route", delay_sec=5)
        assert await engine.gates.postpone(broken, "it hung up", delay_sec=5, cost_usd=None)
        for _ in range(2):
            await engine.gates.settle(plain, Verdict(passed=True, cost_usd=Decimal("0.07")))

        costs = {
            "cancelled": (await engine.read.task(cancelled.id)).cost_usd,
            "unknown": (await engine.read.task(unknown.id)).cost_usd,
            "unreached": (await engine.read.task(unreached.id)).cost_usd,
            "broken": (await engine.read.task(broken.id)).cost_usd,
            "plain": (await engine.read.task(plain.id)).cost_usd,
        }
        assert costs == {
            "cancelled": COST,
            "unknown": Decimal("0.05"),
            "unreached": ZERO,
            "broken": Decimal("0.05"),
            "plain": Decimal("0.07"),
        }
        spent = sum(costs.values(), ZERO)
        assert {name: usd for name, usd in ledgers(connection).items() if usd} == dict.fromkeys(
            ("agent", "dag", "day", "tasks"), spent
        )


async def test_an_attempt_and_its_judge_share_the_total(dsn: str, clock: MovableClock) -> None:
    """0.98 of 1 USD are spent when the output is handed in: there is no money for the judge."""
    judge = Judge(1.0)
    async with node(dsn, clock, judge) as engine:
        await engine.submission.submit([NewTask("code", output=JUDGED, max_total_cost_usd=1)])
        agent = await engine.fleet.register(NewAgent(id="ann"))
        (task,) = (await engine.claims.claim(agent.id, 1, start=True)).tasks
        item = Completion(ref(task), b'"joke"', spent=Spent(Decimal("0.98")))
        assert (await engine.work.complete([item]))[0].unwrap() == "VALIDATING"

        await validator(engine).run_once()

        assert judge.calls == 0
        assert "0.02 USD is left of the task's max_total_cost_usd" in (await why(engine, task))["gate_budget"]


async def test_a_check_of_ones_own_may_cost_money_too(dsn: str, clock: MovableClock) -> None:
    async def ask(_: Any, __: CandidateOutput) -> Verdict:
        return Verdict(passed=True, cost_usd=COST)

    checks = Checks()
    checks.register("ask", ask, is_paid=True)
    with pytest.raises(InvalidInputError, match="isn't async"):
        checks.register("now", lambda _, __: True, is_paid=True)
    async with Engine(dsn, clock=clock, max_connections=4, checks=checks) as engine:
        contract = OutputContract(validation=(Gate("ask"), Gate("ask")))
        (task,) = await handed_in(engine, [NewTask("code", output=contract)], budget="0.08")
        for _ in range(3):
            await validator(engine).run_once()
            clock.advance(60)
        assert "gate 2 of 2" in (await why(engine, task))["gate_budget"]
    check_invariants(dsn)


@pytest.mark.parametrize("score", [1.0, 0.0, None], ids=["passes", "rejects", "no verdict"])
async def test_what_a_judge_reports_counts_up_to_a_ceiling(
    dsn: str, clock: MovableClock, connection: psycopg.Connection, score: float | None
) -> None:
    """A wrong price doesn't use up the day: what is beyond is disputed until a person decides."""
    judge = Judge(score=score, cost=Decimal(1_000_000))
    async with node(dsn, clock, judge) as engine:
        await engine.limits.patch({"daily_budget_usd": 50})
        (task,) = await handed_in(engine, [NewTask("code", output=JUDGED, max_attempts=1)], budget="50")

        await validator(engine).run_once()

        booked = dict.fromkeys(["agent reserved", "dag reserved", "day reserved"], ZERO)
        assert ledgers(connection) == booked | dict.fromkeys(["agent", "dag", "day", "tasks"], Decimal(10))
        read = await engine.read.task(task.id)
        assert (read.cost_usd, read.disputed_usd) == (Decimal(10), Decimal(999_990))
        alerts = "SELECT data FROM lineshaft.events WHERE kind = 'alert'"
        (alert,) = [data for (data,) in connection.execute(alerts)]
        assert (alert["key"], alert["disputed_usd"], alert["gate"]) == ("disputed_cost", 999_990, "llm-judge")

        await engine.corrections.correct(
            task.id, CostCorrection(disputed=Disputed.REFUSE, reason="a wrong price")
        )

        read = await engine.read.task(task.id)
        assert (read.cost_usd, read.disputed_usd) == (Decimal(10), ZERO)
