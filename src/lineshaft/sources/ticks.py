"""The ticks of schedules: cron expressions in a time zone, and intervals.

A job at fixed times (no `*` in minute and hour) runs once a day also when clocks change: a time that is
skipped runs at the first minute after the gap, and a time that occurs twice runs the first time only. A job
with `*` in minute or hour runs by elapsed time: it skips the gap and runs in both hours that have the same
name.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

MIN_EVERY_SEC, MAX_EVERY_SEC = 1.0, 366 * 86_400.0
MAX_JITTER_SEC = 86_400.0
MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MAX_CRON = 200
#: The fields of an expression, and how many values each has.
_FIELD_SIZES = {"minute": 60, "hour": 24, "day-of-month": 31, "month": 12, "day-of-week": 7}
#: More than any clock changes by: wall-clock times that far ahead are later in any case.
_CLOCK_CHANGE = timedelta(hours=3)


class TickError(ValueError):
    """Not a schedule; `field` is the one at fault."""

    def __init__(self, field: str, fault: str) -> None:
        self.field = field
        self.fault = fault
        super().__init__(f"{field}: {fault}")


@lru_cache(maxsize=1_024)
def zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        raise TickError(
            "timezone", f"unknown time zone {name!r}; use an IANA name such as Europe/Berlin"
        ) from None


class Cron:
    def __init__(self, expression: str, timezone: str) -> None:
        self._zone = zone(timezone)
        self._expression = _checked(expression)
        if next(self._simulated(datetime(2000, 1, 1, tzinfo=UTC)), None) is None:
            raise TickError("cron", f"{expression!r} has no tick: that day doesn't exist in any year")

    def after(self, instant: datetime) -> datetime:
        """The first tick after an instant."""
        for tick in self.onwards(instant):
            return tick
        raise TickError("cron", f"{self._expression!r} has no further tick")

    def onwards(self, instant: datetime) -> Iterator[datetime]:
        """The ticks after an instant."""
        # The simulation goes by wall clock, which repeats an hour when clocks go back.
        for tick in self._simulated(instant - _CLOCK_CHANGE):
            if tick > instant:
                yield tick

    def backwards(self, instant: datetime) -> Iterator[datetime]:
        """The ticks up to an instant, the latest first."""
        for tick in self._simulated(instant + _CLOCK_CHANGE, reverse=True):
            if tick <= instant:
                yield tick

    def _simulated(self, start: datetime, *, reverse: bool = False) -> Iterator[datetime]:
        ticks = CronSim(self._expression, start.astimezone(self._zone), reverse=reverse)
        for tick in ticks:
            yield tick.astimezone(UTC)


def _checked(expression: str) -> str:
    given = expression.strip()
    if given.startswith("@"):
        if given.lower() not in MACROS:
            raise TickError("cron", f"unknown name {given!r}; use one of {', '.join(MACROS)}")
        return MACROS[given.lower()]
    fields = given.split()
    if len(given) > _MAX_CRON or len(fields) != len(_FIELD_SIZES):
        raise TickError(
            "cron",
            "must have five fields (minute, hour, day of month, month, day of week), such as '0 9 * * MON', "
            f"got {len(fields)}",
        )
    try:
        CronSim(given, datetime(2000, 1, 1, tzinfo=UTC))
    except (CronSimError, AssertionError) as error:
        raise TickError("cron", _cron_fault(fields, str(error))) from None
    for (name, size), value in zip(_FIELD_SIZES.items(), fields, strict=True):
        # CronSim accepts them, and ticks once per range: '*/90' would run every hour.
        if any(int(step) > size for step in re.findall(r"/(\d+)", value)):
            fault = (
                f"field {name}: {value!r} has a step of more than {size}; for longer intervals use every_sec"
            )
            raise TickError("cron", f"field {name}: {fault}")
    return given


def _cron_fault(fields: list[str], fault: str) -> str:
    """Which field of an expression is wrong."""
    for name, value in zip(_FIELD_SIZES, fields, strict=True):
        if name in fault:
            return f"field {name}: {value!r} is not valid"
    return f"{' '.join(fields)!r} is not valid"


class Every:
    """Ticks at a fixed interval, counted from an instant."""

    def __init__(self, seconds: float, since: datetime) -> None:
        self._every = timedelta(seconds=seconds)
        self._since = since

    def after(self, instant: datetime) -> datetime:
        passed = math.floor((instant - self._since) / self._every)
        tick = self._since + max(passed + 1, 1) * self._every
        # Rounding to microseconds may be off by one tick.
        while tick <= instant:
            tick += self._every
        return tick

    def onwards(self, instant: datetime) -> Iterator[datetime]:
        tick = self.after(instant)
        while True:
            yield tick
            tick += self._every

    def backwards(self, instant: datetime) -> Iterator[datetime]:
        tick = self.after(instant) - self._every
        while tick > self._since:
            if tick <= instant:
                yield tick
            tick -= self._every


Ticks = Cron | Every


def jitter(name: str, tick: datetime, most_sec: float) -> timedelta:
    """The delay of a tick: the same in every process, different for each tick and source."""
    if most_sec <= 0:
        return timedelta()
    digest = hashlib.sha256(f"{name}\0{tick.timestamp()}".encode()).digest()
    return timedelta(seconds=int.from_bytes(digest[:8], "big") / 2**64 * most_sec)


def due(ticks: Ticks, first: datetime, now: datetime, most: int) -> tuple[list[datetime], int]:
    """The latest `most` ticks from `first` to now, oldest first, and the number of earlier ones.

    Of many earlier ones only the first 10,000 are counted.
    """
    found = list(islice(_down_to(ticks, first, now), most))
    earlier = 0
    if len(found) == most:
        rest = islice(_down_to(ticks, first, found[-1] - timedelta(microseconds=1)), 10_000)
        earlier = sum(1 for _ in rest)
    return found[::-1], earlier


def _down_to(ticks: Ticks, first: datetime, now: datetime) -> Iterator[datetime]:
    for tick in ticks.backwards(now):
        if tick < first:
            return
        yield tick
