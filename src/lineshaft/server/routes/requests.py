"""Bodies and queries of requests, apart from the worker protocol, and checks of tasks in them."""

import hashlib
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field
from msgspec.structs import replace

from lineshaft.engine.feed.actor import MAX_REASON
from lineshaft.engine.submit.drafts import LARGEST_DAG, MAX_BATCH, check_dag_size, check_number
from lineshaft.errors import InvalidInputError
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.storable import is_storable
from lineshaft.model.tasks import NewTask
from lineshaft.server.framework.auth import Principal
from lineshaft.types import DagFilter, DeadLetterFilter, TaskFilter, TaskOrder, VelocityAction
from lineshaft.types.costs import DEFAULT_DAYS, MOST_DAYS
from lineshaft.types.json import null
from lineshaft.types.protocol import Body, Name, Seconds, Text
from lineshaft.types.sources import NewSource, SourceFields, SourceKind

#: Of an Idempotency-Key; the database indexes it.
MAX_KEY = 1_000
Reason = Annotated[str, Meta(max_length=MAX_REASON)]


class Batch(Body, frozen=True, kw_only=True):
    tasks: Annotated[list[NewTask], Meta(min_length=1)]


class CancelDag(Body, frozen=True, kw_only=True):
    reason: Text = "cancelled by hand"


class ChangeDag(Body, frozen=True, kw_only=True):
    title: Name | UnsetType = UNSET
    add_budget_usd: Decimal | float | None = None
    #: None: no limit.
    budget_ceiling_usd: Decimal | float | UnsetType | None = UNSET


class RetryMatching(Body, frozen=True, kw_only=True):
    filter: TaskFilter
    #: Only report which tasks match.
    dry_run: bool = False


class CancelMatching(RetryMatching, frozen=True, kw_only=True):
    reason: Text = "cancelled by hand"


class Dependencies(Body, frozen=True, kw_only=True):
    depends_on: Annotated[list[Name], Meta(min_length=1, max_length=10_000)]


class Nothing(Body, frozen=True, kw_only=True):
    pass


class Act(Body, frozen=True, kw_only=True):
    #: The person's, for the event.
    reason: Reason | None = None


class ActQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: The person's, for the event.
    reason: Reason | None = None


class Retry(Body, frozen=True, kw_only=True):
    delay_sec: Seconds = 0.0


class AskEnded(Body, frozen=True, kw_only=True):
    ids: Annotated[list[str], Meta(max_length=10_000)]


class ChangeAgent(Act, frozen=True, kw_only=True):
    #: A new total; null: unlimited.
    budget_usd: Decimal | float | UnsetType | None = UNSET
    add_budget_usd: Decimal | float | None = None
    status: str | None = None
    #: Of each instance; null: as each declares.
    max_concurrent_tasks: int | UnsetType | None = UNSET


class ChangeLimits(Act, frozen=True, kw_only=True):
    """Null: no limit."""

    daily_budget_usd: Decimal | float | UnsetType | None = UNSET
    velocity_usd: Decimal | float | UnsetType | None = UNSET
    velocity_window_sec: float | UnsetType = UNSET
    velocity_action: VelocityAction | UnsetType = UNSET
    default_max_cost_usd: Decimal | float | UnsetType | None = UNSET
    crash_cost_fraction: float | UnsetType = UNSET


class CreateToken(Body, frozen=True, kw_only=True):
    name: str
    #: read, submit, agent, operate or admin.
    scope: str
    #: The only agent that it may act as, with the scope `agent`; null: any.
    agent_id: str | None = None
    #: The budget of that agent, in place of what it declares when it registers.
    budget_usd: Decimal | float | None = None


