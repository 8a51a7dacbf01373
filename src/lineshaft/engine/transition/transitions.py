"""What all transitions share: the database, locks on tasks, and the end of batches."""

from collections import defaultdict
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.engine.live.task_locks import TaskLocks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import raw_json
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.engine.transition.effects import Effects
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
    """Locks tasks, writes effects, and ends batches whose children have all ended."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.locks = TaskLocks(database)

    @property
    def now(self) -> dict[str, Any]:
        return self.database.now

    def effects(self) -> Effects:
        return Effects(self.database.now)

    async def write(self, connection: Connection, effects: Effects) -> None:
        await self.finish_batches(connection, await effects.write(connection))

    async def finish_batches(self, connection: Connection, batches: list[str]) -> None:
        """Complete batches whose children have all ended, and then the batches above them."""
        while batches:
            children: defaultdict[str, dict[str, _ChildOutput]] = defaultdict(dict)
            for child in await fetch_rows(connection, _ChildOutput, _SQL["batch_outputs"], {"ids": batches}):
                children[child.parent_id][child.id] = child
            effects = self.effects()
            for task in (await self.locks.lock(connection, batches)).values():
                below = children[task.id]
                order = graph.order({name: child.after for name, child in below.items()})
                output = [raw_json(below[name].output) for name in order if name in below]
                effects.end(task, Status.COMPLETED, spent=UNREPORTED, output=msgspec.json.encode(output))
                effects.event(task, ["task.completed"])
            batches = await effects.write(connection)
