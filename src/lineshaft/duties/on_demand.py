"""The duties that agents wait for, done when one asks.

So retries become due and agents die also where nobody runs the duties at their intervals, and to the moment
where somebody does.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from lineshaft.duties.loop import Counts
from lineshaft.duties.promoter import Promoter
from lineshaft.duties.reaper import Reaper
from lineshaft.duties.validator import Validator
from lineshaft.engine.engine import Engine

_log = logging.getLogger("lineshaft.duties")

#: So soon again, at the most, does upkeep come: a retry may be due in no time.
_SHORTEST_PAUSE_SEC = 0.05


class OnDemand:
    def __init__(self, engine: Engine, wake_all: Callable[[], None]) -> None:
        """`wake_all` is called when a guard lets agents go on, which nobody else tells them."""
        self._engine = engine
        self._wake_all = wake_all
        #: Gates that take their time, run beside the rest.
        self._validating: asyncio.Task[Counts] | None = None
        #: When it was last looked whether a guard lets agents go on.
        self._looked_at: datetime | None = None
        self._running = asyncio.Lock()
        #: How many have begun.
        self.runs = 0
        self._coming: float | None = None

    async def run(self) -> float | None:
        """Gives the seconds until there is something again. A run that begins after the call serves it."""
        asked = self.runs
        async with self._running:
            if self.runs == asked:
                self.runs += 1
                self._coming = await self._run()
            return self._coming

    async def _run(self) -> float | None:
        await Reaper(self._engine.upkeep).run_once()
        await Promoter(self._engine.upkeep).run_once()
        self._validate()
        openings = await self._engine.working.openings(self._looked_at)
        self._looked_at = openings.now
        if openings.opened:
            # Nobody is told when a slow-down is over, a breaker may be probed, or a new day begins.
            self._wake_all()
        coming = (openings.due_sec, openings.lease_sec, openings.guard_sec)
        return min((max(s, _SHORTEST_PAUSE_SEC) for s in coming if s is not None), default=None)

    def _validate(self) -> None:
        if self._validating is not None:
            if not self._validating.done():
                return
            if not self._validating.cancelled() and (error := self._validating.exception()) is not None:
                _log.warning("Gates could not be run: %s", error)
        validator = Validator(self._engine.gates, self._engine.approvals)
        self._validating = asyncio.create_task(validator.run_once(), name="lineshaft validator")

    async def close(self) -> None:
        if self._validating is not None:
            self._validating.cancel()
            await asyncio.wait({self._validating})
            self._validating = None
