"""Wakes those who wait for work when a guard lets it go on by itself; nobody else does.

A slow-down is over, a breaker may be probed, or a new day's money is there.
"""

import asyncio
import contextlib
from datetime import datetime

from lineshaft.engine.claim.schedule import Schedule
from lineshaft.engine.feed.wakeups import Wakeups
from lineshaft.errors import UnavailableError

#: So often it asks what opens next, while anybody waits.
_ASK_EVERY_SEC = 2.0
_SHORTEST_PAUSE_SEC = 0.05


class Alarm:
    def __init__(self, schedule: Schedule, wakeups: Wakeups) -> None:
        self._schedule = schedule
        self._wakeups = wakeups

    async def run(self) -> None:
        """Until it is cancelled."""
        since: datetime | None = None
        while True:
            pause = _ASK_EVERY_SEC
            if self._wakeups.waiting or since is None:
                with contextlib.suppress(UnavailableError):  # then they poll anyway
                    found = await self._schedule.openings(since)
                    since = found.now
                    if found.opened:
                        self._wakeups.wake_all()
                    if found.guard_sec is not None:
                        pause = min(pause, found.guard_sec)
            await asyncio.sleep(max(pause, _SHORTEST_PAUSE_SEC))
