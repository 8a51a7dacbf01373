"""What claiming, completing and failing make of a record: document 000's rules, without its faults. Pure."""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from lineshaft.checks import decision_report
from lineshaft.errors import InvalidInputError
from lineshaft.integrations.loki.preset import LOKI
from lineshaft.integrations.loki.records import (
    COMPLETED,
    DEAD_LETTER,
    IN_PROGRESS,
    NORMAL,
    PENDING,
    STATUS_IN,
    Record,
    base_of,
    count,
    dependencies_of,
    id_of,
    instant,
    iso,
    priority_number,
    type_of,
    wait_after,
)
from lineshaft.model import ratelimit

_OPEN, _HALF_OPEN = "open", "half-open"


class Ended(NamedTuple):
    """A record after its attempt, and the file that it belongs into."""

    queue: str
    record: Record
    #: The wait that a rate limit asks for.
    rate_limited_sec: float | None = None


def urgency(record: Mapping[str, Any]) -> int:
    """1 to 10; what can't be read is normal."""
    try:
        return priority_number(record.get("priority", NORMAL))
    except InvalidInputError:
        return NORMAL


def is_claimable(
    record: Mapping[str, Any],
    *,
    types: Collection[str],
    completed: Collection[str],
    blocked_types: Collection[str],
    now: datetime,
) -> bool:
    """Whether an agent may take a pending record; `types` empty: of any type."""
    due = instant(record.get("availableAt"))
    kind = type_of(record)
    dependencies = dependencies_of(record)
    return (
        # Its result is reported with the id.
        id_of(record) is not None
        and not record.get("claimedBy")
        and (not types or kind in types)
        and kind not in blocked_types
        and (due is None or due <= now)
        and dependencies is not None
        and all(name in completed for name in dependencies)
    )


def blocked_types(
    breakers: Mapping[str, Any], busy: Collection[str], half_open_after: Mapping[str, float], now: datetime
) -> set[str]:
    """Types whose breaker lets nothing through; `busy`: types of records in progress.

    A half-open breaker lets one record through, and so does an open one whose pause is over.
    """
    found = set()
    for kind, breaker in breakers.items():
        state = breaker.get("state") if isinstance(breaker, dict) else None
        opened = instant(breaker.get("openedAt")) if state == _OPEN else None
        pause = timedelta(seconds=half_open_after.get(kind, half_open_after.get("*", 60.0)))
        resting = state == _OPEN and (opened is None or now - pause <= opened)
        if resting or (state in {_OPEN, _HALF_OPEN} and kind in busy):
            found.add(kind)
    return found


def claimed(record: Record, agent: str, now: datetime) -> Record:
    at = iso(now)
    return record | {
        "claimedBy": agent,
        "claimedAt": at,
        "startedAt": at,
        "status": STATUS_IN[IN_PROGRESS],
        "result": None,
    }


def result_of(given: object) -> Record:
    """A result in document 000's form; anything else is the output of one."""
    if isinstance(given, dict) and ("output" in given or "decisionReport" in given):
        status = given.get("status", "success")
        if status != "success":
            fault = f"must be 'success', got {status!r}; 'lineshaft loki fail' reports a failure"
            raise InvalidInputError(errors=[("result.status", fault)])
        return {"output": None, "decisionReport": None} | given | {"status": status}
    return {"status": "success", "output": given, "decisionReport": None}


def completed(record: Record, result: Record, now: datetime, *, held_by: str | None) -> Ended:
    """A completion; without the decision report that it needs, a failure."""
    if record.get("requireDecisionReport") is not False:
        fault = decision_report.fault_of(result["decisionReport"])
        if fault is not None:
            return failed(record, {"status": "incomplete", "error": fault}, now, held_by=held_by)
    done = record | {"status": STATUS_IN[COMPLETED], "completedAt": iso(now), "result": result}
    return Ended(COMPLETED, done | {"lastError": None})


def failed(record: Record, error: object, now: datetime, *, held_by: str | None) -> Ended:
    """A failed attempt: pending again after its wait, or a dead letter.

    `held_by`: who keeps it from being claimed in the meantime. The wait is computed from the base, which
    doesn't change. A rate limit waits without using up an attempt.
    """
    text = error if isinstance(error, str) else ""
    again = record | {
        "lastError": error,
        "claimedBy": held_by,
        "claimedAt": None,
        "startedAt": None,
        "status": STATUS_IN[PENDING],
    }
    if ratelimit.is_rate_limit(text):
        wait = ratelimit.retry_after_in_error(text, now)
        wait = ratelimit.FIRST_WAIT_SEC if wait is None else wait
        return Ended(PENDING, again | {"availableAt": iso(_later(now, wait))}, wait)
    retries = count(record.get("retries")) + 1
    most = record.get("maxRetries")
    if retries >= (LOKI.max_attempts if not isinstance(most, int) else most):
        result = {"status": "failed", "output": None, "decisionReport": None}
        fields = {
            "status": STATUS_IN[DEAD_LETTER],
            "retries": retries,
            "lastError": error,
            "claimedBy": None,
            "result": result,
        }
        return Ended(DEAD_LETTER, record | fields)
    wait = wait_after(base_of(record), retries)
    waiting = {"retries": retries, "backoffSeconds": wait, "availableAt": iso(_later(now, wait))}
    return Ended(PENDING, again | waiting)


def _later(now: datetime, seconds: float) -> datetime:
    # Whole seconds are written: never earlier than asked for.
    return (now + timedelta(seconds=seconds + 1)).replace(microsecond=0) if seconds else now
