"""Helpers that run agents in tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg

from lineshaft import Agent, Lineshaft, NewTask, RetrySpec, Task, TaskContext
from lineshaft.engine.engine import Engine
from lineshaft.model.states import Status
from lineshaft.types import Attempt
from tests.client import helpers as client_helpers

#: Everything a test waits for comes within this, however busy the machine is.
PATIENCE = 60.0
AT_ONCE = RetrySpec(strategy="immediate")


def engine_of(shaft: Lineshaft) -> Engine:
    return client_helpers.engine_of(shaft)


@asynccontextmanager
async def at_work(*agents: Agent, shaft: Lineshaft) -> AsyncIterator[None]:
    """Run agents while the block runs."""
    running = [asyncio.create_task(agent.run(shaft, handle_signals=False)) for agent in agents]
    try:
        yield
    finally:
        for agent in agents:
            agent.stop(now=True)
        await asyncio.wait_for(asyncio.gather(*running), PATIENCE)


async def drain(shaft: Lineshaft, *agents: Agent) -> None:
    """Run agents until none of them finds a task."""
    runs = (agent.run(shaft, until_idle=True, retries_within_sec=5, handle_signals=False) for agent in agents)
    await asyncio.wait_for(asyncio.gather(*runs), PATIENCE)


async def one(shaft: Lineshaft, agent: Agent, task_type: str, **fields: Any) -> Task:
    """Submit a task, drain the agent, and return the task."""
    submitted = await shaft.submit(NewTask(task_type, **fields))
    await drain(shaft, agent)
    return await shaft.get(submitted)


async def result(shaft: Lineshaft, agent: Agent, task_type: str, **fields: Any) -> Any:
    task = await one(shaft, agent, task_type, **fields)
    assert task.status is Status.COMPLETED, task.failure_history
    return task.result


async def ended(shaft: Lineshaft, task_id: str, patience: float = PATIENCE) -> Task:
    """Wait for the end of a task."""
    task = await shaft.wait(task_id, patience)
    assert isinstance(task, Task)
    return task


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Poll for a condition that has no event."""
    async with asyncio.timeout(PATIENCE):
        while not await check():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


async def lose_claim(shaft: Lineshaft, connection: psycopg.Connection, task_id: str) -> None:
    """Take a task back, as if its process had been silent for longer than its lease."""
    engine = engine_of(shaft)
    # The agent may claim it again at once: that claim stays.
    claim = "id = %s AND epoch = %s AND status IN ('RUNNING', 'VALIDATING')"
    live = connection.execute("SELECT epoch FROM lineshaft.task_live WHERE id = %s", [task_id]).fetchone()
    if live is None:
        return  # It has ended.
    (epoch,) = live

    async def is_taken_back() -> bool:
        # Repeated: the last heartbeat may still be on its way.
        connection.execute(
            "UPDATE lineshaft.task_live SET lease_until = now() - interval '1 s'"
            f" WHERE {claim} AND lease_until > now()",
            [task_id, epoch],
        )
        await engine.maintenance.reap(10)
        held = connection.execute(f"SELECT FROM lineshaft.task_live WHERE {claim}", [task_id, epoch])
        return held.fetchone() is None

    await until(is_taken_back)


@asynccontextmanager
async def with_heartbeats(ctx: TaskContext) -> AsyncIterator[None]:
    """Send heartbeats several times a second while the block runs, whatever the lease is.

    A lease short enough for such heartbeats would expire whenever the machine is busy for a moment.
    """

    async def send() -> None:
        while True:
            ctx.progress("which makes it send a heartbeat")
            await asyncio.sleep(0.1)

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.wait({sending})


def time_out(agent: Agent, task_id: str) -> None:
    """Let the time limit of a running task pass now: a real one may be over too early."""
    assert agent._stop_request is not None
    stopper = agent._stop_request._stopper
    assert stopper is not None
    execution = stopper._slots.get(task_id)
    assert execution is not None
    execution.deadline = execution.host.loop.time()
    stopper._executor.deadlines.look()


async def attempts(shaft: Lineshaft, task_id: str) -> list[Attempt]:
    return await engine_of(shaft).read.attempts(task_id)


async def kinds(shaft: Lineshaft, task_id: str) -> list[str]:
    return [event.kind async for event in shaft.events(None, task_id=task_id, follow=False)]


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE)


@asynccontextmanager
async def reaper(dsn: str) -> AsyncIterator[None]:
    """A process with a good connection reaps expired leases."""

    async def reap() -> None:
        async with Engine(dsn, max_connections=1) as engine:
            while True:
                await engine.maintenance.reap(10)
                await asyncio.sleep(0.02)

    reaping = asyncio.create_task(reap())
    try:
        yield
    finally:
        reaping.cancel()
        with suppress(asyncio.CancelledError):
            await reaping
