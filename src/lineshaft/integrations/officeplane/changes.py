"""Which of OfficePlane's states each event of a task leads to."""

from collections.abc import Mapping
from types import MappingProxyType

from lineshaft.types import Event

#: A failed attempt leads to RETRYING, FAILED or TIMEOUT, which has an event of its own.
_LEADS_TO: Mapping[str, str] = MappingProxyType(
    {
        "task.created": "QUEUED",
        "task.ready": "QUEUED",
        "task.claimed": "RUNNING",
        "task.started": "RUNNING",
        "task.validating": "RUNNING",
        "task.completed": "COMPLETED",
        "task.retry_scheduled": "RETRYING",
        "task.rate_limited": "RETRYING",
        "task.released": "QUEUED",
        "task.waiting": "QUEUED",
        "task.replaced": "QUEUED",
        "task.cancelled": "CANCELLED",
    }
)
#: Decisions that queue a task again.
_RETRIES = frozenset({"retry", "modify_and_retry", "rerun"})

KINDS = (*_LEADS_TO, "task.dead_lettered", "task.resolved")


def state_after(event: Event) -> str | None:
    """None: the event doesn't change the state. The task that is read afterwards may have moved on."""
    if event.kind == "task.dead_lettered":
        return "TIMEOUT" if _of(event, "category") == "timeout" else "FAILED"
    if event.kind == "task.resolved":
        return "QUEUED" if _of(event, "resolution") in _RETRIES else None
    return _LEADS_TO.get(event.kind)


def _of(event: Event, name: str) -> object:
    return event.data.get(name) if isinstance(event.data, dict) else None
