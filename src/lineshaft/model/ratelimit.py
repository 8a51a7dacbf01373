"""Rate limits of a provider. Hitting one is not a failure of the task.

A rate-limited task waits and is retried without using up an attempt, without counting for its circuit breaker
and without counting as a poison pill. The waits have their own counter: after ten, the next limit counts as a
failed attempt, and the counter restarts with the new attempt. An exhausted quota, which an hour of waiting
doesn't restore, is dead-lettered at that point instead. A wait of a minute or more that the provider asked
for says when the limit ends: up to 50 of them in a row aren't counted.

- Length of the wait: the provider's Retry-After, within bounds; otherwise 60 s, doubled with each wait, plus
  up to 10 %, at most an hour in total.
- Detection reads error texts, so it must not find "429" in a task id, an amount or a line number, nor a rate
  limit in "a separate limit". If the agent names another category, that category wins over the text; `crash`
  is the category of unknown failures, so there the text decides.
- Others slow down for half the wait: those that would use the same account; without one, the same model; all
  when no model is known. Beyond an hour the limit is a window of the provider's: the account or the model is
  held back until its end, or, if neither is known, only the agent.
"""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from msgspec import Struct

from lineshaft.model.retry import FailureCategory, Uniform, category_of

FIRST_WAIT_SEC = 60.0
LONGEST_WAIT_SEC = 3_600.0
#: The longest wait that a provider may ask for: a week, with time to spare.
LONGEST_RETRY_AFTER_SEC = 8 * 86_400.0
MAX_WAITS = 10
#: From here on a wait that the provider asked for isn't counted, so many times in a row.
LONG_WAIT_SEC = 60.0
MAX_LONG_WAITS = 50
_WAIT_SPREAD = 0.1

_SPENT_QUOTA = re.compile(
    r"quota[\s_-]?exceeded|exceeded your (?:current )?quota|insufficient[\s_-]?(?:balance|quota)",
    re.IGNORECASE,
)
_PHRASE = re.compile(
    r"(?<![a-z])rate[\s_-]?limit|(?-i:RateLimit)|too[\s_-]?many[\s_-]?requests|retry[_-]after", re.IGNORECASE
)
# The first branch consumes numbers that are not a status, as in "app.py:429" and "line 429".
_STATUS = re.compile(
    r"(?:\.\w+:|\blines?\s+)429|(?P<status>(?<![\w#$./,-])429(?![\w/]|[.,-]\w))", re.IGNORECASE
)

_NUMBER = r"\d+(?:\.\d+)?"
_UNIT = r"(?:ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?)(?![a-z])"
# "30", "-5", "1.5s", "6m0s", "2 minutes", or a date in one of HTTP's three forms.
_WAIT = (
    rf"(?P<span>-?{_NUMBER}(?:\s*{_UNIT}(?:\s*{_NUMBER}\s*{_UNIT})*|(?!\w|[-:.,]\d)))"
    r"|(?P<date>[a-z]{3,9}, \d\d[ -][a-z]{3}[ -]\d{2,4} \d\d:\d\d:\d\d GMT"
    r"|[a-z]{3} [a-z]{3} [ \d]\d \d\d:\d\d:\d\d \d{4})"
)
_BARE_WAIT = re.compile(rf"\s*(?:{_WAIT})\s*", re.IGNORECASE)
_WAIT_IN_TEXT = re.compile(
    r"(?<![a-z])(?:retry[\s_-]?after(?P<ms>[_-]ms)?|(?:re)?try(?:ing)?(?: again)? (?:in|after))"
    rf"[\"'\s:=]*(?:{_WAIT})",
    re.IGNORECASE,
)
_ONLY_NUMBER = re.compile(rf"\s*-?{_NUMBER}\s*")
_PART = re.compile(rf"({_NUMBER})\s*({_UNIT})?", re.IGNORECASE)


def is_spent_quota(text: str) -> bool:
    """Whether the limit is permanent: a balance or a quota is used up."""
    return _SPENT_QUOTA.search(text) is not None


#: Categories of failures that nothing is known about.
_UNSPECIFIC = frozenset({FailureCategory.CRASH, FailureCategory.ERROR})


def is_rate_limit(text: str, category: str | None = None) -> bool:
    """Whether a failure reported by an agent is a rate limit, by its category or otherwise by its text."""
    named = category_of(category or "")
    if named == FailureCategory.RATE_LIMIT:
        return True
    if named in tuple(FailureCategory) and named not in _UNSPECIFIC:
        return False
    return (
        _PHRASE.search(text) is not None
        or is_spent_quota(text)
        or any(match["status"] for match in _STATUS.finditer(text))
    )


