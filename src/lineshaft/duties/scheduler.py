"""Fires schedules whose time has come, each tick once in the whole fleet."""

import asyncio
from collections import Counter

from msgspec import Struct

from lineshaft.duties.loop import Counts
from lineshaft.engine.sources.schedules import Schedules

#: Schedules fired by one run, so that a duty stops soon after it is asked to; the next run continues.
_MOST = 1_000


class Scheduler(Struct, frozen=True):
    schedules: Schedules
    interval_sec: float = 1.0
    #: Transactions at the same time: many schedules are due at midnight.
    concurrency: int = 2
    name: str = "scheduler"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        left = _MOST

        async def fire() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                fired = await self.schedules.fire_due()
                if fired is None:
                    return
                counts.update({f"ticks {outcome}": number for outcome, number in fired.items()})

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.concurrency):
                    group.create_task(fire())
        except ExceptionGroup as errors:
            # The loop of duties knows what to do about the error itself.
            raise errors.exceptions[0] from None
        return counts
