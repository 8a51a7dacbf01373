"""What an agent logs about its tasks: a line when one starts, one when it has ended, and a summary."""

import logging
from decimal import Decimal

from lineshaft.agent.execution import Execution
from lineshaft.agent.outcome import Outcome, OutcomeKind, failed
from lineshaft.clock import lease_time
from lineshaft.errors import StaleClaimError
from lineshaft.logs import TASK_LINES
from lineshaft.model import ratelimit
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.types.work import Moved

_log = logging.getLogger(TASK_LINES)

_LONGEST_TITLE = 60
_LONGEST_ERROR = 500
_CENT = Decimal("0.01")
_MINUTE_SEC, _HOUR_SEC = 60, 3600
#: Where a completed attempt leads whose output is rejected.
_REJECTED = frozenset({Status.RETRYING, Status.DEAD_LETTERED})


class TaskLog:
    def __init__(self) -> None:
        self._done = 0
        self._failed = 0
        self._released = 0
        self._cost = Decimal(0)

    def started(self, execution: Execution) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        task = execution.task
        title = _line(task.title, _LONGEST_TITLE)
        again = f" (attempt {task.attempts + 1} of {task.max_attempts})" if task.attempts else ""
        _log.info("started%s%s", f": {title}" if title != task.type else "", again, extra=execution.labels)

    def ended(self, execution: Execution, moved: Moved | None) -> None:
        """`moved`: how its outcome was written; None: it was not."""
        error = execution.take_error()
        outcome = execution.reported
        if outcome is None:
            return
        cost = execution.spent.cost_usd
        if cost:
            self._cost += cost
        stale = moved.error if moved is not None and isinstance(moved.error, StaleClaimError) else None
        # A written outcome ended the claim, even if the agent claimed the task again before it knew.
        is_written = moved is not None and moved.status is not None
        if stale is not None or (execution.lease.is_lost and not is_written):
            self._lost(execution, str(stale or execution.lease.over))
        elif outcome.kind is OutcomeKind.COMPLETE:
            self._completed(execution, moved, cost)
        elif outcome.kind is OutcomeKind.FAIL:
            self._failure(execution, outcome, moved, error)
        else:
            self._given_up(execution, outcome)

    def _given_up(self, execution: Execution, outcome: Outcome) -> None:
        match outcome.kind:
            case OutcomeKind.NOTHING:
                why = execution.lease.over or "the claim is over"
                _log.info("stopped after %s: %s", _took(execution), why, extra=execution.labels)
            case OutcomeKind.CANCEL:
                reason = _line(outcome.reason, _LONGEST_ERROR)
                _log.info("cancelled by its handler: %s", reason, extra=execution.labels)
            case OutcomeKind.SNOOZE:
                _log.info("snoozed for %s", duration(outcome.delay_sec or 0), extra=execution.labels)
            case OutcomeKind.RELEASE:
                self._released += 1
                why = execution.lease.over or outcome.reason or "no reason"
                # An agent whose claims are always late would never do anything.
                level = logging.INFO if execution.lease.may_hold else logging.WARNING
                _log.log(level, "handed back after %s: %s", _took(execution), why, extra=execution.labels)

    def _lost(self, execution: Execution, why: str) -> None:
        """The queue has taken the task back; one line, whatever showed it first."""
        host = execution.host
        silent_sec = round(lease_time() - execution.lease.renewed_at, 1)
        _log.warning(
            "lost after %s, by agent %s, instance %r: %s; its lease was last renewed %s ago",
            *(_took(execution), host.agent_id, host.instance, _line(why, _LONGEST_ERROR).rstrip(".")),
            duration(silent_sec),
            extra=execution.labels | {"instance": host.instance, "silent_sec": silent_sec},
        )

    def _completed(self, execution: Execution, moved: Moved | None, cost: Decimal | None) -> None:
        status = None if moved is None else moved.status
        if status in _REJECTED:
            self._failure(execution, _rejection(execution, moved), moved, None)
            return
        self._done += status is not None
        if not _log.isEnabledFor(logging.INFO):
            return
        price = f" for {dollars(cost)}" if cost else ""
        then = ""
        if status is Status.VALIDATING:
            then = "; its output is being checked"
        elif status is not Status.COMPLETED:
            then = f"; it is {status} now" if status is not None else "; this was not recorded"
        extra = execution.labels | {"duration_sec": _seconds(execution), "cost_usd": cost}
        _log.info("done in %s%s%s", _took(execution), price, then, extra=extra)

    def _failure(
        self, execution: Execution, outcome: Outcome, moved: Moved | None, error: BaseException | None
    ) -> None:
        wait = None if moved is None else moved.retry_in_sec
        extra = execution.labels | {
            "category": outcome.category,
            "error": outcome.error,
            "duration_sec": _seconds(execution),
            "retry_in_sec": wait,
        }
        reason = _line(outcome.error, _LONGEST_ERROR)
        if ratelimit.is_rate_limit(outcome.error, outcome.category) and wait is not None:
            _log.warning("rate limited, continues in %s: %s", duration(wait), reason, extra=extra)
            return
        self._failed += 1
        # The place, if the handler's code has one.
        raised = None if outcome.traceback is None else error
        _log.error(
            "failed after %s: %s; %s",
            *(_took(execution), reason.rstrip("."), _consequence(execution, moved)),
            extra=extra,
            exc_info=raised,
        )

    def summary(self) -> str:
        """What this run did, in words."""
        parts = [f"{count(self._done, 'task')} done"]
        if self._failed:
            parts.append(f"{count(self._failed, 'attempt')} failed")
        if self._released:
            parts.append(f"{count(self._released, 'task')} handed back")
        if self._cost:
            parts.append(f"{dollars(self._cost)} spent")
        return ", ".join(parts)


def _rejection(execution: Execution, moved: Moved | None) -> Outcome:
    """A completed attempt whose output was rejected, as the failure that it is."""
    reason = (moved and moved.failure_reason) or f"see 'lineshaft task show {execution.task.id}'"
    return failed(f"its output was rejected: {reason}", FailureCategory.INVALID_OUTPUT)


def _seconds(execution: Execution) -> float:
    return round(execution.host.loop.time() - execution.started_at, 3)


def _took(execution: Execution) -> str:
    return duration(_seconds(execution))


def _consequence(execution: Execution, moved: Moved | None) -> str:
    status = None if moved is None else moved.status
    if moved is not None and moved.retry_in_sec is not None:
        return (
            "will retry at once"
            if not moved.retry_in_sec
            else f"will retry in {duration(moved.retry_in_sec)}"
        )
    if status is Status.DEAD_LETTERED:
        return f"won't retry: see 'lineshaft dlq show {execution.task.id}'"
    return "this was not recorded" if status is None else f"it is {status} now"


def _line(text: str, longest: int) -> str:
    """The first line, of bounded length."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= longest else first[: longest - 1] + "…"


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < _MINUTE_SEC:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    if seconds < _HOUR_SEC:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"


def dollars(amount: Decimal) -> str:
    return f"${amount:.2f}" if amount >= _CENT else f"${amount.normalize():f}"
