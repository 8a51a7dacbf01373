"""Stopping: signals, grace, the second signal (R-081)."""

import asyncio
import signal
import sys
import time
from pathlib import Path

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, TaskContext
from lineshaft.model.states import Status
from tests.agent.agent_process import agent_process, program
from tests.agent.helpers import PATIENCE, attempts, engine_of, kinds, soon, until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_it_finish(
    shaft: Lineshaft, where: str, tmp_path: Path, number: signal.Signals
) -> None:
    go = tmp_path / "go"
    running, waiting = await shaft.submit_many([NewTask("work"), NewTask("work")])
    options = ("--wait-at", "between steps", "--wait-for", str(go), "--responsive")
    async with agent_process(where, tmp_path / "log", *options) as process:
        await process.reaches("between steps")
        process.send(number)
        # A signal that was sent has not arrived yet.
        await until(lambda: _has_status(shaft, "draining"))
        go.touch()
        await process.reaches("ended")
        assert await process.ends() == 0

    assert (await shaft.get(running)).status is Status.COMPLETED
    assert (await shaft.get(waiting)).status is Status.READY
    assert (await engine_of(shaft).fleet.read("first")).status == "offline"


@pytest.mark.slow("starts a program")
async def test_after_the_grace_tasks_are_released(shaft: Lineshaft, where: str, tmp_path: Path) -> None:
    submitted = await shaft.submit(NewTask("work"))
    options = ("--wait-at", "between steps", "--grace", "0.2", "--interval", "60")
    async with agent_process(where, tmp_path / "log", *options) as process:
        await process.reaches("between steps")
        process.send(signal.SIGTERM)
        assert await process.ends() == 0

    task = await shaft.get(submitted)
    assert (task.status, task.attempts) == (Status.READY, 0)
    assert (await kinds(shaft, task.id))[-2:] == ["task.released", "task.ready"]
    assert float(task.cost_usd) == 1.0


@pytest.mark.slow("starts a program")
async def test_a_second_signal_waits_for_nothing(shaft: Lineshaft, where: str, tmp_path: Path) -> None:
    submitted = await shaft.submit(NewTask("work"))
    options = ("--wait-at", "between steps", "--grace", "1000", "--interval", "60")
    async with agent_process(where, tmp_path / "log", *options) as process:
        await process.reaches("between steps")
        process.send(signal.SIGTERM)
        # The first one arrived once the agent reports that it drains.
        await until(lambda: _has_status(shaft, "draining"))
        process.send(signal.SIGTERM)
        assert await process.ends() == 0

    task = await shaft.get(submitted)
    assert (task.status, task.attempts) == (Status.READY, 0)


async def _has_status(shaft: Lineshaft, status: str, agent_id: str = "first") -> bool:
    return (await engine_of(shaft).fleet.read(agent_id)).status == status


PROGRAM = """
import asyncio, ctypes, logging, os, sys
import lineshaft.agent.executor
from lineshaft import Agent, AttemptCancelled, Lineshaft

logging.basicConfig(stream=sys.stdout, format="%(message)s")
agent = Agent("a", grace_sec=float(sys.argv[2]), heartbeat_interval_sec=60)

@agent.task("t")
{handler}

async def main():
    async with Lineshaft(sys.argv[1], max_connections=3) as shaft:
        await agent.run(shaft)

asyncio.run(main())
"""

PLAIN = PROGRAM.format(
    handler="""
def handler():
    print("started", flush=True)
    return sys.stdin.readline().strip()
"""
)

#: Its thread ends at once, but a busy machine may not let it.
LOOPING = PROGRAM.format(
    handler="""
def handler(ctx):
    lineshaft.agent.executor._PATIENCE_SEC = 60
    print("started", flush=True)
    while not ctx.cancelled:
        pass
    ctx.spend(1)
    ctx.check_cancelled()
"""
)

#: A call of C that a signal doesn't interrupt: no Python code runs in the main thread.
BLOCKED = PROGRAM.format(
    handler="""
async def handler(ctx):
    ctx.spend(1)
    ctx.state["page"] = 7
    print("blocked", flush=True)
    ctypes.CDLL(None).read(0, ctypes.create_string_buffer(1), 1)
    try:
        ctx.check_cancelled()
    except AttemptCancelled:
        print("went on until AttemptCancelled", flush=True)
        raise
    return "done"
"""
)


