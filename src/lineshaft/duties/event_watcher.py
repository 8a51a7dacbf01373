"""Fires event sources: the queue's own events create work."""

from collections import Counter
from collections.abc import Iterator
from itertools import count

from msgspec import Struct, field

from lineshaft.duties.loop import Counts
from lineshaft.engine.sources.event_sources import EventSource, EventSources

#: Transactions for one source in one run; the next run continues.
_MOST = 100
#: Runs after which a place in the feed is moved although nothing was found.
_MOVE_EVERY = 20


class EventWatcher(Struct, frozen=True):
    sources: EventSources
    interval_sec: float = 0.5
    name: str = "event watcher"
    _runs: Iterator[int] = field(default_factory=count)

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        move_on = next(self._runs) % _MOVE_EVERY == 0
        for each in await self.sources.all():
            source: EventSource | None = each
            for _ in range(_MOST):
                if source is None:
                    break
                fired, source = await self.sources.fire_next(source, move_on=move_on)
                counts.update({f"events {outcome}": number for outcome, number in fired.items()})
        return counts
