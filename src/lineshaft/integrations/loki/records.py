"""Records of queue files, and the tasks that they are: conversion both ways, without files or a database.

A record may be of any program that uses such files, so it is read leniently: older names of fields, words for
priorities, times as numbers. It is written in one form, with the names of document 000 and those of other
programs. What Lineshaft has no field for is kept with the task (`Task.surface`) and written back.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from lineshaft.engine.submit.surface import SurfaceTask
from lineshaft.errors import InvalidInputError
from lineshaft.integrations.loki.preset import LOKI
from lineshaft.model.budget import shown
from lineshaft.model.fields import CREATORS, LONGEST_SECONDS, MAX_ATTEMPTS, MAX_TEXT
from lineshaft.model.idempotency import content_hash
from lineshaft.model.retry import SystemReason
from lineshaft.model.states import Status
from lineshaft.model.tasks import RetrySpec
from lineshaft.types import Task

Record = dict[str, Any]

#: Queue files by the task's state. In-progress also has tasks whose output is being checked.
PENDING, IN_PROGRESS, COMPLETED, DEAD_LETTER, CANCELLED = (
    "pending",
    "in-progress",
    "completed",
    "dead-letter",
    "cancelled",
)
QUEUES = (PENDING, IN_PROGRESS, COMPLETED, DEAD_LETTER, CANCELLED)
STATUS_IN = {
    PENDING: "pending",
    IN_PROGRESS: "in_progress",
    COMPLETED: "completed",
    DEAD_LETTER: "failed",
    CANCELLED: "cancelled",
}
_QUEUE_OF = {
    Status.CLAIMED: IN_PROGRESS,
    Status.RUNNING: IN_PROGRESS,
    Status.VALIDATING: IN_PROGRESS,
    Status.COMPLETED: COMPLETED,
    Status.DEAD_LETTERED: DEAD_LETTER,
    Status.CANCELLED: CANCELLED,
}
#: `claimedBy` of a pending record that only Lineshaft's own agents may take.
HELD_BACK = "lineshaft"
#: The name of the record within `Task.surface`.
SURFACE = "loki"

#: The priority of records that name none.
NORMAL = 5
_WORDS = {"critical": 10, "high": 8, "medium": NORMAL, "normal": NORMAL, "low": 3}
_MOST, _LEAST = 10, 1
#: Fields that no task of another format has.
_SIGNS = frozenset(
    {
        "payload",
        "idempotencyKey",
        "createdAt",
        "claimedBy",
        "maxRetries",
        "backoffSeconds",
        "task_id",
        "task_data",
        "acceptance_criteria",
    }
)
#: Fields that are written from the task, so what a record says is not kept.
_FROM_TASK = frozenset(
    {
        "id",
        "task_id",
        "task_data",
        "type",
        "title",
        "payload",
        "status",
        "dependencies",
        "idempotencyKey",
        "claimedBy",
        "claimedAt",
        "startedAt",
        "completedAt",
        "cancelledAt",
        "cancelReason",
        "timeout",
        "availableAt",
        "lastError",
        "error_summary",
        "result",
        "requireDecisionReport",
    }
)
#: What says what is to be done in records without a payload.
_DESCRIBING = ("title", "description", "acceptance_criteria", "notes")


def is_record(given: object) -> bool:
    """Whether a document is a record, rather than a task in Lineshaft's own format."""
    return isinstance(given, dict) and not _SIGNS.isdisjoint(given) and "spec" not in given


# Reading.


def new_task(given: object) -> SurfaceTask:
    """The task of a record; raises InvalidInputError with all faults, in the record's own names."""
    if not isinstance(given, dict):
        raise InvalidInputError(errors=[("", f"a record must be an object, got {shown(given)}")])
    record = current(given)
    faults: list[tuple[str, str]] = []
    payload = _payload(record, faults)
    limits = _limits(record, faults)
    priority = _priority_of(record, faults)
    dependencies = dependencies_of(record)
    if dependencies is None:
        faults.append(("dependencies", f"must be a list of ids, got {shown(record['dependencies'])}"))
    available = record.get("availableAt")
    run_at = instant(available)
    if available is not None and run_at is None:
        faults.append(("availableAt", f"must be a time in ISO 8601, got {shown(available)}"))
    if faults:
        raise InvalidInputError(errors=faults)
    title, source = record.get("title"), record.get("source")
    return SurfaceTask(
        type=type_of(record),
        id=id_of(record),
        title=title.strip()[:MAX_TEXT] if isinstance(title, str) and title.strip() else None,
        spec=payload,
        priority=priority,
        depends_on=dependencies or [],
        run_at=run_at,
        idempotency_key=key_of(record),
        preset=LOKI.name,
        created_by=source if isinstance(source, str) and source.startswith(CREATORS) else None,
        surface={SURFACE: {name: value for name, value in record.items() if name not in _FROM_TASK}},
        **limits,
    )


