"""Offers: which tasks programs in the folder may take, and when they are given up. See `holdings`."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from lineshaft.engine.engine import Engine
from lineshaft.integrations.loki.shown import Shown
from lineshaft.types import Event

#: Offers that aren't taken go to agents of Lineshaft that are free, after this time.
WITHDRAW_SEC = 10.0
#: In any case they are made again before their claim expires.
_RENEW_SEC = 300.0
_OFFER_EVERY = timedelta(seconds=1)
#: Events after which there may be more to offer.
_CLAIMABLE = frozenset({"task.ready", "queue.resumed", "breaker.closed", "lock.expired"})


class Offers:
    def __init__(self, engine: Engine, shown: Shown, most: int, now: Callable[[], datetime]) -> None:
        self._engine = engine
        self._shown = shown
        self._most = self._size = most
        self._now = now
        self._offer_after: datetime | None = None
        self._rest_until: datetime | None = None
        self._paused = self._looked = False

    def grow(self) -> None:
        """One was taken."""
        self._size = min(self._most, 2 * self._size)

    async def offer(self, events: Sequence[Event]) -> None:
        offered = self._shown.holdings.offered
        now = self._now()
        if self._paused or not self._most:
            self._shown.withdrawing.update(offered)
        else:
            if any(event.kind == "queue.paused" for event in events):
                self._shown.withdrawing.update(offered)
            # Records that programs have written are offers from the beginning, however many they are.
            self._shown.withdrawing.update([*offered][self._most :])
            await self._withdraw_stale(now)
            room = min(self._size, self._most) - len(offered)
            is_new = any(event.kind in _CLAIMABLE for event in events)
            is_due = is_new or self._offer_after is None or now >= self._offer_after
            is_resting = self._rest_until is not None and now < self._rest_until
            if room > 0 and is_due and not is_resting and not self._shown.withdrawing:
                made = await self._shown.holdings.offer(room)
                await self._shown.refresh(made)
                if len(made) < room:
                    self._offer_after = now + _OFFER_EVERY
        self._shown.hold_back(self._shown.withdrawing)
        await self._pin()

    async def _withdraw_stale(self, now: datetime) -> None:
        ages = {
            name: (now - held.since).total_seconds() for name, held in self._shown.holdings.offered.items()
        }
        self._shown.withdrawing.update(name for name, age in ages.items() if age > _RENEW_SEC)
        stale = [name for name, age in ages.items() if age > WITHDRAW_SEC]
        if stale and await self._shown.holdings.others_are_free():
            self._shown.withdrawing.update(stale)
            # Fewer, as long as they aren't taken.
            self._size = max(1, self._size // 2)

    async def give_up(self) -> None:
        """Release offers that no file shows any more."""
        gone = [name for name in self._shown.withdrawing if name in self._shown.holdings.offered]
        if gone and not self._shown.view.changed:
            await self._shown.holdings.withdraw(gone)
            # First agents may have them.
            self._rest_until = self._now() + _OFFER_EVERY
            self._shown.withdrawing.clear()

    async def _pin(self) -> None:
        """Keep what offers depend on in completed.json: programs look for it there."""
        needed = {
            name for offered in self._shown.view.offered for name in self._shown.dependencies.get(offered, ())
        }
        if needed != self._shown.view.pinned:
            self._shown.view.pinned = frozenset(needed)
            await self._shown.refresh([name for name in needed if self._shown.view.place(name) is None])

    async def pause(self) -> None:
        """PAUSE and STOP: while one of them is there, nothing new is claimed."""
        by = self._shown.folder.paused_by
        mine = f"in {self._shown.folder.root}"
        if (by is not None) == self._paused and self._looked:
            return
        self._paused, self._looked = by is not None, True
        pauses = [pause for pause in await self._engine.read.pauses() if pause.type == "*"]
        if by is not None and not pauses:
            await self._engine.pauses.pause(None, reason=f"{by} {mine}")
        elif by is None and any((pause.reason or "").endswith(mine) for pause in pauses):
            await self._engine.pauses.resume(None, reason=f"removed {mine}")
