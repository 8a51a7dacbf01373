"""Wake-ups: heard at once, by one waiter for each lane, never lost, and the channel mends itself."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.waiter import Waiter
from lineshaft.engine.feed.wakeups import POLL_SUBSCRIBED, POLL_UNSUBSCRIBED, Wakeups
from lineshaft.engine.submit.lanes import wake_lanes
from lineshaft.model.tasks import NewTask
from tests.conftest import superuser
from tests.world import World

#: Only to end a test that fails; nothing below waits for it.
LONG = 30.0
SENTINEL = 999_999


@pytest.fixture
async def wakeups(dsn: str) -> AsyncIterator[Wakeups]:
    async with Wakeups(dsn, answer_timeout=LONG, first_pause=0.01) as opened:
        yield opened


@pytest.fixture
def idle() -> Wakeups:
    """Without a connection: for what happens between waiters."""
    return Wakeups("")


def notify(connection: psycopg.Connection, payload: str) -> None:
    connection.execute("SELECT pg_notify('task_ready', %s)", [payload])


async def start(*waits: Coroutine[Any, Any, bool]) -> list[asyncio.Task[bool]]:
    """Tasks that have run up to where they wait."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await settle()
    return tasks


async def settle() -> None:
    """Everything runs that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def heard_so_far(wakeups: Wakeups, connection: psycopg.Connection) -> None:
    """All that was sent before this has arrived."""
    with wakeups.waiter([SENTINEL]) as sentinel:
        notify(connection, str(SENTINEL))
        assert await sentinel.wait(LONG)
        sentinel._woken_by.clear()  # no other waiter wants it


async def test_a_waiter_hears_of_its_lane(wakeups: Wakeups, connection: psycopg.Connection) -> None:
    """R-078, F-35."""
    (waiting,) = await start(wakeups.waiter([3, 4]).wait(LONG))

    notify(connection, "4")

    assert await waiting is True
    assert wakeups.healthy
    assert wakeups.poll_interval == POLL_SUBSCRIBED


async def test_one_waiter_is_woken_for_each_lane_that_moved(
    wakeups: Wakeups, connection: psycopg.Connection
) -> None:
    """The longest waiting first; never the whole herd."""
    tasks = await start(*(wakeups.waiter([1, 2]).wait(LONG) for _ in range(5)))
    (other,) = await start(wakeups.waiter([3]).wait(LONG))

    notify(connection, "1")
    await heard_so_far(wakeups, connection)
    assert [task.done() for task in tasks] == [True, False, False, False, False]

    notify(connection, "1,2")
    await heard_so_far(wakeups, connection)
    assert [task.done() for task in tasks] == [True, True, True, False, False]
    assert not other.done()
    for task in (*tasks, other):
        task.cancel()


async def test_a_wake_up_without_a_waiter_is_kept(wakeups: Wakeups, connection: psycopg.Connection) -> None:
    """A claim that found nothing and a notification may cross."""
    waiter, other = wakeups.waiter([1, 2]), wakeups.waiter([3])
    notify(connection, "1,2")
    await heard_so_far(wakeups, connection)

    assert await other.wait(0) is False
    assert await waiter.wait(LONG) is True
    assert await waiter.wait(0) is False


async def test_a_waiter_for_any_lane_hears_of_all(wakeups: Wakeups, connection: psycopg.Connection) -> None:
    waiter = wakeups.waiter(None)
    for payload in ("5", "6,7"):
        (waiting,) = await start(waiter.wait(LONG))
        notify(connection, payload)
        assert await waiting is True


@pytest.mark.parametrize("payload", ["*", "", "1,x"])
async def test_whatever_cant_be_read_wakes_everybody(
    wakeups: Wakeups, connection: psycopg.Connection, payload: str
) -> None:
    tasks = await start(*(wakeups.waiter([number]).wait(LONG) for number in range(4)))
    busy = wakeups.waiter([9])

    notify(connection, payload)

    assert await asyncio.gather(*tasks) == [True] * 4
    assert await busy.wait(LONG) is True
    assert await busy.wait(0) is False


async def test_time_runs_out(idle: Wakeups) -> None:
    assert await idle.waiter([1]).wait(0) is False
    assert await idle.waiter(None).wait(0.001) is False


async def test_a_wake_up_after_the_time_ran_out_goes_to_another(idle: Wakeups) -> None:
    """Though the first one's task hasn't run yet."""
    first, second = idle.waiter([1]), idle.waiter([1])
    late, patient = await start(first.wait(LONG), second.wait(LONG))

    first._stop()  # what its timer does
    idle.wake(1)

    assert (await late, await patient) == (False, True)


async def test_a_full_claim_passes_its_wake_up_on(idle: Wakeups) -> None:
    waiters = [idle.waiter([1, 2]) for _ in range(3)]
    tasks = await start(*(waiter.wait(LONG) for waiter in waiters))

    idle.wake(1)
    assert await tasks[0]
    waiters[0].pass_on()
    assert await tasks[1]
    waiters[1].pass_on(2)
    assert await tasks[2]
    # Without a waiter: the next one is woken.
    waiters[2].pass_on()
    assert await waiters[0].wait(LONG)
    assert await waiters[1].wait(0) is False


async def test_a_waiter_that_looked_too_early_gets_what_another_declined(idle: Wakeups) -> None:
    looking, constrained = idle.waiter([7]), idle.waiter([7])
    (woken,) = await start(constrained.wait(LONG))
    idle._hear("7")
    assert await woken

    # Who could take it is still looking, and may have begun before it was there.
    constrained.decline()

    assert await looking.wait(LONG)
    assert not await constrained.wait(0)
    assert not await looking.wait(0)


async def test_who_looked_by_itself_and_found_much_calls_another(idle: Wakeups) -> None:
    polling, stranger, same, anyone = (idle.waiter(lanes) for lanes in ([1, 2], [3], [2, 3], None))
    tasks = await start(stranger.wait(LONG), same.wait(LONG), anyone.wait(LONG))

    polling.pass_on()
    await settle()
    assert [task.done() for task in tasks] == [False, True, False]
    polling.pass_on()
    await settle()
    assert [task.done() for task in tasks] == [False, True, True]
    # Who was called and can't come calls the next.
    (again,) = await start(polling.wait(LONG))
    same.close()
    assert await again
    tasks[0].cancel()


@pytest.mark.parametrize("lane", [None, 1])
async def test_a_cancelled_waiters_wake_up_goes_to_another(idle: Wakeups, lane: int | None) -> None:
    """F-42: whether it was cancelled just before or just after."""
    for cancel_first in (False, True):
        waiters = [idle.waiter([1]) for _ in range(2)]
        gone, other = await start(*(waiter.wait(LONG) for waiter in waiters))

        def wake() -> None:
            idle.waiter([1]).pass_on() if lane is None else idle.wake(lane)

        if cancel_first:
            gone.cancel()
            wake()
        else:
            wake()
            gone.cancel()

        with pytest.raises(asyncio.CancelledError):
            await gone
        assert await other is True


async def test_a_closed_waiters_wake_up_goes_to_another(idle: Wakeups) -> None:
    waiters = [idle.waiter([1]) for _ in range(3)]
    first, second, third = await start(*(waiter.wait(LONG) for waiter in waiters))

    with waiters[0]:
        idle.wake(1)
        assert await first
    assert await second
    waiters[2].close()
    assert await third is False


async def test_a_waiter_is_for_one_task(idle: Wakeups) -> None:
    waiter = idle.waiter([1])
    (waiting,) = await start(waiter.wait(LONG))

    with pytest.raises(RuntimeError, match="Use one waiter for each"):
        await waiter.wait(LONG)
    waiting.cancel()


async def test_a_connection_that_dies_is_replaced_and_everybody_looks(
    wakeups: Wakeups, connection: psycopg.Connection
) -> None:
    """U10: once when the channel fails, as they slept for as long as with one; once when it is back."""
    waiter, busy = wakeups.waiter([1]), wakeups.waiter([2])
    (waiting,) = await start(waiter.wait(LONG))

    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'lineshaft wake-ups'"
    )

    await wakeups.wait_until(healthy=False)
    assert wakeups.poll_interval == POLL_UNSUBSCRIBED
    assert await waiting is True
    (waiting,) = await start(waiter.wait(LONG))
    await wakeups.wait_until(healthy=True)
    assert await waiting is True
    assert await busy.wait(LONG) is True
    assert await busy.wait(0) is False
    (waiting,) = await start(waiter.wait(LONG))
    notify(connection, "1")
    assert await waiting is True


async def test_what_arrives_during_a_probe_is_heard(dsn: str, connection: psycopg.Connection) -> None:
    lanes = set(range(300))

    async def hear_all(waiter: Waiter) -> None:
        missing = set(lanes)
        while missing:
            assert await waiter.wait(LONG)
            missing -= waiter._woken_by

    async with Wakeups(dsn, probe_interval=0.0, answer_timeout=LONG) as wakeups:
        hearing = asyncio.create_task(hear_all(wakeups.waiter(None)))
        for lane in lanes:
            await asyncio.to_thread(notify, connection, str(lane))
        await hearing


class Proxy:
    """Passes bytes between clients and the server, until it swallows those of its clients."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self.swallows_new = False
        self.swallowed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_open = asyncio.Event() if self.swallows_new else self._open
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        self._tasks += [
            asyncio.create_task(self._pump(reader, far_writer, is_open)),
            asyncio.create_task(self._pump(far_reader, writer, is_open)),
        ]

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_open: asyncio.Event
    ) -> None:
        try:
            while data := await source.read(65536):
                if not is_open.is_set():
                    self.swallowed.set()
                await is_open.wait()
                target.write(data)
        except ConnectionError:
            pass
        finally:
            target.close()

    def swallow(self, *, also_new: bool = False) -> None:
        self._open.clear()
        self._open = asyncio.Event()
        self._open.set()
        self.swallows_new = also_new

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[tuple[Proxy, str]]:
    parts = conninfo_to_dict(dsn)
    proxy = Proxy(f"{parts['host']}/.s.PGSQL.{parts['port']}")
    with tempfile.TemporaryDirectory(prefix="proxy") as place:
        server = await asyncio.start_unix_server(proxy.serve, Path(place) / ".s.PGSQL.5432")
        try:
            yield proxy, make_conninfo(dsn, host=place, port=5432)
        finally:
            server.close()
            await proxy.close()


