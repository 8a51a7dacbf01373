"""What agents say about their claims, what they are answered, and what a failure comes to."""

from collections.abc import Sequence
from typing import Any

from lineshaft.engine.postgres.literals import array_literal
from lineshaft.engine.transition.changes import Changes, LockedTask
from lineshaft.errors import (
    InvalidTransitionError,
    NotFoundError,
    StaleClaimError,
)
from lineshaft.model import ratelimit, retry
from lineshaft.model.states import Status
from lineshaft.model.storable import replace_unstorable
from lineshaft.types.work import MAX_ERROR, ClaimRef, Failure, Moved

#: In somebody's hands, or on its way out of them.
HELD = frozenset({Status.CLAIMED, Status.RUNNING, Status.VALIDATING})


def claim_columns(claims: Sequence[ClaimRef]) -> dict[str, str]:
    """As parameters of a statement that takes many."""
    return {
        "ids": array_literal([claim.id for claim in claims]),
        "epochs": array_literal([claim.epoch for claim in claims]),
    }


def has_duplicate_tasks(claims: Sequence[ClaimRef]) -> bool:
    """Whether two of them are of one task.

    An agent that lost a task and claimed it again may report on both claims in one call. Results are matched
    by task, so both would get the same result: such calls are split.
    """
    return len({claim.id for claim in claims}) < len(claims)


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
