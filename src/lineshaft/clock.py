"""The clock of SQL statements, and the clock by which a process judges its own leases.

In production only the database's clock counts: every statement gets NULL and uses `now()`. Tests pass a
`MovableClock` and advance it, so that no test has to sleep.
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

#: Linux stops CLOCK_MONOTONIC while the machine is suspended, but leases run out. Elsewhere it goes on.
_LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_time() -> float:
    """Seconds since some moment. It goes on whatever happens to the process, the machine or the calendar."""
    return time.clock_gettime(_LEASE_CLOCK)


class Clock(Protocol):
    def now(self) -> datetime | None:
        """The time for statements to use; None: the database's own."""
        ...


class DatabaseClock:
    def now(self) -> None:
        return None


class MovableClock:
    """A clock that only moves when it is advanced."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2026, 2, 8, 9, 0, tzinfo=UTC)

    def now(self) -> datetime:
        return self._now

    def advance(self, seconds: float) -> datetime:
        """Move forward and return the new time; a clock for leases never goes back."""
        if seconds < 0:
            raise ValueError(f"A clock can't go back: asked to advance by {seconds} s.")
        self._now += timedelta(seconds=seconds)
        return self._now
