"""Why a call of a model failed: one class per category of failures.

A handler may let these through: the category decides about another attempt, and a rate limit about when.
"""

from datetime import UTC, datetime
from decimal import Decimal
from typing import ClassVar

from lineshaft.errors import LineshaftError
from lineshaft.model.retry import FailureCategory

NOTHING = Decimal(0)


class LLMError(LineshaftError):
    """A call of a model failed."""

    category: ClassVar[FailureCategory] = FailureCategory.ERROR

    def __init__(
        self, message: str, *, cost_usd: Decimal | None = NOTHING, retry_at: datetime | None = None
    ) -> None:
        """`cost_usd`: what was spent nevertheless; None: an unknown amount. `retry_at`: not before then."""
        super().__init__(message)
        self.cost_usd = cost_usd
        self.retry_at = retry_at

    @property
    def retry_after_sec(self) -> float | None:
        """Seconds from now until `retry_at`."""
        if self.retry_at is None:
            return None
        return max(0.0, (self.retry_at - datetime.now(UTC)).total_seconds())


class LLMRateLimited(LLMError):  # noqa: N818 - not a fault
    """The provider limits the calls, or is overloaded."""

    category = FailureCategory.RATE_LIMIT
    retryable = True


class LLMUnavailable(LLMError):  # noqa: N818
    """The provider can't be reached, or failed."""

    retryable = True


class LLMTimeout(LLMError):  # noqa: N818
    """The model didn't answer in time."""

    category = FailureCategory.TIMEOUT
    retryable = True


class LLMAuthError(LLMError):
    """The provider refused the key."""

    category = FailureCategory.AUTH_FAILURE


class LLMRequestError(LLMError):
    """The provider refused the request itself: an unknown model, or a prompt that is too long."""

    category = FailureCategory.INVALID_INPUT


class LLMAnswerError(LLMError):
    """The answer can't be used: it isn't JSON, was cut off, or doesn't follow the protocol."""

    category = FailureCategory.INVALID_OUTPUT
    retryable = True

    def __init__(self, message: str, *, cost_usd: Decimal | None = None, answer: str = "") -> None:
        """`answer`: what the model said."""
        super().__init__(message, cost_usd=cost_usd)
        self.answer = answer
