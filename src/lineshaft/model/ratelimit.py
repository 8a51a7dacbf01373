"""Rate limits: a provider says "not now". That is no failure of the task.

A task that met a limit waits and comes back without using up an attempt, without counting for its circuit
breaker or against the task as a poison pill. The waits have a counter of their own: after ten, the next limit
counts as a failed attempt and the counter starts again with the new attempt. A spent quota, which no waiting
of an hour brings back, goes to the dead letters then instead.

- How long: what the provider said (Retry-After), within bounds; else 60 s, doubled with each wait, plus up to
  10 %, and never more than an hour with everything.
- Detection reads error texts, so it must not see "429" in a task id, an amount, or a line number, nor a rate
  limit in "a separate limit". An agent that names another category knows better than the text; `crash` is
  what is said when nothing is known, so there the text decides.
- Others are told to slow down for half the wait: those who would use the same model, or everyone when no
  model is known. The latest signal decides, even when it is the shorter one; a signal that arrives late never
  overrides a newer one. Merging gives the same result in whatever order signals come.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from lineshaft.model.retry import FailureCategory, Uniform, category_of

FIRST_WAIT_SEC = 60.0
LONGEST_WAIT_SEC = 3_600.0
MAX_WAITS = 10
_WAIT_SPREAD = 0.1

_SPENT_QUOTA = re.compile(
    r"quota[\s_-]?exceeded|exceeded your (?:current )?quota|insufficient[\s_-]?(?:balance|quota)",
    re.IGNORECASE,
)
_PHRASE = re.compile(
    r"(?<![a-z])rate[\s_-]?limit|(?-i:RateLimit)|too[\s_-]?many[\s_-]?requests|retry[_-]after", re.IGNORECASE
)
# What is no status is matched first and so is gone for the second branch: "app.py:429", "line 429".
_STATUS = re.compile(
    r"(?:\.\w+:|\blines?\s+)429|(?P<status>(?<![\w#$./,-])429(?![\w/]|[.,-]\w))", re.IGNORECASE
)

_NUMBER = r"\d+(?:\.\d+)?"
_UNIT = r"(?:ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?)(?![a-z])"
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
_PART = re.compile(rf"({_NUMBER})\s*({_UNIT})?", re.IGNORECASE)


def is_spent_quota(text: str) -> bool:
    """Whether the limit is one that lasts: money or a quota is used up."""
    return _SPENT_QUOTA.search(text) is not None


def is_rate_limit(text: str, category: str | None = None) -> bool:
    """Whether a failure that an agent reported is a rate limit, by its category or else by its text."""
    named = category_of(category or "")
    if named == FailureCategory.RATE_LIMIT:
        return True
    if named in tuple(FailureCategory) and named != FailureCategory.CRASH:
        return False
    return (
        _PHRASE.search(text) is not None
        or is_spent_quota(text)
        or any(match["status"] for match in _STATUS.finditer(text))
    )


def parse_retry_after(
    value: str | float | None, now: datetime, *, longest_sec: float = LONGEST_WAIT_SEC
) -> float | None:
    """How long a provider asks to wait; None if it doesn't say.

    A number of seconds, a header's value (seconds or an HTTP date), or an error text that has one in it.
    """
    seconds = _wait_in(value, now) if isinstance(value, str) else value
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
    return {"s": 1.0, "m": 60.0, "h": 3_600.0}[unit[0]]


def backoff_wait(waits_so_far: int, uniform: Uniform) -> float:
    """Seconds to wait when the provider doesn't say, after so many waits before this one."""
    wait = min(FIRST_WAIT_SEC * 2.0 ** min(waits_so_far, MAX_WAITS), LONGEST_WAIT_SEC)
    return min(wait * (1 + _WAIT_SPREAD * uniform()), LONGEST_WAIT_SEC)


@dataclass(frozen=True, slots=True)
class WaitForLimit:
    """Back after `wait_sec` without using an attempt; others shall slow down for `slowdown_sec`."""

    wait_sec: float
    slowdown_sec: float
    waits: int
    """The counter's new value."""


@dataclass(frozen=True, slots=True)
class CountsAsFailure:
    """The waits are used up: `retry.decide_failure` decides; the counter starts again at zero."""


@dataclass(frozen=True, slots=True)
class QuotaSpent:
    """The waits are used up and more would not help: to the dead letters at once."""


def decide_rate_limit(
    *,
    waits_so_far: int,
    retry_after_sec: float | None,
    spent_quota: bool,
    uniform: Uniform,
    refused: bool = False,
    max_waits: int = MAX_WAITS,
) -> WaitForLimit | CountsAsFailure | QuotaSpent:
    """Decide what becomes of a task that met a limit; `retry_after_sec` as `parse_retry_after` gives it.

    `refused`: the task's policy names rate limits as not to be retried (`RetryPolicy.refuses`), so there is
    nothing to wait for.
    """
    if refused:
        return CountsAsFailure()
    if waits_so_far >= max_waits:
        return QuotaSpent() if spent_quota else CountsAsFailure()
    wait_sec = backoff_wait(waits_so_far, uniform) if retry_after_sec is None else retry_after_sec
    return WaitForLimit(wait_sec=wait_sec, slowdown_sec=wait_sec / 2, waits=waits_so_far + 1)
