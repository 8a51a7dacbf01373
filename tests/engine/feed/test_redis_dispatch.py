"""Wake-ups through a real Valkey, beside processes without it, whatever happens to it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.lane_directory import Interest, LaneDirectory
from lineshaft.engine.feed.redis_dispatch import LISTENER, LISTENER_WITH_REDIS, RedisDispatch, _payload
from lineshaft.engine.feed.waiter import Waiter
from lineshaft.engine.feed.wakeups import POLL_SUBSCRIBED, POLL_UNSUBSCRIBED, Mode
from lineshaft.engine.postgres.lane_reports import MOST_WAKES, LaneReports
from lineshaft.integrations.redis.connection import TIMEOUT_SEC, RedisServer
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from tests.conftest import TEMPLATE, NewDatabase
from tests.proxy import Proxy, proxied_url
from tests.valkey import Valkey, valkey_server
from tests.world import World

#: Only to end a test that fails.
LONG = 60.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Valkey]:
    with valkey_server() as server:
        yield server


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """One that a test may break."""
    with valkey_server() as server:
        yield server


class Process:
    """What a process has: an engine, waiters, and an agent that runs tasks."""

    def __init__(self, engine: Engine, directory: LaneDirectory, resources: AsyncExitStack) -> None:
        self.engine = engine
        self.directory = directory
        self.wakeups = directory.wakeups
        self.ran: list[str] = []
        self._resources = resources

    @property
    def dispatch(self) -> RedisDispatch:
        assert self.engine.dispatch is not None
        return self.engine.dispatch

    async def waiter(self) -> Waiter:
        interest = Interest(["a"], (), ())
        await self.directory.enter(interest)
        return self._resources.enter_context(self.directory.waiter(interest))

    async def waits(self) -> "asyncio.Task[bool]":
        """A waiter that waits, for long: only a wake-up ends it soon."""
        waiter = await self.waiter()
        while True:
            task = asyncio.create_task(waiter.wait(LONG))
            await until(lambda: task.done() or waiter in self.wakeups._queue)  # noqa: B023 - it is called here
            if not task.done():
                self._resources.callback(task.cancel)
                return task
            # What happened before woke it at once.

    async def submit(self, number: int = 1) -> list[str]:
        return [each.id for each in await self.engine.submission.submit([NewTask("a")] * number)]

    async def reaches(self, mode: Mode) -> None:
        await until(lambda: self.wakeups.mode is mode)

    async def work(self, name: str) -> None:
        """Claim and complete, and wait for more, as an agent does."""
        agent = await self.engine.fleet.register(NewAgent(id=name, types=("a",)))
        waiter = await self.waiter()
        while True:
            claim = await self.engine.claims.claim(name, agent.incarnation, limit=1, start=True)
            for task in claim.tasks:
                self.ran.append(task.id)
                await self.engine.work.complete([World.completion(task)])
                waiter.pass_on()
            if not claim.tasks:
                waiter.settle()
                await waiter.wait(self.wakeups.poll_interval)


@asynccontextmanager
async def process(dsn: str, url: str | None, *, timeout_sec: float = LONG) -> AsyncIterator[Process]:
    """`timeout_sec`: on a busy machine, the usual deadline passes by chance."""
    async with AsyncExitStack() as resources:
        redis = None if url is None else RedisServer(url, timeout_sec=timeout_sec)
        engine = await resources.enter_async_context(Engine(dsn, redis=redis))
        directory = LaneDirectory(engine.database, redis=engine.dispatch)
        await resources.enter_async_context(directory.wakeups)
        resources.push_async_callback(directory.close)
        opened = Process(engine, directory, await resources.enter_async_context(AsyncExitStack()))
        await opened.reaches(Mode.NOTIFY if url is None else Mode.REDIS)
        yield opened


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


@pytest.fixture
async def lane(dsn: str, connection: psycopg.Connection) -> int:
    """That of the tasks. One has been submitted before any process listens."""
    async with Engine(dsn) as engine:
        (first,) = await engine.submission.submit([NewTask("a")])
        await engine.cancel.cancel(first.id, "not needed")
    (found,) = connection.execute("SELECT id FROM lineshaft.lane").fetchone() or (0,)
    return int(found)


def knows(process: Process, lane: int) -> Process:
    """It has announced the lane to everybody before."""
    process.dispatch._announced[lane] = time.monotonic()
    return process


def heard(listener: psycopg.Connection) -> list[str]:
    """The notifications so far; a statement brings what was committed before it."""
    listener.execute("SELECT 1")
    return [each.payload for each in listener.notifies(timeout=0)]


def next_heard(listener: psycopg.Connection) -> list[str]:
    """The next notification: another process has heard it already."""
    return [each.payload for each in listener.notifies(timeout=LONG, stop_after=1)]


@pytest.fixture
def listener(connection: psycopg.Connection) -> psycopg.Connection:
    connection.execute("LISTEN task_ready")
    return connection


async def test_a_task_wakes_one_waiter_of_the_fleet_without_a_notification(
    dsn: str, shared: Valkey, lane: int, listener: psycopg.Connection
) -> None:
    async with (
        process(dsn, shared.url) as one,
        process(dsn, shared.url) as two,
        process(dsn, shared.url) as three,
    ):
        waits = [await each.waits() for each in (one, two, three)]
        knows(one, lane)
        heard(listener)

        await one.submit()
        await asyncio.wait(waits, timeout=LONG, return_when=asyncio.FIRST_COMPLETED)

        # A second waiter that the first task woke is awake before the one that this task wakes.
        await one.submit()
        await until(lambda: sum(wait.done() for wait in waits) >= 2)
        assert sum(wait.done() for wait in waits) == 2
        assert heard(listener) == []


async def test_the_first_task_of_a_lane_is_announced_to_everybody(
    dsn: str, shared: Valkey, listener: psycopg.Connection
) -> None:
    """A process can't wait for the list of a lane that it doesn't know."""
    async with process(dsn, shared.url) as submitter, process(dsn, shared.url) as other:
        wait = await other.waits()

        await submitter.submit()

        assert await wait
        lane = next(iter(next(iter(other.directory._interests)).lanes))
        assert next_heard(listener) == [str(lane)]


async def test_a_process_without_redis_hears_of_every_task(dsn: str, shared: Valkey, lane: int) -> None:
    async with process(dsn, None) as plain, process(dsn, shared.url) as submitter:
        knows(submitter, lane)
        for _ in range(3):
            wait = await plain.waits()

            await submitter.submit()

            assert await wait
            assert plain.wakeups.poll_interval == POLL_SUBSCRIBED


async def test_what_is_for_others_wakes_nobody_with_redis(
    dsn: str, shared: Valkey, lane: int, listener: psycopg.Connection
) -> None:
    async with (
        process(dsn, None) as plain,
        process(dsn, shared.url) as submitter,
        process(dsn, shared.url) as one,
        process(dsn, shared.url) as two,
    ):
        knows(submitter, lane)
        heard(listener)
        without, *waits = [await each.waits() for each in (plain, one, two)]

        await submitter.submit()
        assert await without
        await asyncio.wait(waits, timeout=LONG, return_when=asyncio.FIRST_COMPLETED)

        assert next_heard(listener) == [f"+{lane}"]
        # Notifications arrive in order: this one comes after it.
        listener.execute("SELECT pg_notify('task_ready', '999999')")
        await until(lambda: all(999999 in each.wakeups._remembered for each in (one, two)))
        assert sum(wait.done() for wait in waits) == 1


async def test_a_submitter_without_redis_wakes_a_process_with_it(dsn: str, shared: Valkey, lane: int) -> None:
    async with process(dsn, None) as submitter, process(dsn, shared.url) as other:
        wait = await other.waits()

        await submitter.submit()

        assert lane
        assert await wait


async def test_a_transaction_of_the_callers_own_wakes_a_process_with_redis(
    dsn: str, shared: Valkey, lane: int
) -> None:
    async with process(dsn, shared.url) as submitter, process(dsn, shared.url) as other:
        knows(submitter, lane)
        wait = await other.waits()
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            await submitter.engine.submission.submit([NewTask("a")], connection=own)
            assert not wait.done()
            await own.commit()

        assert await wait


async def test_databases_that_share_a_redis_dont_wake_each_other(
    dsn: str, shared: Valkey, lane: int, new_database: NewDatabase
) -> None:
    with new_database(TEMPLATE) as other_dsn:
        async with process(dsn, shared.url) as one, process(other_dsn, shared.url) as two:
            wait = await one.waits()
            knows(two, lane)
            await two.submit()
            await until(lambda: lists(two, shared) == 1)
            assert not wait.done()

            await knows(one, lane).submit()

            assert await wait
            assert lists(one, shared) == 0
            assert two.dispatch._opened._prefix != one.dispatch._opened._prefix


def lists(process: Process, valkey: Valkey) -> int:
    """How many lanes of its database have wake-ups that no process has popped."""
    with valkey.client() as client:
        return len(client.keys(f"{process.dispatch._opened._prefix}lane:*"))


async def test_a_list_that_nobody_reads_stays_short_and_expires(dsn: str, shared: Valkey, lane: int) -> None:
    async with process(dsn, shared.url) as submitter:
        knows(submitter, lane)
        for _ in range(5):
            await submitter.submit(100)
        with shared.client() as client:

            def lists() -> list[Any]:
                return list(client.keys(f"{submitter.dispatch._opened._prefix}lane:*"))

            await until(lambda: bool(lists()))
            (key,) = lists()
            await until(lambda: client.llen(key) == MOST_WAKES)
            assert 0 < client.pttl(key) <= 5_000


async def test_a_wake_up_goes_on_if_nobody_here_waits_any_more(dsn: str, shared: Valkey, lane: int) -> None:
    async with process(dsn, shared.url) as one, process(dsn, shared.url) as two:
        wait = await two.waits()

        assert one.dispatch.hand_on(lane)

        assert await wait
        assert not one.dispatch.hand_on(lane, 16), "it ends"


async def test_work_whose_wake_up_was_lost_is_found(dsn: str, shared: Valkey, lane: int) -> None:
    """As after the death of a process between its commit and the push."""
    async with process(dsn, shared.url) as one:
        wait = await one.waits()
        async with Engine(dsn) as silent:
            reports = LaneReports()
            reports.active = True
            silent.database._reports = reports
            await silent.submission.submit([NewTask("a")])
            assert (await reports.take()) == {lane: 1}

        assert await wait
        assert one.wakeups.mode is Mode.REDIS


async def test_what_was_committed_last_is_passed_on_when_a_process_ends(
    dsn: str, shared: Valkey, lane: int
) -> None:
    async with process(dsn, shared.url) as other:
        wait = await other.waits()
        async with process(dsn, shared.url) as submitter:
            await knows(submitter, lane).submit()

        assert await wait


class Fault(NamedTuple):
    begin: Callable[[Valkey, Proxy], Awaitable[None] | None]
    end: Callable[[Valkey, Proxy], Awaitable[None] | None]


def _restart(valkey: Valkey, _: Proxy) -> None:
    valkey.kill()
    valkey.start()


def _slow(_: Valkey, proxy: Proxy) -> None:
    proxy.delay_sec = 2.0


def _fast(_: Valkey, proxy: Proxy) -> None:
    proxy.delay_sec = 0.0


FAULTS = {
    "killed": Fault(lambda valkey, _: valkey.kill(), lambda valkey, _: valkey.start()),
    "frozen": Fault(lambda valkey, _: valkey.freeze(), lambda valkey, _: valkey.thaw()),
    "read-only": Fault(
        lambda valkey, _: valkey.set_read_only(read_only=True),
        lambda valkey, _: valkey.set_read_only(read_only=False),
    ),
    "slow": Fault(_slow, _fast),
    "cut off": Fault(lambda _, proxy: proxy.cut(), lambda _, proxy: proxy.restore()),
    "silent": Fault(lambda _, proxy: proxy.hold(), lambda _, proxy: proxy.restore()),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_redis_is_replaced_while_it_is_away_and_used_again(
    dsn: str, valkey: Valkey, lane: int, name: str, listener: psycopg.Connection
) -> None:
    fault = FAULTS[name]
    async with (
        proxied_url(valkey.url) as (url, proxy),
        process(dsn, url, timeout_sec=TIMEOUT_SEC) as submitter,
        process(dsn, url, timeout_sec=TIMEOUT_SEC) as other,
    ):
        knows(submitter, lane)
        wait = await other.waits()
        fault.begin(valkey, proxy)
        for each in (submitter, other):
            await each.reaches(Mode.NOTIFY)
        assert await wait, "it looks for work, and polls from now on"
        assert other.wakeups.poll_interval == POLL_UNSUBSCRIBED

        wait = await other.waits()
        await submitter.submit()
        assert await wait
        assert str(lane) in heard(listener), "in the transaction"

        fault.end(valkey, proxy)
        for each in (submitter, other):
            await each.reaches(Mode.REDIS)
        wait = await other.waits()
        await submitter.submit()
        assert await wait


@pytest.mark.parametrize("name", [*FAULTS, "restarted empty", "flushed"])
@pytest.mark.slow("faults under load, for seconds")
async def test_every_task_runs_once_whatever_happens_to_redis(
    dsn: str, valkey: Valkey, lane: int, name: str
) -> None:
    others = {
        "restarted empty": Fault(_restart, lambda *_: None),
        "flushed": Fault(lambda valkey, _: valkey.flush(), lambda *_: None),
    }
    fault = (FAULTS | others)[name]
    submitted: list[str] = []
    async with AsyncExitStack() as resources:
        url, proxy = await resources.enter_async_context(proxied_url(valkey.url))
        fleet = [
            await resources.enter_async_context(process(dsn, url, timeout_sec=TIMEOUT_SEC)) for _ in range(3)
        ]
        fleet.append(await resources.enter_async_context(process(dsn, None)))
        knows(fleet[0], lane)
        agents = [
            asyncio.create_task(each.work(f"agent-{number}-{n}"))
            for number, each in enumerate(fleet)
            for n in range(3)
        ]

        def ran() -> list[str]:
            return [task for each in fleet for task in each.ran]

        async def load(number: int) -> None:
            for n in range(number):
                submitted.extend(await fleet[n % len(fleet)].submit(1 + n % 3))

        await load(30)
        fault.begin(valkey, proxy)
        await load(60)
        fault.end(valkey, proxy)
        await load(30)
        for each in fleet[:3]:
            await each.reaches(Mode.REDIS)
        await load(30)
        await until(lambda: len(ran()) >= len(submitted) or any(agent.done() for agent in agents))
        for agent in agents:
            agent.cancel()
        ended = await asyncio.gather(*agents, return_exceptions=True)
        assert [each for each in ended if not isinstance(each, asyncio.CancelledError)] == []
        assert sorted(ran()) == sorted(submitted)


async def test_a_submission_doesnt_wait_for_redis(dsn: str, valkey: Valkey, lane: int) -> None:
    """Nothing has noticed yet that it froze: calls of Redis have a minute here."""
    async with process(dsn, valkey.url) as submitter:
        knows(submitter, lane)
        valkey.freeze()
        try:
            async with asyncio.timeout(LONG / 2):
                for _ in range(3):
                    await submitter.submit()
            assert submitter.wakeups.mode is Mode.REDIS
        finally:
            valkey.thaw()


async def test_the_names_of_listeners_tell_them_apart(
    dsn: str, shared: Valkey, connection: psycopg.Connection
) -> None:
    async with process(dsn, shared.url), process(dsn, None):
        found = connection.execute(
            "SELECT application_name FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'lineshaft wake%' ORDER BY 1"
        ).fetchall()

    assert [name for (name,) in found] == [LISTENER, LISTENER_WITH_REDIS]


def test_an_older_version_reads_what_is_for_it() -> None:
    """It turns each part into a number, and takes anything else for all lanes."""
    assert [int(lane) for lane in _payload([7, 3], "+").split(",")] == [3, 7]
    with pytest.raises(ValueError, match="invalid literal"):
        int(_payload(range(1_000), "+"))
