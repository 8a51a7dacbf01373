"""New tasks as columns of the tables `task`, `task_live` and `event`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from lineshaft.engine.caller import caller
from lineshaft.engine.postgres.copy import Column, Constant
from lineshaft.engine.postgres.literals import array_literal, json_text
from lineshaft.engine.submit.drafts import Draft
from lineshaft.model.admission import fair_key_of, locks_of
from lineshaft.model.priority import PriorityInputs, lane_boost, rank, rekey_at
from lineshaft.model.tasks import TaskRow

_CREATED, _CREATED_READY = "{task.created}", "{task.created,task.ready}"


#: In the order of `_row_values`.
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
    "admission",
    "retry",
    "output_type",
    "gates",
    "tags",
    "created_by",
    "created_by_token",
    "deadline",
    "run_at",
    "priority_boost_per_minute",
    "max_duration_sec",
    "heartbeat_interval_sec",
    "priority",
    "max_attempts",
    "require_decision_report",
    "ignore_failure",
    "expire_at_deadline",
    "open_limits",
    "type_revision",
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
    "admission",
    "lock_owner",
    "heartbeat_sec",
    "limit_sec",
    "is_batch",
    "is_gated",
    "expires",
    "max_cost_usd",
    "max_total_cost_usd",
    "parked",
)


#: The defaults of the tables: a column that has its default in all rows need not be sent.
TASK_DEFAULTS: dict[str, Any] = {
    "preset": "factory",
    "required_capabilities": "{}",
    "model_preferences": "{}",
    "fallback_models": "{}",
    "tags": "{}",
    "priority_boost_per_minute": 0.1,
    "max_duration_sec": 3600.0,
    "priority": 50,
    "max_attempts": 3,
    "require_decision_report": False,
    "ignore_failure": False,
    "expire_at_deadline": False,
    "is_batch": False,
}
LIVE_DEFAULTS: dict[str, Any] = {
    "priority": 50,
    "downstream": 0,
    "blocked": 0,
    "limit_sec": 3600.0,
    "is_batch": False,
    "is_gated": False,
    "expires": False,
}


def task_columns(drafts: Sequence[Draft]) -> dict[str, Column]:
    """Columns of `task`. What uniform tasks share is computed once."""
    shared = {id(draft.row): draft.row for draft in drafts}
    if len(shared) == 1:
        columns: dict[str, Column] = {
            name: Constant(value) for name, value in row_values(drafts[0].row).items()
        }
    else:
        of_row = {key: _row_values(row) for key, row in shared.items()}
        rows = [of_row[id(draft.row)] for draft in drafts]
        columns = dict(zip(_ROW_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    return {
        "id": [draft.id for draft in drafts],
        "dag_id": [draft.dag_id for draft in drafts],
        "spec": [draft.spec.decode() for draft in drafts],
        "inputs": [json_text(draft.stored_inputs()) for draft in drafts],
        "key": [draft.key for draft in drafts],
        "surface": [json_text(draft.surface) for draft in drafts],
        "parent_id": [draft.parent_id for draft in drafts],
        "is_batch": [draft.is_batch for draft in drafts],
        "for_each": [json_text(draft.stored_for_each()) for draft in drafts],
        **columns,
    }


def task_values(draft: Draft) -> dict[str, Any]:
    """The parameters of insert_task."""
    return {
        **row_values(draft.row),
        "id": draft.id,
        "dag_id": draft.dag_id,
        "spec": draft.spec.decode(),
        "surface": json_text(draft.surface),
        "lane_id": draft.lane_id,
        "boost": lane_boost(draft.row.priority_boost_per_minute),
    }


def row_values(row: TaskRow) -> dict[str, Any]:
    """What uniform tasks share, by column of `task`."""
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
        json_text(row.admission),
        json_text(row.retry),
        row.output_type,
        json_text(row.gates),
        array_literal(row.tags),
        row.created_by,
        caller().token,
        row.deadline,
        row.run_at,
        row.priority_boost_per_minute,
        row.max_duration_sec,
        row.heartbeat_interval_sec,
        row.priority,
        row.max_attempts,
        row.require_decision_report,
        row.ignore_failure,
        row.expire_at_deadline,
        row.open_limits,
        row.type_revision,
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
    """Columns of `task_live`, computed as in the statement insert_tasks."""
    first = drafts[0]
    if all(draft.row is first.row and is_standalone(draft) for draft in drafts):
        values = _live_values(first, now, generation)
        columns: dict[str, Column] = {
            name: Constant(value) for name, value in zip(LIVE_COLUMNS, values, strict=True)
        }
    else:
        rows = [_live_values(draft, now, generation) for draft in drafts]
        columns = dict(zip(LIVE_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    columns["parked_key"] = _places_of_keys(drafts, columns)
    return {"id": [draft.id for draft in drafts], **columns}


def _places_of_keys(drafts: Sequence[Draft], columns: Mapping[str, Column]) -> Column:
    """The key of tasks that are READY behind another one with their `fair_key`: claims don't meet them."""
    parked = columns["parked"]
    if parked.value is None if isinstance(parked, Constant) else not any(parked):
        return Constant(None)
    ready, ranks = columns["status"], columns["rank"]
    first: dict[tuple[int | None, str], int] = {}
    places: list[tuple[int, tuple[int | None, str]]] = []
    for n, draft in enumerate(drafts):
        key = fair_key_of(draft.row.admission)
        if key is not None and _at(ready, n) == "READY":
            place: tuple[int | None, str] = (draft.lane_id, key)
            places.append((n, place))
            if place not in first or _at(ranks, n) < _at(ranks, first[place]):
                first[place] = n
    behind: list[Any] = [None] * len(drafts)
    for n, place in places:
        if first[place] != n:
            behind[n] = place[1]
    return behind


