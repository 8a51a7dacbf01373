"""`ctx.quota`: a handler reserves units of a key, waits for room, and settles, over both transports."""

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, Status, SyncTaskContext, TaskContext
from lineshaft.errors import InvalidInputError
from lineshaft.types import Rate, RateUnit
from tests.agent.agent_process import program
from tests.agent.commands import Commands, commands_in
from tests.agent.helpers import AT_ONCE, at_work, drain, ended, engine_of, lose_claim, one, until

KEY = "model:m"

pytestmark = pytest.mark.alike_over_http


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as made:
        yield made


async def limit(shaft: Lineshaft, amount: float, unit: RateUnit = RateUnit.TOKENS) -> None:
    await shaft.set_quota("q", KEY, rate=Rate(amount, unit, 3600))


async def used(shaft: Lineshaft) -> Decimal:
    (quota,) = (await shaft.quotas()).items
    return quota.used


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_handler_settles_with_what_it_used(shaft: Lineshaft, style: str) -> None:
    """Also if it raises; what isn't settled counts as reserved."""
    await limit(shaft, 10_000)
    agent = Agent("a")
    headers = {"X-RateLimit-Remaining-Tokens": "4000"}

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> Any:
        async with ctx.quota(KEY, tokens=2000) as q:
            q.settle(tokens=10)
            q.settle(tokens=1500)
        async with ctx.quota(KEY, tokens=1000):
            pass
        async with ctx.quota("customer:42", tokens=10**9) as free:
            free.settle(tokens=5)
        try:
            async with ctx.quota(KEY, tokens=500) as q:
                q.settle(tokens=1)
                raise RuntimeError("it broke")  # noqa: TRY301
        except RuntimeError:
            before = await used(shaft)
        async with ctx.quota(KEY) as q:
            q.settle(tokens=7, headers=headers)
        return [float(before), free.reservation]

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> Any:
        with ctx.quota(KEY, tokens=2000) as q:
            q.settle(tokens=10)
            q.settle(tokens=1500)
        with ctx.quota(KEY, tokens=1000):
            pass
        with ctx.quota("customer:42", tokens=10**9) as free:
            free.settle(tokens=5)
        try:
            with ctx.quota(KEY, tokens=500) as q:
                q.settle(tokens=1)
                raise RuntimeError("it broke")  # noqa: TRY301
        except RuntimeError:
            before = 2501.0
        with ctx.quota(KEY) as q:
            q.settle(tokens=7, headers=headers)
        return [before, free.reservation]

    task = await one(shaft, agent, style)

    assert task.status is Status.COMPLETED, task.failure_history
    assert task.result == [2501, None]
    assert await used(shaft) == 6000


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_handler_that_waits_keeps_its_lease(
    shaft: Lineshaft, connection: psycopg.Connection, style: str
) -> None:
    """It waits for as long as it must, while heartbeats go on, and goes on when there is room."""
    await limit(shaft, 1, RateUnit.REQUESTS)
    agent = Agent("a", max_concurrent_tasks=2, heartbeat_interval_sec=0.5)
    order: list[str] = []

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> None:
        async with ctx.quota(KEY):
            order.append(ctx.id)

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> None:
        with ctx.quota(KEY):
            order.append(ctx.id)

    first = await shaft.submit(NewTask(style))
    async with at_work(agent, shaft=shaft):
        await ended(shaft, first.id)
        second = await shaft.submit(NewTask(style))

        def beats() -> Any:
            query = "SELECT heartbeat_at FROM lineshaft.task_live WHERE id = %s AND status = 'RUNNING'"
            row = connection.execute(query, [second.id]).fetchone()
            return row and row[0]

        async def runs() -> bool:
            return beats() is not None

        await until(runs)
        for _ in range(3):
            before = beats()

            async def beaten(before: Any = before) -> bool:
                return bool(beats() > before)

            await until(beaten)
        assert order == [first.id]
        await limit(shaft, 2, RateUnit.REQUESTS)
        assert (await ended(shaft, second.id)).status is Status.COMPLETED
    assert order == [first.id, second.id]


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_task_that_waits_can_be_cancelled(shaft: Lineshaft, style: str) -> None:
    await limit(shaft, 1, RateUnit.REQUESTS)
    agent = Agent("a", heartbeat_interval_sec=0.5)
    waits, cancelled = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> None:
        async with ctx.quota(KEY):
            pass
        waits.set()
        try:
            async with ctx.quota(KEY):
                pass
        finally:
            cancelled.set()

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> None:
        with ctx.quota(KEY):
            pass
        loop.call_soon_threadsafe(waits.set)
        try:
            with ctx.quota(KEY):
                pass
        finally:
            loop.call_soon_threadsafe(cancelled.set)

    task = await shaft.submit(NewTask(style))
    async with at_work(agent, shaft=shaft):
        await asyncio.wait_for(waits.wait(), 60)
        await shaft.cancel(task)
        await asyncio.wait_for(cancelled.wait(), 60)
    assert (await shaft.get(task)).status is Status.CANCELLED
    assert await used(shaft) == 1


