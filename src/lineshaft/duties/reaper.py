"""Takes back tasks of lost agents: claims never started, heartbeats missed, time limits exceeded.

Only the lease counts, by the database's clock. The attempt fails with the reason found, and the task is
retried or dead-lettered like after any other failure.
"""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from lineshaft.duties.batches import take_all
from lineshaft.duties.loop import Counts
from lineshaft.engine.maintenance import Maintenance


class Reaper(Struct, frozen=True):
    maintenance: Maintenance
    interval_sec: float = 5.0
    batch: int = 200
    name: str = "reaper"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()

        async def take(limit: int, without: Sequence[str]) -> int:
            reaped = await self.maintenance.reap(limit, without)
            counts.update(reaped)
            return sum(reaped.values())

        if stuck := await take_all(take, self.batch):
            counts["stuck"] = stuck
        return counts