def _at(column: Column, n: int) -> Any:
    return column.value if isinstance(column, Constant) else column[n]


def event_columns(live: Mapping[str, Column], now: datetime) -> dict[str, Column]:
    """Columns of `event` for new tasks."""
    status = live["status"]
    kinds: Column
    if isinstance(status, Constant):
        kinds = Constant(_CREATED_READY if status.value == "READY" else _CREATED)
    else:
        kinds = [_CREATED_READY if each == "READY" else _CREATED for each in status]
    return {"task_id": live["id"], "at": Constant(now), "kinds": kinds, "dag_id": live["dag_id"]}


def is_standalone(draft: Draft) -> bool:
    """A task without an idempotency key, parent, DAG, dependencies or artifacts."""
    return (
        draft.row.idempotency_key is None
        and not draft.row.context_artifacts
        and draft.parent_id is None
        and not draft.joins
        and draft.live_dag_id is None
        and not draft.depends_on
    )


def _live_values(draft: Draft, now: datetime, generation: int) -> tuple[Any, ...]:
    """In the order of LIVE_COLUMNS."""
    row = draft.row
    scheduled = row.run_at is not None and row.run_at > now
    # A list that exists already, because another call has submitted its task, is opened by the promoter.
    opens = draft.is_batch and not draft.blocked
    waits = scheduled or draft.blocked > 0 or opens
    return (
        "PENDING" if waits else "READY",
        draft.live_dag_id,
        draft.lane_id,
        row.priority,
        draft.downstream,
        draft.blocked,
        row.deadline,
        _rank(row.priority, lane_boost(row.priority_boost_per_minute), now, row.deadline, draft.downstream),
        rekey_at(row.deadline, now) or row.deadline,
        None if waits else now,
        row.run_at if scheduled else now if opens else None,
        generation,
        next(iter(locks_of(row.lock_key, row.admission)), None),
        json_text(row.admission),
        draft.lock_owner,
        row.heartbeat_interval_sec,
        row.max_duration_sec,
        draft.is_batch,
        row.gates is not None or row.require_decision_report,
        row.expire_at_deadline,
        row.max_cost_usd,
        row.max_total_cost_usd,
        None if fair_key_of(row.admission) is None else "fair",
    )
