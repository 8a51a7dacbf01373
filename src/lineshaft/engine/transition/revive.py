"""Reviving: what was dead or cancelled begins anew, by hand or from the review desk (R-122, R-133)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
from psycopg.rows import class_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.review.reviews import NewReview, Reviews
from lineshaft.engine.submit.lanes import Lanes, wake_lanes
from lineshaft.engine.transition.changes import Changes
from lineshaft.engine.transition.lifecycle import Lifecycle
from lineshaft.engine.transition.upstream import hold_upstream
from lineshaft.errors import AlreadyExistsError, InvalidTransitionError, LineshaftError, NotFoundError
from lineshaft.model.idempotency import content_hash
from lineshaft.model.priority import Lane
from lineshaft.model.states import Status


@dataclass(frozen=True, slots=True)
class _Revivable:
    id: str
    status: str
    type: str
    required_capabilities: list[str]
    model_preferences: list[str]
    priority_boost_per_minute: float
    max_cost_usd: Decimal | None
    idempotency_key: str | None
    spec: bytes
    is_batch: bool
    dag_id: str | None
    lock_owners: list[str]

    @property
    def lane(self) -> Lane:
        return Lane(
            self.type,
            tuple(self.required_capabilities),
            tuple(self.model_preferences),
            self.priority_boost_per_minute,
            self.max_cost_usd,
        )


class Reviving:
    def __init__(self, database: Database, lanes: Lanes, lifecycle: Lifecycle) -> None:
        self._database = database
        self._lanes = lanes
        self._lifecycle = lifecycle
        self._sql = catalog.load("transition/operations")
        self._moves = catalog.load(
            "transition/changes", "transition/fail", "transition/revive", "transition/task_locks"
        )
        self._reviews = Reviews(database)

    async def revive(
        self, connection: Connection, delays: Mapping[str, float], review: NewReview
    ) -> dict[str, Status]:
        """DEAD_LETTERED or CANCELLED tasks begin anew, each after so many seconds.

        A batch is revived with those of its children that failed. Gives where all of them stand now.
        """
        tasks, roots = await self._with_children(connection, list(delays))
        revived = list(tasks.values())
        await self._retake_keys(connection, revived)
        lanes = await self._lanes.find(connection, [task.lane for task in revived])
        owners = await self._lock_owners(connection, tasks)
        await self._hold_waited_for(connection, tasks)
        cursor = await connection.execute(
            self._moves["revive_tasks"],
            {
                **self._database.now,
                "ids": [task.id for task in revived],
                "lane_ids": [lanes[task.lane] for task in revived],
                # A batch has no work that could wait, but its children have.
                "delays": [0.0 if task.is_batch else float(delays[roots[task.id]]) for task in revived],
                "lock_owners": [owners.get(task.id) for task in revived],
            },
        )
        rows = await cursor.fetchall()
        own_first = [*delays, *(name for name in tasks if name not in delays)]
        causes = await self._reviews.record(connection, own_first, review)
        await self._recount_dags(connection, revived)
        await connection.execute(self._moves["rekey_paths"], {**self._database.now, "ids": list(tasks)})
        ready = [row for row in rows if row[2] == Status.READY]
        told = [
            (row[0], row[1], row[4], review.event_data(row[0], root=roots[row[0]]) | causes.get(row[0], {}))
            for row in rows
        ]
        await self.log(connection, ["task.resolved"], told)
        await self._lifecycle.log(connection, "task.ready", [(row[0], row[1], None, row[4]) for row in ready])
        await wake_lanes(connection, [row[3] for row in ready])
        if done := [row[0] for row in rows if row[5]]:
            await self._lifecycle.finish_batches(connection, done)
        return {row[0]: Status.COMPLETED if row[5] else Status(row[2]) for row in rows}

    async def _with_children(
        self, connection: Connection, ids: Sequence[str]
    ) -> tuple[dict[str, _Revivable], dict[str, str]]:
        """These tasks with what comes along with each, locked; and for each the one that it comes with."""
        tasks = {task.id: task for task in await self._revivable(connection, ids)}
        for task_id in ids:
            if task_id not in tasks:
                cursor = await connection.execute(self._moves["read_live"], {"ids": [task_id]})
                found = await cursor.fetchone()
                raise _not_revivable(task_id, found and found[2])
            if tasks[task_id].status == Status.COMPLETED:
                raise _not_revivable(task_id, Status.COMPLETED)
        roots = {name: name for name in tasks}
        # A batch is retried by retrying those of its children that failed or were cancelled with it.
        frontier = [task for task in tasks.values() if task.is_batch]
        while frontier:
            cursor = await connection.execute(
                self._moves["children"], {"ids": [task.id for task in frontier]}
            )
            parents: dict[str, str] = {row[0]: row[1] for row in await cursor.fetchall()}
            found_below = await self._revivable(connection, [name for name in parents if name not in tasks])
            below = [task for task in found_below if task.status != Status.COMPLETED]
            tasks |= {task.id: task for task in below}
            roots |= {task.id: roots[parents[task.id]] for task in below}
            frontier = [task for task in below if task.is_batch]
        return tasks, roots

    async def _lock_owners(
        self, connection: Connection, tasks: Mapping[str, _Revivable]
    ) -> dict[str, str | None]:
        """For each task the outermost batch that can hold its lock: one that is live, or revived with it."""
        around = sorted({name for task in tasks.values() for name in task.lock_owners} - tasks.keys())
        cursor = await connection.execute(self._moves["read_live"], {"ids": around})
        able = tasks.keys() | {row[0] for row in await cursor.fetchall()}
        return {
            task.id: next((name for name in task.lock_owners if name in able), None)
            for task in tasks.values()
        }

    async def _hold_waited_for(self, connection: Connection, ids: Iterable[str]) -> None:
        cursor = await connection.execute(self._sql["waited_for"], {"ids": list(ids)})
        if names := [row[0] for row in await cursor.fetchall()]:
            await hold_upstream(connection, names)

    async def _revivable(self, connection: Connection, ids: Sequence[str]) -> list[_Revivable]:
        async with connection.cursor(row_factory=class_row(_Revivable)) as cursor:
            await cursor.execute(self._sql["read_revivable"], {"ids": list(ids)})
            return await cursor.fetchall()

    async def _retake_keys(self, connection: Connection, tasks: Iterable[_Revivable]) -> None:
        by_key: dict[str, _Revivable] = {}
        for task in tasks:
            # Of two that had it one after the other only one can have it again.
            if task.idempotency_key is not None and by_key.setdefault(task.idempotency_key, task) is not task:
                raise _key_in_use(task.id, task.idempotency_key)
        if not by_key:
            return
        keyed = sorted(by_key.items(), key=lambda item: item[0])
        cursor = await connection.execute(
            self._sql["retake_keys"],
            {
                **self._database.now,
                "keys": [key for key, _ in keyed],
                "task_ids": [task.id for _, task in keyed],
                "hashes": [content_hash(task.type, msgspec.json.decode(task.spec)) for _, task in keyed],
            },
        )
        taken = {row[0] for row in await cursor.fetchall()}
        for key, task in keyed:
            if key not in taken:
                raise _key_in_use(task.id, key)

    async def _recount_dags(self, connection: Connection, tasks: Sequence[_Revivable]) -> None:
        changes = Changes(self._database.now)
        for task in tasks:
            changes.revive(task.id, task.dag_id, Status(task.status))
        await changes.write(connection)

    async def log(
        self, connection: Connection, kinds: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> None:
        """`rows` are (task, dag, epoch, data); one event row a task, with all kinds."""
        if rows:
            ids, dags, epochs, data = map(list, zip(*rows, strict=True))
            await connection.execute(
                self._moves["insert_events"],
                {
                    **self._database.now,
                    "kinds": ["{" + ",".join(kinds) + "}"] * len(ids),
                    "task_ids": ids,
                    "dag_ids": dags,
                    "agent_ids": [None] * len(ids),
                    "epochs": epochs,
                    "data": [msgspec.json.encode(told).decode() for told in data],
                },
            )


def _key_in_use(task_id: str, key: str) -> LineshaftError:
    return AlreadyExistsError(
        f"Can't retry task {task_id}: its idempotency key {key!r} is in use by a newer task. Cancel that one "
        "first; nothing was changed."
    )


def _not_revivable(task_id: str, status: str | None) -> LineshaftError:
    if status is None:
        return NotFoundError(f"There is no task {task_id}.")
    return InvalidTransitionError(
        f"Can't retry task {task_id}: it is {status}. DEAD_LETTERED, CANCELLED and RETRYING ones can be."
    )