async def test_a_connection_that_was_cut_off_silently_is_noticed(
    dsn: str, connection: psycopg.Connection
) -> None:
    async with (
        proxied(dsn) as (proxy, through),
        Wakeups(through, probe_interval=0.05, answer_timeout=0.2, first_pause=0.01) as wakeups,
    ):
        # A slow answer counts as none: then it connects again.
        await wakeups.wait_until(healthy=True)
        (waiting,) = await start(wakeups.waiter([1]).wait(LONG))
        began = asyncio.get_running_loop().time()

        proxy.swallow()
        await wakeups.wait_until(healthy=False)

        # Far below what psycopg takes to give up a call on such a connection (10 s).
        assert asyncio.get_running_loop().time() - began < 8
        assert await waiting is True
        await wakeups.wait_until(healthy=True)
        (waiting,) = await start(wakeups.waiter([1]).wait(LONG))
        notify(connection, "1")
        assert await waiting is True


@pytest.mark.parametrize("state", ["listening", "probing", "connecting", "pausing"])
async def test_closing_is_prompt(dsn: str, state: str) -> None:
    async with proxied(dsn) as (proxy, through):
        opening: asyncio.Task[None] | None = None
        probe = 0.001 if state == "probing" else LONG
        wakeups = Wakeups(through, probe_interval=probe, answer_timeout=LONG, first_pause=LONG)
        if state == "connecting":
            proxy.swallow(also_new=True)
            opening = asyncio.create_task(wakeups.open())
            await proxy.swallowed.wait()
        elif state == "pausing":
            wakeups._dsn = make_conninfo(through, dbname="there_is_no_such_database")
            await wakeups.open()
            assert not wakeups.healthy
            assert wakeups.poll_interval == POLL_UNSUBSCRIBED
        else:
            await wakeups.open()
            assert wakeups.healthy
            proxy.swallow()
        if state == "probing":
            await proxy.swallowed.wait()
        (waiting,) = await start(wakeups.waiter([1]).wait(LONG))
        began = asyncio.get_running_loop().time()

        await wakeups.close()

        assert asyncio.get_running_loop().time() - began < LONG / 2
        assert await waiting is False
        if opening is not None:
            opening.cancel()
            await asyncio.wait({opening})


