"""The loop: limits, wake-ups, batches, registration."""

import asyncio
import sys
import threading
import time
from typing import Any

import psycopg
import pytest

from lineshaft import Agent, Cancel, Lineshaft, NewTask, RetrySpec, Snooze, SyncTaskContext, TaskContext
from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidInputError, LineshaftError, SupersededError
from lineshaft.model.states import Status
from lineshaft.types import NewAgent
from tests.agent.helpers import (
    AT_ONCE,
    PATIENCE,
    at_work,
    attempts,
    drain,
    engine_of,
    kinds,
    one,
    soon,
    with_heartbeats,
)


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_time_limit_ends_the_attempt(shaft: Lineshaft, style: str) -> None:
    agent = Agent("a")
    released = threading.Event()

    @agent.task("async", time_limit_sec=0.1)
    async def asynchronous() -> None:
        await asyncio.Event().wait()

    @agent.task("sync", time_limit_sec=0.1)
    def synchronous(ctx: SyncTaskContext) -> None:
        while not ctx.cancelled:
            released.wait(0.01)

    task = await one(shaft, agent, style, max_attempts=1)

    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "timeout")
    assert task.failure_reason == "Timed out after 0.1 s (handler time limit)"


async def test_the_task_s_own_limit_counts_too(shaft: Lineshaft) -> None:
    """R-074."""
    agent = Agent("a")

    @agent.task("t")
    async def handler() -> None:
        await asyncio.Event().wait()

    task = await one(shaft, agent, "t", max_attempts=1, max_duration_sec=0.2)

    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "timeout")
    assert task.failure_reason == "Timed out after 0.2 s (max_duration_sec)"


