"""The clock of SQL statements.

In production only the database's clock counts: every statement gets NULL and uses `now()`. Tests pass a
`MovableClock` and advance it, so that no test has to sleep.
"""

from datetime import UTC, datetime, timedelta
from typing import Protocol


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