def current(record: Mapping[str, Any]) -> Record:
    """A record with the names that document 000 has; older ones stay beside them."""
    found: Record = dict(record)
    inner = record.get("task_data")
    if isinstance(inner, dict):
        found = inner | found
        if "payload" not in found and not any(found.get(name) for name in _DESCRIBING):
            found["payload"] = inner
    if "id" not in found and "task_id" in found:
        found["id"] = found["task_id"]
    if found.get("lastError") is None and "error_summary" in found:
        found["lastError"] = found["error_summary"]
    if "retries" not in found and isinstance(found.get("attempts"), list):
        found["retries"] = len(found["attempts"])
    return found


def id_of(record: Mapping[str, Any]) -> str | None:
    """Its id; None: it has none."""
    found = record.get("id", record.get("task_id"))
    return found if isinstance(found, str) and found else None


def dependencies_of(record: Mapping[str, Any]) -> list[str] | None:
    """The ids that it waits for; None: what it says isn't a list of ids."""
    found = record.get("dependencies") or []
    is_list = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return found if is_list else None


def type_of(record: Mapping[str, Any]) -> str:
    found = record.get("type")
    return found if isinstance(found, str) and found.strip() else "task"


def key_of(record: Mapping[str, Any]) -> str:
    """Its own idempotency key, or else the hash of type and payload."""
    found = record.get("idempotencyKey")
    return found if isinstance(found, str) and found.strip() else digest(record)


def digest(record: Mapping[str, Any]) -> str:
    return content_hash(type_of(record), _payload(record, [])).hex()


def _payload(record: Mapping[str, Any], faults: list[tuple[str, str]]) -> Mapping[str, Any]:
    found = record.get("payload")
    if found is None:
        return {name: record[name] for name in _DESCRIBING if record.get(name)}
    if not isinstance(found, dict):
        faults.append(("payload", f"must be an object, got {shown(found)}"))
        return {}
    return found


def _priority_of(record: Mapping[str, Any], faults: list[tuple[str, str]]) -> int | None:
    given = record.get("priority")
    try:
        return stored_priority(priority_number(NORMAL if given is None else given))
    except InvalidInputError as error:
        faults += error.errors
        return None


def priority_number(given: object) -> int:
    """1 to 10, of a number or one of the words critical, high, medium, normal and low."""
    number: object = given
    if isinstance(given, str):
        text = given.strip().lower()
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 3 else _WORDS.get(text)  # noqa: PLR2004
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not _LEAST <= number <= _MOST:
        words = ", ".join(_WORDS)
        fault = f"must be a whole number from {_LEAST} to {_MOST}, or one of {words}, got {shown(given)}"
        raise InvalidInputError(errors=[("priority", fault)])
    return number


def stored_priority(number: int) -> int:
    """Lineshaft's priority, 0 (first) to 100, in the tier that document 000 describes."""
    return 105 - 10 * number