async def test_stop_from_another_thread_and_handlers_in_threads(shaft: Lineshaft) -> None:
    """A thread can't be stopped. Its task is released anyway, and its later result is ignored."""
    agent = Agent("a", grace_sec=0.1)
    started, stopped = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @agent.task("t")
    def handler() -> str:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(stopped.wait(), loop).result()
        return "too late"

    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    await soon(started)
    await asyncio.to_thread(agent.stop)

    async def is_back() -> bool:
        return (await shaft.get(submitted)).status is Status.READY

    await until(is_back)
    stopped.set()
    await asyncio.wait_for(running, PATIENCE)

    assert [past.outcome for past in await attempts(shaft, submitted.id)] == ["released"]
    assert "task.late_result" not in await kinds(shaft, submitted.id)


@pytest.mark.slow("starts a program")
async def test_a_handler_in_a_thread_ends_within_the_grace(shaft: Lineshaft, where: str) -> None:
    """Its task isn't released while its thread goes on."""
    handle = await shaft.submit(NewTask("t"))
    async with program(PLAIN, where, "1000") as process:
        await process.prints("started")
        process.send(signal.SIGTERM)
        await until(lambda: _has_status(shaft, "draining", "a"))
        await process.write("go")
        assert await process.ends() == 0

    task = await shaft.get(handle)
    assert (task.status, task.result) == (Status.COMPLETED, "go")


@pytest.mark.slow("starts a program")
async def test_a_handler_in_a_thread_has_time_to_stop(shaft: Lineshaft, where: str) -> None:
    """After the grace its context is cancelled; the task is released when the thread has ended."""
    handle = await shaft.submit(NewTask("t"))
    async with program(LOOPING, where, "0.1") as process:
        await process.prints("started")
        process.send(signal.SIGTERM)
        assert await process.ends() == 0

    task = await shaft.get(handle)
    assert (task.status, task.attempts, float(task.cost_usd)) == (Status.READY, 0, 1.0)


@pytest.mark.slow("waits for the end of a grace period")
async def test_a_handler_that_hangs_in_a_thread_does_not_keep_the_process(
    shaft: Lineshaft, where: str
) -> None:
    handle = await shaft.submit(NewTask("t"))
    async with program(PLAIN, where, "0.1") as process:
        await process.prints("started")
        process.send(signal.SIGTERM)
        assert await process.ends() == 0

    task = await shaft.get(handle)
    assert (task.status, task.attempts) == (Status.READY, 0)


@pytest.mark.slow("waits for the end of a grace period")
@pytest.mark.parametrize(
    ("grace", "sent"), [("0.1", [signal.SIGTERM]), ("1000", [signal.SIGTERM, signal.SIGINT])]
)
async def test_a_blocked_event_loop_does_not_keep_the_tasks(
    shaft: Lineshaft, where: str, connection: psycopg.Connection, grace: str, sent: list[signal.Signals]
) -> None:
    """The heartbeat thread releases them, after the grace or at the second signal."""
    handle = await shaft.submit(NewTask("t"))
    async with program(BLOCKED, where, grace) as process:
        await process.prints("blocked")
        for number in sent:
            process.send(number)

        await process.prints(f"a: has to stop, but a handler blocks its event loop. Released {handle.id}")
        assert (await shaft.get(handle)).status is Status.READY
        await process.write("go")
        await process.prints("went on until AttemptCancelled")
        assert await process.ends() == 0

    task = await shaft.get(handle)
    assert (task.status, task.attempts, float(task.cost_usd)) == (Status.READY, 0, 1.0)
    assert connection.execute("SELECT data FROM lineshaft.checkpoint").fetchall() == [({"page": 7},)]
    assert [past.outcome for past in await attempts(shaft, task.id)] == ["released"]
    assert "task.late_result" not in await kinds(shaft, task.id)


