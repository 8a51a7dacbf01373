"""Bodies of requests that submit tasks, checked before they are sent as the engine checks them."""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from lineshaft.engine.submit.drafts import LARGEST_DAG, draft_by_key, draft_dag, draft_each
from lineshaft.model.tasks import Gate, NewTask, TaskRules

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(NewTask)} | {"spec": {}}


def _checked_by_server(_: Sequence[Gate]) -> Iterable[tuple[str, str]]:
    """Only the server knows which gates are configured."""
    return ()


_CHECKED_BY_SERVER = TaskRules(_checked_by_server, max_dag_tasks=LARGEST_DAG)


def tasks(given: Sequence[NewTask]) -> list[dict[str, Any]]:
    draft_each(given, _CHECKED_BY_SERVER)
    return [_task(task) for task in given]


def children(given: Sequence[NewTask]) -> list[dict[str, Any]]:
    draft_by_key(given, "", [], _CHECKED_BY_SERVER)
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
        rules=_CHECKED_BY_SERVER,
    )
    return {
        "title": title,
        "tasks": [_task(task) for task in given],
        "budget_ceiling_usd": draft.ceiling,
        "created_by": created_by,
        "idempotency_key": idempotency_key,
    }


def _task(task: NewTask) -> dict[str, Any]:
    """The fields that differ from their defaults: a batch may have ten thousand tasks in one body."""
    found = {name: value for name in _DEFAULTS if (value := getattr(task, name)) != _DEFAULTS[name]}
    if task.children:
        found["children"] = [_task(child) for child in task.children]
    return found


def given_fields(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return {
        field.encode_name: found
        for field in msgspec.structs.fields(value)
        if (found := getattr(value, field.name)) != field.default
    }
