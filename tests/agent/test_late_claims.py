"""Late answers and frozen processes: what others have done by then isn't paid for twice.

Agents judge by their own clock, so most of these tests move that clock. The others hold real answers and
freeze real processes until another agent has done the work.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, SyncTaskContext, TaskContext
from lineshaft.model.states import Status
from tests.agent.agent_process import AgentProcess, CommandAgent, agent_process, command_agent, program
from tests.agent.agent_program import Points, make_agent
from tests.agent.helpers import (
    AT_ONCE,
    PATIENCE,
    at_work,
    attempts,
    drain,
    ended,
    engine_of,
    kinds,
    lose_claim,
    reaper,
    until,
)
from tests.proxy import Proxy, proxied, proxied_url
from tests.races.helpers import blocked_by, held

#: Of agents in these tests: longer than any of them takes, so that only the clock ends it.
INTERVAL_SEC = 60.0
LEASE_SEC = 3 * INTERVAL_SEC


class LeaseClock:
    """The clock of leases, which a test moves ahead."""

    def __init__(self) -> None:
        self.ahead_sec = 0.0

    def clock_gettime(self, which: int) -> float:
        return time.clock_gettime(which) + self.ahead_sec

    def pass_lease(self) -> None:
        self.ahead_sec += LEASE_SEC + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LeaseClock:
    moved = LeaseClock()
    monkeypatch.setattr("lineshaft.clock.time", moved)
    return moved


# The clock of the agent.


@pytest.mark.parametrize("way", ["async", "sync"])
async def test_a_handler_that_would_start_too_late_hands_its_task_back(
    shaft: Lineshaft, clock: LeaseClock, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """No attempt is used while the server still holds the task for this agent."""
    agent = Agent("a", heartbeat_interval_sec=INTERVAL_SEC)
    paid: list[int] = []

    class Prompt(msgspec.Struct):
        text: str

        def __post_init__(self) -> None:
            # The last thing that happens before the handler runs, as long as an import may take.
            if not clock.ahead_sec:
                clock.pass_lease()

    if way == "async":

        @agent.task("t")
        async def handler(ctx: TaskContext, prompt: Prompt) -> str:
            paid.append(ctx.epoch)
            return prompt.text
    else:

        @agent.task("t")
        def handler_in_thread(ctx: SyncTaskContext, prompt: Prompt) -> str:
            paid.append(ctx.epoch)
            return prompt.text

    task = await shaft.submit(NewTask("t", spec={"prompt": {"text": "x"}}))
    with caplog.at_level("INFO", "lineshaft.agent"):
        await drain(shaft, agent)

    done = await shaft.get(task)
    assert (done.status, done.attempts, paid) == (Status.COMPLETED, 0, [2])
    assert [past.outcome for past in await attempts(shaft, task.id)] == ["released", "completed"]
    assert "its lease lasts 180 s; if this happens often, raise heartbeat_interval_sec" in caplog.text


async def test_what_was_claimed_together_is_looked_at_one_by_one(shaft: Lineshaft, clock: LeaseClock) -> None:
    """The first handler takes longer than a lease: those that wait for the event loop don't start."""
    agent = Agent("a", heartbeat_interval_sec=INTERVAL_SEC, max_concurrent_tasks=3)
    paid: list[int] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        paid.append(ctx.epoch)
        if not clock.ahead_sec:
            clock.pass_lease()

    tasks = await shaft.submit_many([NewTask("t") for _ in range(3)])
    await drain(shaft, agent)

    assert paid == [1, 2, 2]
    assert [(await shaft.get(task)).attempts for task in tasks] == [0, 0, 0]


@pytest.mark.parametrize("way", ["async", "sync"])
@pytest.mark.parametrize("lost", [True, False])
async def test_a_step_after_a_pause_waits_for_a_heartbeat(
    shaft: Lineshaft, clock: LeaseClock, connection: psycopg.Connection, way: str, lost: bool
) -> None:
    """What nobody has taken goes on; what others have got is not paid for again."""
    agent = Agent("a", heartbeat_interval_sec=INTERVAL_SEC)
    paid: list[str] = []
    between, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    if way == "async":

        @agent.task("t")
        async def handler(ctx: TaskContext) -> str:
            await ctx.step("one", paid.append, "one")
            if ctx.epoch == 1:
                clock.pass_lease()
                between.set()
                await go.wait()
            await ctx.step("two", paid.append, f"two of {ctx.epoch}")
            return "done"
    else:

        @agent.task("t")
        def handler_in_thread(ctx: SyncTaskContext) -> str:
            ctx.step("one", paid.append, "one")
            if ctx.epoch == 1:
                clock.pass_lease()
                loop.call_soon_threadsafe(between.set)
                asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
            ctx.step("two", paid.append, f"two of {ctx.epoch}")
            return "done"

    task = await shaft.submit(NewTask("t", retry=AT_ONCE))
    async with at_work(agent, shaft=shaft):
        await asyncio.wait_for(between.wait(), PATIENCE)
        if lost:
            await lose_claim(shaft, connection, task.id)
        go.set()
        done = await ended(shaft, task.id)

    assert (done.result, done.attempts) == ("done", 1 if lost else 0)
    assert paid == ["one", "two of 2" if lost else "two of 1"]


# Real answers and real processes.


PROGRAM = """
import asyncio, sys
from lineshaft import Agent, Lineshaft, TaskContext

agent = Agent("late", heartbeat_interval_sec=0.5, max_concurrent_tasks=1)

@agent.task("t")
async def pay(ctx: TaskContext) -> str:
    with open(sys.argv[2], "a") as paid:
        print(ctx.id, ctx.epoch, file=paid)
    return "late"

async def main() -> None:
    async with Lineshaft(sys.argv[1], max_connections=3) as shaft:
        await agent.run(shaft)

asyncio.run(main())
"""


