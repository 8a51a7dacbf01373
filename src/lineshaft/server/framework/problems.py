"""Error responses: application/problem+json (RFC 9457) with a stable code, or the format of a guest API."""

import math
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct, field
from starlette.types import Scope

from lineshaft.errors import (
    InvalidInputError,
    LineshaftError,
    QuotaFullError,
    RateLimitedError,
    UnauthorizedError,
    UnavailableError,
)
from lineshaft.types import Problem
from lineshaft.types.problems import invalid_input

MEDIA_TYPE = "application/problem+json"

STATUSES: Mapping[str, HTTPStatus] = {
    "invalid_input": HTTPStatus.UNPROCESSABLE_ENTITY,
    "cycle_detected": HTTPStatus.UNPROCESSABLE_ENTITY,
    "dependency_not_found": HTTPStatus.UNPROCESSABLE_ENTITY,
    "not_found": HTTPStatus.NOT_FOUND,
    "method_not_allowed": HTTPStatus.METHOD_NOT_ALLOWED,
    "already_exists": HTTPStatus.CONFLICT,
    "already_claimed": HTTPStatus.CONFLICT,
    "not_claimable": HTTPStatus.CONFLICT,
    "superseded": HTTPStatus.CONFLICT,
    "invalid_transition": HTTPStatus.CONFLICT,
    "stale_claim": HTTPStatus.CONFLICT,
    "dependents_running": HTTPStatus.CONFLICT,
    "capability_mismatch": HTTPStatus.FORBIDDEN,
    "forbidden": HTTPStatus.FORBIDDEN,
    "unauthorized": HTTPStatus.UNAUTHORIZED,
    "budget_exceeded": HTTPStatus.PAYMENT_REQUIRED,
    "payload_too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "rate_limited": HTTPStatus.TOO_MANY_REQUESTS,
    "quota_full": HTTPStatus.TOO_MANY_REQUESTS,
    "cursor_expired": HTTPStatus.GONE,
    "unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "internal": HTTPStatus.INTERNAL_SERVER_ERROR,
}
#: Seconds until a retry is worthwhile.
_RETRY_AFTER = {"unavailable": b"1", "rate_limited": b"5", "quota_full": b"5"}

Headers = list[tuple[bytes, bytes]]


def problem(error: LineshaftError, request_id: str | None = None) -> Problem:
    code = error.code if error.code in STATUSES else "internal"
    return Problem.of(error, code=code, status=STATUSES[code].value, request_id=request_id)


def headers_of(error: LineshaftError) -> Headers:
    if isinstance(error, UnauthorizedError):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, RateLimitedError) and error.retry_after_sec is not None:
        return [(b"retry-after", str(math.ceil(error.retry_after_sec)).encode())]
    if isinstance(error, UnavailableError | RateLimitedError | QuotaFullError):
        return [(b"retry-after", _RETRY_AFTER[error.code])]
    return []


class ErrorFormat(Struct, frozen=True):
    media_type: str
    #: The type of the body, for the OpenAPI document.
    shape: Any
    body: Callable[[Problem], Any]


PROBLEM = ErrorFormat(MEDIA_TYPE, Problem, lambda found: found)


class ErrorFormats(Struct, frozen=True):
    """Which format the errors of a path have: those of a guest API are its own."""

    by_prefix: Mapping[str, ErrorFormat] = field(default_factory=dict)

    def of(self, path: str) -> ErrorFormat:
        for prefix, found in self.by_prefix.items():
            if path.startswith(prefix):
                return found
        return PROBLEM


def response(error: LineshaftError, scope: Scope) -> tuple[int, bytes, Headers]:
    """Status, body and headers, in the format that the middleware chose for the path."""
    state = scope.get("state", {})
    found = problem(error, state.get("request_id"))
    error_format: ErrorFormat = state.get("error_format", PROBLEM)
    media_type = (b"content-type", error_format.media_type.encode())
    return found.status, msgspec.json.encode(error_format.body(found)), [media_type, *headers_of(error)]


class MethodNotAllowedError(LineshaftError):
    """The path exists, but not with this method."""

    code = "method_not_allowed"


def unreadable(error: msgspec.MsgspecError | UnicodeDecodeError | ValueError) -> InvalidInputError:
    """The error of a decoder as a fault with its place in the body or the query."""
    if not isinstance(error, msgspec.ValidationError):
        return InvalidInputError(
            f"The body is not valid JSON: {error}. Send a JSON object in UTF-8.",
            errors=[("", f"is not valid JSON: {error}")],
        )
    return invalid_input(error)
