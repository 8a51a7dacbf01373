"""Claims that wait for work. While they wait they use no database connection."""

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from lineshaft import background
from lineshaft.clock import lease_time
from lineshaft.engine.agents import Present
from lineshaft.engine.claim.upcoming import Upcoming
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.lane_directory import Interest, LaneDirectory
from lineshaft.engine.feed.waiter import Waiter
from lineshaft.engine.feed.wakeups import Wakeups
from lineshaft.engine.maintenance import Maintenance, StuckTasksError
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.types.protocol import ClaimItem
from lineshaft.types.work import Claim, ClaimedTask

T = TypeVar("T")

#: How often an agent without a free slot looks again: no wake-up reports a free slot.
_NO_SLOT_POLL_SEC = 5.0
#: The name of the task that watches a client's connection.
DISCONNECT_WATCHER = "lineshaft disconnect watcher"


def check_in_time(tasks: Sequence[ClaimedTask], asked_at: float) -> None:
    """Raise if claimed tasks may be others' by now: the database was slow, or this process was frozen."""
    took = lease_time() - asked_at
    for task in tasks:
        if took >= task.lease_sec:
            raise UnavailableError(
                f"Claiming took {took:.1f} s, longer than the lease of task {task.id}, {task.lease_sec:g} s: "
                "its claim was released. Claim again; if this happens often, raise heartbeat_interval_sec or "
                "claim_ttl_sec."
            )


class _Poll:
    """One call. It ends for all its items at once."""

    def __init__(self) -> None:
        self._waiters: set[Waiter] = set()
        self.opened_at = lease_time()
        self.ended = False

    def end(self) -> None:
        self.ended = True
        for waiter in self._waiters:
            waiter.close()

    @contextlib.contextmanager
    def waiting(self, waiter: Waiter) -> Iterator[None]:
        self._waiters.add(waiter)
        try:
            yield
        finally:
            self._waiters.discard(waiter)


class LongPolls:
    def __init__(
        self, engine: Engine, directory: LaneDirectory, *, turns: asyncio.Semaphore, stopping: asyncio.Event
    ) -> None:
        """`turns` limits how many connections claims use at once."""
        self.engine = engine
        self.directory = directory
        self.turns = turns
        self.stopping = stopping
        self._by_name: dict[str, _Poll] = {}
        self._by_agent: defaultdict[tuple[str, int], set[_Poll]] = defaultdict(set)

    @contextlib.asynccontextmanager
    async def claimed(
        self, items: Sequence[ClaimItem], receive: Receive, *, wait_sec: float = 0.0, name: str | None = None
    ) -> "AsyncIterator[list[ItemClaim]]":
        """Claim; wait for up to `wait_sec` until one item has work or an error.

        The block produces the response. If it fails or takes longer than their leases, or if the client has
        disconnected at its end, the tasks are released. A poll with a name ends the earlier one with the same
        name.
        """
        tasks: list[ClaimedTask] = []
        async with watch_disconnect(receive) as disconnected:
            with self.delivering(tasks, disconnected), self._opened(items, name) as poll:
                disconnected.add_done_callback(lambda _: poll.end())
                claims = [ItemClaim(self, item, poll, tasks) for item in items]
                await _claim(claims, poll, wait_sec)
                yield claims
                for claim in claims:
                    check_in_time(claim.claim.tasks, claim.asked_at)

    @contextlib.contextmanager
    def delivering(self, tasks: Sequence[ClaimedTask], disconnected: "asyncio.Task[None]") -> Iterator[None]:
        """Release the tasks if the block fails, or if the client has disconnected at its end."""
        with self.engine.undelivered.release_if_undelivered(tasks):
            yield
            if disconnected.done():
                raise ClientDisconnect

    def end(self, agent_id: str, incarnation: int) -> None:
        """End the open polls of an agent that takes no more work."""
        for poll in list(self._by_agent.get((agent_id, incarnation), ())):
            poll.end()

    @contextlib.contextmanager
    def _opened(self, items: Sequence[ClaimItem], name: str | None) -> Iterator[_Poll]:
        poll = _Poll()
        if name is not None:
            if (earlier := self._by_name.get(name)) is not None:
                earlier.end()
            self._by_name[name] = poll
        agents = {(item.agent_id, item.incarnation) for item in items}
        for agent in agents:
            self._by_agent[agent].add(poll)
        try:
            yield poll
        finally:
            if name is not None and self._by_name.get(name) is poll:
                del self._by_name[name]
            for agent in agents:
                self._by_agent[agent].discard(poll)
                if not self._by_agent[agent]:
                    del self._by_agent[agent]


