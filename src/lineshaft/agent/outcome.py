"""Outcomes: what a handler's return value or exception means, decided without side effects.

A returned value is the output. `Cancel`, `Snooze` and `Fail` may be returned or raised. Every other exception
has a category, which decides whether there is another attempt. Exceptions of other libraries are recognised
by what they look like (a status code, a response with headers, a name), so that none has to be installed.
"""

import asyncio
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lineshaft.errors import (
    BudgetExceededError,
    LineshaftError,
    RateLimitedError,
    StaleClaimError,
    SupersededError,
)
from lineshaft.integrations.llm.errors import LLMError
from lineshaft.model import ratelimit
from lineshaft.model.accounts import account_fault
from lineshaft.model.durations import Duration, seconds
from lineshaft.model.fields import LONGEST_SECONDS
from lineshaft.model.retry import LONGEST_DELAY_SEC, FailureCategory
from lineshaft.model.storable import NOT_FINITE, contains_nan, json_fault
from lineshaft.tracebacks import has_user_frames, user_traceback
from lineshaft.types.work import MAX_ERROR, end_of

MAX_OUTPUT_BYTES = 256 << 20
#: Causes of causes that are looked at.
_DEEPEST = 10


class Cancel(Exception):  # noqa: N818 - a request of a handler, not an error
    """Returned or raised by a handler: cancel this task and all that depends on it."""

    def __init__(self, reason: str = "cancelled by its handler") -> None:
        self.reason = _text(reason)
        super().__init__(reason)


class Snooze(Exception):  # noqa: N818
    """Returned or raised by a handler: run the task again after this time. Uses no attempt."""

    def __init__(self, duration: Duration) -> None:
        """`duration`: seconds or a timedelta."""
        self.seconds = float(seconds(duration))
        if not 0 <= self.seconds <= LONGEST_SECONDS:
            raise ValueError(
                f"A snooze lasts from 0 to {LONGEST_SECONDS:.0f} seconds, a year, got {duration!r}."
            )
        super().__init__(f"snoozed for {self.seconds:g} s")


class Fail(Exception):  # noqa: N818
    """Returned or raised by a handler: the attempt failed with this reason and category."""

    def __init__(
        self, reason: str, category: str = FailureCategory.ERROR, *, retry_after_sec: Duration | None = None
    ) -> None:
        """`retry_after_sec`: seconds or a timedelta."""
        self.reason = _text(reason)
        self.category = str(category)
        self.retry_after_sec = seconds(retry_after_sec)
        super().__init__(reason)


class RateLimited(Fail):
    """Returned or raised by a handler: a provider refuses for now. The task waits, and uses no attempt.

    The account that the attempt used is left alone; without one, the model.
    """

    def __init__(
        self,
        reason: str = "rate limited",
        *,
        retry_at: datetime | None = None,
        retry_after_sec: Duration | None = None,
        account: str | None = None,
    ) -> None:
        """`retry_at`: when the limit ends, with a time zone; or `retry_after_sec`, seconds or a timedelta.

        `account`: the one that was used, if it isn't `ctx.account`.
        """
        super().__init__(reason, FailureCategory.RATE_LIMIT, retry_after_sec=retry_after_sec)
        if retry_at is not None and retry_at.tzinfo is None:
            raise ValueError(f"retry_at needs a time zone, got {retry_at.isoformat()}.")
        if account is not None and (fault := account_fault(account)):
            raise ValueError(f"account {fault}.")
        self.retry_at = retry_at
        self.account = account


class BudgetExceeded(BudgetExceededError):  # noqa: N818
    """No money is left for this work."""


class SharedBudgetExceeded(BudgetExceeded):
    """No money is left in a budget that others use too: the task waits for more."""


class AttemptCancelled(Exception):  # noqa: N818
    """Raised by `ctx.check_cancelled`: the handler must stop and clean up.

    The task was cancelled, its time is up, the claim was lost, or the agent stops.
    """


class SignalTimeout(TimeoutError):  # noqa: N818
    """Raised by `ctx.wait_for`: the signal didn't come in time.

    That is recorded as the wait's step, so every later attempt gets it too. A handler that doesn't catch it
    fails as `signal_timeout`, which is never retried.
    """


class ClaimOver(BaseException):
    """Unwinds a handler whose claim is over: the task waits for something, or another agent has it.

    Not an Exception, so that a handler's `except Exception` doesn't catch it.
    """


class LateClaim(ClaimOver):
    """Hands a task back whose handler hasn't started: its lease may be over."""


class Result(Struct, frozen=True):
    """An output with artifacts or a decision report."""

    data: Any = None
    artifacts: Any = None
    decision_report: Any = None


class OutcomeKind(StrEnum):
    COMPLETE = "complete"
    FAIL = "fail"
    SNOOZE = "snooze"
    CANCEL = "cancel"
    #: Given back without using an attempt.
    RELEASE = "release"
    #: The claim is over already; nothing is to be written.
    NOTHING = "nothing"


