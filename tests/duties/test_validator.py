"""The validator: slow gates run once each, by real processes, and again when one dies."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lineshaft.artifacts import open_store
from lineshaft.checks.command import CheckCommand
from lineshaft.checks.llm_judge import LLMJudge
from lineshaft.checks.registry import Checks
from lineshaft.checks.verdict import CandidateOutput, NoVerdict, Verdict
from lineshaft.clock import MovableClock
from lineshaft.duties.loop import run
from lineshaft.duties.validator import Validator
from lineshaft.engine.artifacts import artifacts
from lineshaft.engine.engine import Engine
from lineshaft.engine.review.gated_output import GatedOutput
from lineshaft.integrations.llm.configuration import LLMConfig
from lineshaft.model.tasks import Gate, NewTask, OutputContract
from lineshaft.settings import Settings
from lineshaft.types import NewAgent
from lineshaft.types.data_refs import DataRef
from lineshaft.types.work import ClaimedTask, Completion, Moved
from tests.engine.artifacts.helpers import put
from tests.gate_verdicts import gated_attempts
from tests.invariants import check_invariants
from tests.llm_server import USAGE, Reply, llm_server
from tests.processes import gone
from tests.proxy import proxied
from tests.world import ref

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def node(dsn: str, clock: MovableClock, checks: Checks) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, max_connections=4, checks=checks) as engine:
        yield engine
    check_invariants(dsn)


async def handed_in(
    engine: Engine, *gates: Gate, n: int = 1, data: bytes = b'"output"', **fields: Any
) -> list[ClaimedTask]:
    """Complete tasks whose outputs then wait for their first gate."""
    agent = await engine.fleet.register(NewAgent(max_concurrent_tasks=100))
    task = NewTask("code", output=OutputContract(validation=gates), **fields)
    await engine.submission.submit([task] * n)
    tasks = (await engine.claims.claim(agent.id, 1, limit=n, start=True)).tasks
    moved = await engine.work.complete([Completion(ref(task), data) for task in tasks])
    assert {answer.status for answer in moved} == {"VALIDATING"}
    return tasks


def validator(engine: Engine, **options: Any) -> Validator:
    return Validator(engine.gates, engine.approvals, **options)


def statuses(connection: psycopg.Connection) -> dict[str, int]:
    return dict(
        connection.execute("SELECT status::text, count(*) FROM lineshaft.tasks GROUP BY 1").fetchall()
    )


async def test_a_command_decides(
    dsn: str, clock: MovableClock, connection: psycopg.Connection, tmp_path: Path
) -> None:
    """R-096."""
    good = CheckCommand((sys.executable, "-c", "pass"), directory=tmp_path)
    bad = CheckCommand((sys.executable, "-c", "import sys; sys.exit('two tests failed')"), directory=tmp_path)
    async with node(dsn, clock, Checks(commands={"good": good, "bad": bad})) as engine:
        await handed_in(engine, Gate("test-pass", {"command": "good"}))
        (refused,) = await handed_in(engine, Gate("test-pass", {"command": "bad"}), max_attempts=1)

        assert await validator(engine).run_once() == {"approvals announced": 0, "passed": 1, "rejected": 1}

        assert statuses(connection) == {"COMPLETED": 1, "DEAD_LETTERED": 1}
        task = await engine.read.task(refused.id)
        assert task.failure_category == "invalid_output"
        assert task.failure_reason == (
            "test-pass: the command bad ended with exit code 1; last output: two tests failed"
        )
        assert await validator(engine).run_once() == {"approvals announced": 0}


async def test_a_judge_decides_and_its_cost_is_charged(
    dsn: str, clock: MovableClock, connection: psycopg.Connection
) -> None:
    """R-097: score, reasons, model and cost are recorded."""
    with llm_server() as server:
        said = {"score": 0.4, "reasons": ["too dry"]}
        server.reply = Reply(said, usage=USAGE | {"cost": 0.05}, model="gpt-4o-mini")
        checks = Checks(judge=LLMJudge(LLMConfig(model="gpt-x", url=server.url)))
        async with node(dsn, clock, checks) as engine:
            (task,) = await handed_in(engine, Gate("llm-judge", {"criteria": "Is it fun?"}), max_attempts=1)

            assert (await validator(engine).run_once())["rejected"] == 1

            (attempt,) = await gated_attempts(engine, task.id)
            (verdict,) = attempt.verdicts
            assert (verdict.score, verdict.model, verdict.cost_usd) == (0.4, "gpt-4o-mini", 0.05)
            assert verdict.reasons == ["the judge's score is 0.4, below 0.7", "too dry"]
            assert (await engine.read.task(task.id)).cost_usd == Decimal("0.05")
            assert connection.execute("SELECT spent_usd FROM lineshaft.agent").fetchone() == (
                Decimal("0.05"),
            )


async def test_an_unreachable_judge_is_asked_again_later(
    dsn: str, clock: MovableClock, connection: psycopg.Connection
) -> None:
    """No attempt fails; each pause is longer, and finally there is an alert."""
    with llm_server() as server:
        server.reply = Reply("busy", status=503)
        judge = LLMJudge(LLMConfig(model="m", url=server.url))
        async with node(dsn, clock, Checks(judge=judge)) as engine:
            (task,) = await handed_in(engine, Gate("llm-judge", {"criteria": "Is it fun?"}))
            for pause in (5, 10, 20, 40, 80):
                assert (await validator(engine).run_once())["without a verdict"] == 1
                clock.advance(pause - 1)
                assert "without a verdict" not in await validator(engine).run_once()
                clock.advance(2)
            (attempt,) = await gated_attempts(engine, task.id)
            assert (attempt.waits_for, attempt.runs) == ("llm-judge", 5)
            assert "HTTP 503" in (attempt.last_error or "")
            alerts = connection.execute(
                "SELECT count(*) FROM lineshaft.events WHERE kind = 'alert'"
            ).fetchone()
            assert alerts == (1,)

            server.reply = Reply({"score": 1})
            assert (await validator(engine).run_once())["passed"] == 1

            row = connection.execute("SELECT attempts, status::text FROM lineshaft.task_end").fetchone()
            assert row == (0, "COMPLETED")


@pytest.mark.slow("many nodes")
async def test_many_validators_run_each_gate_once(
    dsn: str, clock: MovableClock, connection: psycopg.Connection
) -> None:
    """Safe on any number of nodes."""
    ran: list[str] = []

    async def count(_: Any, output: CandidateOutput) -> bool:
        ran.append(output.task_id)
        await asyncio.sleep(0)
        return True

    checks = Checks()
    checks.register("count", count)
    async with node(dsn, clock, checks) as one, Engine(dsn, clock=clock, checks=checks) as two:
        tasks = await handed_in(one, Gate("count"), Gate("count"), n=30)

        results = await asyncio.gather(
            *(validator(e, concurrency=3).run_once() for e in (one, two, one, two))
        )

        assert sorted(ran) == sorted([task.id for task in tasks] * 2)
        assert sum(counts.get("passed", 0) for counts in results) == 60
        assert statuses(connection) == {"COMPLETED": 30}


async def test_slow_checks_run_concurrently_up_to_the_limit(dsn: str, clock: MovableClock) -> None:
    running = most = 0
    together = asyncio.Barrier(3)

    async def meet(_: Any, __: CandidateOutput) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await together.wait()
        running -= 1
        return True

    checks = Checks()
    checks.register("meet", meet)
    async with node(dsn, clock, checks) as engine:
        await handed_in(engine, Gate("meet"), n=9)

        assert (await validator(engine, concurrency=3).run_once())["passed"] == 9

    assert most == 3


async def test_a_lease_is_renewed_while_a_check_runs(dsn: str, clock: MovableClock) -> None:
    """A check that takes longer than its lease runs once. The clock moves with each renewal."""
    begun = 0
    renewed = asyncio.Event()
    taken_by_others: list[GatedOutput] = []

    async def slow(_: Any, __: CandidateOutput) -> bool:
        nonlocal begun
        begun += 1
        await renewed.wait()
        return True

    checks = Checks()
    checks.register("slow", slow)
    async with node(dsn, clock, checks) as engine:
        await handed_in(engine, Gate("slow"))
        renew, times = engine.gates.renew, 0

        async def counted(outputs: Any, *, lease_sec: float) -> set[str]:
            nonlocal times
            clock.advance(0.1)
            ours = await renew(outputs, lease_sec=lease_sec)
            taken_by_others.extend(await engine.gates.take(limit=5, lease_sec=60))
            times += 1
            if times == 4:  # a third of the lease each: without renewal it would have expired
                renewed.set()
            return ours

        engine.gates.renew = counted  # type: ignore[method-assign]

        assert (await validator(engine, lease_sec=0.3).run_once())["passed"] == 1

    assert (begun, taken_by_others) == (1, [])


async def test_the_check_of_a_cancelled_task_is_cancelled(dsn: str, clock: MovableClock) -> None:
    ended = asyncio.Event()
    started = asyncio.Event()

    async def endless(_: Any, __: CandidateOutput) -> bool:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return True

    checks = Checks()
    checks.register("endless", endless)
    async with node(dsn, clock, checks) as engine:
        (task,) = await handed_in(engine, Gate("endless"))
        work = asyncio.create_task(validator(engine, lease_sec=0.3).run_once())
        await started.wait()
        await engine.cancel.cancel(task.id, "not needed")

        assert (await work)["cancelled"] == 1

    assert ended.is_set()


async def test_a_stopping_validator_ends_its_leases(dsn: str, clock: MovableClock) -> None:
    """Another one needn't wait for the lease."""
    started = asyncio.Event()

    async def endless(_: Any, __: CandidateOutput) -> bool:
        started.set()
        await asyncio.Event().wait()
        return True

    checks = Checks()
    checks.register("endless", endless)
    async with node(dsn, clock, checks) as engine:
        await handed_in(engine, Gate("endless"))
        stop = asyncio.Event()
        duty = asyncio.create_task(run(validator(engine), stop))
        await started.wait()
        stop.set()
        await duty

        (output,) = await engine.gates.take(limit=5, lease_sec=60)
        assert output.gate_runs == 2


