"""Errors as clients see them: application/problem+json (RFC 9457), with a code that never changes."""

import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from lineshaft.errors import (
    InvalidInputError,
    LineshaftError,
    RateLimitedError,
    UnauthorizedError,
    UnavailableError,
)
from lineshaft.types import Problem

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
    "capability_mismatch": HTTPStatus.FORBIDDEN,
    "forbidden": HTTPStatus.FORBIDDEN,
    "unauthorized": HTTPStatus.UNAUTHORIZED,
    "budget_exceeded": HTTPStatus.PAYMENT_REQUIRED,
    "payload_too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "rate_limited": HTTPStatus.TOO_MANY_REQUESTS,
    "cursor_expired": HTTPStatus.GONE,
    "unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "internal": HTTPStatus.INTERNAL_SERVER_ERROR,
}
#: Seconds after which what could not be served is worth another try.
_RETRY_AFTER = {"unavailable": b"1", "rate_limited": b"5"}

Headers = list[tuple[bytes, bytes]]


class Detail(msgspec.Struct, frozen=True):
    """An error as document 003's surface has it."""

    detail: str


def problem(error: LineshaftError, request_id: str | None = None) -> Problem:
    code = error.code if error.code in STATUSES else "internal"
    return Problem.of(error, code=code, status=STATUSES[code].value, request_id=request_id)


def headers_of(error: LineshaftError) -> Headers:
    if isinstance(error, UnauthorizedError):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, UnavailableError | RateLimitedError):
        return [(b"retry-after", _RETRY_AFTER[error.code])]
    return []


def is_plain(path: str) -> bool:
    """Whether errors at this path are document 003's."""
    return path.startswith("/api/")


def rendered(error: LineshaftError, request_id: str | None, path: str) -> tuple[int, Headers, bytes]:
    found = problem(error, request_id)
    headers = headers_of(error)
    if is_plain(path):
        json = (b"content-type", b"application/json")
        return found.status, [json, *headers], msgspec.json.encode(Detail(found.detail))
    media_type = (b"content-type", MEDIA_TYPE.encode())
    return found.status, [media_type, *headers], msgspec.json.encode(found)


class MethodNotAllowedError(LineshaftError):
    """This path doesn't know this method."""

    code = "method_not_allowed"


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")


def unreadable(error: msgspec.MsgspecError | UnicodeDecodeError | ValueError) -> InvalidInputError:
    """What the decoder says about a body or a query, with the place as a path of ours."""
    if not isinstance(error, msgspec.ValidationError):
        return InvalidInputError(
            f"The body is no valid JSON: {error}. Send a JSON object in UTF-8.",
            errors=[("", f"is no valid JSON: {error}")],
        )
    match = _PLACE.match(str(error))
    what, path = (match["what"], match["path"] or "$") if match else (str(error), "$")
    place = path.removeprefix("$").removeprefix(".")
    if named := _FIELD.search(what):
        place = f"{place}.{named['name']}".removeprefix(".")
        what = "is no field of this" if "unknown" in what else "is required"
    else:
        what = what[:1].lower() + what[1:]
    return InvalidInputError(errors=[(place, what)])
