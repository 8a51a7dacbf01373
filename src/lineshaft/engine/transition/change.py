"""Changing a task that hasn't ended: priority, deadline and tags."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from msgspec import UNSET, UnsetType

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.engine.transition.dependencies import reorder_parked
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import InvalidTransitionError
from lineshaft.model.fields import check_fields
from lineshaft.model.states import Status

_SQL = catalog.load(__name__)


@dataclass(frozen=True, slots=True)
class _Before:
    priority: int
    deadline: datetime | None
    tags: list[str]


class Change:
    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks

    async def change(
        self,
        task_id: str,
        *,
        priority: int | UnsetType = UNSET,
        deadline: datetime | UnsetType | None = UNSET,
        tags: Sequence[str] | UnsetType = UNSET,
    ) -> None:
        """`deadline=None` removes the deadline."""
        given = {"priority": priority, "deadline": deadline, "tags": tags}
        wanted: dict[str, Any] = {name: value for name, value in given.items() if value is not UNSET}
        check_fields(**{name: value for name, value in wanted.items() if (name, value) != ("deadline", None)})
        if tags is not UNSET:
            wanted["tags"] = list(dict.fromkeys(tags))
        values = {**dict.fromkeys(given), **wanted, "id": task_id, "keep_deadline": deadline is UNSET}

        async def work(connection: Connection) -> None:
            task = (await self._locks.lock(connection, [task_id])).get(task_id)
            if task is None:
                status = await self._locks.end_status(connection, task_id)
                raise InvalidTransitionError(f"Can't change task {task_id}: it is {status} already.")
            parameters = {**self._database.now, **values}
            (before,) = await fetch_rows(connection, _Before, _SQL["change_task"], parameters)
            changed = {
                name: {"from": getattr(before, name), "to": value}
                for name, value in wanted.items()
                if value != getattr(before, name)
            }
            if not changed:
                return
            changes = self._transitions.changes()
            changes.event(task, ["task.changed"], changed)
            await changes.write(connection)
            if task.status == Status.READY:
                await reorder_parked(connection, task)

        await self._database.run(work)
