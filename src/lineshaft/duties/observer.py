"""Looks for groups of tasks that fail too often, and fires the observers that watch them."""

from collections import Counter

from msgspec import Struct

from lineshaft.duties.loop import Counts
from lineshaft.engine.sources.observers import Observers


class Observer(Struct, frozen=True):
    observers: Observers
    interval_sec: float = 60.0
    name: str = "observer"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        for name in await self.observers.all():
            fired = await self.observers.observe(name)
            counts.update({f"observations {outcome}": number for outcome, number in fired.items()})
        return counts
