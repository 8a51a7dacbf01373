"""The history of OfficePlane's tasks and workers: the event feed in its words, newest first."""

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType

from msgspec import Raw, Struct

from lineshaft.engine.feed.event_query import LAST, EventQuery
from lineshaft.engine.feed.events import Events
from lineshaft.engine.read.queries import Queries
from lineshaft.integrations.officeplane.changes import state_after
from lineshaft.model.lock_keys import document_of
from lineshaft.types import Event, Task

#: Events that are searched, from the newest on.
MOST = 10_000
_ERROR = 300

_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "TASK_QUEUED": ("task.created", "task.resolved"),
        "TASK_STARTED": ("task.started",),
        "TASK_COMPLETED": ("task.completed",),
        "TASK_FAILED": ("task.dead_lettered",),
        "TASK_RETRY": ("task.retry_scheduled", "task.rate_limited"),
        "TASK_CANCELLED": ("task.cancelled",),
        "TASK_TIMEOUT": ("task.dead_lettered",),
        "WORKER_STARTED": ("agent.registered",),
        "WORKER_STOPPED": ("agent.offline",),
    }
)
EVENT_TYPES = tuple(_KINDS)
#: Kinds of events with which more than one type begins, or none: more must be read than is shown.
_SHARED = frozenset({"TASK_QUEUED", "TASK_FAILED", "TASK_TIMEOUT"})
_TYPES = {kind: name for name, kinds in _KINDS.items() for kind in kinds}
_SAYS = {
    "TASK_QUEUED": "queued",
    "TASK_STARTED": "started",
    "TASK_COMPLETED": "completed",
    "TASK_FAILED": "failed",
    "TASK_RETRY": "will be retried",
    "TASK_CANCELLED": "cancelled",
    "TASK_TIMEOUT": "timed out",
    "WORKER_STARTED": "started",
    "WORKER_STOPPED": "stopped",
}


class DocumentRef(Struct, frozen=True):
    id: str
    title: str


class TaskRef(Struct, frozen=True, rename="camel"):
    id: str
    task_type: str
    task_name: str


class HistoryEntry(Struct, frozen=True, kw_only=True, rename="camel"):
    id: str
    event_type: str
    event_message: str
    timestamp: datetime
    #: Of the attempt that ended.
    duration_ms: float | None
    #: worker, user or system.
    actor_type: str
    actor_id: str | None
    document: DocumentRef | None
    task: TaskRef | None
    metadata: Raw


async def read_history(
    events: Events, queries: Queries, event_type: str | None, limit: int, offset: int
) -> list[HistoryEntry]:
    kinds = tuple(_TYPES) if event_type is None else _KINDS[event_type]
    shared = event_type is None or event_type in _SHARED
    most = MOST if shared else offset + limit
    page = await EventQuery(events, most, kinds=kinds).after(f"{LAST}{most}")
    typed = [(event, _type_of(event)) for event in reversed(page.items)]
    wanted = [(event, name) for event, name in typed if name and event_type in {None, name}]
    wanted = wanted[offset : offset + limit]
    ids = list(dict.fromkeys(event.task_id for event, _ in wanted if event.task_id is not None))
    tasks = {task.id: task for task in await queries.tasks_by_id(ids)}
    return [_entry(event, name, tasks.get(event.task_id or "")) for event, name in wanted]


def _type_of(event: Event) -> str | None:
    if event.kind == "task.dead_lettered":
        return f"TASK_{state_after(event)}"
    if event.kind == "task.resolved" and state_after(event) is None:
        return None
    return _TYPES[event.kind]


def _entry(event: Event, name: str, task: Task | None) -> HistoryEntry:
    actor = event.data.get("actor") if isinstance(event.data, dict) else None
    actor_type = "user" if actor else "system" if event.agent_id is None else "worker"
    document = None if task is None else document_of(task.lock_key)
    return HistoryEntry(
        id=_id(event),
        event_type=name,
        event_message=_message(event, name),
        timestamp=event.at,
        duration_ms=None if task is None else _duration_ms(event, task),
        actor_type=actor_type,
        actor_id=actor or event.agent_id,
        document=None if document is None else DocumentRef(document, document),
        task=None if task is None else TaskRef(task.id, task.type, task.title),
        metadata=event.data_json,
    )


def _id(event: Event) -> str:
    """The same whenever it is read; a cursor isn't."""
    parts = (event.at.isoformat(), event.kind, event.task_id, event.agent_id, event.epoch)
    return "evt_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _message(event: Event, name: str) -> str:
    subject = f"Worker {event.agent_id}" if event.task_id is None else f"Task {event.title or event.task_id}"
    error = event.data.get("error") if isinstance(event.data, dict) else None
    return f"{subject} {_SAYS[name]}" + (f": {error[:_ERROR]}" if isinstance(error, str) else "")


def _duration_ms(event: Event, task: Task) -> float | None:
    """How long the attempt took that ended with this event; None: none did."""
    if event.at == task.ended_at and task.started_at is not None:
        return _ms(event.at - task.started_at)
    for attempt in task.failure_history:
        if attempt.started_at is not None:
            took = timedelta(seconds=attempt.duration_sec)
            if abs(attempt.started_at + took - event.at) < timedelta(milliseconds=1):
                return _ms(took)
    return None


def _ms(duration: timedelta) -> float:
    return round(duration.total_seconds() * 1000, 1)
