"""DAGs as callers read them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated

from msgspec import Meta, Struct, field

from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.request import Name
from lineshaft.types.tasks import Submitted, Task


class NewDag(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A DAG to submit. Its tasks depend on each other by `key`."""

    title: Name
    tasks: Annotated[list[NewTask], Meta(min_length=1)]
    budget_ceiling_usd: Decimal | float | None = None
    created_by: Name | None = None
    idempotency_key: str | None = None


_NOT_DONE = {"CANCELLED": "cancelled", "DEAD_LETTERED": "dead-lettered"}


class Dag(Struct, frozen=True, kw_only=True):
    id: str
    title: str
    #: pending, running, completed, failed or cancelled.
    status: str
    #: A label that the caller chose; it proves nothing.
    created_by: str | None
    #: The name of the token that the server saw; None: there was none, or the call was not over HTTP.
    created_by_token: str | None
    tasks: list[str]
    roots: list[str]
    leaves: list[str]
    #: The longest chain of unfinished tasks, from root to leaf. A dead letter is unfinished.
    critical_path: list[str]
    #: Number of tasks by status; statuses without tasks are left out.
    counts: dict[str, int]
    budget_ceiling_usd: Decimal | None
    reserved_usd: Decimal
    spent_usd: Decimal
    created_at: datetime
    completed_at: datetime | None
    #: The DAG of a standalone task, which has no row of its own.
    virtual: bool

    @property
    def outcome(self) -> str:
        """The status in words: tasks of a completed DAG may be cancelled, or dead letters that it ignored."""
        rest = [
            f"{number:,} of {sum(self.counts.values()):,} tasks {word}"
            for status, word in _NOT_DONE.items()
            if self.status == "completed" and (number := self.counts.get(status, 0))
        ]
        return ", ".join([self.status, *rest])


class ListItems(Struct):
    """The children of a list, counted."""

    counts: Counter[Status] = field(default_factory=Counter)
    cost_usd: Decimal = Decimal(0)

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[status]:,} {status}" for status in Status.in_order(self.counts))


def children_of_lists(tasks: Sequence[Task]) -> dict[str, str]:
    """The children of lists, each with its task; those of a list that was replaced are under no task."""
    present = {task.id: frozenset(task.depends_on) for task in tasks if task.for_each is not None}
    return {
        task.id: task.parent_id if task.id in present[task.parent_id] else ""
        for task in tasks
        if task.parent_id in present
    }


def items_of_lists(tasks: Sequence[Task], children: Mapping[str, str]) -> dict[str, ListItems]:
    """The children of each list, by the id of its task."""
    found: dict[str, ListItems] = {}
    for task in tasks:
        if name := children.get(task.id):
            items = found.setdefault(name, ListItems())
            items.counts[task.status] += 1
            items.cost_usd += task.cost_usd
    return found


class SubmittedDag(Struct, frozen=True):
    id: str
    #: By the keys of the request.
    tasks: Mapping[str, Submitted]
    duplicate: bool = False
