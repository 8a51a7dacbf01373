"""A task with `for_each` becomes one child for each item of a list, as soon as the list exists.

This happens in the transaction that makes the task ready, in any process: no agent is involved. The
children are copies of the task, made by one statement; they count and cost as spawned tasks do. With a
`concurrency` of n each child waits for the end of the one n positions before it, so there are n chains, and a
slow child holds up its own chain only.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.engine.live.task_locks import LockedTask, TaskLocks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import array_literal
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.transition.effects import Effects
from lineshaft.errors import InvalidInputError
from lineshaft.ids import new_id
from lineshaft.model.parts import StoredForEach, items_of
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.types.data_refs import MAX_INLINE_BYTES, data_ref_in
from lineshaft.types.work import UNREPORTED

_SQL = catalog.load(__name__)
#: The specs of all children of a list together.
MAX_SPEC_BYTES = 256 << 20


class _List(Struct, frozen=True):
    """A task that has no children yet, and the output with its list."""

    id: str
    for_each: bytes
    spec_bytes: int
    #: Retention has deleted the task that returned it.
    deleted: bool
    output: bytes | None


class Expansion:
    def __init__(self, locks: TaskLocks, max_spawned_tasks: int) -> None:
        self._locks = locks
        self._max_spawned_tasks = max_spawned_tasks

    async def expand(self, connection: Connection, effects: Effects, ids: Sequence[str]) -> dict[str, Status]:
        """Give these tasks the children of their lists, as part of the effects; returns what became of them.

        They wait for nothing else, and this transaction has their rows locked.
        """
        lists = await fetch_rows(connection, _List, _SQL["lists"], {"ids": list(ids)})
        tasks = await self._locks.lock(connection, [each.id for each in lists])
        results: dict[str, Status] = {}
        for found in lists:
            task, each = tasks[found.id], msgspec.json.decode(found.for_each, type=StoredForEach)
            try:
                results[task.id] = await self._expand(connection, effects, task, _items(found, each), each)
            except InvalidInputError as error:
                reason = f"for_each over {each.over!r}: {error}."
                dead_letter(effects, task, reason, FailureCategory.INVALID_INPUT)
                results[task.id] = Status.DEAD_LETTERED
        return results

    async def _expand(
        self,
        connection: Connection,
        effects: Effects,
        task: LockedTask,
        items: Sequence[Any],
        each: StoredForEach,
    ) -> Status:
        if not items:
            effects.end(task, Status.COMPLETED, spent=UNREPORTED, output=b"[]")
            effects.event(task, ["task.completed"])
            return Status.COMPLETED
        await self._count(connection, task.task_dag_id, len(items))
        await connection.execute(
            _SQL["expand"],
            {
                **effects.now,
                "id": task.id,
                "ids": array_literal([new_id("task") for _ in items]),
                "items": msgspec.json.encode(items).decode(),
                "concurrency": each.concurrency,
            },
        )
        effects.touch_dag(task.task_dag_id, added=len(items))
        effects.event(task, ["task.waiting"], {"items": len(items)})
        return Status.PENDING

    async def _count(self, connection: Connection, dag_id: str, n: int) -> None:
        """A list must not make more tasks than agents may spawn."""
        most = self._max_spawned_tasks
        if not await fetch_column(
            connection, _SQL["count_spawned"], {"dag_id": dag_id, "n": n, "most": most}
        ):
            raise InvalidInputError(
                f"with the {n} items of the list, DAG {dag_id} would have more than {most} spawned tasks. "
                "Return fewer items, or raise LINESHAFT_MAX_SPAWNED_TASKS, and retry this task"
            )


def _items(found: _List, each: StoredForEach) -> list[Any]:
    source = f"task {each.source.task}"
    if found.deleted:
        raise InvalidInputError(f"retention has deleted {source}, which returned the list")
    if (ref := data_ref_in(found.output)) is not None:
        raise InvalidInputError(
            f"the output of {source} is larger than {MAX_INLINE_BYTES} bytes, so it is in the artifact store "
            f"({ref.data_ref}). Return a smaller one, for example names instead of contents"
        )
    items = items_of(None if found.output is None else msgspec.json.decode(found.output), each)
    if found.spec_bytes * len(items) > MAX_SPEC_BYTES:
        raise InvalidInputError(
            f"{len(items)} copies of this task's spec of {found.spec_bytes} bytes are larger than "
            f"{MAX_SPEC_BYTES} bytes together. Put what the children share into an artifact"
        )
    return items


def dead_letter(effects: Effects, task: LockedTask, reason: str, category: FailureCategory) -> None:
    """A task without an attempt of its own is a dead letter: nothing would change with another try."""
    effects.end(task, Status.DEAD_LETTERED, spent=UNREPORTED, reason=reason, category=category)
    effects.event(task, ["task.dead_lettered"], {"category": category, "error": reason})
