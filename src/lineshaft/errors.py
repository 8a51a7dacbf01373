"""Every error Lineshaft raises on purpose.

A message says what was asked, what was found and what to do. `code` is the stable name in responses of the
HTTP API. `retryable` means that the same call may succeed later without a change.
"""

from collections.abc import Sequence


class LineshaftError(Exception):
    """Something went wrong in Lineshaft."""

    # The code of the class, except where a newer server answers with one that has no class here.
    code: str = "internal"
    retryable: bool = False

    def __init__(self, message: str | None = None) -> None:
        text = message or (self.__doc__ or "").strip()
        # The message may quote input with a lone surrogate, which could neither be printed nor sent.
        super().__init__(text.encode(errors="backslashreplace").decode())


class InvalidInputError(LineshaftError):
    """The input is not valid; nothing was changed."""

    code = "invalid_input"

    def __init__(self, message: str | None = None, *, errors: Sequence[tuple[str, str]] = ()) -> None:
        """`errors` are (field, fault) pairs."""
        self.errors = tuple(errors)
        faults = (f"{place}: {fault}" if place else fault for place, fault in self.errors)
        super().__init__(message or "; ".join(faults) or None)


class CycleError(LineshaftError):
    """The dependencies form a cycle; nothing was changed."""

    code = "cycle_detected"

    def __init__(self, cycle: Sequence[str]) -> None:
        """`cycle` starts and ends with the same task; each task depends on the next."""
        self.cycle = tuple(cycle)
        self.errors = (("depends_on", f"forms a cycle: {' → '.join(self.cycle)}"),)
        super().__init__(
            f"The dependencies form a cycle: {' → '.join(self.cycle)} (each depends on the next). "
            "Remove one of these dependencies; nothing was changed."
        )


class NotFoundError(LineshaftError):
    """Not found."""

    code = "not_found"


class DependencyNotFoundError(LineshaftError):
    """A task depends on one that doesn't exist; nothing was changed."""

    code = "dependency_not_found"

    def __init__(self, message: str | None = None, *, errors: Sequence[tuple[str, str]] = ()) -> None:
        """`errors` are (field, fault) pairs."""
        self.errors = tuple(errors)
        super().__init__(message)


class AlreadyExistsError(LineshaftError):
    """The id or key is already in use; nothing was changed."""

    code = "already_exists"


class AlreadyClaimedError(LineshaftError):
    """Another agent holds the task."""

    code = "already_claimed"


class NotClaimableError(LineshaftError):
    """The task can't be claimed now."""

    code = "not_claimable"
    retryable = True

    def __init__(self, message: str, *, reasons: Sequence[tuple[str, str]] = ()) -> None:
        """`reasons` are (code, detail) pairs, as in `why`."""
        self.reasons = tuple(reasons)
        super().__init__(message)


class SupersededError(LineshaftError):
    """The agent was registered again elsewhere; this process must stop using it."""

    code = "superseded"


class StaleClaimError(LineshaftError):
    """The claim is no longer held; nothing was changed."""

    code = "stale_claim"


class CapabilityMismatchError(LineshaftError):
    """The agent lacks a capability that the task requires."""

    code = "capability_mismatch"


class UnavailableError(LineshaftError):
    """The database is not available."""

    code = "unavailable"
    retryable = True


class InvalidTransitionError(LineshaftError):
    """The task's state doesn't allow this."""

    code = "invalid_transition"


class AlreadyReviewedError(InvalidTransitionError):
    """This dead letter has already been resolved; nothing was changed."""

    def __init__(self, message: str, *, resolution: str | None = None, reviewer: str | None = None) -> None:
        """`resolution` and `reviewer` are those of the existing decision; no reviewer: a manual retry."""
        self.resolution = resolution
        self.reviewer = reviewer
        super().__init__(message)


class DependentsRunningError(LineshaftError):
    """Tasks that depend on this one are running; nothing was changed."""

    code = "dependents_running"


class BudgetExceededError(LineshaftError):
    """The remaining budget is too small."""

    code = "budget_exceeded"


class UnauthorizedError(LineshaftError):
    """A token is required."""

    code = "unauthorized"


class ForbiddenError(LineshaftError):
    """This is not allowed."""

    code = "forbidden"


class PayloadTooLargeError(LineshaftError):
    """The request is larger than the server accepts; nothing was changed."""

    code = "payload_too_large"


class RateLimitedError(LineshaftError):
    """Too many requests at the same time."""

    code = "rate_limited"
    retryable = True

    def __init__(self, message: str | None = None, *, retry_after_sec: float | None = None) -> None:
        """`retry_after_sec`: when there is room again, if that is known."""
        self.retry_after_sec = retry_after_sec
        super().__init__(message)


class QuotaFullError(LineshaftError):
    """So many tasks of a key wait that a quota admits no more."""

    code = "quota_full"
    retryable = True


class SettingsError(LineshaftError):
    """The configuration is not valid."""

    code = "settings"


class DatabaseError(LineshaftError):
    """The database can't be used."""

    code = "database"


class EmbeddedServerError(DatabaseError):
    """The embedded PostgreSQL can't be started."""

    code = "embedded_server"


class MigrationError(DatabaseError):
    """The schema can't be brought to this version."""

    code = "migration"


class CursorExpiredError(LineshaftError):
    """Retention has deleted events after this cursor; start again from the beginning."""

    code = "cursor_expired"


class TaskFailed(LineshaftError):  # noqa: N818 - an outcome of a task, not a fault of the call
    """The task failed permanently: it is a dead letter."""

    code = "task_failed"

    def __init__(
        self,
        message: str,
        *,
        task_id: str = "",
        error: str | None = None,
        category: str | None = None,
        attempts: int = 0,
        traceback: str | None = None,
    ) -> None:
        """`error`, `category` and `traceback` are those of the last attempt.

        `traceback` is the end of the handler's, if its agent sent one. A program that ends with this error
        shows it.
        """
        self.task_id = task_id
        self.error = error
        self.category = category
        self.attempts = attempts
        self.traceback = traceback
        super().__init__(message)
        if traceback is not None:
            self.add_note(f"In the agent:\n{traceback.rstrip()}")


class TaskCancelled(LineshaftError):  # noqa: N818 - as TaskFailed
    """The task was cancelled."""

    code = "task_cancelled"

    def __init__(self, message: str, *, task_id: str = "", reason: str | None = None) -> None:
        self.task_id = task_id
        self.reason = reason
        super().__init__(message)


class OutputTypeError(LineshaftError):
    """The output of a task doesn't fit the return type of its handler."""

    code = "output_type"