class Outcome(Struct, frozen=True):
    kind: OutcomeKind
    output: bytes | None = None
    artifacts: bytes | None = None
    decision_report: bytes | None = None
    error: str = ""
    category: str = FailureCategory.ERROR
    retry_after_sec: float | None = None
    traceback: str | None = None
    delay_sec: float | None = None
    reason: str = ""
    #: Of a rate limit.
    retry_at: datetime | None = None
    account: str | None = None

    @property
    def is_postponed(self) -> bool:
        """Postponed: the task continues later, and no attempt is used."""
        if self.kind is OutcomeKind.FAIL:
            return ratelimit.is_rate_limit(self.error, self.category)
        return self.kind in {OutcomeKind.SNOOZE, OutcomeKind.RELEASE}


NOTHING = Outcome(OutcomeKind.NOTHING)
RELEASED = Outcome(OutcomeKind.RELEASE)
_NO_OUTPUT = Outcome(OutcomeKind.COMPLETE, output=b"null")


def failed(
    error: str, category: str, *, retry_after_sec: float | None = None, traceback: str | None = None
) -> Outcome:
    return Outcome(
        OutcomeKind.FAIL, error=error, category=category, retry_after_sec=retry_after_sec, traceback=traceback
    )


def of_value(value: Any, artifacts: list[Any] | None = None) -> Outcome:
    """What a returned value means; `artifacts` are those that the handler named while it ran."""
    if value is None and not artifacts:
        return _NO_OUTPUT
    if isinstance(value, Cancel | Snooze | Fail):
        return of_exception(value)
    result = value if isinstance(value, Result) else Result(value)
    if not isinstance(result.artifacts, list | tuple | None):
        text = f"The handler's artifacts must be a list, got a {type(result.artifacts).__qualname__}"
        return failed(text, FailureCategory.INVALID_OUTPUT)
    named = [*(artifacts or ()), *(result.artifacts or ())]
    try:
        return Outcome(
            OutcomeKind.COMPLETE,
            output=encoded(result.data, "output"),
            artifacts=encoded(named, "artifacts") if named else None,
            decision_report=None
            if result.decision_report is None
            else encoded(result.decision_report, "decision_report"),
        )
    except ValueError as error:
        return failed(f"The handler's {error}", FailureCategory.INVALID_OUTPUT)


def encoded(value: Any, what: str) -> bytes:
    """As JSON that can be stored; raises a ValueError whose message begins with `what`."""
    try:
        json = msgspec.json.encode(value, enc_hook=encode_others)
    except Exception as error:  # noqa: BLE001 - models of others may raise anything
        reason = error if isinstance(error, TypeError | ValueError | RecursionError) else describe(error)
        raise ValueError(f"{what} can't be stored as JSON: {reason}") from None
    if len(json) > MAX_OUTPUT_BYTES:
        raise ValueError(
            f"{what} is {len(json)} bytes of JSON, more than {MAX_OUTPUT_BYTES}. Store it elsewhere and "
            "return a reference (ctx.artifact)."
        )
    if fault := json_fault(json):
        raise ValueError(f"{what} {fault}")
    if contains_nan(value, json, encode_others):
        raise ValueError(f"{what} {NOT_FINITE}")
    return json


