"""The database is away for twenty seconds, whatever agents are doing just then.

By default it is a tenth of that; OUTAGE_SEC=20 for the full length.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, SyncTaskContext, TaskContext
from tests.agent.helpers import AT_ONCE, PATIENCE, at_work, lose_claim, soon
from tests.client.helpers import engine_beside
from tests.invariants import check_invariants
from tests.proxy import Proxy, proxied

pytestmark = pytest.mark.slow("outages of two seconds")

OUTAGE_SEC = float(os.environ.get("OUTAGE_SEC", "2"))
#: Three of these make a lease. The longer one is the default, and is long for a busy machine too.
OUTLASTING_IT, NOT_OUTLASTING_IT = max(30.0, 1.5 * OUTAGE_SEC), OUTAGE_SEC / 10
#: How soon an agent notices after an outage that it has lost a claim.
NOTICING_SEC = 4.0


@pytest.fixture
async def near(dsn: str) -> AsyncIterator[Lineshaft]:
    """A queue that never loses its database."""
    async with Lineshaft(dsn, max_connections=4) as opened, engine_beside(opened, dsn):
        yield opened
    check_invariants(dsn)


@pytest.fixture
async def line(dsn: str, near: Lineshaft) -> AsyncIterator[tuple[Lineshaft, Proxy]]:
    del near  # it checks the invariants when all agents have stopped
    async with proxied(dsn) as (through, proxy), Lineshaft(through, max_connections=4) as shaft:
        yield shaft, proxy
        proxy.restore()


@asynccontextmanager
async def away(proxy: Proxy) -> AsyncIterator[None]:
    """Clients try to connect during the outage."""
    began = time.monotonic()
    proxy.cut()
    yield
    while time.monotonic() - began < OUTAGE_SEC:
        await asyncio.wait_for(proxy.refuses(1), PATIENCE)
    proxy.restore()


async def test_agents_go_on_if_the_lease_outlasts_the_outage(
    near: Lineshaft, line: tuple[Lineshaft, Proxy]
) -> None:
    """A step, an outcome, children, a checkpoint, a thread: each waits, and is written once."""
    through, proxy = line
    agent = Agent("a", heartbeat_interval_sec=OUTLASTING_IT, max_concurrent_tasks=5)
    ran: list[str] = []
    begun, cut = asyncio.Event(), asyncio.Event()

    async def reached(kind: str) -> None:
        ran.append(kind)
        if len(ran) == 5:
            begun.set()
        await cut.wait()

    @agent.task("step")
    async def step(ctx: TaskContext) -> str:
        await ctx.step("s", reached, "step")
        return "done"

    @agent.task("outcome")
    async def outcome() -> str:
        await reached("outcome")
        return "done"

    @agent.task("children")
    async def children(ctx: TaskContext) -> str:
        if not ctx.resume:
            await reached("children")
        (kid,) = await ctx.spawn("kid", [NewTask("kid")], wait=True)
        return str(kid.output)

    @agent.task("kid")
    async def kid() -> str:
        ran.append("kid")
        return "done"

    @agent.task("checkpoint")
    async def checkpoint(ctx: TaskContext) -> str:
        await reached("checkpoint")
        await ctx.checkpoint({"page": 1})
        return "done"

    @agent.task("thread")
    def thread(ctx: SyncTaskContext) -> str:
        asyncio.run_coroutine_threadsafe(reached("thread"), loop).result()
        return ctx.step("s", lambda: "done")

    loop = asyncio.get_running_loop()
    types = ["step", "outcome", "children", "checkpoint", "thread"]
    tasks = await near.submit_many([NewTask(name) for name in types])
    async with at_work(agent, shaft=through):
        await soon(begun)
        async with away(proxy):
            cut.set()
            tasks.append(await near.submit(NewTask("kid")))
        ended = [await near.wait(task, PATIENCE) for task in tasks]

    assert [(task.result, task.attempts) for task in ended] == [("done", 0)] * 6
    assert sorted(ran) == sorted([*types, "kid", "kid"])


async def test_another_agent_takes_over_if_the_lease_is_shorter(
    near: Lineshaft, line: tuple[Lineshaft, Proxy], connection: psycopg.Connection
) -> None:
    through, proxy = line
    cut_off = Agent("cut off", heartbeat_interval_sec=NOTICING_SEC)
    other = Agent("other", heartbeat_interval_sec=OUTLASTING_IT)
    begun, noticed = asyncio.Event(), asyncio.Event()

    @cut_off.task("t")
    async def handler(ctx: TaskContext) -> str:
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                # It learns that the claim is over, and nothing that it does then is written.
                noticed.set()
        return await ctx.step("work", lambda: "cut off")

    @other.task("t")
    async def replacement(ctx: TaskContext) -> str:
        return await ctx.step("work", lambda: "other")

    submitted = await near.submit(NewTask("t", retry=AT_ONCE))
    async with at_work(cut_off, shaft=through):
        await soon(begun)
        async with away(proxy):
            await lose_claim(near, connection, submitted.id)
            async with at_work(other, shaft=near):
                task = await near.wait(submitted, PATIENCE)
        await soon(noticed)
        again = await near.wait(await near.submit(NewTask("t", retry=AT_ONCE)), PATIENCE)

    assert (task.result, again.result, again.attempts) == ("other", "cut off", 0)
    assert [past.error for past in task.failure_history] == ["heartbeat_timeout"]
    assert (await near.get(submitted)).result == "other"


async def test_an_agent_stopped_during_the_outage_ends_and_loses_nothing(
    near: Lineshaft, line: tuple[Lineshaft, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not release in time is taken back when its lease expires."""
    monkeypatch.setattr("lineshaft.agent.run._LAST_WRITES_SEC", OUTAGE_SEC / 4)
    through, proxy = line
    stopped = Agent("stopped", heartbeat_interval_sec=NOT_OUTLASTING_IT, grace_sec=OUTAGE_SEC / 4)
    begun = asyncio.Event()

    @stopped.task("t")
    async def handler() -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    submitted = await near.submit(NewTask("t", retry=AT_ONCE))
    running = asyncio.create_task(stopped.run(through, handle_signals=False))
    await soon(begun)
    async with away(proxy):
        stopped.stop()
        await asyncio.wait_for(running, PATIENCE)

    other = Agent("other")

    @other.task("t")
    async def replacement() -> str:
        return "other"

    async with at_work(other, shaft=near):
        task = await near.wait(submitted, PATIENCE)
    assert task.result == "other"
