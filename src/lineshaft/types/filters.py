"""Filters of lists. Each field: any of these values; empty: all. An item must pass every filter."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TypedDict

from msgspec import Struct

#: One value or several.
Names = str | Sequence[str]


def names(given: Names) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


class TaskOrder(StrEnum):
    #: Newest first.
    CREATED_AT = "created_at"
    #: In the order in which tasks are claimed; only tasks that have not ended.
    PRIORITY = "priority"


class TaskFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    status: Names = ()
    type: Names = ()
    dag_id: Names = ()
    parent_id: Names = ()
    #: The agent that holds the task, or held it when it ended.
    agent_id: Names = ()
    tag: Names = ()
    created_by: Names = ()
    #: Part of the title, ignoring case.
    q: Names = ()
    lock_key: Names = ()
    #: The submitted priority, before age and deadline change it.
    priority_from: int | None = None
    priority_to: int | None = None
    #: Only tasks whose work is done by their children.
    batches: bool = False


class TaskFilters(TypedDict, total=False):
    """The filters of a task list, as keyword arguments."""

    status: Names
    type: Names
    dag_id: Names
    parent_id: Names
    agent_id: Names
    tag: Names
    created_by: Names
    q: Names


class MatchedTasks(Struct, frozen=True):
    """The tasks that a call cancelled or retried; with `dry_run`, would have."""

    ids: list[str]
    count: int


class DagFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: pending, running, completed, failed or cancelled.
    status: Names = ()
    created_by: Names = ()
    #: Part of the title, ignoring case.
    q: Names = ()
    #: Include the DAGs of standalone tasks.
    virtual: bool = True


class DeadLetterFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reviewed: bool | None = None
    type: Names = ()
    category: Names = ()
    #: Part of the error, ignoring case.
    error_contains: str | None = None
    poison_pill: bool | None = None
    task_ids: Names = ()
    dag_id: Names = ()
    #: The last decision.
    resolution: Names = ()
    #: As in a group.
    pattern: Names = ()
    #: Include deleted entries.
    hidden: bool = False
