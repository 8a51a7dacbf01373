"""What agents say about their claims, what they are answered, and what a failure comes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lineshaft.checks.decision_report import MAX_BYTES as MAX_REPORT_BYTES
from lineshaft.engine.postgres.literals import array_literal
from lineshaft.engine.transition.changes import UNREPORTED, Changes, LockedTask, Spent
from lineshaft.errors import (
    InvalidInputError,
    InvalidTransitionError,
    LineshaftError,
    NotFoundError,
    StaleClaimError,
)
from lineshaft.model import ratelimit, retry
from lineshaft.model.fields import MAX_TEXT
from lineshaft.model.states import Status
from lineshaft.model.storable import check_json, is_storable, replace_unstorable

MAX_ERROR = 10_000
MAX_PROGRESS_BYTES = 64 << 10
#: In somebody's hands, or on its way out of them.
HELD = frozenset({Status.CLAIMED, Status.RUNNING, Status.VALIDATING})


def check_report_size(report: bytes | None) -> None:
    if report is not None and len(report) > MAX_REPORT_BYTES:
        fault = (
            f"must be at most {MAX_REPORT_BYTES} bytes of JSON, got {len(report)}; put details in an artifact"
        )
        raise InvalidInputError(errors=[("decision_report", fault)])


class ClaimRef(msgspec.Struct, frozen=True):
    """One claim of a task."""

    id: str
    epoch: int


def claim_columns(claims: Sequence[ClaimRef]) -> dict[str, str]:
    """As parameters of a statement that takes many."""
    return {
        "ids": array_literal([claim.id for claim in claims]),
        "epochs": array_literal([claim.epoch for claim in claims]),
    }


def has_duplicate_tasks(claims: Sequence[ClaimRef]) -> bool:
    """Whether two of them are of one task.

    An agent that lost a task and got it again may hand in both at once. Answers go by task, so it would be
    told the same of both: such calls are taken apart.
    """
    return len({claim.id for claim in claims}) < len(claims)


class Completion(msgspec.Struct, frozen=True):
    claim: ClaimRef
    #: {"data": …, "artifacts": …, "decision_report": …}, each as JSON.
    output: bytes | None = None
    artifacts: bytes | None = None
    decision_report: bytes | None = None
    spent: Spent = UNREPORTED
    #: What the output is, for whoever reads it; None: what the task asked for.
    output_type: str | None = None

    def __post_init__(self) -> None:
        # Here, so that one bad output is refused alone and not with all others of its call.
        check_json(output=self.output, artifacts=self.artifacts, decision_report=self.decision_report)
        check_report_size(self.decision_report)
        named = self.output_type
        if named is not None and not (0 < len(named) <= MAX_TEXT and is_storable(named)):
            fault = f"must be a text of 1 to {MAX_TEXT} characters without U+0000, got {named[:100]!r}"
            raise InvalidInputError(errors=[("output.type", fault)])


def check_progress_size(progress: bytes | None) -> None:
    """It goes with heartbeats, which must be quick, and each is kept as an event."""
    if progress is not None and len(progress) > MAX_PROGRESS_BYTES:
        fault = (
            f"must be at most {MAX_PROGRESS_BYTES} bytes of JSON, got {len(progress)}; checkpoint the rest"
        )
        raise InvalidInputError(errors=[("progress", fault)])


@dataclass(frozen=True, slots=True)
class Failure:
    claim: ClaimRef
    error: str
    #: A category, or a system's reason; None: told from the text if it is a rate limit, else a crash.
    category: str | None = None
    retry_after_sec: float | None = None
    spent: Spent = UNREPORTED

    @property
    def is_rate_limit(self) -> bool:
        return ratelimit.is_rate_limit(self.error, self.category)

    @property
    def kind(self) -> str:
        if self.is_rate_limit:
            return retry.FailureCategory.RATE_LIMIT.value
        return str(retry.category_of(self.category or retry.FailureCategory.CRASH))


@dataclass(frozen=True, slots=True)
class Beat:
    claim: ClaimRef
    progress: bytes | None = None
    spent: Spent = UNREPORTED

    def __post_init__(self) -> None:
        check_json(progress=self.progress)
        check_progress_size(self.progress)


class Moved(msgspec.Struct, frozen=True):
    """What became of one task of a call: its new status, or why it didn't move."""

    id: str
    status: Status | None
    error: LineshaftError | None = None

    def unwrap(self) -> Status:
        if self.error is not None:
            raise self.error
        assert self.status is not None  # noqa: S101 - one of the two is always there
        return self.status


def refusal(
    claim: ClaimRef,
    live: tuple[int, str] | None,
    end: tuple[int, str] | None,
    target: Status | None,
    verb: str,
) -> Moved:
    found = live or end
    if found is None:
        return Moved(claim.id, None, NotFoundError(f"There is no task {claim.id}."))
    epoch, status = found
    if epoch == claim.epoch and (status == target or (target is None and status in _AFTER_FAILURE)):
        # The same call again: its first answer was lost on the way.
        return Moved(claim.id, Status(status))
    if epoch != claim.epoch or status not in HELD:
        return Moved(
            claim.id,
            None,
            StaleClaimError(
                f"Can't {verb} task {claim.id} with the claim of epoch {claim.epoch}: it is {status} with "
                f"epoch {epoch}. The claim ended; stop working on this task."
            ),
        )
    return Moved(claim.id, None, InvalidTransitionError(f"Can't {verb} task {claim.id}: it is {status}."))


_AFTER_FAILURE = frozenset({Status.RETRYING, Status.DEAD_LETTERED, Status.READY})


def record_failure(
    changes: Changes,
    task: LockedTask,
    failure: Failure,
    decision: retry.Retry | retry.DeadLetter | ratelimit.WaitForLimit,
    lane_id: int,
) -> Status:
    error = replace_unstorable(failure.error[:MAX_ERROR]) or "no message"
    category = replace_unstorable(failure.kind)
    spent = failure.spent
    told: dict[str, Any] = {"category": category, "error": error}
    if isinstance(decision, ratelimit.WaitForLimit):
        changes.requeue(
            task, Status.RETRYING, delay_sec=decision.wait_sec, spent=spent, rate_limits=decision.waits
        )
        changes.attempt(task, "rate_limited", spent=spent, category="rate_limit", error=error)
        changes.event(task, ["task.rate_limited"], told | {"wait_sec": decision.wait_sec})
        return Status.RETRYING
    changes.attempt(task, "failed", spent=spent, category=category, error=error)
    told["attempt"] = task.attempts + 1
    if isinstance(decision, retry.Retry):
        changes.requeue(
            task,
            Status.RETRYING,
            delay_sec=decision.delay_sec,
            spent=spent,
            attempts=task.attempts + 1,
            rate_limits=0,
            lane_id=lane_id,
            category=category,
        )
        told["delay_sec"] = decision.delay_sec
        changes.event(task, ["task.failed", "task.retry_scheduled"], told)
        return Status.RETRYING
    changes.end(
        task,
        Status.DEAD_LETTERED,
        spent=spent,
        reason=error,
        category=category,
        attempts=task.attempts + 1,
        poison_pill=decision.poison_pill,
    )
    told |= {"because": decision.reason, "poison_pill": decision.poison_pill}
    changes.event(task, ["task.failed", "task.dead_lettered"], told)
    return Status.DEAD_LETTERED
