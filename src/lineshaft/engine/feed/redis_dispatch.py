"""Wake-ups through Redis, beside notifications of PostgreSQL.

**Sending.** While Redis answers, transactions don't notify: after the commit their lanes are pushed to lists,
off the caller's way, and each push wakes one waiter of the fleet. A process that listens by notifications
only still hears of everything: if there is one, this process notifies it, once for many transactions.

**Waiting.** Each process pops from the lists of the lanes that it waits for, and still hears notifications:
of processes without Redis, and of transactions that callers began themselves.

**Lost wake-ups.** A process can die between its commit and the push, or between the pop and the claim, and
Redis can lose what it had. So one process of the fleet looks every second for lanes whose tasks have waited
too long, and pushes those again. Redis chooses it: none is needed while Redis is away.

**Failures.** Every call has a deadline, and each process checks twice a second that Redis takes a write.
At the first failure transactions notify again, all waiters look for work, and poll every second. Redis is
used again once it has answered for a while.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from lineshaft import background
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.postgres.lane_reports import LaneReports
from lineshaft.engine.postgres.rows import fetch_column, fetch_value
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.integrations.redis.connection import RedisServer
from lineshaft.integrations.redis.lists import WakeupLists

#: The name of connections that listen, in processes without Redis ...
LISTENER = "lineshaft wake-ups"
#: ... and in those with it, which need no notification of what was pushed.
LISTENER_WITH_REDIS = "lineshaft wake-ups beside Redis"
#: A notification that begins with this is for the former. They read +7 as the lane 7.
FOR_OTHERS = "+"

_WATCH_SEC = 0.5
#: How long a pop waits. With the deadline of an answer this is how long a frozen Redis goes unnoticed.
_POP_SEC = 0.3
_SWEEP_SEC = 1.0
_MOST_SWEPT = 1_000
#: At most so often are processes without Redis notified.
_NOTIFY_PAUSE_SEC = 0.1
#: How often a lane is announced to everybody: a process that doesn't know it can't wait for its list.
_ANNOUNCED_SEC = 600.0
#: A notification holds 8,000 bytes.
_MOST_NAMED = 600
#: Waiters that can't use a wake-up pass it on, so many times.
_MOST_PASSES = 16
#: Checks that must succeed after a failure: twice as many after each, until all is well for a minute.
_MOST_CHECKS = 16
_WELL_SEC = 60.0
#: A command that ends before this needs no connection to Redis.
_PATIENCE_SEC = 0.3
_FLUSH_SEC = 1.0

_SQL = catalog.load(__name__)
_log = logging.getLogger(__name__)


class Waiting(Protocol):
    """The waiters of this process."""

    def lanes(self) -> set[int]:
        """The lanes that they wait for."""
        ...

    async def someone_waits(self) -> None: ...

    def wake_popped(self, lane: int, passed: int) -> bool:
        """Wake one of them. False: none waits for this lane."""
        ...

    def redis_changed(self) -> None: ...


class RedisDispatch:
    """One per process, from `open` to `close`."""

    def __init__(self, server: RedisServer, database: Database, reports: LaneReports) -> None:
        self.server = server
        self._database = database
        self._reports = reports
        self._lists: WakeupLists | None = None
        self._up = asyncio.Event()
        self._up_at = 0.0
        #: Why Redis isn't used; None: it is used.
        self.fault: str | None = "not connected yet"
        self._checks_needed = 1
        self._checks_left = 1
        self._waiting: Waiting | None = None
        self._listened: set[int] = set()
        self._interrupting = False
        #: Lanes to notify: everybody, and those without Redis.
        self._for_all: set[int] = set()
        self._for_others: set[int] = set()
        self._has_to_notify = asyncio.Event()
        self._announced: dict[int, float] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._attached = asyncio.Event()

    # Life.

    async def open(self) -> None:
        for work in (self._watch(), self._send(), self._notify()):
            self._start(work)

    async def close(self) -> None:
        await background.stop(*self._background)
        # What was committed last is passed on too.
        with contextlib.suppress(LineshaftError, TimeoutError):
            async with asyncio.timeout(_FLUSH_SEC):
                if self._reports.waiting:
                    await self._pass_on(await self._reports.take())
                if self._for_all or self._for_others:
                    await self._notify_once()
        self._reports.active = False
        if self._lists is not None:
            await self._lists.close()

    def attach(self, waiting: Waiting) -> None:
        """Its waiters are woken from now on."""
        self._waiting = waiting
        self._attached.set()
        self._start(self._listen(waiting))

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    @property
    def _opened(self) -> WakeupLists:
        if self._lists is None:
            raise AssertionError("lists are opened before Redis is used")
        return self._lists

    # For waiters.

    def wants(self, lanes: AbstractSet[int]) -> None:
        """A waiter begins to wait for these lanes."""
        if self.is_up and not lanes <= self._listened and not self._interrupting:
            self._interrupting = True
            self._start(self._interrupt())

    def hand_on(self, lane: int, passed: int = 0) -> bool:
        """A wake-up that no waiter here can use goes to another process. False: it isn't passed on."""
        if not self.is_up or passed >= _MOST_PASSES:
            return False
        self._start(self._push_back(lane, passed))
        return True

    # Whether Redis answers.

    async def _watch(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SEC):
                await self._attached.wait()
        while True:
            try:
                if self._lists is None:
                    self._lists = WakeupLists(self.server, await self._identity())
                leads = await self._lists.lead(_SWEEP_SEC)
            except UnavailableError as error:
                self._fall(error)
            else:
                self._rise()
                if leads and self.is_up:
                    self._start(self._sweep())
            await asyncio.sleep(_WATCH_SEC)

    async def _identity(self) -> str:
        async with self._database.connection() as connection:
            return str(await fetch_value(connection, _SQL["identity"], {}))

    def _rise(self) -> None:
        now = time.monotonic()
        if self.is_up:
            if now - self._up_at > _WELL_SEC:
                self._checks_needed = 1
            return
        self._checks_left -= 1
        if self._checks_left > 0:
            return
        self._up_at = now
        self.fault = None
        self._up.set()
        self._reports.active = True
        _log.info("Wake-ups go through Redis at %s.", self.server.place)
        if self._waiting is not None:
            self._waiting.redis_changed()

    def _fall(self, error: UnavailableError) -> None:
        if self.is_up or self.fault != str(error):
            _log.log(
                logging.WARNING if self.is_up or self._up_at == 0 else logging.DEBUG,
                "Wake-ups go through PostgreSQL: %s",
                error,
            )
        self.fault = str(error)
        if not self.is_up:
            self._checks_left = self._checks_needed
            return
        self._checks_needed = min(2 * self._checks_needed, _MOST_CHECKS)
        self._checks_left = self._checks_needed
        self._up.clear()
        self._reports.active = False
        if self._waiting is not None:
            self._waiting.redis_changed()

    # Sending.

    async def _send(self) -> None:
        while True:
            await self._pass_on(await self._reports.take())

    async def _pass_on(self, wakes: dict[int, int]) -> None:
        try:
            is_pushed = await self._push(wakes)
        except asyncio.CancelledError:
            # `close` passes them on.
            for lane, number in wakes.items():
                self._reports.add(lane, number)
            raise
        if not is_pushed:
            self._for_all |= wakes.keys()
        else:
            now = time.monotonic()
            for lane in wakes:
                if self._announced.get(lane, -_ANNOUNCED_SEC) + _ANNOUNCED_SEC <= now:
                    self._announced[lane] = now
                    self._for_all.add(lane)
                else:
                    self._for_others.add(lane)
        self._has_to_notify.set()

    async def _push(self, wakes: dict[int, int], *, passed: int = 0) -> bool:
        if not self.is_up:
            return False
        try:
            await self._opened.push(wakes, passed=passed)
        except UnavailableError as error:
            self._fall(error)
            return False
        return True

    async def _push_back(self, lane: int, passed: int) -> None:
        await self._push({lane: 1}, passed=passed)

    async def _notify(self) -> None:
        while True:
            await self._has_to_notify.wait()
            await self._notify_once()
            await asyncio.sleep(_NOTIFY_PAUSE_SEC)

    async def _notify_once(self) -> None:
        self._has_to_notify.clear()
        for_all, self._for_all = self._for_all, set()
        for_others, self._for_others = self._for_others, set()
        try:
            async with self._database.connection() as connection:
                if for_all:
                    await connection.execute(_SQL["notify"], {"lanes": _payload(for_all)})
                if for_others:
                    payload = _payload(for_others, FOR_OTHERS)
                    await connection.execute(_SQL["notify_others"], {"lanes": payload, "name": LISTENER})
        except (LineshaftError, asyncio.CancelledError) as error:
            self._for_all |= for_all
            self._for_others |= for_others
            self._has_to_notify.set()
            if not isinstance(error, LineshaftError):
                raise
            _log.debug("Notifications wait: %s", error)

    async def _sweep(self) -> None:
        parameters = {**self._database.now, "most": _MOST_SWEPT, "age": _SWEEP_SEC}
        with contextlib.suppress(LineshaftError):
            async with self._database.connection() as connection:
                lanes = await fetch_column(connection, _SQL["forgotten_lanes"], parameters)
            if lanes:
                await self._push(dict.fromkeys(lanes, 1))

    # Waiting.

    async def _listen(self, waiting: Waiting) -> None:
        while True:
            await self._up.wait()
            await waiting.someone_waits()
            if not self.is_up:
                continue
            self._listened = waiting.lanes()
            try:
                popped = await self._opened.pop(list(self._listened), _POP_SEC)
            except UnavailableError as error:
                self._fall(error)
                continue
            if popped is not None and not waiting.wake_popped(popped.lane, popped.passed):
                # The waiter for it has been woken in the meantime.
                self.hand_on(popped.lane, popped.passed + 1)

    async def _interrupt(self) -> None:
        try:
            await self._opened.interrupt()
        except UnavailableError as error:
            self._fall(error)
        finally:
            self._interrupting = False

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="lineshaft dispatch through Redis")
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("Dispatch through Redis failed", exc_info=error)


def _payload(lanes: Iterable[int], mark: str = "") -> str:
    named = sorted(lanes)
    return ",".join(f"{mark}{lane}" for lane in named) if len(named) <= _MOST_NAMED else f"{mark}*"
