"""Until when a provider asks to wait: from the headers and the text of its refusal.

Providers say it in many ways: `Retry-After` in seconds or as a date, windows that are used up with the time
of their reset, or a text such as "resets at 2026-01-31T17:00:00Z", "resets at 5pm (Europe/Berlin)" or
"resets in 4h 12m".
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from lineshaft.model import ratelimit

#: A year: what is further away is an id or a mistake.
_LONGEST_SEC = 366 * 86_400.0
_BEFORE = r"(?:resets?|reset[_ ]at|resetting|available again|try again|retry|wait until)"
_INSTANT = re.compile(
    rf"{_BEFORE}(?:[\"']?\s*[:=|])?(?:\s+(?:at|on|after|until))?[\"'\s:=|]+"
    r"(?P<iso>\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?\s?(?:Z|UTC|[+-]\d\d:?\d\d)?)",
    re.IGNORECASE,
)
_EPOCH = re.compile(
    rf"{_BEFORE}(?:[\"']?\s*[:=|])?(?:\s+(?:at|on))?[\"'\s:=|]+(?P<epoch>\d{{10}}(?:\d{{3}})?)(?!\d)",
    re.IGNORECASE,
)
_CLOCK = re.compile(
    r"resets?(?:\s+at)?\s+(?P<hour>\d{1,2})(?::(?P<minute>\d\d))?\s*(?P<half>[ap]m)?(?!\w)"
    r"(?:\s*\(?(?P<zone>UTC|GMT|[A-Z][A-Za-z]+/[A-Za-z_/]+)\)?)?",
    re.IGNORECASE,
)
_SPAN = re.compile(r"resets? (?:in|after)\s+(?P<span>(?:\d+(?:\.\d+)?\s*[a-z]+[\s,]*)+)", re.IGNORECASE)
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[dhms])", re.IGNORECASE)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
#: Of a provider: what is left in a window, and when the next window begins.
_WINDOWS = (
    ("x-ratelimit-remaining-{}", "x-ratelimit-reset-{}"),
    ("anthropic-ratelimit-{}-remaining", "anthropic-ratelimit-{}-reset"),
)
_UNITS_OF_WINDOWS = ("requests", "tokens", "input-tokens", "output-tokens")


def wait_until(headers: Mapping[str, str], text: str, now: datetime) -> datetime | None:
    """When a call may succeed again; None: the provider doesn't say. `headers`: names in small letters."""
    instants = [*_in_headers(headers, now), *_in_text(text, now)]
    return max(
        (instant for instant in instants if (instant - now).total_seconds() <= _LONGEST_SEC), default=None
    )


def _in_headers(headers: Mapping[str, str], now: datetime) -> Iterator[datetime]:
    milliseconds, seconds = headers.get("retry-after-ms", ""), headers.get("retry-after")
    if milliseconds.strip().isdigit():
        yield now + timedelta(milliseconds=int(milliseconds))
    elif (wait := ratelimit.parse_retry_after(seconds, now, longest_sec=_LONGEST_SEC)) is not None:
        yield now + timedelta(seconds=wait)
    for remaining, reset in _WINDOWS:
        for unit in _UNITS_OF_WINDOWS:
            # Only a window that is used up says anything about the next call.
            if headers.get(remaining.format(unit), "").strip() == "0":
                yield from _value(headers.get(reset.format(unit), ""), now)
    yield from _value(headers.get("anthropic-ratelimit-unified-reset", ""), now)


def _value(value: str, now: datetime) -> Iterator[datetime]:
    """A header's value: an instant, seconds since 1970, or a span such as 6m0s."""
    value = value.strip()
    if re.fullmatch(r"\d{10}(\d{3})?", value):
        yield _since_1970(value)
    elif re.match(r"\d{4}-\d\d-\d\d", value):
        yield from _instant(value)
    elif parts := _PART.findall(value):
        yield now + _span(parts)
    elif (wait := ratelimit.parse_retry_after(value, now, longest_sec=_LONGEST_SEC)) is not None:
        yield now + timedelta(seconds=wait)


def _in_text(text: str, now: datetime) -> Iterator[datetime]:
    for match in _INSTANT.finditer(text):
        yield from _instant(match["iso"])
    for match in _EPOCH.finditer(text):
        yield _since_1970(match["epoch"])
    for match in _SPAN.finditer(text):
        if parts := _PART.findall(match["span"]):
            yield now + _span(parts)
    for match in _CLOCK.finditer(text):
        yield from _next_time(match, now)


def _instant(text: str) -> Iterator[datetime]:
    try:
        at = datetime.fromisoformat(text.upper().replace(" UTC", "Z").replace("UTC", "Z").strip())
    except ValueError:
        return
    yield at if at.tzinfo else at.replace(tzinfo=UTC)


def _since_1970(digits: str) -> datetime:
    return datetime.fromtimestamp(int(digits[:10]), UTC)


def _span(parts: list[tuple[str, str]]) -> timedelta:
    return timedelta(seconds=sum(float(number) * _UNITS[unit.lower()] for number, unit in parts))


def _next_time(match: re.Match[str], now: datetime) -> Iterator[datetime]:
    """The next time of day as the text says it; without am or pm it must have minutes."""
    hour, minute = int(match["hour"]), int(match["minute"] or 0)
    half = (match["half"] or "").lower()
    if not half and match["minute"] is None:
        return
    if half:
        if not 1 <= hour <= 12:  # noqa: PLR2004 - as on a clock
            return
        hour = hour % 12 + (12 if half == "pm" else 0)
    zone: tzinfo = UTC
    if match["zone"] and "/" in match["zone"]:
        try:
            zone = ZoneInfo(match["zone"])
        except (KeyError, ValueError, OSError):
            return
    try:
        at = now.astimezone(zone).replace(hour=hour, minute=minute, second=0, microsecond=0)
    except ValueError:
        return
    yield (at if at > now else at + timedelta(days=1)).astimezone(UTC)
