"""Wakes those who wait for work when a slow-down is over or a breaker may be probed; nobody else does."""

import asyncio
import contextlib

from lineshaft.errors import UnavailableError
from lineshaft.store.wakeups import Wakeups
from lineshaft.store.working import Working

#: So often it asks what opens next, while anybody waits.
_ASK_EVERY_SEC = 2.0
_SHORTEST_PAUSE_SEC = 0.05


class Alarm:
    def __init__(self, working: Working, wakeups: Wakeups) -> None:
        self._working = working
        self._wakeups = wakeups

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        opens_at: float | None = None
        while True:
            pause = _ASK_EVERY_SEC
            if opens_at is not None and loop.time() >= opens_at:
                self._wakeups.wake_all()
            if self._wakeups.waiting or opens_at is not None:
                with contextlib.suppress(UnavailableError):  # then they poll anyway
                    seconds = (await self._working.openings()).guard_sec
                    opens_at = None if seconds is None else loop.time() + seconds
                    pause = min(pause, _ASK_EVERY_SEC if seconds is None else seconds)
            await asyncio.sleep(max(pause, _SHORTEST_PAUSE_SEC))