async def test_it_announces_tasks_that_wait_for_people(dsn: str, clock: MovableClock) -> None:
    async with node(dsn, clock, Checks()) as engine:
        await engine.submission.submit([NewTask("errand", required_capabilities=["human"])] * 2)

        assert await validator(engine).run_once() == {"approvals announced": 2}


async def test_a_check_without_a_verdict_may_cost_money(dsn: str, clock: MovableClock) -> None:
    async def undecided(_: Any, __: CandidateOutput) -> Verdict:
        raise NoVerdict("hm", cost_usd=Decimal("0.1"))

    checks = Checks()
    checks.register("undecided", undecided)
    async with node(dsn, clock, checks) as engine:
        (task,) = await handed_in(engine, Gate("undecided"))
        await validator(engine).run_once()

        assert (await engine.read.task(task.id)).cost_usd == Decimal("0.1")


# Crashes.


@pytest.mark.slow("starts processes")
async def test_a_validator_that_dies_is_replaced(dsn: str, tmp_path: Path) -> None:
    """A real process, killed in the middle of a check: the check is repeated, and no attempt fails.

    Its command and that command's processes are killed: otherwise two would work in one directory.
    """
    reported = tmp_path / "reported"
    os.mkfifo(reported)
    endless = (
        "import os, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}'); time.sleep(600)"
    )
    # The other one lives by the database's clock, and keeps its lease however busy the machine is.
    clock = MovableClock(datetime.now(UTC))
    checks = Checks(commands={"test": CheckCommand((sys.executable, "-c", "pass"))})
    async with Engine(dsn, clock=clock, checks=checks) as engine:
        (task,) = await handed_in(engine, Gate("test-pass", {"command": "test"}))
        doomed = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.duties.validator_program", dsn, sys.executable, "-c", endless, str(reported)),
            cwd=ROOT,
        )
        command, child = map(int, (await asyncio.to_thread(reported.read_text)).split())
        assert await validator(engine).run_once() == {"approvals announced": 0}, "it is the other one's"
        doomed.kill()
        await doomed.wait()

        await asyncio.wait_for(gone(command), 60)
        await asyncio.wait_for(gone(child), 60)
        assert await validator(engine).run_once() == {"approvals announced": 0}, "its lease lasts"
        clock.advance(3_600)
        assert (await validator(engine).run_once())["passed"] == 1

        found = await engine.read.task(task.id)
        assert (found.status, found.attempts) == ("COMPLETED", 0)
        assert [attempt.outcome for attempt in await engine.read.attempts(task.id)] == ["completed"]
    check_invariants(dsn)


