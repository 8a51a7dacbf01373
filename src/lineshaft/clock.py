"""Where statements get their `now` from.

In production the database's clock is the only one: every statement is given NULL and takes `now()`. A test
gives a `MovableClock` instead and moves time by hand, so that nothing ever has to sleep.
"""

from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime | None:
        """The instant that statements shall work with; None: the database's own."""
        ...


class DatabaseClock:
    def now(self) -> None:
        return None


class MovableClock:
    """Stands still until it is moved."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2026, 2, 8, 9, 0, tzinfo=UTC)

    def now(self) -> datetime:
        return self._now

    def advance(self, seconds: float) -> datetime:
        """Move ahead and tell the new time; a clock for leases never goes back."""
        if seconds < 0:
            raise ValueError(f"A clock can't go back: asked to advance by {seconds} s.")
        self._now += timedelta(seconds=seconds)
        return self._now
