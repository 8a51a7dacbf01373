"""Errors on the wire: application/problem+json (RFC 9457), with a code that never changes."""

import re
from collections.abc import Iterator
from http import HTTPStatus

from msgspec import Struct, ValidationError

from lineshaft import errors
from lineshaft.errors import LineshaftError
from lineshaft.types.stats import Reason, ReasonCode


class Fault(Struct, frozen=True):
    #: The field, as tasks[3].priority.
    loc: str
    msg: str


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str = ""
    title: str = ""
    status: int = 0
    #: What was asked, what was found, and what to do.
    detail: str
    code: str
    #: The same request may succeed later without a change. Always sent, even if false.
    retryable: bool | None = None
    request_id: str | None = None
    #: Every fault that was found, with invalid_input, cycle_detected and dependency_not_found.
    errors: tuple[Fault, ...] | None = None
    #: With cycle_detected: each of these depends on the next.
    cycle: tuple[str, ...] | None = None
    #: With not_claimable: the reasons, as in `why`.
    reasons: tuple[Reason, ...] | None = None
    #: With invalid_transition on a dead letter that is already resolved: how, and by whom.
    resolution: str | None = None
    reviewer: str | None = None
    #: With rate_limited: when there is room again, to the fraction of a second.
    retry_after_sec: float | None = None

    @classmethod
    def of(cls, error: LineshaftError, *, code: str, status: int, request_id: str | None = None) -> "Problem":
        reviewed = error if isinstance(error, errors.AlreadyReviewedError) else None
        return cls(
            type=f"urn:lineshaft:error:{code}",
            title=code.replace("_", " ").capitalize(),
            status=status,
            detail=str(error),
            code=code,
            retryable=error.retryable,
            request_id=request_id,
            errors=tuple(Fault(*fault) for fault in error.errors)
            if isinstance(error, _WITH_FAULTS)
            else None,
            cycle=tuple(error.cycle) if isinstance(error, errors.CycleError) else None,
            reasons=tuple(Reason(ReasonCode(name), detail) for name, detail in error.reasons)
            if isinstance(error, errors.NotClaimableError)
            else None,
            resolution=None if reviewed is None else reviewed.resolution,
            reviewer=None if reviewed is None else reviewed.reviewer,
            retry_after_sec=error.retry_after_sec if isinstance(error, errors.RateLimitedError) else None,
        )

    @property
    def exception(self) -> LineshaftError:
        """The exception that the engine raised: the same class and text."""
        match self.code:
            case errors.InvalidInputError.code | errors.DependencyNotFoundError.code:
                return _BY_FAULTS[self.code](self.detail, errors=self._faults)
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
                return errors.UnauthorizedError(f"{self.detail.removesuffix('.')}. {_WHERE_TO_PUT_IT}")
        kind = _KINDS.get(self.code)
        error = self._of_newer_server if kind is None else kind(self.detail)
        if isinstance(error, errors.RateLimitedError):
            error.retry_after_sec = self.retry_after_sec
        return error

    @property
    def _of_newer_server(self) -> LineshaftError:
        """The error of a code that this version doesn't know: its class follows from the HTTP status."""
        kind = _BY_STATUS.get(self.status, LineshaftError)
        if self.retryable and self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            kind = errors.UnavailableError
        error = kind(self.detail)
        error.code = self.code
        if self.retryable is not None:
            error.retryable = self.retryable
        return error

    @property
    def _faults(self) -> list[tuple[str, str]]:
        return [(fault.loc, fault.msg) for fault in self.errors or ()]


#: Only classes that say nothing more than the status does.
_BY_STATUS: dict[int, type[LineshaftError]] = {
    HTTPStatus.UNAUTHORIZED: errors.UnauthorizedError,
    HTTPStatus.PAYMENT_REQUIRED: errors.BudgetExceededError,
    HTTPStatus.FORBIDDEN: errors.ForbiddenError,
    HTTPStatus.NOT_FOUND: errors.NotFoundError,
    HTTPStatus.CONFLICT: errors.InvalidTransitionError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: errors.PayloadTooLargeError,
    HTTPStatus.UNPROCESSABLE_ENTITY: errors.InvalidInputError,
    HTTPStatus.TOO_MANY_REQUESTS: errors.RateLimitedError,
}
_BY_FAULTS = {kind.code: kind for kind in (errors.InvalidInputError, errors.DependencyNotFoundError)}
_WITH_FAULTS = (errors.InvalidInputError, errors.CycleError, errors.DependencyNotFoundError)


_WHERE_TO_PUT_IT = (
    "Clients send LINESHAFT_TOKEN, or what 'lineshaft token create --save' wrote to LINESHAFT_HOME. "
    "In Python, pass it as Lineshaft(url, token=…)."
)


def _kinds() -> Iterator[type[LineshaftError]]:
    """Errors that take only a message; of two with one code the base class wins."""
    for kind in reversed(vars(errors).values()):
        if isinstance(kind, type) and issubclass(kind, LineshaftError):
            yield kind


_KINDS = {kind.code: kind for kind in _kinds()}

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")


def invalid_input(error: ValidationError) -> errors.InvalidInputError:
    """The error of a decoder as a fault with its place, as in tasks[3].priority."""
    match = _PLACE.match(str(error))
    what, path = (match["what"], match["path"] or "$") if match else (str(error), "$")
    place = path.removeprefix("$").removeprefix(".")
    if named := _FIELD.search(what):
        place = f"{place}.{named['name']}".removeprefix(".")
        what = "unknown field" if "unknown" in what else "is required"
    else:
        what = what[:1].lower() + what[1:]
    return errors.InvalidInputError(errors=[(place, what)])
