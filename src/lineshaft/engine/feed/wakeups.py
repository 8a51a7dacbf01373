"""Wake-ups: who waits for work hears of it when it is committed, without asking.

A transaction that makes tasks claimable sends one NOTIFY with the ids of their lanes. Each process has one
connection that listens, and any number of waiters. A lane that moved wakes one waiter that may take from it,
not all of them; a waiter that can't use its wake-up, or not alone, passes it on.

**No wake-up is lost.** A waiter that is claiming just now can't be woken; if no other waits for the lane, it
is remembered, and whoever waits for it next is woken at once. What woke a waiter that is cancelled or closed
goes to another. Waking once too often costs an empty claim, so in doubt somebody is woken: all of them when
the channel opens (something may have been missed while it was down), and when it fails (they sleep for as
long as one may with a channel).

**The database remains what counts.** A wake-up is a hint, so waiters also look by themselves now and then:
`poll_interval` says how often.

The connection is probed, as one that was cut off silently looks just like one on which nothing happens.
psycopg can't be cancelled quickly while it waits for an answer on such a connection (it tries to reach the
server first), so the socket is shut down under it: then its call ends by itself.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection

from lineshaft.engine.postgres.pool import shut_down

CHANNEL = "lineshaft"
_LISTEN = f"LISTEN {CHANNEL}"

#: How long a waiter may sleep while it would be woken, and while it would not.
POLL_SUBSCRIBED = 30.0
POLL_DEAF = 1.0

_log = logging.getLogger(__name__)


class Waiter:
    """Waits for work in some lanes; None: in any. One task may wait at a time.

    A `set` of lanes is not copied: whoever gave it may add to it.
    """

    def __init__(self, wakeups: "Wakeups", lanes: Collection[int] | None) -> None:
        self._wakeups = wakeups
        self._lanes: AbstractSet[int] | None = (
            lanes if isinstance(lanes, set) or lanes is None else set(lanes)
        )
        self._future: asyncio.Future[bool] | None = None
        #: What woke it, until it waits again: these lanes ...
        self._woken_by: set[int] = set()
        #: ... or others, for these lanes of theirs, that had looked by themselves and found much.
        self._called_for: list[AbstractSet[int] | None] = []
        self._heard = wakeups.calls
        #: How many lanes had moved when it last began to look.
        self.looked_at = wakeups.moves

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def wait(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - running out of time is an answer, no error
        """True: look for work. False: the time is up, or it was closed."""
        if self._future is not None:
            raise RuntimeError("Two tasks wait with the same waiter. Give each its own.")
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
        self._wakeups.line_up(self)
        try:
            return await self._future
        except asyncio.CancelledError:
            self._return()
            raise
        finally:
            self.looked_at = self._wakeups.moves
            if timer is not None:
                timer.cancel()
            self._wakeups.step_out(self)
            self._future = None

    def pass_on(self, lane: int | None = None) -> None:
        """Let another look as well, as a claim that came back full may have left something.

        None: for the lanes that woke this one. If it looked by itself, one other is woken that shares a lane.
        """
        if lane is not None:
            self._wakeups.wake(lane)
        elif self._woken_by or self._called_for:
            self._return()
        else:
            self._wakeups.wake_like(self._lanes)

    def decline(self) -> None:
        """It has no room for what woke it: let one look who has not since; nobody twice."""
        lanes, self._woken_by = self._woken_by, set()
        for lane in sorted(lanes):
            self._wakeups.wake_other(lane, self.looked_at)

    def close(self) -> None:
        """What woke it goes to another, unless it has waited again since."""
        self._stop()
        self._return()

    def wants(self, lane: int) -> bool:
        return self._lanes is None or lane in self._lanes

    def offer(self, lane: int | None) -> bool:
        """Wake it; None: as it is for all of them. False: it has stopped waiting."""
        if self._future is None or self._future.done():
            return False
        if lane is not None:
            self._woken_by.add(lane)
        self._heard = self._wakeups.calls
        self._wakeups.step_out(self)
        self._future.set_result(True)
        return True

    def call(self, lanes: AbstractSet[int] | None) -> bool:
        """Wake it if it might take from one of these lanes."""
        shares = lanes is None or self._lanes is None or not lanes.isdisjoint(self._lanes)
        if not (shares and self.offer(None)):
            return False
        self._called_for.append(lanes)
        return True

    def _stop(self) -> None:
        # Out of the line at once: a wake-up between now and when its task runs must go to another.
        self._wakeups.step_out(self)
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
    """One for each process. Its waiters live in the event loop that opened it."""

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
        """`dsn` must lead to the database itself: a pooler in transaction mode delivers no notifications.

        Behind one, don't `listen`: a connection that is never told anything looks just like a quiet one.
        A connection that was cut off is noticed after `probe_interval` and `answer_timeout` at the latest.
        The pauses are those between attempts to open a new one. `on_unwanted` is called with each lane that
        moves while it has no waiter here.
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
        #: Those who wait, the longest waiting first.
        self._line: dict[Waiter, None] = {}
        #: Lanes that moved while nobody waited for them.
        self._remembered: set[int] = set()
        #: Lanes that were declined while nobody else waited, for whoever had begun to look before this move.
        self._declined: dict[int, int] = {}
        self._on_unwanted = on_unwanted
        #: How often everybody was woken.
        self.calls = 0
        #: How often it was heard that a lane has moved.
        self.moves = 0

    async def open(self) -> None:
        """Returns when the first attempt is over. If it failed, more are made while waiters poll."""
        if not self._listen:
            return
        self._task = asyncio.create_task(self._run(), name="lineshaft wake-ups")
        tried = asyncio.create_task(self._tried.wait())
        try:
            # Should the task itself fail, its error belongs here.
            await asyncio.wait({tried, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            tried.cancel()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Whoever waits is let go, as if the time were up."""
        for waiter in list(self._line):
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
        """Whether wake-ups arrive, as far as is known."""
        return self._up.is_set()

    @property
    def poll_interval(self) -> float:
        return POLL_SUBSCRIBED if self.healthy else POLL_DEAF

    async def wait_until(self, *, healthy: bool) -> None:
        await (self._up if healthy else self._down).wait()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._line)

    def waiter(self, lanes: Collection[int] | None) -> Waiter:
        """Make it before looking for work for the first time: what happens from then on will wake it."""
        return Waiter(self, lanes)

    def wake(self, lane: int) -> None:
        """Wake one waiter for the lane, now or when one comes."""
        for waiter in self._line:
            if waiter.wants(lane) and waiter.offer(lane):
                return
        self._remembered.add(lane)
        self._on_unwanted(lane)

    def wake_other(self, lane: int, moves: int) -> None:
        """Wake one who began to look before this many lanes had moved."""
        for waiter in self._line:
            if waiter.looked_at < moves and waiter.wants(lane) and waiter.offer(lane):
                return
        # Who is looking just now may have begun too early to see it.
        self._declined[lane] = moves

    def wake_like(self, lanes: AbstractSet[int] | None) -> None:
        """Wake one who might take the same. Nobody there: whoever comes looks before it waits."""
        for waiter in self._line:
            if waiter.call(lanes):
                return

    def take_remembered(self, lanes: AbstractSet[int] | None, looked_at: int) -> set[int]:
        # All at once: who looks for work looks into all of its lanes, and passes them on if there is more.
        taken = set(self._remembered) if lanes is None else self._remembered & lanes
        self._remembered -= taken
        unseen = {lane for lane, moves in self._declined.items() if looked_at < moves}
        taken |= unseen if lanes is None else unseen & lanes
        for lane in taken:
            self._declined.pop(lane, None)
        return taken

    def line_up(self, waiter: Waiter) -> None:
        self._line[waiter] = None

    def step_out(self, waiter: Waiter) -> None:
        self._line.pop(waiter, None)

    def wake_all(self) -> None:
        self.calls += 1
        for waiter in list(self._line):
            waiter.offer(None)

    def _hear(self, payload: str) -> None:
        try:
            lanes = [int(lane) for lane in payload.split(",")]
        except ValueError:
            # More lanes than fit into a payload are sent as *. Whatever else it may be, something has moved.
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
        """Returns when the connection is lost: whether it had held until a probe."""
        connection: AsyncConnection[Any] | None = None
        held = False
        try:
            async with asyncio.timeout(self._answer_timeout):
                connection = await AsyncConnection.connect(
                    self._dsn, autocommit=True, application_name="lineshaft wake-ups"
                )
            await self._execute(connection, _LISTEN)
            self._switch(healthy=True)
            while True:
                # It runs to its end, always: what it has received but not given yet is lost when it is left.
                async for notification in connection.notifies(timeout=self._probe_interval):
                    self._hear(notification.payload)
                await self._execute(connection, "SELECT 1")
                held = True
        except (psycopg.Error, OSError, TimeoutError) as error:
            news = self.healthy or not self._tried.is_set()
            _log.log(
                logging.WARNING if news else logging.DEBUG,
                "Wake-ups don't arrive, polling instead: %s",
                str(error) or type(error).__name__,
            )
            return held
        finally:
            self._switch(healthy=False)
            if connection is not None:
                await connection.close()

    async def _execute(self, connection: AsyncConnection[Any], statement: Any) -> None:
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

    def _switch(self, *, healthy: bool) -> None:
        self._tried.set()
        if healthy == self.healthy:
            return
        now, before = (self._up, self._down) if healthy else (self._down, self._up)
        now.set()
        before.clear()
        self.wake_all()
