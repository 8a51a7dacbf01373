"""Tasks in OfficePlane's format: its names, states and priorities.

Tasks are the same as those of /v1: the type is `taskType`, the spec `payload`, the document the lock
`doc:{documentId}`. Fields without a column, or which must be returned as they were spelled, are in `surface`.
"""

from collections.abc import Mapping
from datetime import datetime
from math import ceil
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from lineshaft.engine.submit.surface import SurfaceTask
from lineshaft.errors import InvalidInputError, LineshaftError, NotFoundError
from lineshaft.integrations.officeplane.conversion import (
    max_attempts,
    parse_priority,
    priority_word,
    state_name,
)
from lineshaft.model.lock_keys import DOCUMENT_PREFIX, document_of
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import Task, TaskOutput
from lineshaft.types.data_refs import DataRef
from lineshaft.types.request import Name

STATES = ("QUEUED", "RUNNING", "COMPLETED", "FAILED", "RETRYING", "CANCELLED", "TIMEOUT")
DEFAULT_MAX_RETRIES = 3
#: States of tasks that ended without success.
_RETRIED_BY_HAND = frozenset({"FAILED", "TIMEOUT", "CANCELLED"})

MaxRetries = Annotated[int, Meta(ge=0, le=999)]


class NewDocumentTask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Only `taskType` is required."""

    task_type: Name
    task_name: Name | None = None
    #: Tasks of one document run one after another.
    document_id: Name | None = None
    instance_id: Name | None = None
    parent_task_id: Name | None = None
    #: CRITICAL, HIGH, NORMAL or LOW; or 4 to 1.
    priority: str | int | None = None
    #: Not counting the first attempt.
    max_retries: MaxRetries | None = None
    timeout_seconds: float | None = None
    scheduled_for: datetime | None = None
    tags: Annotated[list[Name], Meta(max_length=1000)] = []
    payload: dict[str, Any] = {}
    metadata: Any = None
    #: Run in this order; the task itself completes after the last one.
    children: "list[NewDocumentTask]" = []


class InQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """The same fields in the query, for requests whose whole body is the payload."""

    task_type: Name | None = None
    task_name: Name | None = None
    document_id: Name | None = None
    instance_id: Name | None = None
    parent_task_id: Name | None = None
    priority: str | None = None
    max_retries: MaxRetries | None = None
    timeout_seconds: float | None = None
    scheduled_for: datetime | None = None
    tags: tuple[Name, ...] = ()


class DocumentTask(Struct, frozen=True, kw_only=True, rename="camel"):
    id: str
    task_type: str
    task_name: str
    document_id: str | None
    instance_id: str | None
    parent_task_id: str | None
    payload: Raw
    #: For a task with children: a list of their results.
    result: Raw | None
    state: str
    priority: str
    max_retries: int
    #: Attempts after the first, with one that is scheduled; under both names.
    retry_count: int
    retries: int
    #: The task ended without success, and can be queued again by hand.
    can_retry: bool
    #: Why no worker gets the waiting task; null: one will. Messages of WebSockets have null.
    blocked_reason: str | None
    #: All reasons, and what the task is doing.
    why: str
    created_at: datetime
    scheduled_for: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    cancelled_at: datetime | None
    timeout_seconds: int | None
    error_message: str | None
    cancel_reason: str | None
    worker_id: str | None
    tags: list[str]
    metadata: Raw | None
    #: Only in the response to a submission: a task with this idempotency key existed.
    duplicate: bool | UnsetType = UNSET

    def at(self, state: str) -> "DocumentTask":
        """The task as it was in this state, without what came later."""
        if state == self.state:
            return self
        return replace(
            self,
            state=state,
            can_retry=state in _RETRIED_BY_HAND,
            result=None,
            completed_at=None,
            cancelled_at=None,
            cancel_reason=None,
        )


class _Surface(Struct, frozen=True, rename="camel"):
    max_retries: int | None = None
    instance_id: str | None = None
    metadata: Raw = Raw(b"null")


_SURFACE = msgspec.json.Decoder(_Surface)
_NOTHING = _Surface()


class TaskConverter:
    """Converts tasks from and to OfficePlane's format."""

    def __init__(self, *, first_is_extra: bool) -> None:
        """`first_is_extra`: maxRetries doesn't count the first attempt."""
        self._first_is_extra = first_is_extra

    def task(self, requested: NewDocumentTask, idempotency_key: str | None = None) -> NewTask:
        retries = DEFAULT_MAX_RETRIES if requested.max_retries is None else requested.max_retries
        new = self._task(requested)
        # Not from the preset, because it depends on the setting; children inherit it.
        return replace(new, max_attempts=self._attempts(retries), idempotency_key=idempotency_key)

    def _task(self, requested: NewDocumentTask) -> NewTask:
        retries = requested.max_retries
        return SurfaceTask(
            type=requested.task_type,
            title=requested.task_name,
            spec=requested.payload,
            lock_key=None if requested.document_id is None else lock_key(requested.document_id),
            parent_id=requested.parent_task_id,
            priority=None if requested.priority is None else priority_number(requested.priority),
            max_attempts=None if retries is None else self._attempts(retries),
            max_duration_sec=requested.timeout_seconds,
            run_at=requested.scheduled_for,
            tags=requested.tags,
            children=[self._task(child) for child in requested.children],
            surface=_to_echo(requested),
        )

    def _attempts(self, retries: int) -> int:
        return max_attempts(retries, first_is_extra=self._first_is_extra)

    def view(
        self, task: Task, *, blocked_reason: str | None = None, duplicate: bool | UnsetType = UNSET
    ) -> DocumentTask:
        sent = _NOTHING if task.surface_json is UNSET else _SURFACE.decode(task.surface_json)
        retries = task.max_attempts - 1 if self._first_is_extra else task.max_attempts
        done = task.status is Status.COMPLETED
        state = state_of(task)
        made = _retries_made(task)
        return DocumentTask(
            id=task.id,
            task_type=task.type,
            task_name=task.title,
            document_id=document_of(task.lock_key),
            instance_id=sent.instance_id,
            parent_task_id=task.parent_id,
            payload=task.spec_json,
            result=_result(task.output) if done else None,
            state=state,
            priority=priority_word(task.priority),
            max_retries=retries if sent.max_retries is None else sent.max_retries,
            retry_count=made,
            retries=made,
            can_retry=state in _RETRIED_BY_HAND,
            blocked_reason=blocked_reason,
            why=f"/v1/tasks/{quote(task.id, safe='')}/why",
            created_at=task.created_at,
            scheduled_for=task.retry_at or task.run_at,
            started_at=task.started_at,
            completed_at=task.ended_at,
            cancelled_at=task.cancelled_at,
            timeout_seconds=None if task.max_duration_sec is None else ceil(task.max_duration_sec),
            error_message=None if task.status is Status.CANCELLED else task.failure_reason,
            cancel_reason=task.cancel_reason,
            worker_id=task.claim.agent_id,
            tags=task.tags,
            metadata=None if bytes(sent.metadata) == b"null" else sent.metadata,
            duplicate=duplicate,
        )


