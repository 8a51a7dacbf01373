"""What an agent logs about its tasks: a line when one starts, one when it has ended, and a summary."""

import logging
from decimal import Decimal

from lineshaft.agent.outcome import Outcome, Verdict
from lineshaft.agent.run import Run
from lineshaft.logs import TASK_LINES
from lineshaft.model import ratelimit
from lineshaft.model.states import Status
from lineshaft.types.work import Moved

_log = logging.getLogger(TASK_LINES)

_LONGEST_TITLE = 60
_LONGEST_ERROR = 500
_CENT = Decimal("0.01")
_MINUTE_SEC, _HOUR_SEC = 60, 3600


class TaskLog:
    def __init__(self, agent_id: str) -> None:
        self._agent_id = agent_id
        self._done = 0
        self._failed = 0
        self._released = 0
        self._cost = Decimal(0)

    def started(self, run: Run) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        task = run.execution.task
        title = _line(task.title, _LONGEST_TITLE)
        again = f" (attempt {task.attempts + 1} of {task.max_attempts})" if task.attempts else ""
        _log.info("started%s%s", f": {title}" if title != task.type else "", again, extra=self._about(run))

    def ended(self, run: Run, moved: Moved | None) -> None:
        """`moved`: how its outcome was written; None: it was not."""
        error, run.error = run.error, None
        outcome = run.reported
        if outcome is None:
            return
        cost = run.spent.cost_usd
        if cost:
            self._cost += cost
        status = None if moved is None else moved.status
        match outcome.verdict:
            case Verdict.COMPLETE:
                self._done += status is not None
                if _log.isEnabledFor(logging.INFO):
                    self._completed(run, status, cost)
            case Verdict.FAIL:
                self._failure(run, outcome, moved, error)
            case Verdict.NOTHING:
                _log.info("stopped after %s: %s", *_stopped(run), extra=self._about(run))
            case Verdict.CANCEL:
                reason = _line(outcome.reason, _LONGEST_ERROR)
                _log.info("cancelled by its handler: %s", reason, extra=self._about(run))
            case Verdict.SNOOZE:
                _log.info("snoozed for %s", duration(outcome.delay_sec or 0), extra=self._about(run))
            case Verdict.RELEASE:
                self._released += 1
                why = run.execution.over or outcome.reason or "no reason"
                _log.info("handed back after %s: %s", self._took(run), why, extra=self._about(run))

    def _completed(self, run: Run, status: Status | None, cost: Decimal | None) -> None:
        price = f" for {dollars(cost)}" if cost else ""
        then = ""
        if status is Status.VALIDATING:
            then = "; its output is being checked"
        elif status is not Status.COMPLETED:
            then = f"; it is {status} now" if status is not None else "; another agent has the task"
        extra = self._about(run) | {"duration_sec": self._seconds(run), "cost_usd": cost}
        _log.info("done in %s%s%s", self._took(run), price, then, extra=extra)

    def _failure(self, run: Run, outcome: Outcome, moved: Moved | None, error: BaseException | None) -> None:
        wait = None if moved is None else moved.retry_in_sec
        extra = self._about(run) | {
            "category": outcome.category,
            "error": outcome.error,
            "duration_sec": self._seconds(run),
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
            *(self._took(run), reason.rstrip("."), _consequence(run, moved)),
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

    def _about(self, run: Run) -> dict[str, object]:
        task = run.execution.task
        return {
            "task_id": task.id,
            "task_type": task.type,
            "attempt": task.attempts + 1,
            "agent_id": self._agent_id,
        }

    def _seconds(self, run: Run) -> float:
        return round(run.execution.host.loop.time() - run.started_at, 3)

    def _took(self, run: Run) -> str:
        return duration(self._seconds(run))


def _stopped(run: Run) -> tuple[str, str]:
    seconds = run.execution.host.loop.time() - run.started_at
    return duration(seconds), run.execution.over or "the claim is over"


def _consequence(run: Run, moved: Moved | None) -> str:
    status = None if moved is None else moved.status
    if moved is not None and moved.retry_in_sec is not None:
        return (
            "will retry at once"
            if not moved.retry_in_sec
            else f"will retry in {duration(moved.retry_in_sec)}"
        )
    if status is Status.DEAD_LETTERED:
        return f"won't retry: see 'lineshaft dlq show {run.id}'"
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
