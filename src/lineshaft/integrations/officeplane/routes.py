"""OfficePlane's HTTP routes, over the same tasks as /v1."""

from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from lineshaft import __version__
from lineshaft.engine.read.queries import Queries
from lineshaft.errors import InvalidInputError, InvalidTransitionError, LineshaftError, NotFoundError
from lineshaft.integrations.officeplane.conversion import priority_word
from lineshaft.integrations.officeplane.officeplane import Call
from lineshaft.integrations.officeplane.preset import OFFICEPLANE
from lineshaft.integrations.officeplane.tasks import (
    STATES,
    DocumentTask,
    InQuery,
    NewDocumentTask,
    from_query,
    in_officeplane_names,
    lock_key,
    priority_number,
    state_of,
)
from lineshaft.model.states import Status
from lineshaft.operations import new_tasks
from lineshaft.operations.dags import CancelDag
from lineshaft.operations.operation import operation
from lineshaft.operations.wire import Body, Header
from lineshaft.server.framework.problems import unreadable
from lineshaft.server.routes.health import Health
from lineshaft.types import Scope, Task, TaskFilter
from lineshaft.types.page import MAX_LIMIT
from lineshaft.types.request import ById, Limit, Name, Nothing

_EXAMPLE = {
    "taskType": "batch_edit",
    "documentId": "abc",
    "priority": "HIGH",
    "children": [
        {"taskType": "add_section", "payload": {"heading": "Results"}},
        {"taskType": "write_page", "payload": {"page": 3}},
    ],
}


class ListQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    state: tuple[str, ...] = ()
    priority: str | None = None
    document_id: tuple[Name, ...] = ()
    limit: Limit = 100


@operation("GET /api/tasks", Scope.READ)
async def list_document_tasks(call: Call, request: ListQuery) -> list[DocumentTask]:
    """List tasks with OfficePlane's names and states, newest first."""
    states = [_state(name) for name in request.state]
    low, high = (None, None)
    if request.priority is not None:
        low, high = _PRIORITIES[priority_word(priority_number(request.priority))]
    fits = TaskFilter(
        lock_key=tuple(lock_key(name) for name in request.document_id), priority_from=low, priority_to=high
    )
    found = await _newest(call.service.engine.read, fits, states, request.limit)
    return await _views(call, found)


class SubmitDocument(InQuery, frozen=True, kw_only=True):
    body: Body[Raw]
    idempotency_key: Header = None


@operation(
    "POST /api/tasks",
    Scope.SUBMIT,
    created=lambda task: task.duplicate is not True,
    codes=("dependency_not_found", "already_exists", "not_found", "rate_limited"),
    example=_EXAMPLE,
    body_shape=NewDocumentTask,
)
async def submit_document_task(call: Call, request: SubmitDocument) -> DocumentTask:
    """Submit a task in OfficePlane's format.

    Either the body is the task, or `taskType` and the other fields are in the query and the whole body is the
    payload. 200 with `"duplicate": true` if a task with this Idempotency-Key exists.
    """
    key = new_tasks.key_of(request.idempotency_key, None)
    try:
        requested = _requested(request)
        (submitted,) = await call.service.engine.submission.submit(
            [call.service.converter.task(requested, key)], preset=OFFICEPLANE.name
        )
    except (InvalidInputError, NotFoundError) as error:
        raise in_officeplane_names(error) from None
    (view,) = await _views(
        call, [await call.service.engine.read.task(submitted.id)], duplicate=submitted.duplicate or UNSET
    )
    return view


@operation("GET /api/tasks/{id}", Scope.READ, codes=("not_found",))
async def get_document_task(call: Call, request: ById) -> DocumentTask:
    """Read a task."""
    return await _task(call, request.id)


@operation("POST /api/tasks/{id}/cancel", Scope.OPERATE, codes=("not_found", "invalid_transition"))
async def cancel_document_task(call: Call, request: CancelDag) -> DocumentTask:
    """Cancel a task, its children and everything that depends on it. Cancelling again changes nothing."""
    cancelling = call.service.engine.cancel.cancel(request.id, request.reason)
    return await _acted(call, request.id, cancelling, "cancelled", "QUEUED, RUNNING or RETRYING")


class RetryDocument(Nothing, frozen=True, kw_only=True):
    id: str


