"""`ctx.state` is saved automatically whenever a task is postponed (R-211)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from lineshaft import Agent, Fail, NewTask, Snooze, SyncTaskContext, TaskContext
from lineshaft.testing import Workbench
from tests.agent.helpers import at_work, soon


@pytest.fixture
async def bench(dsn: str) -> AsyncIterator[Workbench]:
    async with Workbench(dsn) as opened:
        yield opened


def checkpoints(connection: psycopg.Connection) -> list[Any]:
    return [row[0] for row in connection.execute("SELECT data FROM lineshaft.checkpoint").fetchall()]


@pytest.mark.parametrize("put_off", [Fail("HTTP 429, retry after 30 s"), Snooze(30)])
async def test_the_next_run_starts_with_it(bench: Workbench, put_off: Exception) -> None:
    """After a rate limit in the middle of the work; the handler saves nothing itself."""
    agent = Agent("a")
    read: list[int] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> object:
        while (page := ctx.state.get("page", 0)) < 3:
            read.append(page)
            ctx.state["page"] = page + 1
            if page == 1:
                raise put_off
        return page

    task = await bench.run(agent, NewTask("t"))
    await bench.advance(60)
    await bench.drain(agent)

    assert (await bench.shaft.get(task.id)).result == 3
    assert read == [0, 1, 2]


async def test_it_is_saved_for_a_handler_in_a_thread(
    bench: Workbench, connection: psycopg.Connection
) -> None:
    agent = Agent("a")

    @agent.task("t")
    def handler(ctx: SyncTaskContext) -> None:
        ctx.state["page"] = 7
        raise Snooze(30)

    await bench.run(agent, NewTask("t"))

    assert checkpoints(connection) == [{"page": 7}]


async def test_it_is_saved_before_a_wait_for_children(bench: Workbench) -> None:
    agent = Agent("a")

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> str:
        ctx.state.setdefault("asked by", ctx.epoch)
        await ctx.spawn("kid", [NewTask("kid")], wait=True)
        return f"epoch {ctx.state['asked by']}"

    @agent.task("kid")
    async def kid() -> None: ...

    assert await bench.result(agent, NewTask("parent")) == "epoch 1"


async def test_it_is_saved_when_the_agent_stops(bench: Workbench, connection: psycopg.Connection) -> None:
    agent = Agent("a", grace_sec=0.05)
    running = asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        ctx.state["page"] = 7
        running.set()
        await asyncio.Event().wait()

    await bench.shaft.submit(NewTask("t"))
    async with at_work(agent, shaft=bench.shaft):
        await soon(running)

    assert checkpoints(connection) == [{"page": 7}]


async def test_a_failed_attempt_saves_nothing(bench: Workbench, connection: psycopg.Connection) -> None:
    """The state may be the cause of the failure."""
    agent = Agent("a")
    found: list[Any] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        found.append(dict(ctx.state))
        if ctx.attempt == 1:
            await ctx.checkpoint({"page": 1})
        ctx.state["page"] = 2
        raise RuntimeError

    await bench.run(agent, NewTask("t", max_attempts=2))

    assert found == [{}, {"page": 1}]
    assert checkpoints(connection) == [{"page": 1}]


async def test_an_unused_state_leaves_the_checkpoint_alone(
    bench: Workbench, connection: psycopg.Connection
) -> None:
    """Whatever its form: only a dict becomes a state."""
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        assert ctx.state == {}
        await ctx.checkpoint([7])
        raise Snooze(30)

    await bench.run(agent, NewTask("t"))
    await bench.advance(60)
    await bench.drain(agent)

    assert checkpoints(connection) == [[7]]


async def test_a_state_that_is_not_json_is_logged(
    bench: Workbench, connection: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """The task is postponed anyway."""
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        ctx.state["lock"] = asyncio.Lock()
        raise Snooze(30)

    task = await bench.run(agent, NewTask("t"))

    assert (task.status, checkpoints(connection)) == ("PENDING", [])
    assert "without saving a checkpoint: state can't be stored as JSON" in caplog.text
