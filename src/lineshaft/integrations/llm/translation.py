"""Errors of pydantic-ai and of providers' libraries as ours (`errors.py`)."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_ai import exceptions as theirs

from lineshaft.integrations.llm.errors import (
    NOTHING,
    LLMAnswerError,
    LLMAuthError,
    LLMError,
    LLMRateLimited,
    LLMRequestError,
    LLMTimeout,
    LLMUnavailable,
)
from lineshaft.integrations.llm.limits import wait_until
from lineshaft.integrations.llm.secrets import without_secrets

_MOST_TEXT = 1_000
#: With several models, the error of the one that is most likely to answer later counts.
_HOPE = (LLMRateLimited, LLMUnavailable, LLMTimeout, LLMAnswerError, LLMRequestError, LLMAuthError)


def translated(error: BaseException, keys: Sequence[str | None] = ()) -> LLMError | None:
    """An error of a call as ours; None: it isn't about the call of a model. Its text has none of `keys`."""
    if isinstance(error, LLMError):
        return error
    if isinstance(error, theirs.FallbackExceptionGroup):
        each = [one for one in (translated(inner, keys) for inner in error.exceptions) if one is not None]
        return _together(each) if each else None
    if isinstance(error, theirs.ModelAPIError):
        return _of_call(error, keys)
    if isinstance(error, theirs.UnexpectedModelBehavior):
        return LLMAnswerError(_short(f"The model's answer can't be used: {error}", keys))
    return None


def _of_call(error: theirs.ModelAPIError, keys: Sequence[str | None]) -> LLMError:  # noqa: PLR0911 - a table
    now = datetime.now(UTC)
    said = _said(error)
    status = getattr(error, "status_code", None)
    headers: Mapping[str, str] = getattr(error, "headers", None) or {}
    at = wait_until(headers, said, now)
    what = f"The model {error.model_name!r}"
    answered = f" (HTTP {status}): {said}" if status is not None else f": {said}"

    def text(verb: str) -> str:
        return _short(f"{what} {verb}{answered}", keys)

    match error:
        case theirs.ModelRateLimitError() | theirs.ModelOverloadedError() | theirs.ModelQuotaExceededError():
            verb = (
                "is overloaded"
                if isinstance(error, theirs.ModelOverloadedError)
                else "refused for a rate limit"
            )
            return LLMRateLimited(text(verb), retry_at=at)
        case theirs.ModelAuthenticationError():
            return LLMAuthError(text("refused the key"))
        case theirs.ModelRequestRejectedError():
            return LLMRequestError(text("refused the request"))
        case theirs.ModelTimeoutError() | theirs.ModelRequestTimeout():
            return LLMTimeout(text("didn't answer in time"), cost_usd=_cost_of_lost(error))
        case theirs.ModelConnectionError():
            return LLMUnavailable(text("can't be reached"), cost_usd=_cost_of_lost(error))
        case theirs.ModelHTTPError():
            return LLMUnavailable(text("failed"), retry_at=at)
        case _:
            # The response arrived, and may be paid for, but it isn't one of the protocol.
            return LLMAnswerError(text("gave an answer that can't be used"))


def _cost_of_lost(error: theirs.ModelAPIError) -> Any:
    """A request that arrived may be paid for, whether its answer arrives or not."""
    return NOTHING if getattr(error, "phase", None) in {"pool", "connect"} else None


def _said(error: theirs.ModelAPIError) -> str:
    """What the provider says, without what the message says of it."""
    body = error.body
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, Mapping) else inner
        return str(message or body)
    return str(body) if body else error.message


def _short(text: str, keys: Sequence[str | None]) -> str:
    text = without_secrets(text, keys)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"


def _together(errors: Sequence[LLMError]) -> LLMError:
    """What the failures of several models mean: that of the most hopeful, with the texts of all."""
    if len(errors) == 1:
        return errors[0]
    kind = next(kind for kind in _HOPE if any(type(error) is kind for error in errors))
    text = "; ".join(str(error) for error in errors)
    alike = [error.retry_at for error in errors if type(error) is kind]
    # A call may succeed as soon as one of the models takes it.
    at = None if None in alike else min((at for at in alike if at is not None), default=None)
    costs = [error.cost_usd for error in errors]
    cost = None if None in costs else sum((cost for cost in costs if cost is not None), NOTHING)
    together = kind(text, cost_usd=cost)
    together.retry_at = at
    return together