@operation(
    "POST /api/tasks/{id}/retry",
    Scope.OPERATE,
    codes=("not_found", "invalid_transition", "already_exists"),
)
async def retry_document_task(call: Call, request: RetryDocument) -> DocumentTask:
    """Queue a failed, timed-out or cancelled task again, or retry a RETRYING task now."""
    retrying = call.service.engine.revive.retry(request.id)
    return await _acted(call, request.id, retrying, "retried", "FAILED, TIMEOUT, CANCELLED or RETRYING")


@operation("GET /health", None)
async def healthy(call: Call, request: Nothing) -> Health:  # noqa: ARG001 - every operation has them
    """The process answers. The same as /healthz, under OfficePlane's name."""
    return Health("ok", __version__)


async def _acted(call: Call, task_id: str, act: Awaitable[object], what: str, allowed: str) -> DocumentTask:
    """The task after an act by hand; a refusal names OfficePlane's states."""
    try:
        await act
    except InvalidTransitionError:
        task = await _task(call, task_id)
        raise InvalidTransitionError(
            f"Task {task_id} can't be {what}: it is {task.state}. It must be {allowed}."
        ) from None
    return await _task(call, task_id)


def _requested(request: SubmitDocument) -> NewDocumentTask:
    try:
        if request.task_type is not None:
            return from_query(request, msgspec.json.decode(request.body))
        if any(getattr(request, name) != default for name, default in _IN_QUERY.items()):
            raise InvalidInputError(
                errors=[("taskType", "is required in the query if other fields are in the query")]
            )
        return msgspec.json.decode(request.body, type=NewDocumentTask)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unreadable(error) from None


_IN_QUERY = {field.name: field.default for field in msgspec.structs.fields(InQuery)}


async def _task(call: Call, task_id: str) -> DocumentTask:
    found = await call.service.engine.read.task(task_id)
    # What is too large for one answer, or can't be read now, is a reference.
    with suppress(LineshaftError):
        found = await call.service.engine.artifacts.with_data(found)
    (view,) = await _views(call, [found])
    return view


async def _views(
    call: Call, tasks: Sequence[Task], *, duplicate: bool | UnsetType = UNSET
) -> list[DocumentTask]:
    reasons = await call.service.engine.read.reasons([task.id for task in tasks if task.status in _WAITING])
    return [
        call.service.converter.view(task, blocked_reason=reasons.get(task.id), duplicate=duplicate)
        for task in tasks
    ]


_WAITING = frozenset({Status.PENDING, Status.READY, Status.RETRYING})
_PRIORITIES = {"CRITICAL": (0, 9), "HIGH": (10, 29), "NORMAL": (30, 59), "LOW": (60, 100)}
#: The searches that find all tasks of a state; tasks in other states are dropped from the results.
_SEARCHES: dict[str, tuple[TaskFilter, ...]] = {
    "QUEUED": (TaskFilter(status=(Status.PENDING, Status.READY)),),
    "RUNNING": (
        TaskFilter(status=(Status.CLAIMED, Status.RUNNING, Status.VALIDATING)),
        TaskFilter(status=(Status.PENDING,), batches=True),
    ),
    "RETRYING": (TaskFilter(status=(Status.RETRYING,)),),
    "COMPLETED": (TaskFilter(status=(Status.COMPLETED,)),),
    "CANCELLED": (TaskFilter(status=(Status.CANCELLED,)),),
    "FAILED": (TaskFilter(status=(Status.DEAD_LETTERED,)),),
    "TIMEOUT": (TaskFilter(status=(Status.DEAD_LETTERED,)),),
}


def _state(name: str) -> str:
    if name.upper() not in STATES:
        raise InvalidInputError(errors=[("state", f"must be one of {', '.join(STATES)}, got {name!r}")])
    return name.upper()


async def _newest(queries: Queries, fits: TaskFilter, states: Iterable[str], limit: int) -> list[Task]:
    if not states:
        return await _search(queries, fits, STATES, limit)
    found: dict[str, Task] = {}
    for state in states:
        for search in _SEARCHES[state]:
            wanted = replace(fits, status=search.status, batches=search.batches)
            found |= {task.id: task for task in await _search(queries, wanted, [state], limit)}
    newest = sorted(found.values(), key=lambda task: (task.created_at, task.id), reverse=True)
    return newest[:limit]


async def _search(queries: Queries, wanted: TaskFilter, states: Iterable[str], limit: int) -> list[Task]:
    found: list[Task] = []
    cursor: str | None = None
    size = limit
    while True:
        page = await queries.tasks(wanted, limit=size, cursor=cursor)
        found += [task for task in page.items if state_of(task) in states]
        cursor, size = page.next_cursor, MAX_LIMIT
        if len(found) >= limit or cursor is None:
            return found[:limit]