async def test_the_smaller_of_two_limits_is_named(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t", time_limit_sec=60)
    async def handler() -> None:
        await asyncio.Event().wait()

    task = await one(shaft, agent, "t", max_attempts=1, max_duration_sec=0.2)

    assert task.failure_reason == "Timed out after 0.2 s (max_duration_sec)"


async def test_a_handler_that_ignores_its_cancellation_is_abandoned(shaft: Lineshaft) -> None:
    agent = Agent("a", max_concurrent_tasks=1)
    go = asyncio.Event()

    @agent.task("stubborn", time_limit_sec=0.1)
    async def stubborn() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    submitted = await shaft.submit(NewTask("stubborn", max_attempts=1))
    async with at_work(agent, shaft=shaft):
        task = await shaft.wait(submitted, PATIENCE)
        go.set()

    assert task.failure_category == "timeout"


async def test_work_that_comes_later_wakes_the_agent(shaft: Lineshaft) -> None:
    """R-077, R-075: within a moment, though polls are 30 s apart; also for a new task type."""
    agent = Agent("a")
    agent.task("old")(lambda: None)
    agent.task("new")(lambda: None)
    await one(shaft, agent, "old")

    async with at_work(agent, shaft=shaft):
        for task_type in ("old", "new", "new"):
            started = time.monotonic()
            await shaft.wait(await shaft.submit(NewTask(task_type)), PATIENCE)
            assert time.monotonic() - started < 20


async def test_one_wake_up_many_agents(shaft: Lineshaft) -> None:
    """An agent whose claim is full passes the wake-up on to the next."""
    agents = [Agent(f"a{n}", max_concurrent_tasks=1) for n in range(4)]
    all_busy, busy = asyncio.Event(), set()

    for agent in agents:

        @agent.task("t")
        async def handler(ctx: TaskContext) -> None:
            busy.add(ctx.agent_id)
            if len(busy) == 4:
                all_busy.set()
            await all_busy.wait()

    async with at_work(*agents, shaft=shaft):
        submitted = await shaft.submit_many([NewTask("t") for _ in range(4)])
        await asyncio.wait_for(all_busy.wait(), PATIENCE)
        for task in submitted:
            await shaft.wait(task, PATIENCE)


async def test_it_claims_only_what_it_can_do(shaft: Lineshaft) -> None:
    agent = Agent("a", capabilities=["python"])
    agent.task("t")(lambda: None)
    able = await shaft.submit(NewTask("t", required_capabilities=["python"]))
    unable = await shaft.submit(NewTask("t", required_capabilities=["web-search"]))
    other = await shaft.submit(NewTask("other"))

    await drain(shaft, agent)

    assert [(await shaft.get(task)).status for task in (able, unable, other)] == [
        "COMPLETED",
        "READY",
        "READY",
    ]


async def test_snooze_and_cancel(shaft: Lineshaft) -> None:
    agent = Agent("a")
    runs: list[int] = []

    @agent.task("snooze")
    async def snooze(ctx: TaskContext) -> object:
        runs.append(ctx.attempt)
        ctx.spend(0.25)
        return Snooze(0.05) if len(runs) < 3 else "awake"

    @agent.task("cancel")
    async def cancel() -> None:
        raise Cancel("not needed")

    submitted = await shaft.submit(NewTask("snooze"))
    async with at_work(agent, shaft=shaft):
        task = await shaft.wait(submitted, PATIENCE)
    assert (task.result, task.attempts, float(task.cost_usd)) == ("awake", 0, 0.75)
    assert runs == [1, 1, 1]

    doomed = await shaft.submit(NewTask("cancel"))
    below = await shaft.submit(NewTask("cancel", depends_on=[doomed.id]))
    await drain(shaft, agent)
    task = await shaft.get(doomed)
    assert (task.status, task.cancel_reason) == (Status.CANCELLED, "not needed")
    assert (await shaft.get(below)).status is Status.CANCELLED


async def test_draining_leaves_tasks_for_later(shaft: Lineshaft) -> None:
    agent = Agent("a")
    agent.task("snooze")(lambda: Snooze(1000))

    @agent.task("fail")
    async def fail() -> None:
        raise RuntimeError

    assert (await one(shaft, agent, "snooze")).status is Status.PENDING
    assert (await one(shaft, agent, "fail")).status is Status.RETRYING


async def test_draining_waits_for_quick_retries(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> int:
        if ctx.attempt < 3:
            raise RuntimeError
        return ctx.attempt

    quick = RetrySpec(strategy="fixed", initial_delay_sec=0.2, jitter=False)
    assert (await one(shaft, agent, "t", retry=quick)).result == 3


async def test_progress_is_seen_while_it_runs(shaft: Lineshaft) -> None:
    agent = Agent("a")
    go = asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        ctx.progress({"percent": 40})
        await go.wait()

    submitted = await shaft.submit(NewTask("t"))
    async with at_work(agent, shaft=shaft):
        async for event in shaft.events(None, task_id=submitted.id, kinds=["task.progress"]):
            assert event.data == {"percent": 40}
            break
        assert (await shaft.get(submitted)).progress == {"percent": 40}
        go.set()
        await shaft.wait(submitted, PATIENCE)


async def test_a_superseded_agent_stops_and_does_not_come_back(shaft: Lineshaft) -> None:
    agent = Agent("a", instance="x")
    started, cancelled = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        started.set()
        try:
            async with with_heartbeats(ctx):
                await asyncio.Event().wait()
        finally:
            cancelled.set()

    submitted = await shaft.submit(NewTask("t", retry=AT_ONCE, max_attempts=5))
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    await soon(started)
    rival = await engine_of(shaft).fleet.register(NewAgent(id="a", instance="x"))

    with pytest.raises(SupersededError, match="'a'"):
        await asyncio.wait_for(running, PATIENCE)

    assert cancelled.is_set()
    view = await engine_of(shaft).fleet.read("a")
    assert (view.incarnation, view.status) == (rival.incarnation, "active")
    assert (await attempts(shaft, submitted.id))[0].error == "agent_restarted"


async def test_an_idle_agent_notices_that_it_was_superseded(shaft: Lineshaft) -> None:
    agent = Agent("a", instance="x", heartbeat_interval_sec=0.2)
    agent.task("t")(lambda: None)
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    async for event in shaft.events(None, kinds=["agent.registered"]):
        assert event.agent_id == "a"
        break

    await engine_of(shaft).fleet.register(NewAgent(id="a", instance="x"))

    with pytest.raises(SupersededError):
        await asyncio.wait_for(running, PATIENCE)


async def test_it_runs_once_at_a_time(shaft: Lineshaft) -> None:
    agent = Agent("a")
    agent.task("t")(lambda: None)
    async with at_work(agent, shaft=shaft):
        await asyncio.sleep(0)
        with pytest.raises(LineshaftError, match="already running"):
            await agent.run(shaft)


async def test_invalid_registrations_are_refused(shaft: Lineshaft) -> None:
    agent = Agent("a", max_concurrent_tasks=0)
    agent.task("t")(lambda: None)
    with pytest.raises(InvalidInputError, match="max_concurrent_tasks"):
        await agent.run(shaft)


async def test_a_new_incarnation_for_every_run(shaft: Lineshaft) -> None:
    agent = Agent("a")
    agent.task("t")(lambda: None)

    await drain(shaft, agent)
    await drain(shaft, agent)

    assert (await engine_of(shaft).fleet.read("a")).incarnation == 2


PROCESS_OF_ITS_OWN = """
import asyncio, gc, sys
from lineshaft import Agent, Lineshaft

agent = Agent("a")

@agent.task("t")
async def handler():
    agent.stop()
    return gc.get_freeze_count()

async def main():
    async with Lineshaft(sys.argv[1]) as shaft:
        await agent.run(shaft, optimize=sys.argv[2] == "optimized")

asyncio.run(main())
"""


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("how", ["optimized", "plain"])
async def test_a_process_may_exempt_its_objects_from_garbage_collection(dsn: str, how: str) -> None:
    async with Lineshaft(dsn) as shaft:
        handle = await shaft.submit(NewTask("t"))
        command = (sys.executable, "-c", PROCESS_OF_ITS_OWN, dsn, how)
        process = await asyncio.create_subprocess_exec(*command)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        frozen = await handle.result(PATIENCE)

    assert frozen > 10_000 if how == "optimized" else frozen == 0


async def test_outcomes_are_written_in_batches(shaft: Lineshaft, connection: psycopg.Connection) -> None:
    agent = Agent("a", max_concurrent_tasks=100)

    @agent.task("t")
    async def handler() -> None: ...

    await shaft.submit_many([NewTask("t") for _ in range(400)])
    await drain(shaft, agent)

    transactions = connection.execute(
        "SELECT count(DISTINCT xid), count(*) FROM lineshaft.event WHERE 'task.completed' = ANY (kinds)"
    ).fetchone()
    assert transactions is not None
    assert transactions[1] == 400
    assert transactions[0] < 100


@pytest.mark.slow("blocks for longer than a lease")
async def test_a_blocked_event_loop_keeps_its_lease(shaft: Lineshaft) -> None:
    """A handler that calls time.sleep blocks its process except for heartbeats."""
    # Its lease outlasts a moment in which the machine is busy.
    agent = Agent("a", heartbeat_interval_sec=3)

    @agent.task("t")
    async def handler() -> str:
        time.sleep(10)  # noqa: ASYNC251 - three heartbeats, more than a lease
        return "still mine"

    submitted = await shaft.submit(NewTask("t"))
    reaping = threading.Event()

    # Somebody else looks for expired leases all the while.
    def reap() -> None:
        async def look() -> None:
            async with Engine(engine_of(shaft).database.dsn, max_connections=1) as engine:
                while not reaping.is_set():
                    await engine.maintenance.reap(10)
                    await asyncio.sleep(0.05)

        asyncio.run(look())

    thread = threading.Thread(target=reap)
    thread.start()
    try:
        async with at_work(agent, shaft=shaft):
            task = await shaft.wait(submitted, PATIENCE)
    finally:
        reaping.set()
        thread.join()

    assert (task.result, task.attempts) == ("still mine", 0)
    assert "task.failed" not in await kinds(shaft, task.id)


async def test_cancellation_reaches_running_code_within_a_heartbeat(shaft: Lineshaft) -> None:
    agent = Agent("a", heartbeat_interval_sec=1)
    running = {"async": asyncio.Event(), "sync": asyncio.Event()}
    ended: dict[str, float] = {}
    loop = asyncio.get_running_loop()

    @agent.task("async")
    async def asynchronous() -> None:
        running["async"].set()
        try:
            await asyncio.Event().wait()
        finally:
            ended["async"] = time.monotonic()

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> None:
        loop.call_soon_threadsafe(running["sync"].set)
        pause = threading.Event()
        while not ctx.cancelled:
            pause.wait(0.01)
        ended["sync"] = time.monotonic()
        ctx.check_cancelled()

    async with at_work(agent, shaft=shaft):
        for style in ("async", "sync"):
            submitted = await shaft.submit(NewTask(style))
            await soon(running[style])
            await shaft.cancel(submitted, "enough")
            cancelled_at = time.monotonic()
            while style not in ended:
                await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.01)
            assert ended[style] - cancelled_at < 20, "a heartbeat and the patience with a busy machine"
            task = await shaft.get(submitted)
            assert (task.status, task.cancel_reason) == (Status.CANCELLED, "enough")
            assert "task.late_result" not in await kinds(shaft, task.id)


async def test_a_defect_elsewhere_does_not_end_it(shaft: Lineshaft, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers 500 to a claim may recover."""
    agent = Agent("a")

    @agent.task("t")
    async def handler() -> str:
        return "done"

    claim, calls = shaft.backend.claim, 0

    async def fail_first(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise LineshaftError("It broke.")
        return await claim(*args, **options)

    monkeypatch.setattr(shaft.backend, "claim", fail_first)

    assert (await one(shaft, agent, "t")).result == "done"