def shown_priority(priority: int) -> int:
    """1 to 10, of Lineshaft's 0 to 100."""
    return max(_LEAST, min(_MOST, 10 - priority // 10))


def _limits(record: Mapping[str, Any], faults: list[tuple[str, str]]) -> dict[str, Any]:
    """Attempts, back-off and time limit. What an imported record has used up already counts."""
    failed = _number(record, "retries", 0, MAX_ATTEMPTS, faults, whole=True) or 0
    most = _number(record, "maxRetries", 0, MAX_ATTEMPTS, faults, whole=True)
    timeout = _number(record, "timeout", 0, LONGEST_SECONDS, faults)
    found: dict[str, Any] = {"max_duration_sec": timeout or None}
    if most is not None or failed:
        found["max_attempts"] = max(1, int((LOKI.max_attempts if most is None else most) - failed))
    if _number(record, "backoffSeconds", 0, LONGEST_SECONDS, faults) is not None and not faults:
        # The series goes on where it stopped.
        found["retry"] = RetrySpec(initial_delay_sec=wait_after(base_of(record), int(failed) + 1))
    return found


def _number(
    record: Mapping[str, Any],
    name: str,
    low: float,
    high: float,
    faults: list[tuple[str, str]],
    *,
    whole: bool = False,
) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    right = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not right or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        faults.append((name, f"must be a {kind} from {low:.15g} to {high:.15g}, got {shown(value)}"))
        return None
    return float(value)


def base_of(record: Mapping[str, Any]) -> float:
    """The wait after the first failure: `backoffSeconds` is the wait now in force, which doubles."""
    base = record.get("backoffSeconds")
    if not isinstance(base, int | float) or isinstance(base, bool) or not 0 <= base <= LONGEST_SECONDS:
        return LOKI.retry.initial_delay_sec
    return base / 2.0 ** max(min(count(record.get("retries")), 60) - 1, 0)


def wait_after(base: float, failures: int) -> float:
    """Seconds to wait after so many failures."""
    longest = max(LOKI.retry.max_delay_sec or base, base)
    return min(base * 2.0 ** min(failures - 1, 60), longest)


def instant(value: object) -> datetime | None:
    """A time in ISO 8601, or in seconds since 1970 as jq writes it; None: it is neither."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
        if isinstance(value, str):
            found = datetime.fromisoformat(value)
            return found if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


# Writing.


def queue_of(task: Task) -> str:
    """The file that a task is in."""
    return _QUEUE_OF.get(task.status, PENDING)


def record_of(task: Task, *, offered: bool = False) -> Record:
    """The record of a task; `offered`: it is held for the folder, which may take it."""
    sent = _sent(task)
    queue = PENDING if offered else queue_of(task)
    in_progress, ended = queue == IN_PROGRESS, task.status.ended
    earlier = count(sent.get("retries"))
    retries = earlier + task.attempts
    due = None if ended or in_progress else task.retry_at or task.run_at
    fields: Record = {
        "id": task.id,
        "title": task.title,
        "description": _description(task, sent),
        "type": task.type,
        "priority": _as_sent(task.priority, sent.get("priority")),
        "status": STATUS_IN[queue],
        "source": sent.get("source") or task.created_by,
        "payload": task.spec,
        "dependencies": task.depends_on,
        "idempotencyKey": task.idempotency_key,
        "createdAt": sent.get("createdAt") or iso(task.created_at),
        "created_at": sent.get("created_at") or sent.get("createdAt") or iso(task.created_at),
        "claimedBy": None if offered or ended else task.claim.agent_id if in_progress else HELD_BACK,
        "claimedAt": iso(task.claim.claimed_at) if in_progress else None,
        "startedAt": iso(task.started_at) if in_progress or ended else None,
        "completedAt": iso(task.completed_at),
        "cancelledAt": iso(task.cancelled_at),
        "cancelReason": task.cancel_reason,
        "timeout": task.max_duration_sec,
        "retries": retries,
        "maxRetries": earlier + task.max_attempts,
        "backoffSeconds": _wait_in_force(task, sent, retries),
        "availableAt": iso(due),
        "lastError": _last_error(task),
        "acceptance_criteria": sent.get("acceptance_criteria", []),
        "notes": sent.get("notes"),
        "logs": sent.get("logs", []),
        "result": _result(task),
    }
    if not task.output.require_decision_report:
        fields["requireDecisionReport"] = False
    return fields | {name: value for name, value in sent.items() if name not in fields}


def _sent(task: Task) -> Mapping[str, Any]:
    surface = task.surface
    found = surface.get(SURFACE) if isinstance(surface, dict) else None
    return found if isinstance(found, dict) else {}


def iso(time: datetime | None) -> str | None:
    """Whole seconds, as jq's `fromdateiso8601` reads them."""
    return None if time is None else time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _as_sent(priority: int, sent: object) -> int:
    try:
        number = None if sent is None else priority_number(sent)
    except InvalidInputError:
        number = None
    return number if number is not None and stored_priority(number) == priority else shown_priority(priority)


def count(value: object) -> int:
    """A number of attempts; 0: it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return int(min(value, MAX_ATTEMPTS)) if is_number else 0  # type: ignore[call-overload]


def _description(task: Task, sent: Mapping[str, Any]) -> str:
    found = (sent.get("description"), *(task.spec.get(name) for name in ("description", "goal", "prompt")))
    return next((text for text in found if isinstance(text, str) and text), task.title)


def _wait_in_force(task: Task, sent: Mapping[str, Any], retries: int) -> float:
    if "backoffSeconds" in sent and not task.attempts:
        return base_of(sent) if not retries else wait_after(base_of(sent), retries)
    policy, failures = task.retry, max(task.attempts, 1)
    if policy.strategy == "immediate":
        return 0.0
    if policy.strategy == "fixed":
        return policy.initial_delay_sec
    wait = policy.initial_delay_sec * policy.backoff_multiplier ** min(failures - 1, 60)
    return wait if policy.max_delay_sec is None else min(wait, policy.max_delay_sec)


def _last_error(task: Task) -> Any:
    reason = task.failure_reason
    if reason is not None and reason.startswith(SystemReason.INCOMPLETE_DECISION_REPORT):
        return {"status": "incomplete", "error": reason}
    return reason


def error_text(value: object) -> str:
    """The text of a `lastError`, which may be an object."""
    if isinstance(value, dict):
        value = value.get("error") or value.get("message") or value
    return str(value) if value not in (None, "") else "failed without an error"


def _result(task: Task) -> Record | None:
    if task.status is Status.DEAD_LETTERED:
        return {"status": "failed", "output": None, "decisionReport": None}
    if task.status is not Status.COMPLETED:
        return None
    output = task.output
    data = {"data_ref": output.data_ref} if output.data_ref and output.data is None else output.data
    return {"status": "success", "output": data, "decisionReport": output.decision_report}
