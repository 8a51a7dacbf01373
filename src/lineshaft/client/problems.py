"""Refusals of a server as the exceptions that the database backend would have raised: class and words."""

from collections.abc import Iterator
from http import HTTPStatus

import msgspec
from msgspec import Struct

from lineshaft import errors
from lineshaft.errors import LineshaftError, PayloadTooLargeError, UnavailableError


class Fault(Struct, frozen=True):
    loc: str
    msg: str


class Reason(Struct, frozen=True):
    code: str
    detail: str


class Problem(Struct, frozen=True, kw_only=True):
    """application/problem+json, as far as it makes an exception."""

    code: str
    detail: str
    errors: tuple[Fault, ...] | None = None
    cycle: tuple[str, ...] | None = None
    reasons: tuple[Reason, ...] | None = None
    resolution: str | None = None
    reviewer: str | None = None

    @property
    def exception(self) -> LineshaftError:
        match self.code:
            case errors.InvalidInputError.code:
                faults = [(fault.loc, fault.msg) for fault in self.errors or ()]
                return errors.InvalidInputError(self.detail, errors=faults)
            case errors.CycleError.code:
                return errors.CycleError(self.cycle or ())
            case errors.NotClaimableError.code:
                reasons = [(reason.code, reason.detail) for reason in self.reasons or ()]
                return errors.NotClaimableError(self.detail, reasons=reasons)
            case errors.InvalidTransitionError.code if self.resolution is not None:
                return errors.AlreadyReviewedError(
                    self.detail, resolution=self.resolution, reviewer=self.reviewer
                )
            case errors.UnauthorizedError.code:
                return errors.UnauthorizedError(f"{self.detail} {_WHERE_TO_PUT_IT}")
        return _KINDS.get(self.code, LineshaftError)(self.detail)


_WHERE_TO_PUT_IT = "Give it to Lineshaft(url, token=…), or as LINESHAFT_TOKEN."


def _kinds() -> Iterator[type[LineshaftError]]:
    """Those that are made of a message; a class comes after the one it specialises, which counts."""
    for kind in reversed(vars(errors).values()):
        if isinstance(kind, type) and issubclass(kind, LineshaftError):
            yield kind


_KINDS = {kind.code: kind for kind in _kinds()}
_decode = msgspec.json.Decoder(Problem).decode
_SERVER_FAULT = 500
#: What proxies say when they, or whoever is behind them, have too much to do.
_TRY_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


def exception_of(status: int, body: bytes, place: str) -> LineshaftError:
    """What an answer other than 2xx means; `place` is the server's address."""
    try:
        return _decode(body).exception
    except msgspec.MsgspecError:
        return strange(status, place)


def strange(status: int, place: str) -> LineshaftError:
    """An answer that makes no sense."""
    kind: type[LineshaftError] = LineshaftError
    if status >= _SERVER_FAULT or status in _TRY_LATER:
        kind = UnavailableError
    elif status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        kind = PayloadTooLargeError
    return kind(
        f"{place} answered {status}, and not as a Lineshaft server of this version does: something else is "
        "there, or in between. Check the URL (LINESHAFT_URL)."
    )