def encode_others(value: Any) -> Any:
    """Pydantic models, which msgspec doesn't know."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"a value of type {type(value).__qualname__} has no form in JSON")
    return dump(mode="json")


def of_exception(error: BaseException) -> Outcome:
    """What an exception from a handler means."""
    chain = list(_unfolded(error))
    for one in chain:
        wish = _wish(one)
        if wish is not None:
            return with_traceback(wish, error)
    text, trace = describe(error), _traceback(error)
    for one in chain:
        category = _category(one)
        if category is not None:
            wait = _retry_after(one) if category is FailureCategory.RATE_LIMIT else None
            return failed(text, category, retry_after_sec=wait, traceback=trace)
    return failed(text, FailureCategory.ERROR, traceback=trace)


def with_traceback(outcome: Outcome, error: BaseException) -> Outcome:
    """A failure with the place where the handler was, for people."""
    # The handler of a command is Lineshaft's own.
    if outcome.kind is not OutcomeKind.FAIL or not has_user_frames(error):
        return outcome
    return replace(outcome, traceback=_traceback(error))


def _traceback(error: BaseException) -> str:
    return end_of(user_traceback(error))


def _wish(error: BaseException) -> Outcome | None:
    """What one of our own exceptions means."""
    outcome = None
    match error:
        case LateClaim() | SharedBudgetExceeded():
            # A heartbeat that reports the same of a budget releases the task too.
            outcome = Outcome(OutcomeKind.RELEASE, reason=str(error))
        case ClaimOver() | StaleClaimError() | SupersededError():
            outcome = NOTHING
        case Cancel():
            outcome = Outcome(OutcomeKind.CANCEL, reason=error.reason)
        case Snooze():
            outcome = Outcome(OutcomeKind.SNOOZE, delay_sec=error.seconds)
        case RateLimited():
            limited = failed(error.reason, error.category, retry_after_sec=error.retry_after_sec)
            outcome = replace(limited, retry_at=error.retry_at, account=error.account)
        case Fail():
            outcome = failed(error.reason, error.category, retry_after_sec=error.retry_after_sec)
        case LLMError():
            # The one place where the instant of a provider's limit is passed on.
            outcome = replace(failed(str(error), error.category), retry_at=error.retry_at)
        case BudgetExceededError():
            outcome = failed(str(error), FailureCategory.BUDGET_EXCEEDED)
        case RateLimitedError():
            # The queue's own limit. Named with its class it would look like a provider's, and slow a model.
            outcome = failed(str(error), FailureCategory.ERROR)
    return outcome


def describe(error: BaseException) -> str:
    """The type and the message, for people and prompts. The attempt and the log have the traceback."""
    if isinstance(error, SystemExit):
        return f"The handler called sys.exit({error.code!r})"
    if isinstance(error, asyncio.CancelledError):
        return "The handler was cancelled from inside"
    try:
        text = str(error)[:MAX_ERROR]
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the error itself
        text = ""
    if isinstance(error, BaseExceptionGroup):
        text = "; ".join([error.message, *map(describe, error.exceptions)])
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:MAX_ERROR]


def _text(reason: object) -> str:
    """A handler may pass an exception as the reason."""
    return describe(reason) if isinstance(reason, BaseException) else str(reason)[:MAX_ERROR]


def _unfolded(error: BaseException, depth: int = 0) -> Iterator[BaseException]:
    """An exception, those of a group, and those it was explicitly raised from."""
    yield error
    if depth >= _DEEPEST:
        return
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _unfolded(one, depth + 1)
    if error.__cause__ is not None:
        yield from _unfolded(error.__cause__, depth + 1)


_AUTH_NAMES = frozenset({"AuthenticationError", "PermissionDeniedError"})
_INVALID_OUTPUT_NAMES = frozenset({"ValidationError", "JSONDecodeError", "DecodeError"})


def _category(error: BaseException) -> FailureCategory | None:
    name = type(error).__name__
    status = _status(error)
    if status == 429 or name.startswith(("RateLimit", "TooManyRequests")):  # noqa: PLR2004 - HTTP's number
        return FailureCategory.RATE_LIMIT
    if status in {401, 403} or name in _AUTH_NAMES:
        return FailureCategory.AUTH_FAILURE
    if isinstance(error, TimeoutError) or "Timeout" in name:
        of_signal = isinstance(error, SignalTimeout)
        return FailureCategory.SIGNAL_TIMEOUT if of_signal else FailureCategory.TIMEOUT
    if name in _INVALID_OUTPUT_NAMES:
        return FailureCategory.INVALID_OUTPUT
    # The message may be the only sign.
    if not isinstance(error, LineshaftError | BaseExceptionGroup) and ratelimit.is_rate_limit(
        describe(error)
    ):
        return FailureCategory.RATE_LIMIT
    return None


def _status(error: BaseException) -> int | None:
    """The HTTP status of an exception or of its response."""
    response = getattr(error, "response", None)
    for holder, name in (
        (error, "status_code"),
        (response, "status_code"),
        (error, "status"),
        (response, "status"),
        (error, "code"),
    ):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


#: The engine has the limit of the installation.
_LONGEST = LONGEST_DELAY_SEC


def _retry_after(error: BaseException) -> float | None:
    """How long a provider asks to wait; None: the engine looks for it in the message."""
    now = datetime.now(UTC)
    value = getattr(error, "retry_after", None)
    if isinstance(value, int | float | str):
        return ratelimit.parse_retry_after(value, now, longest_sec=_LONGEST)
    for holder in (getattr(error, "response", None), error):
        headers = getattr(holder, "headers", None)
        if isinstance(headers, Mapping) or hasattr(headers, "get"):
            milliseconds = _header(headers, "retry-after-ms")
            if milliseconds is not None and milliseconds.strip().isdigit():
                return ratelimit.parse_retry_after(int(milliseconds) / 1000, now, longest_sec=_LONGEST)
            if (header := _header(headers, "retry-after")) is not None:
                return ratelimit.parse_retry_after(header, now, longest_sec=_LONGEST)
    return None


def _header(headers: Any, name: str) -> str | None:
    """Header objects ignore case, plain dicts don't."""
    for spelling in (name, name.title(), name.replace("-ms", "-Ms").title()):
        value = headers.get(spelling)
        if value is not None:
            return str(value)
    return None
