"""Deletes old history, if a retention is set, and what nothing refers to.

Event partitions are created in advance, so that no transition waits for one, and dropped whole when they are
too old: days for a short retention, otherwise months. Their events are counted for the metrics before that.
"""

import logging
from collections import Counter
from datetime import timedelta

from msgspec import Struct

from lineshaft.duties.loop import Counts
from lineshaft.engine.agents import Fleet
from lineshaft.engine.artifacts.artifacts import ArtifactRegistry
from lineshaft.engine.feed.partitions import Partitions, Period
from lineshaft.engine.guards.quotas import Quotas
from lineshaft.engine.guards.reservations import Reservations
from lineshaft.engine.maintenance import Maintenance
from lineshaft.engine.read.tally import Tally
from lineshaft.engine.sessions import Sessions
from lineshaft.engine.sources.registry import SourceRegistry

_log = logging.getLogger("lineshaft.duties")

#: Instances that have been silent for longer are deleted.
_SILENT_SEC = 86_400.0


class Janitor(Struct, frozen=True):
    maintenance: Maintenance
    fleet: Fleet
    partitions: Partitions
    tally: Tally
    sources: SourceRegistry
    sessions: Sessions
    #: How long finished tasks are kept; None: forever.
    keep_tasks: timedelta | None = None
    #: How long events are kept; None: forever.
    keep_events: timedelta | None = None
    #: How long an agent is kept that has no instance, budget or spend.
    keep_agents: timedelta = timedelta(days=30)
    #: How long the history of sources is kept.
    keep_firings: timedelta = timedelta(days=30)
    quotas: Quotas | None = None
    reservations: Reservations | None = None
    #: None: this process takes no care of artifacts.
    artifacts: ArtifactRegistry | None = None
    #: How long an artifact is kept that no task refers to.
    keep_artifacts: timedelta = timedelta(days=30)
    #: Twice an hour, so that what killed uploads leave is gone within one.
    interval_sec: float = 1_800.0
    batch: int = 1_000
    #: There may be years of history to count or to delete. Each part is a transaction; the next run
    #: continues.
    interruptible: bool = True
    name: str = "janitor"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        period = Period.for_retention(self.keep_events)
        made = await self.partitions.ensure_partitions(period.ahead.days, period=period)
        counts["event partitions created"] += len(made.made)
        if made.postponed:
            _log.warning(
                "Could not create event partitions, because the table is in use or event_default has too "
                "many of their rows to move: %s. Those events stay in event_default; retention deletes them "
                "row by row.",
                ", ".join(made.postponed),
            )
        await self.tally.count()
        counts["figures deleted"] += await self.tally.forget()
        if self.keep_events is not None:
            dropped = await self.partitions.drop_partitions(self.keep_events)
            counts["event partitions dropped"] += len(dropped.dropped)
            counts["events deleted"] += dropped.deleted
            if dropped.postponed:
                _log.warning(
                    "Could not drop old event partitions, because the table is in use: %s",
                    ", ".join(dropped.postponed),
                )
        await self._delete_tasks(counts)
        while True:
            forgotten = await self.fleet.forget(
                silent_sec=_SILENT_SEC, unused_sec=self.keep_agents.total_seconds(), limit=self.batch
            )
            counts["instances and agents deleted"] += forgotten
            if forgotten < self.batch:
                break
        counts["firings and their keys deleted"] += await self.sources.forget(
            self.keep_firings.total_seconds(), self.batch
        )
        counts["sessions deleted"] += await self.sessions.forget(self.batch)
        await self.maintenance.sweep_generations(self.batch)
        counts["lanes deleted"] += await self.maintenance.remove_lanes()
        if self.quotas is not None:
            await self.quotas.forget_uses()
        if self.reservations is not None:
            counts["ended reservations deleted"] += await self.reservations.forget(self.batch)
        if self.artifacts is not None:
            # Last: the store may be away.
            counts += await self.artifacts.clean_up(
                older_than_sec=self.keep_artifacts.total_seconds(), limit=self.batch
            )
        return counts

    async def _delete_tasks(self, counts: Counter[str]) -> None:
        if self.keep_tasks is None:
            return
        while True:
            deleted = await self.maintenance.delete_finished(self.keep_tasks.total_seconds(), self.batch)
            counts["finished tasks deleted"] += deleted
            if deleted < self.batch:
                return
