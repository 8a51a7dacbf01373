"""The duties that agents depend on, run on request.

This promotes retries and takes back lost tasks where no process runs the duties at their intervals, and
without delay where one does.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from lineshaft import background
from lineshaft.duties.loop import Counts
from lineshaft.duties.promoter import Promoter
from lineshaft.duties.quota_keeper import QuotaKeeper
from lineshaft.duties.reaper import Reaper
from lineshaft.duties.scheduler import Scheduler
from lineshaft.duties.validator import Validator
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.actor import acting_as

_log = logging.getLogger("lineshaft.duties")

#: The shortest pause between two runs: a retry may be due immediately.
_SHORTEST_PAUSE_SEC = 0.05


class OnDemand:
    def __init__(self, engine: Engine, wake_all: Callable[[], None]) -> None:
        """`wake_all` is called when a guard admits tasks again, of which agents get no other notice."""
        self._engine = engine
        self._wake_all = wake_all
        #: Runs slow gates concurrently with the rest.
        self._validating: asyncio.Task[Counts] | None = None
        #: When the guards were last checked.
        self._checked_at: datetime | None = None
        self._running = asyncio.Lock()
        #: The number of runs started.
        self.runs = 0
        self._next_sec: float | None = None

    async def run(self) -> float | None:
        """Run the duties; returns the seconds until they are needed again.

        Callers share a run that starts after their call.
        """
        before = self.runs
        async with self._running:
            if self.runs == before:
                self.runs += 1
                # The caller isn't the actor of what duties do.
                with acting_as(None):
                    self._next_sec = await self._run()
            return self._next_sec

    async def _run(self) -> float | None:
        await Reaper(self._engine.maintenance).run_once()
        await Promoter(self._engine.maintenance).run_once()
        await QuotaKeeper(self._engine.quotas).run_once()
        tick_sec = await self._fire_schedules()
        self._validate()
        openings = await self._engine.upcoming.openings(self._checked_at)
        self._checked_at = openings.now
        if openings.opened:
            # There is no event when a slowdown ends, a breaker is due for a probe, or a new day begins.
            self._wake_all()
        coming = (openings.due_sec, openings.lease_sec, openings.guard_sec, tick_sec)
        return min((max(s, _SHORTEST_PAUSE_SEC) for s in coming if s is not None), default=None)

    async def _fire_schedules(self) -> float | None:
        """Seconds until the next tick of a schedule; those that are due are fired first."""
        next_sec = await self._engine.schedules.next_due_sec()
        if next_sec is None or next_sec > 0:
            return next_sec
        await Scheduler(self._engine.schedules).run_once()
        return await self._engine.schedules.next_due_sec()

    def _validate(self) -> None:
        if self._validating is not None:
            if not self._validating.done():
                return
            if not self._validating.cancelled() and (error := self._validating.exception()) is not None:
                _log.warning("Could not run gates: %s", error)
        validator = Validator(self._engine.gates, self._engine.approvals)
        self._validating = asyncio.create_task(validator.run_once(), name="lineshaft validator")

    async def close(self) -> None:
        if self._validating is not None:
            await background.stop(self._validating)
            self._validating = None
