"""What is asked of a server, as JSON; refused before it is sent if the database backend would refuse it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from typing import Any

import msgspec

from lineshaft.engine.agents import NewAgent
from lineshaft.engine.read.listing import TaskFilter
from lineshaft.engine.review.dead_letter_views import DeadLetterFilter
from lineshaft.engine.submit.submission import draft_by_key, draft_dag, draft_each
from lineshaft.model.tasks import Gate, NewTask

#: Filters of tasks and of dead letters that the server knows.
_TASK_FILTERS = ("status", "type", "dag_id", "parent_id", "agent_id", "tag", "created_by", "q", "lock_key")
_LETTER_FILTERS = ("reviewed", "type", "category", "error_contains", "task_ids", "poison_pill", "dag_id")

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(NewTask)} | {"spec": {}}


def _the_server_knows(_: Sequence[Gate]) -> Iterable[tuple[str, str]]:
    """Which gates there are is the server's business."""
    return ()


def tasks(given: Sequence[NewTask]) -> list[dict[str, Any]]:
    draft_each(given, _the_server_knows)
    return [_task(task) for task in given]


def children(given: Sequence[NewTask]) -> list[dict[str, Any]]:
    draft_by_key(given, "", [], _the_server_knows)
    return [_task(task) for task in given]


def dag(
    title: str,
    given: Sequence[NewTask],
    *,
    budget_ceiling_usd: Decimal | float | None,
    created_by: str | None,
    idempotency_key: str | None,
) -> dict[str, Any]:
    draft, *_ = draft_dag(
        title,
        given,
        budget_ceiling_usd=budget_ceiling_usd,
        created_by=created_by,
        idempotency_key=idempotency_key,
        gate_faults=_the_server_knows,
    )
    return {
        "title": title,
        "tasks": [_task(task) for task in given],
        "budget_ceiling_usd": draft.ceiling,
        "created_by": created_by,
        "idempotency_key": idempotency_key,
    }


def _task(task: NewTask) -> dict[str, Any]:
    """Only what differs from the defaults: a batch may have ten thousand, and a body has a limit."""
    found = {name: value for name in _DEFAULTS if (value := getattr(task, name)) != _DEFAULTS[name]}
    if task.children:
        found["children"] = [_task(child) for child in task.children]
    return found


def agent(given: NewAgent) -> dict[str, Any]:
    found = {field.name: getattr(given, field.name) for field in fields(given)}
    return {name: value for name, value in found.items() if value is not None}


def task_filter(given: TaskFilter) -> dict[str, list[str]]:
    return {name: [str(value) for value in getattr(given, name)] for name in _TASK_FILTERS}


def letter_filter(given: DeadLetterFilter) -> Mapping[str, Any]:
    found = {name: getattr(given, name) for name in _LETTER_FILTERS}
    return {name: value for name, value in found.items() if value is not None and value != ()}
