"""Agents and guards: idle agents notice without a notification when a breaker may be probed."""

import asyncio
from pathlib import Path

import pytest

from lineshaft import Agent, Lineshaft, NewTask, TaskContext
from tests.agent.helpers import at_work, engine_of, soon, with_heartbeats

#: Less than the 30 s after which an idle agent polls.
SOON = 20.0


async def test_idle_agents_poll_when_a_breaker_may_be_probed(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-183: they sleep no longer than until then; the thresholds come from the operator's file."""
    path = tmp_path / "circuit-breakers.yaml"
    path.write_text("defaults: {failureThreshold: 1, halfOpenAfter: 1}")
    monkeypatch.setenv("LINESHAFT_CIRCUIT_BREAKERS", str(path))
    agent = Agent("a")
    failed, done = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler(n: int) -> None:
        if n == 1:
            failed.set()
            raise RuntimeError("it broke")
        done.set()

    async with Lineshaft(dsn, max_connections=6) as shaft, at_work(agent, shaft=shaft):
        await shaft.submit(NewTask("t", spec={"n": 1}, max_attempts=1))
        await soon(failed)
        async for _ in shaft.events(None, kinds=["breaker.opened"]):
            break
        await shaft.submit(NewTask("t", spec={"n": 2}))
        await asyncio.wait_for(done.wait(), SOON)
        async for _ in shaft.events(None, kinds=["breaker.closed"]):
            break


async def test_a_running_handler_sees_a_slow_down(shaft: Lineshaft) -> None:
    """R-218: with the next heartbeat."""
    agent = Agent("a", models=["m"])
    started, seen = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        started.set()
        async with with_heartbeats(ctx):
            while ctx.slowdown_until is None:  # noqa: ASYNC110 - as a handler would, between calls of a model
                await asyncio.sleep(0.01)
        seen.set()

    async with at_work(agent, shaft=shaft):
        await shaft.submit(NewTask("t"))
        await soon(started)
        await engine_of(shaft).slowdowns.slow_down("model:m", 100)
        await soon(seen)