@pytest.mark.slow("starts a program")
async def test_a_handler_that_blocks_within_the_grace_completes(shaft: Lineshaft, where: str) -> None:
    handle = await shaft.submit(NewTask("t"))
    async with program(BLOCKED, where, "1000") as process:
        await process.prints("blocked")
        process.send(signal.SIGTERM)
        await process.write("go")
        assert await process.ends() == 0

    assert (await shaft.get(handle)).result == "done"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that end at once when they are cancelled have time for it on a busy machine too."""
    monkeypatch.setattr("lineshaft.agent.executor._PATIENCE_SEC", PATIENCE)


@pytest.mark.usefixtures("patient")
async def test_a_step_in_a_thread_is_waited_for(shaft: Lineshaft) -> None:
    """No other agent gets the task in the meantime, and what the step spends is booked."""
    agent = Agent("a", grace_sec=0.1)
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    log: list[str] = []

    async def turns() -> None:
        """Enough for a cancelled handler to end."""
        for _ in range(20):
            await asyncio.sleep(0)

    def pay(ctx: TaskContext) -> None:
        loop.call_soon_threadsafe(started.set)
        while not ctx.cancelled:
            time.sleep(0.001)
        asyncio.run_coroutine_threadsafe(turns(), loop).result()
        ctx.spend(1)
        log.append("step ended")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        try:
            await ctx.step("pay", pay, ctx)
        finally:
            log.append("handler ended")

    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    await soon(started)
    agent.stop(now=True)
    await asyncio.wait_for(running, PATIENCE)

    assert log == ["step ended", "handler ended"]
    task = await shaft.get(submitted)
    assert (task.status, task.attempts, float(task.cost_usd)) == (Status.READY, 0, 1.0)


async def test_a_cancelled_run_releases_its_tasks(shaft: Lineshaft) -> None:
    """F-29: a timeout or a task group cancels the agent: no claim is left."""
    agent = Agent("a")
    started = asyncio.Event()

    @agent.task("t")
    async def handler() -> None:
        started.set()
        await asyncio.Event().wait()

    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    await soon(started)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    task = await shaft.get(submitted)
    assert (task.status, task.attempts) == (Status.READY, 0)


async def test_a_result_within_the_grace_counts(shaft: Lineshaft) -> None:
    """A handler that returns its result when it is cancelled does not run again."""
    agent = Agent("a", grace_sec=0.1)
    started = asyncio.Event()

    @agent.task("t")
    async def handler() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "what I have so far"
        return "all"

    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    await soon(started)
    agent.stop()
    await asyncio.wait_for(running, PATIENCE)

    assert (await shaft.get(submitted)).result == "what I have so far"


@pytest.mark.usefixtures("patient")
async def test_a_handler_saves_a_checkpoint_when_it_is_stopped(shaft: Lineshaft) -> None:
    agent = Agent("a", grace_sec=0.1)
    started = asyncio.Event()
    seen: list[object] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        seen.append(ctx.last_checkpoint)
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await ctx.checkpoint({"page": 7})
            raise

    await shaft.submit(NewTask("t"))
    for _ in range(2):
        started.clear()
        running = asyncio.create_task(agent.run(shaft, handle_signals=False))
        await soon(started)
        agent.stop()
        await asyncio.wait_for(running, PATIENCE)

    assert seen == [None, {"page": 7}]


SIGNALS = """
import asyncio, signal, sys
from lineshaft import Agent, Lineshaft

seen = []
def mine(*_): seen.append("mine")
if sys.argv[2] == "own": signal.signal(signal.SIGTERM, mine)
if sys.argv[2] == "ignored": signal.signal(signal.SIGTERM, signal.SIG_IGN)

agent = Agent("a")

@agent.task("t")
async def handler():
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(0)
    return seen

async def main():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with Lineshaft(sys.argv[1]) as shaft:
        running = asyncio.create_task(agent.run(shaft))
        task = (await shaft.list()).items[0]
        await shaft.wait(task, 60)
        if sys.argv[2] != "default":
            assert not running.done()
            agent.stop()
        await running
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before

asyncio.run(main())
"""


@pytest.mark.slow("starts programs")
@pytest.mark.parametrize(("who", "seen"), [("default", []), ("own", ["mine"]), ("ignored", [])])
async def test_signals_that_the_program_handles_are_left_alone(dsn: str, who: str, seen: list[str]) -> None:
    async with Lineshaft(dsn) as shaft:
        handle = await shaft.submit(NewTask("t"))
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", SIGNALS, dsn, who)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        assert await handle.result(PATIENCE) == seen
