"""DAGs as callers read them."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated

from msgspec import Meta, Struct

from lineshaft.model.tasks import NewTask
from lineshaft.types.request import Name
from lineshaft.types.tasks import Submitted


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


class SubmittedDag(Struct, frozen=True):
    id: str
    #: By the keys of the request.
    tasks: Mapping[str, Submitted]
    duplicate: bool = False