async def test_more_lanes_than_a_notification_holds_are_all_of_them(
    world: World, connection: psycopg.Connection
) -> None:
    connection.execute("LISTEN task_ready")
    for lanes in ([2**31 - 1 - n for n in range(699)], list(range(700)), [3, 1, 3]):
        async with world.engine.database.connection() as own:
            await wake_lanes(own, lanes)

    sent = [each.payload for each in connection.notifies(timeout=LONG, stop_after=3)]

    assert [sent[0].count(","), *sent[1:]] == [698, "*", "1,3"]


def notifications(listener: psycopg.Connection) -> list[str]:
    """Those that have arrived; a statement brings what was committed before it."""
    listener.execute("SELECT 1")
    return [each.channel for each in listener.notifies(timeout=0)]


async def test_a_program_that_listens_for_task_ready_hears_of_new_tasks(world: World, dsn: str) -> None:
    """004 §6.4: by every way of submitting."""
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("LISTEN task_ready")
        for tasks in ([NewTask("a")], [NewTask("a")], [NewTask("a"), NewTask("b")], [NewTask("a")] * 60):
            await world.engine.submission.submit(tasks)
            assert notifications(listener) == ["task_ready"]


async def test_another_channel_can_be_chosen_for_the_whole_database(dsn: str) -> None:
    """Another program may use the name; a caller's own connection agrees too."""
    with psycopg.connect(superuser(dsn), autocommit=True) as admin:
        name = conninfo_to_dict(dsn)["dbname"]
        admin.execute(f"ALTER DATABASE {name} SET lineshaft.channel = 'Our tasks'".encode())
        admin.execute("LISTEN task_ready")
        async with Wakeups(dsn, answer_timeout=LONG) as wakeups, Engine(dsn) as engine:
            for connection in (None, await psycopg.AsyncConnection.connect(dsn)):
                (waiting,) = await start(wakeups.waiter(None).wait(LONG))
                await engine.submission.submit([NewTask("a")], connection=connection)
                if connection is not None:
                    await connection.commit()
                    await connection.close()
                assert await waiting is True
            # By notifications, not because the channel had just opened.
            assert wakeups.moves == 2
        assert notifications(admin) == []
