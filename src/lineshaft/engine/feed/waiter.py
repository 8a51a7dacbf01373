"""One of the waiters of a process; `wakeups.py` wakes it."""

import asyncio
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from lineshaft.engine.feed.wakeups import Wakeups


class Waiter:
    """Waits for work in some lanes; None: in any. One asyncio task may wait at a time.

    A `set` of lanes is not copied: its owner may add lanes to it.
    """

    def __init__(self, wakeups: "Wakeups", lanes: Collection[int] | None) -> None:
        self._wakeups = wakeups
        self._lanes: AbstractSet[int] | None = (
            lanes if isinstance(lanes, set) or lanes is None else set(lanes)
        )
        #: Of the wake-ups that came from Redis: how many processes had them before.
        self._passed: dict[int, int] = {}
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
        self._passed = {}
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
            self._wakeups.hand_on(lane)
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
            self._wakeups.wake_other(lane, self.looked_at, self._passed.get(lane))

    def close(self) -> None:
        """Its wake-up goes to another waiter, unless it has waited again since."""
        self._stop()
        self._return()

    def wants(self, lane: int) -> bool:
        return self._lanes is None or lane in self._lanes

    @property
    def lanes(self) -> AbstractSet[int]:
        """Those that are known by number."""
        return self._lanes or frozenset()

    def offer(self, lane: int | None, passed: int | None = None) -> bool:
        """Wake it; `lane`: None is for all lanes; `passed`: see `Wakeups`. False: it is not waiting."""
        if self._future is None or self._future.done():
            return False
        if lane is not None:
            self._woken_by.add(lane)
            if passed is not None:
                self._passed[lane] = passed
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
            self._wakeups.hand_on(lane)
