"""Keeps the history within what the operator wants to keep: nothing is deleted unless a retention is set.

Event partitions are made ahead, so that no transition ever waits for one, and dropped whole when too old.
What is in them is counted for the metrics before, whether anybody asks for those or not.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

from lineshaft.duties.loop import Counts
from lineshaft.engine.feed.partitions import Partitions
from lineshaft.engine.maintenance import Upkeep
from lineshaft.engine.read.metrics import Tally

_log = logging.getLogger("lineshaft.duties")


@dataclass(frozen=True, slots=True)
class Janitor:
    upkeep: Upkeep
    partitions: Partitions
    tally: Tally
    #: How long finished tasks are kept; None: for ever.
    keep_tasks: timedelta | None = None
    #: How long events are kept; None: for ever.
    keep_events: timedelta | None = None
    ahead_days: int = 40
    interval_sec: float = 3_600.0
    batch: int = 1_000
    #: There may be years to count or to delete. Each part is a transaction; another run does the rest.
    interruptible: bool = True
    name: str = "janitor"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        made = await self.partitions.ensure_partitions(self.ahead_days)
        counts["event partitions made"] += len(made.made)
        if made.postponed:
            _log.warning(
                "Event partitions could not be made, as the table is in use, or event_default holds too many "
                "rows of them to move: %s. Their events stay there; retention deletes them row by row.",
                ", ".join(made.postponed),
            )
        await self.tally.count()
        if self.keep_events is not None:
            dropped = await self.partitions.drop_partitions(self.keep_events)
            counts["event partitions dropped"] += len(dropped.dropped)
            counts["events deleted"] += dropped.deleted
            if dropped.postponed:
                _log.warning(
                    "Event partitions that are too old could not be dropped, as the table is in use: %s",
                    ", ".join(dropped.postponed),
                )
        if self.keep_tasks is not None:
            while True:
                deleted = await self.upkeep.delete_finished(self.keep_tasks.total_seconds(), self.batch)
                counts["finished tasks deleted"] += deleted
                if deleted < self.batch:
                    break
        await self.upkeep.sweep_generations(self.batch)
        return counts