async def test_a_long_check_does_not_block_others(dsn: str, clock: MovableClock) -> None:
    begun, end, quick_done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def long(_: Any, __: CandidateOutput) -> bool:
        begun.set()
        await end.wait()
        return True

    async def quick(_: Any, __: CandidateOutput) -> bool:
        quick_done.set()
        return True

    checks = Checks()
    checks.register("long", long)
    checks.register("quick", quick)
    async with node(dsn, clock, checks) as engine:
        await handed_in(engine, Gate("long"))
        running = asyncio.create_task(validator(engine, interval_sec=0.05).run_once())
        await begun.wait()
        await handed_in(engine, Gate("quick"))
        await quick_done.wait()
        end.set()
        await running


async def test_a_failing_check_does_not_end_others(dsn: str, clock: MovableClock) -> None:
    """A check may have cost money: it isn't cancelled because the verdict of another can't be recorded."""
    both = asyncio.Barrier(2)
    failed = asyncio.Event()
    begun = 0

    async def meet(_: Any, __: CandidateOutput) -> bool:
        nonlocal begun
        begun += 1
        if await both.wait() == 0:
            await failed.wait()
        return True

    checks = Checks()
    checks.register("meet", meet)
    async with node(dsn, clock, checks) as engine:
        await handed_in(engine, Gate("meet"), n=2)
        settle = engine.gates.settle

        async def fail_first(output: GatedOutput, verdict: Verdict) -> Moved:
            if not failed.is_set():
                asyncio.get_running_loop().call_soon(failed.set)
                raise RuntimeError("a defect")
            return await settle(output, verdict)

        engine.gates.settle = fail_first  # type: ignore[method-assign]

        counts = await validator(engine).run_once()

    assert (begun, counts["passed"], counts["failed"]) == (2, 1, 1)