class Line:
    """The way of a process to the queue, on which answers may wait."""

    def __init__(self, where: str, proxy: Proxy, heartbeats: bytes) -> None:
        """`heartbeats`: what their connection begins with, and no other."""
        self.where = where
        self._proxy = proxy
        self._heartbeats = heartbeats

    def hold(self) -> None:
        self._proxy.hold_answers(but=self._heartbeats)

    def let_go(self) -> None:
        self._proxy.restore()


@pytest.fixture
async def line(where: str, transport: str) -> AsyncIterator[Line]:
    leading = proxied(where) if transport == "database" else proxied_url(where)
    async with leading as (through, proxy):
        heartbeats = b"lineshaft heartbeats" if transport == "database" else b"/v1/work/heartbeat"
        yield Line(through, proxy, heartbeats)
        proxy.restore()


async def registered(dsn: str) -> None:
    async def is_there() -> bool:
        return look.execute("SELECT FROM lineshaft.instance").fetchone() is not None

    with psycopg.connect(dsn, autocommit=True) as look:
        await until(is_there)


async def do_it_elsewhere(shaft: Lineshaft, log: Path, task_id: str) -> None:
    """Another agent does the task, once it was taken back."""
    other = Agent("other")

    @other.task("t")
    async def pay(ctx: TaskContext) -> str:
        with log.open("a") as paid:
            print(ctx.id, ctx.epoch, file=paid)
        return "other"

    async with at_work(other, shaft=shaft):
        assert (await ended(shaft, task_id)).result == "other"


@pytest.mark.slow("starts a process, and waits for the end of a lease")
@pytest.mark.parametrize("fault", ["frozen", "delayed"])
@pytest.mark.parametrize("kind", ["python", "exec"])
async def test_a_claim_that_another_agent_has_done_by_then_is_not_paid_twice(  # noqa: PLR0917
    shaft: Lineshaft, line: Line, dsn: str, tmp_path: Path, fault: str, kind: str
) -> None:
    """The process is stopped with SIGSTOP, or its answer is late, until its lease is over."""
    log = tmp_path / "paid"
    script = f"echo $LINESHAFT_TASK_ID $LINESHAFT_TASK_EPOCH >>{log}; echo late"
    started = (
        program(PROGRAM, line.where, str(log))
        if kind == "python"
        else command_agent(line.where, tmp_path, script, "--heartbeat", "0.5", "--slots", "1")
    )
    async with started as process, reaper(dsn):
        await registered(dsn)
        with (
            held(dsn, "SELECT FROM lineshaft.instance FOR UPDATE") as holder,
            psycopg.connect(dsn, autocommit=True) as look,
        ):
            task = await shaft.submit(NewTask("t", retry=AT_ONCE))
            await asyncio.wait_for(blocked_by(look, holder), PATIENCE)
            stop(process) if fault == "frozen" else line.hold()
            holder.rollback()
        await do_it_elsewhere(shaft, log, task.id)
        go_on(process) if fault == "frozen" else line.let_go()
        # It has one slot: it has dealt with the first task when it has done the next.
        after = await shaft.submit(NewTask("t", retry=AT_ONCE))
        assert str((await ended(shaft, after.id)).result).strip() == "late"

    paid = log.read_text().splitlines()
    assert [line for line in paid if line.startswith(task.id)] == [f"{task.id} 2"]
    assert [past.error for past in await attempts(shaft, task.id)] == ["heartbeat_timeout", None]


def stop(process: AgentProcess | CommandAgent) -> None:
    process.send(signal.SIGSTOP)


def go_on(process: AgentProcess | CommandAgent) -> None:
    process.send(signal.SIGCONT)


@pytest.mark.slow("starts a process, and waits for the end of a lease")
async def test_a_frozen_process_does_not_pay_for_the_next_step(
    shaft: Lineshaft, where: str, dsn: str, tmp_path: Path
) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    task = await shaft.submit(NewTask("work", retry=AT_ONCE, max_attempts=2))
    options = ("--wait-at", "between steps", "--wait-for", str(go), "--interval", "0.5")
    async with agent_process(where, log, *options) as process, reaper(dsn):
        await process.reaches("between steps")
        stop(process)
        second = make_agent("second", Points(log), interval=60, grace=5)
        async with at_work(second, shaft=shaft):
            assert (await ended(shaft, task.id)).result == {"sum": 3, "by": "second"}
        go.touch()
        go_on(process)
        process.send(signal.SIGTERM)
        assert await process.ends() == 0

    assert log.read_text().splitlines().count("in another step") == 1
    assert (await shaft.get(task)).cost_usd == 3
    assert "task.late_result" not in await kinds(shaft, task.id)
    assert len(await engine_of(shaft).read.steps(task.id)) == 2


async def test_a_task_with_a_shorter_interval_than_its_agent_is_kept(
    shaft: Lineshaft, connection: psycopg.Connection
) -> None:
    """Its lease lasts for three of its own intervals."""
    agent = Agent("a", heartbeat_interval_sec=INTERVAL_SEC)
    renewed: set[object] = set()

    async def is_renewed_often() -> bool:
        row = connection.execute("SELECT heartbeat_at FROM lineshaft.task_live").fetchone()
        connection.commit()
        renewed.add(row)
        return len(renewed) > 4

    @agent.task("t")
    async def handler() -> None:
        await until(is_renewed_often)

    task = await shaft.submit(NewTask("t", heartbeat_interval_sec=1))
    await drain(shaft, agent)
    assert (await shaft.get(task)).attempts == 0