def parse_retry_after(
    value: str | float | None, now: datetime, *, longest_sec: float = LONGEST_RETRY_AFTER_SEC
) -> float | None:
    """The seconds a provider asks to wait; None if it doesn't say.

    `value` is a number of seconds, a header's value (seconds or an HTTP date), or a text with one in it.
    """
    return _clamped(_wait_in(value, now) if isinstance(value, str) else value, longest_sec)


def retry_after_in_error(
    error: str, now: datetime, *, longest_sec: float = LONGEST_RETRY_AFTER_SEC
) -> float | None:
    """As `parse_retry_after` for an error text. One that is only a number is a status, not a wait."""
    return None if _ONLY_NUMBER.fullmatch(error) else parse_retry_after(error, now, longest_sec=longest_sec)


def _clamped(seconds: float | None, longest_sec: float) -> float | None:
    if seconds is None or isinstance(seconds, bool) or seconds != seconds:  # noqa: PLR0124 (not a number)
        return None
    return float(min(max(seconds, 0), longest_sec))


def _wait_in(text: str, now: datetime) -> float | None:
    match = _BARE_WAIT.fullmatch(text) or _WAIT_IN_TEXT.search(text)
    if match is None:
        return None
    if match["date"] is not None:
        try:
            at = parsedate_to_datetime(match["date"])
        except ValueError:
            return None
        return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - now).total_seconds()
    span: str = match["span"]
    if span.startswith("-"):
        return 0.0
    in_ms = match.re is _WAIT_IN_TEXT and match["ms"] is not None
    return sum(
        float(number) * _unit_sec(unit or ("ms" if in_ms else "s")) for number, unit in _PART.findall(span)
    )


def _unit_sec(unit: str) -> float:
    unit = unit.lower()
    if unit.startswith(("ms", "milli")):
        return 0.001
    return {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}[unit[0]]


def backoff_wait(waits_so_far: int, uniform: Uniform) -> float:
    """Seconds to wait if the provider doesn't say how long."""
    wait = min(FIRST_WAIT_SEC * 2.0 ** min(waits_so_far, MAX_WAITS), LONGEST_WAIT_SEC)
    return min(wait * (1 + _WAIT_SPREAD * uniform()), LONGEST_WAIT_SEC)


class WaitForLimit(Struct, frozen=True):
    """Retry after `wait_sec` without using an attempt; others slow down for `slowdown_sec`."""

    wait_sec: float
    slowdown_sec: float
    #: The new values of the counters.
    waits: int
    long_waits: int = 0

    @property
    def is_window(self) -> bool:
        """It is too long for everyone to wait."""
        return self.slowdown_sec > LONGEST_WAIT_SEC


class CountsAsFailure(Struct, frozen=True):
    """The waits are used up: `retry.decide_failure` decides, and the counter restarts at zero."""


class QuotaSpent(Struct, frozen=True):
    """The waits are used up and more would not help: dead-letter the task."""


def decide_rate_limit(
    *,
    waits_so_far: int,
    long_waits_so_far: int = 0,
    retry_after_sec: float | None,
    spent_quota: bool,
    uniform: Uniform,
    refused: bool = False,
    max_waits: int = MAX_WAITS,
) -> WaitForLimit | CountsAsFailure | QuotaSpent:
    """Decide what happens to a rate-limited task; `retry_after_sec` is the result of `parse_retry_after`.

    `refused`: the task's policy doesn't retry rate limits (`RetryPolicy.refuses`), so it doesn't wait.
    """
    if refused:
        return CountsAsFailure()
    asked_sec = retry_after_sec or 0.0
    if asked_sec >= LONG_WAIT_SEC and long_waits_so_far < MAX_LONG_WAITS:
        return _wait(asked_sec, waits_so_far, long_waits_so_far + 1)
    if waits_so_far >= max_waits:
        return QuotaSpent() if spent_quota else CountsAsFailure()
    wait_sec = backoff_wait(waits_so_far, uniform) if retry_after_sec is None else retry_after_sec
    return _wait(wait_sec, waits_so_far + 1, long_waits_so_far)


def _wait(wait_sec: float, waits: int, long_waits: int) -> WaitForLimit:
    slowdown_sec = wait_sec if wait_sec > LONGEST_WAIT_SEC else wait_sec / 2
    return WaitForLimit(wait_sec=wait_sec, slowdown_sec=slowdown_sec, waits=waits, long_waits=long_waits)
