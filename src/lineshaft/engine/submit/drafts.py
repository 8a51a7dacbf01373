"""New tasks on their way in: checked, numbered and strung together in memory, before anything is written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from lineshaft.engine.postgres.copying import Column, Same
from lineshaft.engine.postgres.literals import array_literal, json_text
from lineshaft.errors import InvalidInputError
from lineshaft.ids import new_id
from lineshaft.model import graph
from lineshaft.model.idempotency import content_hash
from lineshaft.model.priority import PriorityInputs, rank, rekey_at
from lineshaft.model.resolving import Resolver
from lineshaft.model.tasks import MAX_CHILD_DEPTH, NewTask, TaskRow

_NONE: Mapping[str, str] = MappingProxyType({})
_CREATED, _CREATED_READY = "{task.created}", "{task.created,task.ready}"


class Draft(msgspec.Struct, eq=False, kw_only=True):
    """A task on its way in. A Struct, because a bulk submission feels what it costs to make one."""

    id: str
    #: What it has in common with others of the call that are like it; the spec is its own.
    row: TaskRow
    spec: bytes
    place: str
    parent_id: str | None
    dag_id: str
    #: None while the DAG is virtual.
    live_dag_id: str | None
    #: What the caller wrote: keys of the call, or ids.
    asked: tuple[str, ...] = ()
    depends_on: Sequence[str] = ()
    #: Keys that `spec.context_refs` names, with the ids they stand for.
    refs: Mapping[str, str] = _NONE
    batch: "Draft | None" = None
    first_child: "Draft | None" = None
    is_batch: bool = False
    lock_owner: str | None = None
    content: bytes = b""
    blocked: int = 0
    downstream: int = 0
    lane_id: int = 0


@dataclass(frozen=True, slots=True)
class DagDraft:
    id: str
    title: str
    created_by: str | None
    ceiling: Decimal | None = None
    key: str | None = None

    def parameters(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "key": self.key,
            "created_by": self.created_by,
            "ceiling": self.ceiling,
        }


#: Those of `_row_values`.
_ROW_COLUMNS = (
    "idempotency_key",
    "type",
    "title",
    "preset",
    "required_capabilities",
    "model_preferences",
    "fallback_models",
    "max_cost_usd",
    "max_total_cost_usd",
    "lock_key",
    "retry",
    "output_type",
    "gates",
    "tags",
    "created_by",
    "surface",
    "deadline",
    "run_at",
    "priority_boost_per_minute",
    "max_duration_sec",
    "heartbeat_interval_sec",
    "priority",
    "max_attempts",
    "require_decision_report",
)
LIVE_COLUMNS = (
    "status",
    "dag_id",
    "lane_id",
    "priority",
    "downstream",
    "blocked",
    "deadline",
    "rank",
    "rekey_at",
    "ready_at",
    "due_at",
    "generation",
    "lock_key",
    "lock_owner",
    "heartbeat_sec",
    "limit_sec",
    "is_batch",
    "is_gated",
)


#: What the tables put in by themselves: columns that have nothing else in a whole batch need not be sent.
TASK_DEFAULTS: dict[str, Any] = {
    "preset": "factory",
    "required_capabilities": "{}",
    "model_preferences": "{}",
    "fallback_models": "{}",
    "tags": "{}",
    "priority_boost_per_minute": 0.1,
    "max_duration_sec": 300.0,
    "priority": 50,
    "max_attempts": 3,
    "require_decision_report": False,
    "is_batch": False,
}
LIVE_DEFAULTS: dict[str, Any] = {
    "priority": 50,
    "downstream": 0,
    "blocked": 0,
    "limit_sec": 300.0,
    "is_batch": False,
    "is_gated": False,
}


def task_columns(drafts: Sequence[Draft]) -> dict[str, Column]:
    """What goes into `task`. What alike tasks share is worked out once."""
    shared = {id(draft.row): draft.row for draft in drafts}
    if len(shared) == 1:
        columns: dict[str, Column] = {name: Same(value) for name, value in row_values(drafts[0].row).items()}
    else:
        of_row = {key: _row_values(row) for key, row in shared.items()}
        rows = [of_row[id(draft.row)] for draft in drafts]
        columns = dict(zip(_ROW_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    return {
        "id": [draft.id for draft in drafts],
        "dag_id": [draft.dag_id for draft in drafts],
        "spec": [draft.spec.decode() for draft in drafts],
        "parent_id": [draft.parent_id for draft in drafts],
        "is_batch": [draft.is_batch for draft in drafts],
        **columns,
    }


def task_values(draft: Draft) -> dict[str, Any]:
    """The parameters of insert_task."""
    return {
        **row_values(draft.row),
        "id": draft.id,
        "dag_id": draft.dag_id,
        "spec": draft.spec.decode(),
        "lane_id": draft.lane_id,
    }


def row_values(row: TaskRow) -> dict[str, Any]:
    """What alike tasks share, by column of `task`."""
    return dict(zip(_ROW_COLUMNS, _row_values(row), strict=True))


def _row_values(row: TaskRow) -> tuple[Any, ...]:
    return (
        row.idempotency_key,
        row.type,
        row.title,
        row.preset,
        array_literal(row.required_capabilities),
        array_literal(row.model_preferences),
        array_literal(row.fallback_models),
        row.max_cost_usd,
        row.max_total_cost_usd,
        row.lock_key,
        json_text(row.retry),
        row.output_type,
        json_text(row.gates),
        array_literal(row.tags),
        row.created_by,
        json_text(row.surface),
        row.deadline,
        row.run_at,
        row.priority_boost_per_minute,
        row.max_duration_sec,
        row.heartbeat_interval_sec,
        row.priority,
        row.max_attempts,
        row.require_decision_report,
    )


@lru_cache(maxsize=1024)
def _rank(priority: int, boost: float, now: datetime, deadline: datetime | None, downstream: int) -> float:
    inputs = PriorityInputs(
        priority=priority,
        boost_per_minute=boost,
        ready_at=now,
        deadline=deadline,
        downstream_length=downstream,
    )
    return rank(inputs, now)


def live_columns(drafts: Sequence[Draft], now: datetime, generation: int) -> dict[str, Column]:
    """What goes into `task_live`, as the statement insert_tasks would work it out."""
    first = drafts[0]
    if all(draft.row is first.row and is_plain(draft) for draft in drafts):
        values = _live_values(first, now, generation)
        columns: dict[str, Column] = {
            name: Same(value) for name, value in zip(LIVE_COLUMNS, values, strict=True)
        }
    else:
        rows = [_live_values(draft, now, generation) for draft in drafts]
        columns = dict(zip(LIVE_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    return {"id": [draft.id for draft in drafts], **columns}


def event_columns(live: Mapping[str, Column], now: datetime) -> dict[str, Column]:
    """What is told of new tasks."""
    status = live["status"]
    kinds: Column
    if isinstance(status, Same):
        kinds = Same(_CREATED_READY if status.value == "READY" else _CREATED)
    else:
        kinds = [_CREATED_READY if each == "READY" else _CREATED for each in status]
    return {"task_id": live["id"], "at": Same(now), "kinds": kinds, "dag_id": live["dag_id"]}


def is_plain(draft: Draft) -> bool:
    """A task that has nothing to do with any other."""
    return (
        draft.row.idempotency_key is None
        and draft.parent_id is None
        and draft.live_dag_id is None
        and not draft.depends_on
    )


def _live_values(draft: Draft, now: datetime, generation: int) -> tuple[Any, ...]:
    """In the order of LIVE_COLUMNS."""
    row = draft.row
    scheduled = row.run_at is not None and row.run_at > now
    waits = scheduled or draft.blocked > 0
    return (
        "PENDING" if waits else "READY",
        draft.live_dag_id,
        draft.lane_id,
        row.priority,
        draft.downstream,
        draft.blocked,
        row.deadline,
        _rank(row.priority, row.priority_boost_per_minute, now, row.deadline, draft.downstream),
        rekey_at(row.deadline, now) or row.deadline,
        None if waits else now,
        row.run_at if scheduled else None,
        generation,
        row.lock_key,
        draft.lock_owner,
        row.heartbeat_interval_sec,
        row.max_duration_sec,
        draft.is_batch,
        row.gates is not None or row.require_decision_report,
    )


def draft_task(
    task: NewTask,
    *,
    place: str,
    drafts: list[Draft],
    resolver: Resolver,
    dag_id: str | None = None,
    parent: Draft | None = None,
    depth: int = 0,
) -> Draft:
    """Check a task and add it, and its children in order, to the drafts."""
    row, spec = resolver(task, place=place)
    task_id = task.id or new_id("task")
    in_dag = dag_id is not None or bool(task.children)
    dag = dag_id or (f"dag_{task_id}" if task.id else virtual_dag(task_id))
    draft = Draft(
        id=task_id,
        row=row,
        spec=spec,
        place=place,
        parent_id=task.parent_id if parent is None else parent.id,
        dag_id=dag,
        live_dag_id=dag if in_dag else None,
        batch=parent,
        is_batch=bool(task.children),
        lock_owner=None if parent is None else _lock_owner(row.lock_key, parent),
    )
    if task.depends_on or row.context_tasks:
        draft.asked = tuple(dict.fromkeys([*task.depends_on, *row.context_tasks]))
    if row.idempotency_key is not None:
        if parent is not None:
            fault = "a child is created with its batch: give the key to the batch"
            raise InvalidInputError(errors=[(f"{place}.idempotency_key", fault)])
        draft.content = content_hash(row.type, msgspec.json.decode(spec))
    drafts.append(draft)
    if task.children:
        if depth >= MAX_CHILD_DEPTH:
            raise InvalidInputError(
                errors=[(f"{place}.children", f"are nested deeper than {MAX_CHILD_DEPTH}")]
            )
        _draft_children(task, draft, drafts=drafts, resolver=resolver, depth=depth)
    return draft


def virtual_dag(task_id: str) -> str:
    """A standalone task's DAG is virtual: an id that can be told from the task's own, and no row."""
    return f"dag_{task_id[5:]}"


def _draft_children(
    task: NewTask, batch: Draft, *, drafts: list[Draft], resolver: Resolver, depth: int
) -> None:
    previous: Draft | None = None
    for number, child in enumerate(task.children):
        inherited = msgspec.structs.replace(
            child,
            lock_key=task.lock_key if child.lock_key is None else child.lock_key,
            priority=task.priority if child.priority is None else child.priority,
            max_attempts=task.max_attempts if child.max_attempts is None else child.max_attempts,
            preset=task.preset if child.preset is None else child.preset,
            # A batch has no work that could wait until then, but its first child has.
            run_at=task.run_at if child.run_at is None and number == 0 else child.run_at,
        )
        below = draft_task(
            inherited,
            place=f"{batch.place}.children[{number}]" if batch.place else f"children[{number}]",
            drafts=drafts,
            resolver=resolver,
            dag_id=batch.dag_id,
            parent=batch,
            depth=depth + 1,
        )
        if previous is None:
            batch.first_child = below
        else:
            wait_for(below, [previous.id])
        batch.depends_on = [*batch.depends_on, below.id]
        previous = below


def _lock_owner(lock_key: str | None, batch: Draft | None) -> str | None:
    """The outermost batch around a task that has the same lock: it holds it for all of them (R-196)."""
    owner = None
    while lock_key is not None and batch is not None:
        if batch.row.lock_key == lock_key:
            owner = batch.id
        batch = batch.batch
    return owner


def wait_for(draft: Draft, names: Iterable[str]) -> None:
    """Hold a task back. The children of a batch run one after another, so the first holds back all."""
    held: Draft | None = draft
    while held is not None:
        held.depends_on = list(dict.fromkeys([*held.depends_on, *names]))
        held = held.first_child


def link(drafts: Iterable[Draft], ids: Mapping[str, str]) -> None:
    """Make tasks wait for what they asked for; `ids` are those of the call's keys."""
    for draft in drafts:
        if draft.asked:
            wait_for(draft, [ids.get(name, name) for name in draft.asked])
            draft.refs = {name: ids[name] for name in draft.row.context_tasks if name in ids}


def with_refs(spec: bytes, ids: Mapping[str, str]) -> bytes:
    """References by key as references by id: keys are forgotten once the call is over."""
    decoded = msgspec.json.decode(spec)
    names = {f"task:{key}:output": f"task:{task_id}:output" for key, task_id in ids.items()}
    decoded["context_refs"] = [names.get(ref, ref) for ref in decoded["context_refs"]]
    return msgspec.json.encode(decoded)


def refuse_cycle(drafts: Sequence[Draft], keys_of: Mapping[str, str]) -> None:
    own = {draft.id for draft in drafts}
    named = {
        keys_of.get(draft.id, draft.id): [keys_of.get(name, name) for name in draft.depends_on if name in own]
        for draft in drafts
    }
    graph.order(named)


def place_in_graph(new: Sequence[Draft], satisfied: set[str]) -> None:
    """Count what each task waits for, and how much waits for it."""
    if not any(draft.depends_on for draft in new):
        return
    lengths = graph.downstream_lengths({draft.id: draft.depends_on for draft in new})
    for draft in new:
        draft.blocked = sum(name not in satisfied for name in draft.depends_on)
        draft.downstream = min(lengths[draft.id], 32_000)