def _retries_made(task: Task) -> int:
    """The first attempt is none; neither is the failure that ended the task."""
    failed_for_good = task.status is Status.DEAD_LETTERED
    return max(task.attempts - 1, 0) if failed_for_good else task.attempts


def _result(output: TaskOutput) -> Raw:
    """The data; in lists, messages and above 64 MiB a reference to an artifact in place of large data."""
    if output.data_ref is not None and output.data is None:
        return Raw(DataRef(data_ref=output.data_ref, size=output.size).json)
    return output.data_json


def state_of(task: Task) -> str:
    began = task.is_batch and task.started_at is not None
    return state_name(task.status, last_category=task.failure_category, batch_started=began)


def lock_key(document_id: str) -> str:
    return DOCUMENT_PREFIX + document_id


def priority_number(priority: str | int) -> int:
    """Read a word or a number, which is a string in a query."""
    if isinstance(priority, str) and priority.isascii() and priority.isdigit():
        return parse_priority(int(priority[:10]))
    return parse_priority(priority)


def from_query(query: InQuery, payload: Any) -> NewDocumentTask:
    fields = {name: getattr(query, name) for name in InQuery.__struct_fields__}
    if not isinstance(payload, dict):
        raise InvalidInputError(errors=[("payload", "must be an object: the body is the payload")])
    return NewDocumentTask(**fields | {"tags": list(query.tags), "payload": payload})


def _to_echo(requested: NewDocumentTask) -> Mapping[str, Any] | None:
    echoed = {
        "maxRetries": requested.max_retries,
        "instanceId": requested.instance_id,
        "metadata": requested.metadata,
    }
    return {name: value for name, value in echoed.items() if value is not None} or None


#: Fields with other names in OfficePlane's format.
_NAMES = {
    "type": "taskType",
    "title": "taskName",
    "spec": "payload",
    "lock_key": "documentId",
    "parent_id": "parentTaskId",
    "max_attempts": "maxRetries",
    "max_duration_sec": "timeoutSeconds",
    "run_at": "scheduledFor",
    "idempotency_key": "Idempotency-Key",
}


def in_officeplane_names(error: InvalidInputError | NotFoundError) -> LineshaftError:
    """The error with OfficePlane's field names."""
    if isinstance(error, NotFoundError):
        return NotFoundError(str(error).replace("parent_id", _NAMES["parent_id"]))
    faults = [
        (".".join(_NAMES.get(part, part) for part in place.split(".")), fault)
        for place, fault in error.errors
    ]
    return InvalidInputError(errors=faults) if faults else error
