"""What people and parents do to tasks: cancel, retry by hand, change, spawn children, add a dependency."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.review.reviews import MANUAL_RETRY
from lineshaft.engine.submit.dags import give_dag_a_row, insert_edges
from lineshaft.engine.submit.drafts import Draft, draft_by_key
from lineshaft.engine.submit.lanes import Lanes, wake_lanes
from lineshaft.engine.submit.submission import Submission
from lineshaft.engine.transition.cancel import Cancelling
from lineshaft.engine.transition.changes import Changes, LockedTask
from lineshaft.engine.transition.lifecycle import Lifecycle
from lineshaft.engine.transition.revive import Reviving
from lineshaft.engine.transition.upstream import hold_upstream
from lineshaft.errors import (
    CycleError,
    DependencyNotFoundError,
    InvalidInputError,
    InvalidTransitionError,
    NotFoundError,
    StaleClaimError,
)
from lineshaft.model import graph
from lineshaft.model.fields import check_fields
from lineshaft.model.states import Status
from lineshaft.model.storable import replace_unstorable
from lineshaft.model.tasks import NewTask
from lineshaft.types import Submitted
from lineshaft.types.work import SPAWN_STEP, UNREPORTED, ClaimRef, Spent


class Operations:
    def __init__(
        self, database: Database, lanes: Lanes, lifecycle: Lifecycle, submission: Submission
    ) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self.reviving = Reviving(database, lanes, lifecycle)
        self.cancelling = Cancelling(database, lifecycle, self.reviving)
        self._submission = submission
        self._sql = catalog.load("transition/operations")
        self._moves = catalog.load("transition/changes", "transition/revive", "transition/task_locks")
        self._steps = catalog.load("transition/working")

    async def cancel(self, task_id: str, reason: str, *, cascade: bool = True) -> list[str]:
        """Cancel a task, its children and, with `cascade`, all that depends on it; gives who was cancelled.

        Cancelling a cancelled task changes nothing; a COMPLETED or DEAD_LETTERED one can't be cancelled.
        """

        async def work(connection: Connection) -> list[str]:
            cancelled = await self.cancelling.cancel(
                connection, [task_id], replace_unstorable(reason), cascade=cascade
            )
            if task_id not in cancelled:
                await self._check_cancelled(connection, task_id)
            return cancelled

        return await self._database.run(work)

    async def cancel_dag(self, dag_id: str, reason: str) -> list[str]:
        """Cancel whatever of a DAG has not ended, and what depends on it elsewhere; gives who was cancelled.

        A DAG that is over changes nothing.
        """

        async def work(connection: Connection) -> list[str]:
            cancelled: list[str] = []
            while True:
                cursor = await connection.execute(self._sql["members"], {"dag_id": dag_id})
                members = [row[0] for row in await cursor.fetchall()]
                if not members:
                    raise NotFoundError(f"There is no DAG {dag_id}.")
                # Until nothing was added meanwhile by a task that was just being worked on.
                more = await self.cancelling.cancel(
                    connection, members, replace_unstorable(reason), cascade=True
                )
                if not more:
                    return sorted(cancelled)
                cancelled += more

        return await self._database.run(work)

    async def _check_cancelled(self, connection: Connection, task_id: str) -> None:
        status = await self._end(connection, task_id)
        if status != Status.CANCELLED:
            raise InvalidTransitionError(f"Can't cancel task {task_id}: it is {status} already.")

    async def _end(self, connection: Connection, task_id: str) -> str:
        """How a task ended that is not live."""
        cursor = await connection.execute(self._moves["read_ends"], {"ids": [task_id]})
        row = await cursor.fetchone()
        if row is None:
            raise NotFoundError(f"There is no task {task_id}.")
        return str(row[2])

    async def retry(self, task_id: str, *, delay_sec: float = 0.0) -> Status:
        """Revive a DEAD_LETTERED or CANCELLED task with fresh counters, or end the wait of a RETRYING one."""

        async def work(connection: Connection) -> Status:
            promoted = await connection.execute(
                self._sql["promote_retry"], {**self._database.now, "id": task_id}
            )
            row = await promoted.fetchone()
            if row is not None:
                await self._lifecycle.log(connection, "task.ready", [(row[0], row[1], None, None)])
                await wake_lanes(connection, [row[2]])
                return Status.READY
            return (await self.reviving.revive(connection, {task_id: delay_sec}, MANUAL_RETRY))[task_id]

        return await self._database.run(work)

    async def spawn(
        self,
        claim: ClaimRef,
        tasks: Sequence[NewTask],
        *,
        wait: bool = False,
        checkpoint: bytes | None = None,
    ) -> list[Submitted]:
        """Create children in the parent's DAG; with `wait` the parent pauses until all of them have ended.

        A paused parent uses no attempt, and gives back its slot, its money and its document lock. As it ends
        the claim, the same call again with `wait` gives what it gave, and changes nothing.
        """
        if not tasks:
            raise InvalidInputError(errors=[("tasks", "at least one task is needed")])

        digest = hashlib.sha256(msgspec.json.encode(tasks)).hexdigest() if wait else ""
        step = {"id": claim.id, "name": f"{SPAWN_STEP}{claim.epoch}.{digest[:16]}"}

        async def work(connection: Connection) -> list[Submitted]:
            try:
                parent = await self._lifecycle.hold(connection, claim, "spawn from")
            except StaleClaimError:
                cursor = await connection.execute(self._steps["read_step"], step)
                known = await cursor.fetchone()
                if known is None:
                    raise
                return msgspec.json.decode(known[0], type=list[Submitted])
            if checkpoint is not None:
                await self._lifecycle.save_checkpoint_in(connection, claim, checkpoint)
            changes = Changes(self._database.now)
            parent, children = await self.create_children(connection, changes, parent, tasks)
            if wait:
                made = {"epoch": claim.epoch, "data": msgspec.json.encode(children).decode()}
                await connection.execute(self._steps["insert_step"], {**self._database.now, **step, **made})
                await self.pause_for(connection, changes, parent, children)
            else:
                await changes.write(connection)
            return children

        return await self._database.run(work, pipeline=False)

    async def create_children(
        self, connection: Connection, changes: Changes, parent: LockedTask, tasks: Sequence[NewTask]
    ) -> tuple[LockedTask, list[Submitted]]:
        """In the parent's DAG, which may become a real one by it; also gives the parent as it is then."""
        dag_id = parent.task_dag_id
        drafts: list[Draft] = []
        own = [msgspec.structs.replace(task, parent_id=parent.id) for task in tasks]
        heads = draft_by_key(own, dag_id, drafts, self._submission.gate_faults).values()
        if parent.dag_id is None:
            await give_dag_a_row(connection, self._database.now, parent)
            parent = replace(parent, dag_id=dag_id)
        results = await self._submission.write_in(connection, drafts, [])
        added = sum(draft.id not in results or not results[draft.id].duplicate for draft in drafts)
        changes.touch_dag(dag_id, added=added)
        return parent, [results[head.id] for head in heads]

    async def pause_for(
        self,
        connection: Connection,
        changes: Changes,
        parent: LockedTask,
        children: Sequence[Submitted],
        spent: Spent = UNREPORTED,
    ) -> None:
        """Out of the agent's hands until all of these have ended; writes the changes."""
        open_children = await self._wait_for(connection, parent.id, children)
        self._pause(changes, parent, open_children, spent.no_less_than_known(parent))
        await changes.write(connection)
        ids = [child.id for child in children]
        await self._rekey_paths(connection, ids)

    async def _wait_for(self, connection: Connection, parent: str, children: Sequence[Submitted]) -> int:
        """Edges from a parent to children it waits for; those that have ended already don't count."""
        names = list(dict.fromkeys(child.id for child in children))
        if any(child.duplicate for child in children) or await self._lead_on(connection, names):
            # What exists already may just be made to wait for others, in the end for the parent.
            await connection.execute(self._sql["lock_edges"], {})
        stands = await hold_upstream(connection, names)
        await self._refuse_late_cycle(connection, parent, names)
        ended = {name for name, status in stands.items() if status is not None}
        await connection.execute(
            self._sql["insert_waits"],
            {"parent": parent, "ids": names, "ended": [name in ended for name in names]},
        )
        return len(names) - len(ended)

    def _pause(self, changes: Changes, parent: LockedTask, open_children: int, spent: Spent) -> None:
        waits = open_children > 0
        changes.requeue(
            parent,
            Status.PENDING if waits else Status.READY,
            spent=spent,
            blocked=open_children,
        )
        if waits:
            changes.lend_lock(parent)
        changes.attempt(parent, "waiting", spent=spent)
        changes.event(parent, ["task.waiting"] if waits else ["task.waiting", "task.ready"])

    async def add_dependencies(self, task_id: str, depends_on: Sequence[str]) -> Status:
        """Make a task that nobody has claimed yet wait for others too."""
        wanted = list(dict.fromkeys(depends_on))

        async def work(connection: Connection) -> Status:
            await connection.execute(self._sql["lock_edges"], {})
            stands = await hold_upstream(connection, wanted)
            locked = await self._lifecycle.lock(connection, [task_id])
            if task_id not in locked or locked[task_id].status not in {Status.PENDING, Status.READY}:
                status = locked[task_id].status if task_id in locked else await self._end(connection, task_id)
                raise InvalidTransitionError(
                    f"Can't add a dependency to task {task_id}: it is {status}; only what nobody has claimed "
                    "yet can be made to wait."
                )
            waits = await self._add_edges(connection, task_id, stands, wanted)
            await connection.execute(self._sql["block_task"], {"id": task_id, "n": waits})
            await self._rekey_paths(connection, [task_id])
            if not waits:
                return Status(locked[task_id].status)
            changes = Changes(self._database.now)
            # What it waits for now may have failed.
            changes.reconsider(task_id, locked[task_id].dag_id)
            if locked[task_id].status == Status.READY:
                changes.event(locked[task_id], ["task.waiting"])
            await changes.write(connection)
            await self._reorder_parked(connection, locked[task_id])
            return Status.PENDING

        return await self._database.run(work)

    async def wait_for_inputs(self, connection: Connection, task_id: str, names: Sequence[str]) -> None:
        """Before a revival, as part of it: the task waits for what its new spec refers to."""
        if names:
            await connection.execute(self._sql["lock_edges"], {})
            await self._add_edges(connection, task_id, await hold_upstream(connection, names), names)

    async def _add_edges(
        self,
        connection: Connection,
        task_id: str,
        stands: Mapping[str, Status | None],
        wanted: Sequence[str],
    ) -> int:
        """Under lock_edges, to tasks that are held as they stand; gives how many it waits for."""
        for name in wanted:
            if name not in stands:
                raise DependencyNotFoundError(f"There is no task {name}; nothing was changed.")
            if stands[name] is Status.CANCELLED:
                raise InvalidInputError(errors=[("depends_on", f"{name} was cancelled")])
        await self._refuse_late_cycle(connection, task_id, wanted)
        cursor = await connection.execute(self._sql["existing_edges"], {"id": task_id})
        known = {row[0] for row in await cursor.fetchall()}
        new = [name for name in wanted if name not in known]
        satisfied = {name for name in new if stands[name] is Status.COMPLETED}
        await insert_edges(connection, [(task_id, name) for name in new], satisfied)
        return len(new) - len(satisfied)

    async def change(
        self,
        task_id: str,
        *,
        priority: int | UnsetType = UNSET,
        deadline: datetime | UnsetType | None = UNSET,
        tags: Sequence[str] | UnsetType = UNSET,
    ) -> None:
        """What people may decide anew about a task that has not ended (R-167); `deadline=None` is none."""
        given = {"priority": priority, "deadline": deadline, "tags": tags}
        asked: dict[str, Any] = {name: value for name, value in given.items() if value is not UNSET}
        check_fields(**{name: value for name, value in asked.items() if (name, value) != ("deadline", None)})
        if tags is not UNSET:
            asked["tags"] = list(dict.fromkeys(tags))

        async def work(connection: Connection) -> None:
            task = (await self._lifecycle.lock(connection, [task_id])).get(task_id)
            if task is None:
                status = await self._end(connection, task_id)
                raise InvalidTransitionError(f"Can't change task {task_id}: it is {status} already.")
            cursor = await connection.execute(
                self._sql["change_task"],
                {
                    **self._database.now,
                    "id": task_id,
                    "keep_deadline": deadline is UNSET,
                    **dict.fromkeys(given),
                    **asked,
                },
            )
            (row,) = await cursor.fetchall()
            found = dict(zip(given, row, strict=True))
            told = {
                name: {"from": found[name], "to": value}
                for name, value in asked.items()
                if value != found[name]
            }
            if not told:
                return
            changes = Changes(self._database.now)
            changes.event(task, ["task.changed"], told)
            await changes.write(connection)
            if task.status == Status.READY:
                await self._reorder_parked(connection, task)

        await self._database.run(work)

    async def _reorder_parked(self, connection: Connection, task: LockedTask) -> None:
        """Only the best waiters for a lock, or for a DAG's money, are in sight: they may be others now.

        A task that was in sight needs no wake-up: whoever may take it was told when it became READY.
        """
        if task.lock_key is not None:
            await connection.execute(self._moves["unpark_lock_waiters"], {"keys": [task.lock_key]})
        if task.dag_id is not None:
            await connection.execute(self._moves["unpark_budget_waiters"], {"dag_ids": [task.dag_id]})

    async def pause(self, type_: str | None = None) -> None:
        """Nothing of this type, or nothing at all, is claimed until it is resumed; what runs goes on."""
        if type_ is not None:
            check_fields(type=type_)
        async with self._database.connection() as connection:
            await connection.execute(self._sql["pause"], {**self._database.now, "type": type_ or "*"})

    async def resume(self, type_: str | None = None) -> bool:
        """Whether it was paused."""

        async def work(connection: Connection) -> bool:
            cursor = await connection.execute(self._sql["resume"], {"type": type_ or "*"})
            resumed = await cursor.fetchone() is not None
            if resumed:
                await connection.execute(self._sql["wake_everybody"], {})
            return resumed

        return await self._database.run(work)

    async def _lead_on(self, connection: Connection, names: Sequence[str]) -> bool:
        """Whether these tasks wait for any others but themselves."""
        upstream = await self._upstream_of(connection, names)
        return any(name not in names for above in upstream.values() for name in above)

    async def _upstream_of(self, connection: Connection, names: Sequence[str]) -> dict[str, list[str]]:
        """Whatever these tasks wait for, directly or not: for each all that it waits for."""
        cursor = await connection.execute(self._sql["upstream_of"], {"ids": list(names)})
        upstream: dict[str, list[str]] = {}
        for below, above in await cursor.fetchall():
            upstream.setdefault(below, []).append(above)
        return upstream

    async def _refuse_late_cycle(self, connection: Connection, task_id: str, wanted: Sequence[str]) -> None:
        upstream = await self._upstream_of(connection, wanted)
        cycle = graph.closes_cycle(upstream, task_id, wanted)
        if cycle is not None:
            raise CycleError(cycle)

    async def _rekey_paths(self, connection: Connection, ids: Sequence[str]) -> None:
        await connection.execute(self._moves["rekey_paths"], {**self._database.now, "ids": ids})