async def test_an_outage_does_not_end_checks(dsn: str, connection: psycopg.Connection) -> None:
    begun = 0
    started, end = asyncio.Event(), asyncio.Event()

    async def slow(_: Any, __: CandidateOutput) -> bool:
        nonlocal begun
        begun += 1
        started.set()
        await end.wait()
        return True

    checks = Checks()
    checks.register("slow", slow)
    async with proxied(dsn) as (through, proxy), Engine(through, checks=checks) as engine:
        await handed_in(engine, Gate("slow"))
        running = asyncio.create_task(validator(engine, interval_sec=0.05).run_once())
        await started.wait()
        proxy.cut()
        await proxy.refuses(2)
        proxy.restore()
        end.set()

        assert (await running)["passed"] == 1

    assert begun == 1
    assert statuses(connection) == {"COMPLETED": 1}


async def test_data_that_is_too_large_for_checks_is_rejected(
    dsn: str, clock: MovableClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is found only by the validator; a person may still decide about it."""
    monkeypatch.setattr(artifacts, "MAX_DATA_BYTES", 3)
    good = CheckCommand((sys.executable, "-c", "pass"), directory=tmp_path)
    store = open_store(Settings(artifacts=str(tmp_path / "artifacts")))
    checks = Checks(commands={"good": good})
    async with Engine(dsn, clock=clock, max_connections=4, checks=checks, store=store) as engine:
        made = await put(engine, b'"large"')
        reference = DataRef(data_ref=made.ref, size=made.size).json
        command, person = Gate("test-pass", {"command": "good"}), Gate("human")
        (checked,) = await handed_in(engine, command, max_attempts=1, data=reference)
        (reviewed,) = await handed_in(engine, person, max_attempts=1, data=reference)

        assert await validator(engine).run_once() == {"approvals announced": 0, "rejected": 1}

        found = await engine.read.task(checked.id)
        assert found.failure_category == "invalid_output"
        assert "The data is 7 bytes, more than 3." in str(found.failure_reason)
        assert (await engine.read.task(reviewed.id)).status == "VALIDATING"
