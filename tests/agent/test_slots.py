"""How many tasks an agent has in its hands, and in which turn they come."""

import asyncio
import threading
from collections import Counter
from functools import partial

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, SyncTaskContext, TaskContext
from lineshaft.model.states import Status
from tests.agent.helpers import (
    PATIENCE,
    at_work,
    drain,
    ended,
    engine_of,
    soon,
    time_out,
    until,
    with_heartbeats,
)


class Gauge:
    """Counts how many ran at the same time."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def hold(self, name: str, until: asyncio.Event) -> None:
        self.now[name] += 1
        self.most[name] = max(self.most[name], self.now[name])
        await until.wait()
        self.now[name] -= 1


async def test_three_slots_by_default(shaft: Lineshaft) -> None:
    """R-076."""
    agent = Agent("a")
    gauge, full, go = Gauge(), asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler() -> None:
        if gauge.now["t"] == 2:
            full.set()
        await gauge.hold("t", go)

    submitted = await shaft.submit_many([NewTask("t") for _ in range(7)])
    async with at_work(agent, shaft=shaft):
        await soon(full)
        held = (await engine_of(shaft).fleet.read("a")).current_tasks
        go.set()
        for task in submitted:
            await shaft.wait(task, PATIENCE)

    assert (gauge.most["t"], held) == (3, 3)


async def test_a_handler_has_its_own_limit(shaft: Lineshaft) -> None:
    agent = Agent("a", max_concurrent_tasks=6)
    gauge, go = Gauge(), asyncio.Event()
    full = asyncio.Event()

    @agent.task("heavy", concurrency=2)
    async def heavy() -> None:
        await gauge.hold("heavy", go)

    @agent.task("light")
    async def light() -> None:
        if gauge.now["light"] == 3:
            full.set()
        await gauge.hold("light", go)

    await shaft.submit_many([NewTask("heavy") for _ in range(6)])
    await shaft.submit_many([NewTask("light") for _ in range(4)])
    running = asyncio.create_task(drain(shaft, agent))
    await soon(full)
    go.set()
    await running

    assert gauge.most["heavy"] <= 2
    assert gauge.most["light"] == 4
    assert (await shaft.list(status="READY")).items == []


async def test_claims_ahead_fill_all_slots_and_not_one_more(shaft: Lineshaft) -> None:
    """R-076: with many slots the next are claimed while the last are started."""
    agent = Agent("a", max_concurrent_tasks=60)
    gauge, full, go = Gauge(), asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler() -> None:
        if gauge.now["t"] == 59:
            full.set()
        await gauge.hold("t", go)

    submitted = await shaft.submit_many([NewTask("t") for _ in range(150)])
    async with at_work(agent, shaft=shaft):
        await soon(full)
        held = (await engine_of(shaft).fleet.read("a")).current_tasks
        go.set()
        for task in submitted:
            assert (await shaft.wait(task, PATIENCE)).status is Status.COMPLETED

    assert (gauge.most["t"], held) == (60, 60)


async def test_a_backlog_does_not_keep_handlers_with_a_limit_from_their_turn(shaft: Lineshaft) -> None:
    agent = Agent("a", max_concurrent_tasks=60)
    order: list[str] = []

    @agent.task("common")
    async def common() -> None:
        order.append("common")

    @agent.task("rare", concurrency=1)
    async def rare() -> None:
        order.append("rare")

    await shaft.submit_many([NewTask("common") for _ in range(400)])
    await shaft.submit(NewTask("rare"))
    await drain(shaft, agent)

    assert len(order) == 401
    assert order.index("rare") < 300


async def test_slots_that_stay_taken_do_not_hold_up_the_rest(
    shaft: Lineshaft, connection: psycopg.Connection
) -> None:
    """Ten outcomes are written at once, two of them of threads that hang past their time."""
    agent = Agent("a", max_concurrent_tasks=30)
    loop = asyncio.get_running_loop()
    begun, hanging = Counter[str](), asyncio.Semaphore(0)
    all_begun, go_first, go, end = (asyncio.Event() for _ in range(4))
    over = threading.Event()

    async def work(name: str, until: asyncio.Event) -> None:
        begun[name] += 1
        if begun.total() == 28:
            all_begun.set()
        await until.wait()

    @agent.task("first")
    async def first() -> None:
        await work("first", go_first)

    @agent.task("quick")
    async def quick() -> None:
        await work("quick", go)

    @agent.task("long")
    async def long() -> None:
        await work("long", end)

    @agent.task("hangs", time_limit_sec=2)
    def hangs(ctx: SyncTaskContext) -> None:
        while not ctx.cancelled:
            over.wait(0.01)
        loop.call_soon_threadsafe(hanging.release)
        over.wait(PATIENCE)

    head = await shaft.submit(NewTask("first"))
    await shaft.submit_many(
        [NewTask("quick")] * 8 + [NewTask("long")] * 19 + [NewTask("hangs", max_attempts=1)] * 2
    )
    async with at_work(agent, shaft=shaft):
        await soon(all_begun)
        with connection.transaction():
            # Its end can't be written, and what ends in the meantime waits for the next turn of the writer.
            connection.execute("SELECT FROM lineshaft.task_live WHERE id = %s FOR UPDATE", [head.id])
            go_first.set()
            await until(partial(_somebody_waits, connection))
            go.set()
            for _ in range(2):
                await asyncio.wait_for(hanging.acquire(), PATIENCE)
        last = await shaft.submit(NewTask("quick"))
        assert (await shaft.wait(last, PATIENCE)).status is Status.COMPLETED
        end.set()
        over.set()


async def test_stopping_amid_claims_ahead_leaves_nothing_held(shaft: Lineshaft) -> None:
    """R-081: tasks claimed in the meantime are completed or released."""
    agent = Agent("a", max_concurrent_tasks=60)
    started = 0

    @agent.task("t")
    async def handler() -> None:
        nonlocal started
        started += 1
        if started == 25:
            agent.stop(now=True)
        await asyncio.sleep(0)

    submitted = await shaft.submit_many([NewTask("t") for _ in range(300)])
    await asyncio.wait_for(agent.run(shaft, handle_signals=False), PATIENCE)

    statuses = Counter([(await shaft.get(task)).status for task in submitted])
    assert set(statuses) == {Status.COMPLETED, Status.READY}
    assert (await engine_of(shaft).fleet.read("a")).current_tasks == 0


async def test_more_slots_while_it_works(shaft: Lineshaft) -> None:
    """An operator raises the limit of a busy agent: it claims the next task at once."""
    agent = Agent("a", max_concurrent_tasks=1)
    gauge, go = Gauge(), asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        async with with_heartbeats(ctx):
            await gauge.hold("t", go)

    async def running(count: int) -> bool:
        return gauge.now["t"] == count

    submitted = [await shaft.submit(NewTask("t")) for _ in range(3)]
    async with at_work(agent, shaft=shaft):
        await until(lambda: running(1))

        await engine_of(shaft).fleet.patch("a", max_concurrent_tasks=2)

        await until(lambda: running(2))
        await engine_of(shaft).fleet.patch("a", max_concurrent_tasks=1)
        go.set()
        for task in submitted:
            await ended(shaft, task.id)
    assert gauge.most["t"] == 2


@pytest.mark.database_only
async def test_a_thread_that_ends_while_its_timeout_is_written_is_counted_once(
    shaft: Lineshaft, connection: psycopg.Connection
) -> None:
    agent = Agent("a", max_concurrent_tasks=10)
    loop, hangs = asyncio.get_running_loop(), asyncio.Event()
    hung, go = threading.Event(), threading.Event()
    counting = threading.Lock()
    now = most = 0

    @agent.task("t", concurrency=1)
    def handler(first: bool = False) -> None:
        nonlocal now, most
        if first:
            loop.call_soon_threadsafe(hangs.set)
            hung.wait(PATIENCE)
            return
        with counting:
            now += 1
            most = max(most, now)
        go.wait(PATIENCE)
        with counting:
            now -= 1

    @agent.task("marker")
    async def marker() -> None: ...

    slow = await shaft.submit(NewTask("t", spec={"first": True}, max_duration_sec=3600, max_attempts=1))
    async with at_work(agent, shaft=shaft):
        await soon(hangs)
        with connection.transaction():
            connection.execute("SELECT FROM lineshaft.task_live WHERE id = %s FOR UPDATE", [slow.id])
            time_out(agent, slow.id)
            await until(partial(_somebody_waits, connection))
            hung.set()
            later = await shaft.submit_many([NewTask("t") for _ in range(2)])
        await ended(shaft, slow.id)
        # An agent that claims this has looked at those before.
        await ended(shaft, (await shaft.submit(NewTask("marker"))).id)
        go.set()
        for task in later:
            await ended(shaft, task.id)
    assert most == 1


async def _somebody_waits(connection: psycopg.Connection) -> bool:
    # A transaction sees the sessions of its first look; one that waits may be newer.
    connection.execute("SELECT pg_stat_clear_snapshot()")
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE wait_event_type = 'Lock' AND datname = current_database()"
    ).fetchone()
    return row is not None and row[0] > 0
