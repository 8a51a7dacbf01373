"""What a handler's value or exception means: decided purely, for libraries that need not be installed."""

import asyncio
import json
import urllib.error
from email.message import Message
from typing import Any

import pytest

from lineshaft import BudgetExceeded, Cancel, Fail, Snooze
from lineshaft.agent.outcome import ClaimOver, Outcome, OutcomeKind, of_exception, of_value
from lineshaft.errors import InvalidInputError, RateLimitedError, StaleClaimError


class Response:
    """As in httpx, openai and anthropic."""

    def __init__(self, status_code: int, headers: Any = None) -> None:
        self.status_code = status_code
        self.headers = headers or {}


class HTTPStatusError(Exception):
    def __init__(self, response: Response, text: str = "") -> None:
        self.response = response
        super().__init__(text or f"Client error '{response.status_code}'")


class RateLimitError(Exception):
    def __init__(self, response: Response | None) -> None:
        self.response = response
        super().__init__("slow down")


class AuthenticationError(Exception):
    pass


class APITimeoutError(Exception):
    pass


class ValidationError(ValueError):
    pass


def categories(error: BaseException) -> tuple[str, float | None]:
    outcome = of_exception(error)
    assert outcome.kind is OutcomeKind.FAIL
    return outcome.category, outcome.retry_after_sec


def raised_from(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("odd"), ("error", None)),
        (SystemExit(3), ("error", None)),
        (asyncio.CancelledError(), ("error", None)),
        (TimeoutError(), ("timeout", None)),
        (APITimeoutError("no answer"), ("timeout", None)),
        (HTTPStatusError(Response(500)), ("error", None)),
        (HTTPStatusError(Response(401)), ("auth_failure", None)),
        (HTTPStatusError(Response(403)), ("auth_failure", None)),
        (AuthenticationError("bad key"), ("auth_failure", None)),
        (ValidationError("not what was asked"), ("invalid_output", None)),
        (json.JSONDecodeError("no", "x", 0), ("invalid_output", None)),
        (BudgetExceeded("no money"), ("budget_exceeded", None)),
        (InvalidInputError("a bad child"), ("error", None)),
        (Fail("no such file", "invalid_input"), ("invalid_input", None)),
        (Fail("wait", "rate_limit", retry_after_sec=5), ("rate_limit", 5)),
        # Rate limits: by status, by name, by wording; the wait from any of these.
        (HTTPStatusError(Response(429)), ("rate_limit", None)),
        (HTTPStatusError(Response(429, {"retry-after": "7"})), ("rate_limit", 7.0)),
        (HTTPStatusError(Response(429, {"Retry-After": "7"})), ("rate_limit", 7.0)),
        (HTTPStatusError(Response(429, {"retry-after-ms": "250"})), ("rate_limit", 0.25)),
        (RateLimitError(Response(429, {"retry-after": "1.5"})), ("rate_limit", 1.5)),
        (RateLimitError(None), ("rate_limit", None)),
        (RuntimeError("HTTP 429 Too Many Requests"), ("rate_limit", None)),
        (RuntimeError("quota exceeded"), ("rate_limit", None)),
        (RuntimeError("line 429"), ("error", None)),
        # What was raised on purpose because of something else.
        (raised_from(RuntimeError("the model failed"), RateLimitError(None)), ("rate_limit", None)),
        (ExceptionGroup("two", [ValueError("x"), HTTPStatusError(Response(401))]), ("auth_failure", None)),
    ],
)
def test_categories(error: BaseException, expected: tuple[str, float | None]) -> None:
    assert categories(error) == expected


def test_the_limit_of_the_queue_itself_is_no_rate_limit_of_a_model() -> None:
    """Otherwise one who fills the lanes would slow models down for the whole fleet."""
    outcome = of_exception(RateLimitedError("Tasks wait in 2000 lanes, and this call needs 1 more"))

    assert (outcome.category, outcome.is_postponed) == ("error", False)


def test_a_retry_after_that_is_an_attribute_or_a_date() -> None:
    error = RuntimeError("429")
    error.retry_after = 12  # type: ignore[attr-defined]
    assert categories(error) == ("rate_limit", 12.0)
    past = HTTPStatusError(Response(429, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}))
    assert categories(past) == ("rate_limit", 0.0)
    headers = Message()
    headers["Retry-After"] = "9"
    assert categories(urllib.error.HTTPError("http://x", 429, "no", headers, None)) == ("rate_limit", 9.0)


@pytest.mark.parametrize("raised", [True, False])
def test_requests_are_returned_or_raised(raised: bool) -> None:
    def meant(wish: Exception) -> Outcome:
        return of_exception(wish) if raised else of_value(wish)

    assert meant(Cancel("enough")) == Outcome(OutcomeKind.CANCEL, reason="enough")
    assert meant(Snooze(5)) == Outcome(OutcomeKind.SNOOZE, delay_sec=5.0)
    assert meant(Fail("broken", "auth_failure")) == Outcome(
        OutcomeKind.FAIL, error="broken", category="auth_failure"
    )


def test_a_request_inside_a_group_counts() -> None:
    assert of_exception(ExceptionGroup("g", [ValueError(), Snooze(1)])).kind is OutcomeKind.SNOOZE


@pytest.mark.parametrize("error", [ClaimOver(), StaleClaimError("gone")])
def test_nothing_is_written_for_a_claim_that_is_over(error: BaseException) -> None:
    assert of_exception(error).kind is OutcomeKind.NOTHING


def test_values() -> None:
    assert of_value(None).output == b"null"
    assert of_value({"a": [1, None]}).output == b'{"a":[1,null]}'
    assert of_value(None, ["x"]).artifacts == b'["x"]'


def test_a_snooze_has_a_valid_duration() -> None:
    with pytest.raises(ValueError, match="from 0 to"):
        Snooze(-1)
    with pytest.raises(ValueError, match="from 0 to"):
        Snooze(float("nan"))


def test_the_error_says_what_kind_it_is() -> None:
    assert of_exception(KeyError("x")).error == "KeyError: 'x'"
    assert of_exception(ZeroDivisionError()).error == "ZeroDivisionError"
    assert of_exception(SystemExit(3)).error == "The handler called sys.exit(3)"

    class Odd(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise RuntimeError

    assert of_exception(Odd()).error == "Odd"


def test_the_end_of_a_traceback_is_kept() -> None:
    """R-018: the place and the error; what a handler says itself needs none."""

    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise KeyError("é" * 9_000)

    with pytest.raises(KeyError) as caught:
        deep(5)
    found = of_exception(caught.value).traceback

    assert found is not None
    assert len(found.encode()) <= 16 << 10
    assert found.rstrip().endswith("é'")
    assert of_exception(Fail("not possible")).traceback is None
