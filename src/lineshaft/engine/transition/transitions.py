"""What all transitions share: the database, locks on tasks, and the end of batches."""

from collections import defaultdict
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.engine.live.task_locks import LockedTask, TaskLocks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import raw_json
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.engine.transition.effects import Effects
from lineshaft.engine.transition.expand import Expansion, dead_letter
from lineshaft.model import graph
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.model.tasks import MAX_SPAWNED_TASKS
from lineshaft.types.work import MAX_INPUT_BYTES, UNREPORTED

_SQL = catalog.load(__name__)


class _ChildOutput(Struct, frozen=True):
    parent_id: str
    id: str
    output: bytes | None
    #: Its position in the list of a for_each; None: its batch has no such list.
    index: int | None
    after: list[str]


class Transitions:
    """Locks tasks, writes effects, and ends batches whose children have all ended."""

    def __init__(self, database: Database, *, max_spawned_tasks: int = MAX_SPAWNED_TASKS) -> None:
        self.database = database
        self.locks = TaskLocks(database)
        self._expansion = Expansion(self.locks, max_spawned_tasks)

    @property
    def now(self) -> dict[str, Any]:
        return self.database.now

    def effects(self) -> Effects:
        return Effects(self.database.now)

    async def write(self, connection: Connection, effects: Effects) -> None:
        await self.finish_batches(connection, await effects.write(connection))

    async def finish_batches(self, connection: Connection, batches: list[str]) -> dict[str, Status]:
        """Complete batches whose children have all ended, and then the batches above them.

        A task with a list has no children before: it gets them now. Returns what became of all of them.
        """
        results: dict[str, Status] = {}
        while batches:
            children: defaultdict[str, list[_ChildOutput]] = defaultdict(list)
            for child in await fetch_rows(connection, _ChildOutput, _SQL["batch_outputs"], {"ids": batches}):
                children[child.parent_id].append(child)
            effects = self.effects()
            if childless := [name for name in batches if name not in children]:
                results |= await self._expansion.expand(connection, effects, childless)
            ended = [name for name in batches if name not in results]
            for task in (await self.locks.lock(connection, ended)).values():
                results[task.id] = _end_batch(effects, task, children[task.id])
            batches = await effects.write(connection)
        return results


def _end_batch(effects: Effects, task: LockedTask, children: list[_ChildOutput]) -> Status:
    size = sum(len(child.output or b"") for child in children if child.index is not None)
    if size > MAX_INPUT_BYTES:
        reason = (
            f"the outputs of its {len(children)} children have {size} bytes together, more than the "
            f"{MAX_INPUT_BYTES} that a task can get as inputs. Let them return less, such as references to "
            "artifacts, and run them again"
        )
        dead_letter(effects, task, reason, FailureCategory.INVALID_OUTPUT)
        return Status.DEAD_LETTERED
    output = [raw_json(child.output) for child in _ordered(children)]
    effects.end(task, Status.COMPLETED, spent=UNREPORTED, output=msgspec.json.encode(output))
    effects.event(task, ["task.completed"])
    return Status.COMPLETED


def _ordered(children: list[_ChildOutput]) -> list[_ChildOutput]:
    """In the order of the list, or as they wait for each other."""
    if all(child.index is not None for child in children):
        return sorted(children, key=lambda child: child.index or 0)
    by_id = {child.id: child for child in children}
    return [
        by_id[name] for name in graph.order({child.id: child.after for child in children}) if name in by_id
    ]