async def test_more_than_the_quota_allows_is_an_error_of_the_handler(shaft: Lineshaft) -> None:
    await limit(shaft, 1000)
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        with pytest.raises(InvalidInputError, match="'q' allows 1000 in 3600 s"):
            async with ctx.quota(KEY, tokens=1001):
                pass
        with pytest.raises(InvalidInputError, match=r"units.tokens"):
            async with ctx.quota(KEY, tokens=-1):
                pass
        return "went on"

    assert (await one(shaft, agent, "t")).result == "went on"


async def test_a_lost_claim_neither_acquires_nor_settles(
    shaft: Lineshaft, connection: psycopg.Connection
) -> None:
    """The handler ends; what it has reserved counts in full, and its next attempt reserves again."""
    await limit(shaft, 1000)
    agent = Agent("a")
    runs: list[int] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> int:
        runs.append(ctx.epoch)
        async with ctx.quota(KEY, tokens=300) as q:
            if len(runs) == 1:
                await lose_claim(shaft, connection, ctx.id)
            q.settle(tokens=100)
        return ctx.epoch

    task = await one(shaft, agent, "t", retry=AT_ONCE)
    assert (task.result, runs) == (2, [1, 2])
    assert await used(shaft) == 400


HOLDER = """
import asyncio, sys
from lineshaft import Agent, Lineshaft
agent = Agent("first")

@agent.task("t")
async def handler(ctx):
    async with ctx.quota("model:m", tokens=600):
        print("holds", flush=True)
        await asyncio.Event().wait()

async def main():
    async with Lineshaft(sys.argv[1]) as shaft:
        await agent.run(shaft)

asyncio.run(main())
"""


async def test_a_killed_holder_leaves_nothing_behind(
    shaft: Lineshaft, where: str, connection: psycopg.Connection
) -> None:
    """SIGKILL in the middle: what it reserved counts until it leaves the window, and nothing else is left."""
    await limit(shaft, 1000)
    task = await shaft.submit(NewTask("t", retry=AT_ONCE))
    async with program(HOLDER, where) as process:
        await process.prints("holds")
        await process.kill()
    await lose_claim(shaft, connection, task.id)
    reservations = engine_of(shaft).reservations
    assert (await shaft.get_quota("q")).users == []
    assert await used(shaft) == 600

    agent = Agent("second")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        async with ctx.quota(KEY, tokens=400) as q:
            (user,) = (await shaft.get_quota("q")).users
            assert (user.task_id, user.key, user.agent_id) == (ctx.id, KEY, "second")
            assert user.amount == 400
            assert q.reservation is not None

    await drain(shaft, agent)
    assert (await shaft.get(task)).status is Status.COMPLETED
    assert await reservations.forget(1) == 2
    assert connection.execute("SELECT count(*) FROM lineshaft.reservation").fetchone() == (0,)


async def test_a_command_reserves_and_settles(shaft: Lineshaft, commands: Commands) -> None:
    await limit(shaft, 1000)
    agent = commands.agent("""
answer=$(ask '{"quota": "model:m", "units": {"tokens": 800}}')
reservation=${answer#*reservation\\":\\"}
tell '{"settle": "'"${reservation%\\"*}"'", "units": {"tokens": 250}}'
ask '{"quota": "customer:1", "units": {"tokens": 800}}' >&2
tell '{"settle": null, "units": {"tokens": 1}}'
ask '{"quota": "model:m", "units": {"tokens": 750}}' >/dev/null
echo "$answer"
""")
    task = await one(shaft, agent, "t")
    assert task.status is Status.COMPLETED, task.failure_history
    assert task.result["quota"] == KEY
    assert task.result["reservation"].startswith("reservation_")
    assert await used(shaft) == 1000


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"quota": "model:m", "units": {"tokens": 1001}}', "can never be acquired"),
        ('{"quota": "model:m", "units": {"apples": 1}}', "not a valid message"),
        ('{"settle": "reservation_1", "units": {"tokens": 1}}', "has no reservation 'reservation_1'"),
    ],
)
async def test_a_command_is_told_what_is_wrong(
    shaft: Lineshaft, commands: Commands, line: str, why: str
) -> None:
    await limit(shaft, 1000)
    task = await one(shaft, commands.agent(f"ask '{line}'"), "t", max_attempts=1)
    assert task.failure_category == "invalid_output"
    assert why in (task.failure_reason or "")
