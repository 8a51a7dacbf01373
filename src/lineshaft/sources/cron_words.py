"""Cron expressions in words, for people. What has no short description stays an expression."""

import re
from collections.abc import Sequence

from lineshaft.sources.ticks import MACROS

_DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
#: Times of a day that are listed.
_MOST_TIMES = 6
_HOUR, _DAY = 60, 24


def in_words(cron: str) -> str | None:
    """Such as `at 09:00 on Monday`; None: it has no short description."""
    given = cron.strip()
    fields = MACROS.get(given.lower(), given).upper().split()
    if len(fields) != len(("minute", "hour", "day", "month", "weekday")):
        return None
    minute, hour, day, month, weekday = fields
    time, days, months = _time(minute, hour), _days(day, weekday), _months(month)
    if time is None or days is None or months is None:
        return None
    if not days and time.startswith("at "):
        days = "every day"
    return " ".join(part for part in (time, days, months) if part)


def _time(minute: str, hour: str) -> str | None:
    every = _step(minute, _HOUR)
    if every is not None:
        return _every_minutes(every, hour)
    minutes = _numbers(minute, _HOUR - 1)
    return None if minutes is None else _at_minutes(minutes, hour)


def _every_minutes(every: int, hour: str) -> str | None:
    rate = "every minute" if every == 1 else f"every {every} minutes"
    if hour == "*":
        return rate
    span = _span(hour)
    return None if span is None else f"{rate} from {span[0]:02}:00 to {span[1]:02}:59"


def _at_minutes(minutes: Sequence[int], hour: str) -> str | None:
    hours = _step(hour, _DAY)
    if hours is not None:
        rate = "every hour" if hours == 1 else f"every {hours} hours"
        past = "on the hour" if minutes == [0] else f"at minute {_listed([str(each) for each in minutes])}"
        return f"{rate}, {past}"
    if (span := _span(hour)) is not None and span[0] < span[1] and len(minutes) == 1:
        return f"every hour from {span[0]:02}:{minutes[0]:02} to {span[1]:02}:{minutes[0]:02}"
    wanted = _numbers(hour, _DAY - 1)
    if wanted is None or len(wanted) * len(minutes) > _MOST_TIMES:
        return None
    return "at " + _listed([f"{each:02}:{past:02}" for each in wanted for past in minutes])


def _days(day: str, weekday: str) -> str | None:
    """Empty: every day. Cron takes either, if both are given."""
    of_month, of_week = _days_of_month(day), _days_of_week(weekday)
    if of_month is None or of_week is None:
        return None
    return " or ".join(part for part in (of_month, of_week) if part)


def _days_of_month(day: str) -> str | None:
    if day in {"*", "?"}:
        return ""
    if day == "L":
        return "on the last day of the month"
    numbers = _numbers(day, 31)
    if numbers is None:
        return None
    return f"on day {_listed([str(each) for each in numbers])} of the month"


def _days_of_week(weekday: str) -> str | None:
    if weekday in {"*", "?"}:
        return ""
    text = _named(weekday, _DAYS, 0)
    if (span := _span(text)) is not None and span[0] < span[1] <= len(_DAYS):
        return f"{_DAYS[span[0]]} to {_DAYS[span[1] % len(_DAYS)]}"
    numbers = _numbers(text, len(_DAYS))
    return None if numbers is None else f"on {_listed([_DAYS[each % len(_DAYS)] for each in numbers])}"


def _months(month: str) -> str | None:
    if month == "*":
        return ""
    text = _named(month, _MONTHS, 1)
    if (span := _span(text)) is not None and 1 <= span[0] < span[1] <= len(_MONTHS):
        return f"from {_MONTHS[span[0] - 1]} to {_MONTHS[span[1] - 1]}"
    numbers = _numbers(text, len(_MONTHS))
    if numbers is None or 0 in numbers:
        return None
    return f"in {_listed([_MONTHS[each - 1] for each in numbers])}"


def _step(field: str, size: int) -> int | None:
    """`*` is 1, `*/5` is 5; only steps that are the same over the whole circle."""
    if field == "*":
        return 1
    found = re.fullmatch(r"\*/(\d{1,2})", field)
    step = int(found[1]) if found else 0
    return step if step and size % step == 0 else None


def _span(field: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d{1,2})-(\d{1,2})", field)
    return (int(found[1]), int(found[2])) if found else None


def _numbers(field: str, most: int) -> list[int] | None:
    if not re.fullmatch(r"\d{1,2}(,\d{1,2})*", field):
        return None
    numbers = sorted({int(each) for each in field.split(",")})
    return numbers if numbers[-1] <= most else None


def _named(field: str, names: Sequence[str], first: int) -> str:
    """With numbers for names such as MON."""
    for number, name in enumerate(names, first):
        field = field.replace(name[:3].upper(), str(number))
    return field


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