class ItemClaim:
    """One item of a poll and what came of it: a claim, which may be empty, or an error."""

    def __init__(self, polls: LongPolls, item: ClaimItem, poll: _Poll, tasks: list[ClaimedTask]) -> None:
        """`tasks` collects everything that the poll has claimed."""
        self._polls = polls
        self._item = item
        self._poll = poll
        self._tasks = tasks
        self._present: Present | None = None
        self.claim = Claim()
        #: When the claim was sent to the database, by the clock of leases.
        self.asked_at = poll.opened_at
        self.slowdown_until: datetime | None = None
        self.error: LineshaftError | None = None

    @property
    def waited_sec(self) -> float:
        """How long the poll had waited when it claimed."""
        return self.asked_at - self._poll.opened_at

    @property
    def is_idle(self) -> bool:
        return not self.claim.tasks and self.error is None

    async def run(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except LineshaftError as error:
            self.error = error
        except Exception:
            # A defect. The other items end too, so that what they have claimed is released.
            self._poll.end()
            raise
        if not self.is_idle:
            self._poll.end()

    async def claim_now(self) -> None:
        item = self._item
        async with self._polls.turns:
            self.asked_at = lease_time()
            self.claim = await self._polls.engine.claims.claim(
                item.agent_id, item.incarnation, limit=item.limit, types=item.types, start=item.start
            )
        self._tasks += self.claim.tasks

    async def check_in(self) -> None:
        """Record that the agent is alive, and read what it may take."""
        async with self._polls.turns:
            present = await self._polls.engine.fleet.present(self._item.agent_id, self._item.incarnation)
        self.slowdown_until = present.slowdown_until
        self._present = present

    async def wait(self, until: float) -> None:
        """Look whenever there may be work, until the time is up, the poll ends or the server stops."""
        assert self._present is not None  # noqa: S101 - it has checked in
        item, directory = self._item, self._polls.directory
        types = self._present.types if item.types is None else item.types
        interest = Interest(types, self._present.capabilities, self._present.models_available)
        await directory.enter(interest)
        with directory.waiter(interest) as waiter, self._poll.waiting(waiter):
            while not self._is_over:
                await self.claim_now()
                if len(self.claim.tasks) == item.limit:
                    # There may be more than it could take.
                    waiter.pass_on()
                elif self.claim.leaves_some:
                    waiter.decline()
                else:
                    waiter.settle()
                left = until - asyncio.get_running_loop().time()
                if self.claim.tasks or left <= 0:
                    return
                if not self._is_over:
                    pause = directory.wakeups.poll_interval
                    pause = pause if self.claim.has_room else min(pause, _NO_SLOT_POLL_SEC)
                    await waiter.wait(min(left, pause))

    @property
    def _is_over(self) -> bool:
        return self._poll.ended or self._polls.stopping.is_set()


async def _claim(claims: Sequence[ItemClaim], poll: _Poll, wait_sec: float) -> None:
    until = asyncio.get_running_loop().time() + wait_sec

    async def all_idle(steps: Iterable[Coroutine[Any, Any, None]]) -> bool:
        runs = [claim.run(step) for claim, step in zip(claims, steps, strict=True)]
        # A task for each takes memory, of which thousands of waiting agents need little.
        if len(runs) == 1:
            await runs[0]
        else:
            # All of them to their end: what one claims after another has failed must be released too.
            for error in await asyncio.gather(*runs, return_exceptions=True):
                if error is not None:
                    raise error
        return all(claim.is_idle for claim in claims)

    if (
        await all_idle(claim.claim_now() for claim in claims)
        and await all_idle(claim.check_in() for claim in claims)
        and wait_sec
        and await all_idle(claim.wait(until) for claim in claims)
        and not poll.ended
    ):
        # Slowdowns may have changed.
        await all_idle(claim.check_in() for claim in claims)
    errors = [claim.error for claim in claims]
    if errors and isinstance(errors[0], UnavailableError) and None not in errors:
        raise errors[0]


@contextlib.asynccontextmanager
async def watch_disconnect(receive: Receive) -> "AsyncIterator[asyncio.Task[None]]":
    """A task that is done when the client has disconnected. The request has been read to its end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(watch(), name=DISCONNECT_WATCHER)
    try:
        yield watching
    finally:
        await background.stop(watching)


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event) -> T:
    """Await what may wait for long, unless the client disconnects or the server stops."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        async with watch_disconnect(receive) as disconnected:
            await asyncio.wait({working, stopped, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if disconnected.done():
                raise ClientDisconnect
    finally:
        await background.stop(working, stopped)
    raise UnavailableError("The server is being stopped. Call another, or the same a moment later.")


class OpeningsWatcher:
    """Wakes waiting agents when tasks become claimable without a notification.

    A guard opens: a slowdown ends, a breaker can be probed, a new day begins. Or a task is due: a retry, a
    snooze, a time to run at. No other process sends a wake-up for a guard, and the promoter looks for due
    tasks only at its interval.
    """

    #: How often it asks when the next guard opens, or the next task is due, while agents wait.
    _INTERVAL_SEC = 2.0
    _SHORTEST_PAUSE_SEC = 0.05
    #: Tasks that are due within this time are promoted together.
    _DUE_PAUSE_SEC = 0.2
    _BATCH = 1_000

    def __init__(self, upcoming: Upcoming, maintenance: Maintenance, wakeups: Wakeups) -> None:
        self._upcoming = upcoming
        self._maintenance = maintenance
        self._wakeups = wakeups
        self._expected = math.inf
        self._sooner = asyncio.Event()

    def expect(self, delay_sec: float) -> None:
        """A task is due in so many seconds: perhaps before the next look."""
        due = asyncio.get_running_loop().time() + delay_sec
        if due < self._expected:
            self._expected = due
            self._sooner.set()

    async def run(self) -> None:
        """Run until cancelled."""
        clock = asyncio.get_running_loop().time
        since: datetime | None = None
        while True:
            self._expected = math.inf
            pause = self._INTERVAL_SEC
            if self._wakeups.waiting or since is None:
                with contextlib.suppress(UnavailableError):  # agents poll then
                    found = await self._upcoming.openings(since)
                    since = found.now
                    if found.opened:
                        self._wakeups.wake_all()
                    if found.guard_sec is not None:
                        pause = min(pause, found.guard_sec)
                    if found.due_sec is not None and (found.due_sec > 0 or await self._promote()):
                        pause = min(pause, max(found.due_sec, self._DUE_PAUSE_SEC))
            looked = clock()
            while (
                left := max(min(looked + pause, self._expected), looked + self._SHORTEST_PAUSE_SEC) - clock()
            ) > 0:
                self._sooner.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._sooner.wait()

    async def _promote(self) -> int:
        """Make due tasks READY, with a notification; returns how many were due."""
        try:
            return await self._maintenance.promote_due(self._BATCH)
        except StuckTasksError:
            # The promoter finds out which.
            return 0
