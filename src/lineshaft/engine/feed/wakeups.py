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

The connection is probed, because one that was cut off silently looks like an idle one. psycopg can't be
cancelled quickly while it waits for an answer on such a connection (it contacts the server first), so the
socket is shut down, which ends the call.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, AsyncCursor, sql

from lineshaft.engine.postgres.session import connect_options, shut_down

_CHANNEL = "SELECT lineshaft.channel()"

#: How long a waiter sleeps while the channel works, and while it doesn't.
POLL_SUBSCRIBED = 30.0
POLL_UNSUBSCRIBED = 1.0

_log = logging.getLogger(__name__)


class Waiter:
    """Waits for work in some lanes; None: in any. One asyncio task may wait at a time.

    A `set` of lanes is not copied: its owner may add lanes to it.
    """

    def __init__(self, wakeups: "Wakeups", lanes: Collection[int] | None) -> None:
        self._wakeups = wakeups
        self._lanes: AbstractSet[int] | None = (
            lanes if isinstance(lanes, set) or lanes is None else set(lanes)
        )
        self._future: asyncio.Future[bool] | None = None
        #: Why it was woken, until it waits again: notifications about these lanes ...
        self._woken_by: set[int] = set()
        #: ... or other waiters with these lanes, which had polled and found more than they could take.
        self._called_for: list[AbstractSet[int] | None] = []
        self._heard = wakeups.calls
        #: The number of notifications when it last began to look for work.
        self.looked_at = wakeups.moves

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def wait(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - a timeout is a result, not an error
        """True: look for work. False: timed out, or closed."""
        if self._future is not None:
            raise RuntimeError("Two tasks wait with the same waiter. Use one waiter for each.")
        self._woken_by = self._wakeups.take_remembered(self._lanes, self.looked_at)
        self._called_for = []
        missed_call = self._heard != self._wakeups.calls
        self._heard = self._wakeups.calls
        if self._woken_by or missed_call:
            self.looked_at = self._wakeups.moves
            return True
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, self._stop)
        self._wakeups.enqueue(self)
        try:
            return await self._future
        except asyncio.CancelledError:
            self._return()
            raise
        finally:
            self.looked_at = self._wakeups.moves
            if timer is not None:
                timer.cancel()
            self._wakeups.dequeue(self)
            self._future = None

    def pass_on(self, lane: int | None = None) -> None:
        """Wake another waiter, because a claim that returned a full batch may have left tasks behind.

        None: for the lanes that woke this one. If it was polling, another waiter that shares a lane is woken.
        """
        if lane is not None:
            self._wakeups.wake(lane)
        elif self._woken_by or self._called_for:
            self._return()
        else:
            self._wakeups.wake_like(self._lanes)

    def settle(self) -> None:
        """It has taken all there is for it: closing it passes nothing on."""
        self._woken_by, self._called_for = set(), []

    def decline(self) -> None:
        """It has no room for more work: wake one that has not looked since; none is woken twice."""
        lanes, self._woken_by = self._woken_by, set()
        for lane in sorted(lanes):
            self._wakeups.wake_other(lane, self.looked_at)

    def close(self) -> None:
        """Its wake-up goes to another waiter, unless it has waited again since."""
        self._stop()
        self._return()

    def wants(self, lane: int) -> bool:
        return self._lanes is None or lane in self._lanes

    def offer(self, lane: int | None) -> bool:
        """Wake it; `lane`: None is for all lanes. False: it is not waiting."""
        if self._future is None or self._future.done():
            return False
        if lane is not None:
            self._woken_by.add(lane)
        self._heard = self._wakeups.calls
        self._wakeups.dequeue(self)
        self._future.set_result(True)
        return True

    def call(self, lanes: AbstractSet[int] | None) -> bool:
        """Wake it if it waits for one of these lanes."""
        shares = lanes is None or self._lanes is None or not lanes.isdisjoint(self._lanes)
        if not (shares and self.offer(None)):
            return False
        self._called_for.append(lanes)
        return True

    def _stop(self) -> None:
        # Leave the queue at once: a wake-up before its task runs must go to another waiter.
        self._wakeups.dequeue(self)
        if self._future is not None and not self._future.done():
            self._future.set_result(False)

    def _return(self) -> None:
        lanes, self._woken_by = self._woken_by, set()
        calls, self._called_for = self._called_for, []
        for others in calls:
            self._wakeups.wake_like(others)
        for lane in sorted(lanes):
            self._wakeups.wake(lane)


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
    ) -> None:
        """`dsn` must be a direct connection: a pooler in transaction mode delivers no notifications.

        Behind a pooler, don't `listen`: a connection without notifications looks like an idle one. A lost
        connection is detected after at most `probe_interval` plus `answer_timeout`. The pauses are those
        between attempts to reconnect. `on_unwanted` is called with each lane that has work but no waiter
        here.
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
        #: How often all waiters were woken.
        self.calls = 0
        #: The number of notifications about lanes.
        self.moves = 0

    async def open(self) -> None:
        """Returns after the first attempt to connect. If it failed, more follow while waiters poll."""
        if not self._listen:
            return
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
            task.cancel()
            await asyncio.wait({task})
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
        return POLL_SUBSCRIBED if self.healthy else POLL_UNSUBSCRIBED

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

    def wake_other(self, lane: int, moves: int) -> None:
        """Wake one that began to look before this many notifications."""
        for waiter in self._queue:
            if waiter.looked_at < moves and waiter.wants(lane) and waiter.offer(lane):
                return
        # One that is looking now may have begun too early to see it.
        self._declined[lane] = moves

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

    def dequeue(self, waiter: Waiter) -> None:
        self._queue.pop(waiter, None)

    def wake_all(self) -> None:
        self.calls += 1
        for waiter in list(self._queue):
            waiter.offer(None)

    def _hear(self, payload: str) -> None:
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
                    application_name="lineshaft wake-ups",
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
        self.wake_all()
