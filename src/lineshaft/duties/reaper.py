"""Takes back tasks whose agent is gone: claims never started, heartbeats missed, execution limits passed.

The lease is the only thing it looks at, by the database's clock. Each task fails its attempt for the reason
found and is retried or dead-lettered like any other failure.
"""

import logging
from collections import Counter
from dataclasses import dataclass

from lineshaft.duties.loop import Counts
from lineshaft.store.upkeep import UnreapableError, Upkeep

_log = logging.getLogger("lineshaft.duties")


@dataclass(frozen=True, slots=True)
class Reaper:
    upkeep: Upkeep
    interval_sec: float = 5.0
    batch: int = 200
    name: str = "reaper"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        batch = self.batch
        bad: list[str] = []
        while True:
            try:
                reaped = await self.upkeep.reap(batch, without=bad)
            except UnreapableError as error:
                # One bad task must not keep all the others from being reaped: find it by taking them singly.
                _log.exception("Some expired tasks could not be reaped; going on one by one")
                if batch == 1:
                    bad += error.ids
                    counts["not to be taken back"] += 1
                    if not error.ids or len(bad) > self.batch:
                        raise
                batch = 1
                continue
            counts.update(reaped)
            if sum(reaped.values()) < batch:
                return counts
