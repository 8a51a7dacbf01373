"""What operations are sent. A field that nobody knows is refused, so that a misspelt one is never ignored."""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field
from msgspec.structs import replace

from lineshaft.engine.submit.drafts import MAX_BATCH, check_number
from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.storable import is_storable, readable_json
from lineshaft.model.tasks import NewTask
from lineshaft.types import DagFilter, DeadLetterFilter, TaskFilter, TaskOrder, TokensUsed
from lineshaft.types.work import Spent

Name = Annotated[str, Meta(min_length=1, max_length=1000)]
Reason = Annotated[str, Meta(max_length=10_000)]
Seconds = Annotated[float, Meta(ge=0, le=365 * 86_400)]
Incarnation = Annotated[int, Meta(ge=0, le=2**62)]

#: Idempotency-Key of the header; the database indexes it.
MAX_KEY = 1_000


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def _null() -> Raw:
    return Raw(b"null")


class Batch(Body, frozen=True, kw_only=True):
    tasks: Annotated[list[NewTask], Meta(min_length=1)]


class Cancel(Body, frozen=True, kw_only=True):
    reason: Reason = "cancelled by hand"
    cascade: bool = True
    claim_token: str | None = None


class CancelDag(Body, frozen=True, kw_only=True):
    reason: Reason = "cancelled by hand"


class ChangeDag(Body, frozen=True, kw_only=True):
    add_budget_usd: Decimal | float | None = None
    #: None: no limit.
    budget_ceiling_usd: Decimal | float | UnsetType | None = UNSET


class Change(Body, frozen=True, kw_only=True):
    priority: int | UnsetType = UNSET
    deadline: datetime | UnsetType | None = UNSET
    tags: list[str] | UnsetType = UNSET


class Dependencies(Body, frozen=True, kw_only=True):
    depends_on: Annotated[list[Name], Meta(min_length=1, max_length=10_000)]


class Nothing(Body, frozen=True, kw_only=True):
    pass


class Retry(Body, frozen=True, kw_only=True):
    delay_sec: Seconds = 0.0


class AskEnded(Body, frozen=True, kw_only=True):
    ids: Annotated[list[str], Meta(max_length=10_000)]


class ChangeAgent(Body, frozen=True, kw_only=True):
    add_budget_usd: Decimal | float | None = None
    status: str | None = None
    max_concurrent_tasks: int | None = None


class Claim(Body, frozen=True, kw_only=True):
    incarnation: Incarnation
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1
    wait_sec: Annotated[float, Meta(ge=0, le=60)] = 0.0
    types: Annotated[list[Name], Meta(max_length=1000)] | None = None


class ClaimTask(Body, frozen=True, kw_only=True):
    agent_id: str
    incarnation: Incarnation


class Start(Body, frozen=True, kw_only=True):
    claim_token: str


class Used(Body, frozen=True, kw_only=True):
    """What an attempt has used since its claim."""

    cost_usd: Decimal | float | None = None
    tokens_used: TokensUsed | None = None

    @property
    def spent(self) -> Spent:
        used = self.tokens_used or _NO_TOKENS
        cost = None if self.cost_usd is None else money(self.cost_usd, "cost_usd")
        return Spent(cost, used.input, used.output)


_NO_TOKENS = TokensUsed()


class Beat(Used, frozen=True, kw_only=True):
    id: str
    claim_token: str
    progress: Raw = field(default_factory=_null)


class Heartbeat(Body, frozen=True, kw_only=True):
    incarnation: Incarnation
    tasks: Annotated[list[Beat], Meta(max_length=10_000)] = []


class Result(Body, frozen=True, kw_only=True):
    #: What it is, for whoever reads it; without it, what the task asked for.
    type: Name | None = None
    data: Raw = field(default_factory=_null)
    artifacts: Raw = field(default_factory=_null)
    decision_report: Raw = field(default_factory=_null)


class Complete(Used, frozen=True, kw_only=True):
    claim_token: str
    output: Result = field(default_factory=Result)


class Fail(Used, frozen=True, kw_only=True):
    claim_token: str
    error: str
    category: Name | None = None
    retry_after_sec: Seconds | None = None


class Release(Body, frozen=True, kw_only=True):
    claim_token: str
    delay_sec: Seconds | None = None


class Subtasks(Body, frozen=True, kw_only=True):
    claim_token: str
    tasks: Annotated[list[NewTask], Meta(min_length=1)]
    wait: bool = False
    #: Kept with the parent, and handed back when it is claimed again.
    checkpoint: Raw = field(default_factory=_null)


class Save(Body, frozen=True, kw_only=True):
    claim_token: str
    data: Raw


class CreateToken(Body, frozen=True, kw_only=True):
    name: str
    #: read, submit, agent, operate or admin.
    scope: str


class Pause(Body, frozen=True, kw_only=True):
    type: Name | None = None


Limit = Annotated[int, Meta(ge=1, le=500)]


class Page(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Limit = 50
    cursor: str | None = None


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


def json_or_none(name: str, given: Raw) -> bytes | None:
    """As the store wants it: null is nothing."""
    json = bytes(given)
    return None if json == b"null" else readable_json(name, json)


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


def _number_of(tasks: tuple[_Task, ...]) -> int:
    return len(tasks) + sum(_number_of(task.children) for task in tasks if task.children)


def check_tasks(tasks: Sequence[NewTask], *, keys: bool, place: str = "tasks") -> None:
    """Refuse what only programs inside may set; `keys`: whether the tasks of this call may have names."""
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


def keyed(tasks: Sequence[NewTask], header: str | None) -> list[NewTask]:
    """Tasks of one call, each with a key of its own made from the call's, unless it brings one."""
    key = key_of(header, None)
    if key is None:
        return list(tasks)
    return [
        task if task.idempotency_key is not None else replace(task, idempotency_key=_key_of_item(key, number))
        for number, task in enumerate(tasks)
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
    #: The output, where the task itself is a person's.
    data: Raw = field(default_factory=_null)
    decision_report: Raw = field(default_factory=_null)