class ChangeSource(SourceFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: The version that the change is based on: it is refused if the source has changed since.
    version: int | None = None


class PutSource(ChangeSource, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: SourceKind
    #: As in the path.
    name: str | UnsetType = UNSET


class ApplySources(Body, frozen=True, kw_only=True):
    #: Marks these sources: only those of the same origin are removed.
    origin: Annotated[str, Meta(pattern="^file:[A-Za-z0-9._-]{1,100}$")]
    sources: Annotated[list[NewSource], Meta(max_length=10_000)]
    dry_run: bool = False


class FireSource(Body, frozen=True, kw_only=True):
    event: dict[str, Any] | UnsetType = UNSET
    dry_run: bool = False


class Pause(Act, frozen=True, kw_only=True):
    type: Name | None = None


Limit = Annotated[int, Meta(ge=1, le=500)]


class Page(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Limit = 50
    cursor: str | None = None


class SourceQuery(Page, frozen=True, kw_only=True):
    kind: str | None = None


class ReadTask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: With the data of a large output, which is null otherwise.
    full: bool = False


class ListArtifacts(Page, frozen=True, kw_only=True, forbid_unknown_fields=True):
    task_id: str | None = None


class PutArtifact(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: The task that made it.
    task_id: str | None = None


class ReadContent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Answer with the address of the content on S3, if it is there.
    redirect: bool = False


class TypesQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: tuple[str, ...] = ()


class RetryQuery(TypesQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    within_sec: Seconds = 0.0


class IdQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: A short form, such as `J8K2M3N4-W1X2`, or the first characters of an id, at least 4.
    name: Name
    #: Only ids of tasks or of DAGs; null: of both.
    kind: Literal["task", "dag"] | None = None


class TaskQuery(TaskFilter, frozen=True, kw_only=True):
    order: str = TaskOrder.CREATED_AT
    limit: Limit = 50
    cursor: str | None = None


class DagQuery(DagFilter, frozen=True, kw_only=True):
    limit: Limit = 50
    cursor: str | None = None


class AgentQuery(Page, frozen=True, kw_only=True):
    status: tuple[str, ...] = ()


class EventQuery(Page, frozen=True, kw_only=True):
    after: str | None = None
    task_id: str | None = None
    dag_id: str | None = None
    kind: tuple[str, ...] = ()

    @property
    def place(self) -> str | None:
        return self.after or self.cursor


class _Task(Struct, frozen=True, gc=False):
    children: "tuple[_Task, ...]" = ()


class _Tasks(Struct, frozen=True):
    tasks: tuple[_Task, ...] = ()
    #: Of a single task.
    children: tuple[_Task, ...] = ()


_count = msgspec.json.Decoder(_Tasks).decode
_SHORTEST_TASK = len('{"type":""}')


def check_task_count(body: bytes) -> None:
    """Refuse too many tasks before they are decoded, which takes much longer than counting.

    Raises the decoder's error if the body has the wrong form.
    """
    if len(body) > MAX_BATCH * _SHORTEST_TASK:
        found = _count(body)
        check_number(_number_of(found.tasks) + _number_of(found.children))


def check_dag_count(body: bytes) -> None:
    """As `check_task_count`, for tasks of one DAG: the engine knows the limit of the installation."""
    if len(body) > LARGEST_DAG * _SHORTEST_TASK:
        check_dag_size(_number_of(_count(body).tasks), LARGEST_DAG)


def _number_of(tasks: tuple[_Task, ...]) -> int:
    return len(tasks) + sum(_number_of(task.children) for task in tasks if task.children)


def check_tasks(tasks: Sequence[NewTask], *, keys: bool, place: str = "tasks") -> None:
    """Refuse fields that only internal callers may set; `keys`: whether tasks may have a key."""
    faults = []
    for number, task in enumerate(tasks):
        where = f"{place}[{number}]." if place else ""
        if task.surface is not None:
            faults.append((f"{where}surface", "unknown field"))
        if task.key is not None and not keys:
            faults.append((f"{where}key", "unknown field: tasks that depend on each other are a DAG"))
        if task.children:
            check_tasks(task.children, keys=True, place=f"{where}children")
    if faults:
        raise InvalidInputError(errors=faults)


def check_creators(principal: Principal, tasks: Iterable[NewTask]) -> None:
    """Refuse a `created_by` of others, if the caller is bound to an agent."""
    if principal.agent_id is not None:
        for task in tasks:
            principal.check_creator(task.created_by)
            check_creators(principal, task.children)


def key_of(header: str | None, body: str | None) -> str | None:
    """The idempotency key, from the header or the body."""
    if header is None:
        return body
    if not header or len(header) > MAX_KEY or not is_storable(header):
        raise InvalidInputError(errors=[("Idempotency-Key", f"must be a text of 1 to {MAX_KEY} characters")])
    if body is not None and body != header:
        raise InvalidInputError(
            errors=[("idempotency_key", f"is {body!r}, but the header Idempotency-Key is {header!r}")]
        )
    return header


def keyed(tasks: Sequence[NewTask], header: str | None, numbers: Iterable[int]) -> list[NewTask]:
    """Those without an idempotency key get one derived from the request's and their number in it."""
    key = key_of(header, None)
    if key is None:
        return list(tasks)
    return [
        task if task.idempotency_key is not None else replace(task, idempotency_key=_key_of_item(key, number))
        for task, number in zip(tasks, numbers, strict=False)
    ]


def _key_of_item(key: str, number: int) -> str:
    own = f"{key}#{number}"
    return own if len(own) <= MAX_KEY else f"{hashlib.sha256(key.encode()).hexdigest()}#{number}"


def with_key(task: NewTask, key: str | None) -> NewTask:
    return task if key == task.idempotency_key else replace(task, idempotency_key=key)


class LetterQuery(DeadLetterFilter, frozen=True, kw_only=True):
    limit: Limit = 50
    cursor: str | None = None


class GroupQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    limit: Limit = 50


class CostQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    days: Annotated[int, Meta(ge=1, le=MOST_DAYS)] = DEFAULT_DAYS
    type: str | None = None
    model: str | None = None
    agent_id: str | None = None


class ReportQuery(Page, frozen=True, kw_only=True):
    q: str = ""
    type: str | None = None
    dag_id: str | None = None


class ResolveMany(ResolutionRequest, frozen=True, kw_only=True):
    filter: DeadLetterFilter


class Approve(Body, frozen=True, kw_only=True):
    approve: bool
    reviewer: str
    note: str | None = None
    #: The output, if the person does the task.
    data: Raw = field(default_factory=null)
    decision_report: Raw = field(default_factory=null)
