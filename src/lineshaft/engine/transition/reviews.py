"""Reviews of dead letters: locking a dead letter before a decision, and recording the decision."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from msgspec import Struct
from psycopg.rows import class_row, dict_row

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import json_text
from lineshaft.engine.postgres.rows import fetch_column
from lineshaft.model.reviews import Resolution
from lineshaft.model.spec_change import SpecChange

#: Changed places of a spec that an event names; the table `review` has the whole change.
_NAMED_CHANGES = 20


class NewReview(Struct, frozen=True, kw_only=True):
    """A decision that is about to be recorded."""

    resolution: Resolution
    #: None: a manual retry that bypassed the review.
    reviewer: str | None = None
    note: str | None = None
    not_before: datetime | None = None
    spec_before: bytes | None = None
    spec_change: bytes | None = None
    changed: tuple[SpecChange, ...] = ()
    #: Names of steps that run again, or "all".
    forgotten: list[str] | str | None = None
    #: It is part of a rerun of a completed task; dead letters among its dependents are retried.
    rerun: bool = False
    #: A person's reason for the event, where it isn't the note of a decision.
    reason: str | None = None

    @property
    def verb(self) -> str:
        return "rerun" if self.rerun else "retry"

    def parameters(self) -> dict[str, Any]:
        return {
            "resolution": self.resolution,
            "reviewer": self.reviewer,
            "note": self.note,
            "not_before": self.not_before,
            "spec_before": json_text(self.spec_before),
            "spec_change": json_text(self.spec_change),
        }

    def event_data(self, task_id: str, *, root: str | None = None) -> dict[str, Any]:
        """For the event of one task; `root`: the task that was decided about, if it is another one."""
        data = with_actor({"resolution": "rerun" if self.rerun else self.resolution}, self.reason)
        for name in ("reviewer", "note", "not_before"):
            if (value := getattr(self, name)) is not None:
                data[name] = value
        if root is not None and root != task_id:
            data["with"] = root
            return data
        if self.changed:
            data["changed"] = [change.path for change in self.changed[:_NAMED_CHANGES]]
        if self.forgotten is not None:
            data["forget_steps"] = self.forgotten
        return data


MANUAL_RETRY = NewReview(resolution=Resolution.RETRY)


class LockedDeadLetter(Struct, frozen=True):
    id: str
    epoch: int
    dag_id: str | None
    type: str
    preset: str
    spec: bytes
    inputs: bytes | None
    max_cost_usd: Decimal | None
    max_duration_sec: float
    required_capabilities: list[str]
    model_preferences: list[str]
    fallback_models: list[str]
    #: The dead letter was escalated.
    reviewed: bool
    now: datetime


class Reviews:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = catalog.load(__name__)

    async def lock(self, connection: Connection, ids: Sequence[str]) -> dict[str, LockedDeadLetter]:
        """Those of these tasks that are dead letters, locked against other decisions."""
        locked = await fetch_column(connection, self._sql["lock_dead_letters"], {"ids": list(ids)})
        async with connection.cursor(row_factory=class_row(LockedDeadLetter)) as cursor:
            parameters = {**self._database.now, "ids": locked}
            await cursor.execute(self._sql["read_locked_dead_letters"], parameters)
            return {letter.id: letter for letter in await cursor.fetchall()}

    async def record(
        self, connection: Connection, ids: Sequence[str], review: NewReview
    ) -> dict[str, dict[str, str]]:
        """Record a decision about those of these tasks that are open dead letters.

        A spec change belongs to the first task.

        Returns the category and error of each, for its event.
        """
        async with connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(
                self._sql["record_review"],
                {**self._database.now, "ids": list(ids), "root": ids[0], **review.parameters()},
            )
            return {row.pop("task_id"): row for row in await cursor.fetchall()}
