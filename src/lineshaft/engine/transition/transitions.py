"""Transitions: what all changes of tasks have in common."""

from collections import defaultdict
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import raw_json
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.engine.transition.changes import Changes
from lineshaft.engine.transition.task_locks import TaskLocks
from lineshaft.model import graph
from lineshaft.model.states import Status
from lineshaft.types.work import UNREPORTED

_SQL = catalog.load(__name__)


class _ChildOutput(Struct, frozen=True):
    parent_id: str
    id: str
    output: bytes | None
    after: list[str]


class Transitions:
    """Locks tasks, writes changes, and ends batches whose children have all ended."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.locks = TaskLocks(database)

    @property
    def now(self) -> dict[str, Any]:
        return self.database.now

    def changes(self) -> Changes:
        return Changes(self.database.now)

    async def write(self, connection: Connection, changes: Changes) -> None:
        await self.finish_batches(connection, await changes.write(connection))

    async def finish_batches(self, connection: Connection, batches: list[str]) -> None:
        """Complete batches whose children have all ended, and then the batches above them."""
        while batches:
            children: defaultdict[str, dict[str, _ChildOutput]] = defaultdict(dict)
            for child in await fetch_rows(connection, _ChildOutput, _SQL["batch_outputs"], {"ids": batches}):
                children[child.parent_id][child.id] = child
            changes = self.changes()
            for task in (await self.locks.lock(connection, batches)).values():
                below = children[task.id]
                order = graph.order({name: child.after for name, child in below.items()})
                output = [raw_json(below[name].output) for name in order if name in below]
                changes.end(task, Status.COMPLETED, spent=UNREPORTED, output=msgspec.json.encode(output))
                changes.event(task, ["task.completed"])
            batches = await changes.write(connection)
