"""OfficePlane's names for states and priorities."""

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.model.priority import Tier, tier
from lineshaft.model.states import Status

_STATES = {
    Status.CREATED: "QUEUED",
    Status.PENDING: "QUEUED",
    Status.READY: "QUEUED",
    Status.CLAIMED: "RUNNING",
    Status.RUNNING: "RUNNING",
    Status.VALIDATING: "RUNNING",
    Status.FAILED: "RUNNING",
    Status.RETRYING: "RETRYING",
    Status.COMPLETED: "COMPLETED",
    Status.CANCELLED: "CANCELLED",
    Status.DEAD_LETTERED: "FAILED",
}
_PRIORITIES = {"CRITICAL": 5, "HIGH": 20, "NORMAL": 50, "LOW": 70}
_WORDS = {4: "CRITICAL", 3: "HIGH", 2: "NORMAL", 1: "LOW"}


def state_name(status: Status, *, last_category: str | None = None, batch_started: bool = False) -> str:
    """The OfficePlane state of a task.

    `last_category` distinguishes a task that timed out permanently from one that failed. `batch_started` is
    true for a PENDING batch parent once one of its children has started.
    """
    if status is Status.PENDING and batch_started:
        return "RUNNING"
    if status is Status.DEAD_LETTERED and last_category == "timeout":
        return "TIMEOUT"
    return _STATES[status]


def parse_priority(priority: str | int) -> int:
    """Read one of OfficePlane's four priority words, or its number from 4 (critical) to 1 (low)."""
    word = _WORDS.get(priority) if isinstance(priority, int) else priority.upper()
    if word not in _PRIORITIES:
        fault = f"must be CRITICAL, HIGH, NORMAL or LOW (or 4, 3, 2, 1), got {shown(priority)}"
        raise InvalidInputError(errors=[("priority", fault)])
    return _PRIORITIES[word]


def priority_word(priority: float) -> str:
    return {Tier.CRITICAL: "CRITICAL", Tier.HIGH: "HIGH", Tier.NORMAL: "NORMAL"}.get(tier(priority), "LOW")


def max_attempts(max_retries: int, *, first_is_extra: bool) -> int:
    """The number of attempts that `maxRetries` allows.

    OfficePlane's documentation doesn't count the first attempt, its program does: `first_is_extra` chooses.
    Zero is one attempt either way.
    """
    return max_retries + 1 if first_is_extra else max(max_retries, 1)
