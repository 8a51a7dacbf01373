"""Wake-ups: waiters learn about new work when it is committed, without polling.

A transaction that makes tasks claimable sends one NOTIFY (on `task_ready`) with the ids of their lanes. Each
process has one connection that listens, and any number of waiters. A notification about a lane wakes one
waiter for that lane, not all of them; a waiter that can't use its wake-up, or not alone, passes it on.

**No wake-up is lost.** A waiter that is claiming can't be woken; if no other waits for the lane, the wake-up
is kept, and the next waiter for the lane is woken at once. The wake-up of a waiter that is cancelled or
closed goes to another one. A superfluous wake-up costs an empty claim, so in doubt waiters are woken: all of
them when the channel opens (notifications may have been missed), and when it fails (they would sleep for the
long interval).

**The database is the source of truth.** A wake-up is a hint, so waiters also poll: see `poll_interval`.

**Redis** (`redis_dispatch.py`) wakes waiters too. A wake-up from there is the only one in the fleet, so it is
passed on to other processes where one from a notification stays in this one.

The connection is probed, because one that was cut off silently looks like an idle one. psycopg can't be
cancelled quickly while it waits for an answer on such a connection (it contacts the server first), so the
socket is shut down, which ends the call.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, AsyncCursor, sql

from lineshaft import background
from lineshaft.engine.feed.redis_dispatch import FOR_OTHERS, LISTENER, LISTENER_WITH_REDIS, RedisDispatch
from lineshaft.engine.feed.waiter import Waiter
from lineshaft.engine.postgres.session import connect_options, shut_down


class Mode(StrEnum):
    """How waiting agents learn of new tasks."""

    REDIS = "redis"
    NOTIFY = "notify"
    POLLING = "polling"


_CHANNEL = "SELECT lineshaft.channel()"

#: How long a waiter sleeps while the channel works, and while it doesn't.
POLL_SUBSCRIBED = 30.0
POLL_UNSUBSCRIBED = 1.0

_log = logging.getLogger(__name__)


class Wakeups:
    """One per process. Its waiters belong to the event loop that opened it."""

    def __init__(
        self,
        dsn: str,
        *,
        probe_interval: float = 10.0,
        answer_timeout: float = 5.0,
        first_pause: float = 0.1,
        longest_pause: float = 5.0,
        listen: bool = True,
        on_unwanted: Callable[[int], None] = lambda _: None,
        on_listening: Callable[[], None] = lambda: None,
        redis: RedisDispatch | None = None,
    ) -> None:
        """`dsn` must be a direct connection: a pooler in transaction mode delivers no notifications.

        Behind a pooler, don't `listen`: a connection without notifications looks like an idle one. A lost
        connection is detected after at most `probe_interval` plus `answer_timeout`. The pauses are those
        between attempts to reconnect. `on_unwanted` is called with each lane that has work but no waiter
        here, `on_listening` when notifications may have been missed before. `redis` wakes waiters too.
        """
        self._dsn = dsn
        self._listen = listen
        self._probe_interval = probe_interval
        self._answer_timeout = answer_timeout
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        #: Waiters, the longest waiting first.
        self._queue: dict[Waiter, None] = {}
        #: Lanes that were notified while they had no waiter.
        self._remembered: set[int] = set()
        #: Lanes declined while there was no other waiter, for one that began to look before this move.
        self._declined: dict[int, int] = {}
        self._on_unwanted = on_unwanted
        self._on_listening = on_listening
        self._redis = redis
        #: Set while there are waiters.
        self._waited_for = asyncio.Event()
        self.mode = Mode.POLLING
        self.mode_since = datetime.now(UTC)
        #: How often all waiters were woken.
        self.calls = 0
        #: The number of notifications about lanes.
        self.moves = 0

    async def open(self) -> None:
        """Returns after the first attempt to connect. If it failed, more follow while waiters poll."""
        if not self._listen:
            return
        if self._redis is not None:
            self._redis.attach(self)
        self._task = asyncio.create_task(self._run(), name="lineshaft wake-ups")
        tried = asyncio.create_task(self._tried.wait())
        try:
            # If the task itself fails, its error is raised here.
            await asyncio.wait({tried, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            tried.cancel()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """All waits end as if they had timed out."""
        for waiter in list(self._queue):
            waiter.close()
        if self._task is not None:
            task, self._task = self._task, None
            await background.stop(task)
            if not task.cancelled():
                task.result()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def healthy(self) -> bool:
        """Whether wake-ups arrive, as far as known."""
        return self._up.is_set()

    @property
    def poll_interval(self) -> float:
        """While Redis is away, others may still push to it, if only this process can't reach it."""
        hears_all = self.healthy and (self._redis is None or self._redis.is_up)
        return POLL_SUBSCRIBED if hears_all else POLL_UNSUBSCRIBED

    @property
    def wakes_at_once(self) -> bool:
        """Whether new tasks wake waiters; otherwise they poll."""
        return self.mode is not Mode.POLLING

    async def wait_until(self, *, healthy: bool) -> None:
        await (self._up if healthy else self._down).wait()

    @property
    def waiting(self) -> int:
        """The number of waiters."""
        return len(self._queue)

    def waiter(self, lanes: Collection[int] | None) -> Waiter:
        """Create it before the first look for work: everything after that wakes it."""
        return Waiter(self, lanes)

    def wake(self, lane: int) -> None:
        """Wake one waiter for the lane, now or when there is one."""
        for waiter in self._queue:
            if waiter.wants(lane) and waiter.offer(lane):
                return
        self._remembered.add(lane)
        self._on_unwanted(lane)

    def hand_on(self, lane: int) -> None:
        """A wake-up that one waiter couldn't use, or not alone: wake another one, here or elsewhere."""
        for waiter in self._queue:
            if waiter.wants(lane) and waiter.offer(lane):
                return
        if self._redis is None or not self._redis.hand_on(lane):
            self._remembered.add(lane)

    def wake_other(self, lane: int, moves: int, passed: int | None = None) -> None:
        """Wake one that began to look before this many notifications.

        `passed`: it came from Redis, and so many processes had it before; None: all processes have it.
        """
        for waiter in self._queue:
            if waiter.looked_at < moves and waiter.wants(lane) and waiter.offer(lane):
                return
        # One that is looking now may have begun too early to see it.
        self._declined[lane] = moves
        if passed is not None and self._redis is not None:
            self._redis.hand_on(lane, passed + 1)

    def wake_like(self, lanes: AbstractSet[int] | None) -> None:
        """Wake one that shares a lane. If there is none, the next waiter looks for work before it waits."""
        for waiter in self._queue:
            if waiter.call(lanes):
                return

    def take_remembered(self, lanes: AbstractSet[int] | None, looked_at: int) -> set[int]:
        # All at once: a waiter looks into all of its lanes, and passes them on if there is more.
        taken = set(self._remembered) if lanes is None else self._remembered & lanes
        self._remembered -= taken
        unseen = {lane for lane, moves in self._declined.items() if looked_at < moves}
        taken |= unseen if lanes is None else unseen & lanes
        for lane in taken:
            self._declined.pop(lane, None)
        return taken

    def enqueue(self, waiter: Waiter) -> None:
        self._queue[waiter] = None
        self._waited_for.set()
        if self._redis is not None:
            self._redis.wants(waiter.lanes)

    def dequeue(self, waiter: Waiter) -> None:
        self._queue.pop(waiter, None)
        if not self._queue:
            self._waited_for.clear()

    # For Redis.

    def lanes(self) -> set[int]:
        """The lanes that waiters wait for."""
        return set().union(*(waiter.lanes for waiter in self._queue))

    async def someone_waits(self) -> None:
        await self._waited_for.wait()

    def wake_popped(self, lane: int, passed: int) -> bool:
        """Wake one waiter with a wake-up that no other process has. False: none waits for this lane."""
        self.moves += 1
        return any(waiter.wants(lane) and waiter.offer(lane, passed) for waiter in self._queue)

    def redis_changed(self) -> None:
        self._note_mode()
        if self._redis is not None and not self._redis.is_up:
            # They would sleep for the long interval.
            self.wake_all()

    def wake_all(self) -> None:
        self.calls += 1
        for waiter in list(self._queue):
            waiter.offer(None)

    def _hear(self, payload: str) -> None:
        if payload.startswith(FOR_OTHERS) and self._redis is not None and self._redis.is_up:
            # Redis has woken one waiter of the fleet.
            return
        try:
            lanes = [int(lane) for lane in payload.split(",")]
        except ValueError:
            # More lanes than fit into a payload are sent as *.
            self.wake_all()
            return
        for lane in lanes:
            self.moves += 1
            self.wake(lane)

    async def _run(self) -> None:
        pause = self._first_pause
        while True:
            if await self._subscribe_and_listen():
                pause = self._first_pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._longest_pause)

    async def _subscribe_and_listen(self) -> bool:
        """Returns when the connection is lost: whether it lasted until a probe."""
        connection: AsyncConnection[Any] | None = None
        held = False
        try:
            async with asyncio.timeout(self._answer_timeout):
                connection = await AsyncConnection.connect(
                    self._dsn,
                    autocommit=True,
                    application_name=LISTENER if self._redis is None else LISTENER_WITH_REDIS,
                    **connect_options(self._dsn),
                )
            found = await (await self._execute(connection, _CHANNEL)).fetchone()
            channel = sql.Identifier(found[0] if found else "")
            await self._execute(connection, sql.SQL("LISTEN {}").format(channel))
            self._switch(healthy=True)
            while True:
                # Always run it to its end: leaving early loses notifications that it has received.
                async for notification in connection.notifies(timeout=self._probe_interval):
                    self._hear(notification.payload)
                await self._execute(connection, "SELECT 1")
                held = True
        except (psycopg.Error, OSError, TimeoutError) as error:
            news = self.healthy or not self._tried.is_set()
            _log.log(
                logging.WARNING if news else logging.DEBUG,
                "Wake-ups are not available, polling instead: %s",
                str(error) or type(error).__name__,
            )
            return held
        finally:
            self._switch(healthy=False)
            if connection is not None:
                await connection.close()

    async def _execute(self, connection: AsyncConnection[Any], statement: Any) -> AsyncCursor[Any]:
        call = asyncio.ensure_future(connection.execute(statement))
        try:
            await asyncio.wait({call}, timeout=self._answer_timeout)
            if not call.done():
                raise TimeoutError(f"no answer within {self._answer_timeout:g} s")
        finally:
            if not call.done():
                shut_down(connection)
                await asyncio.wait({call})
            error = call.exception()
        if error is not None:
            raise error
        return call.result()

    def _switch(self, *, healthy: bool) -> None:
        self._tried.set()
        if healthy == self.healthy:
            return
        now, before = (self._up, self._down) if healthy else (self._down, self._up)
        now.set()
        before.clear()
        self._note_mode()
        if healthy:
            self._on_listening()
        self.wake_all()

    def _note_mode(self) -> None:
        if self._redis is not None and self._redis.is_up:
            mode = Mode.REDIS
        else:
            mode = Mode.NOTIFY if self.healthy else Mode.POLLING
        if mode != self.mode:
            self.mode, self.mode_since = mode, datetime.now(UTC)
