"""Dependencies between existing tasks: added by a person, a changed spec, or a parent that waits."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.live.parking import reorder_parked
from lineshaft.engine.live.upstream import hold_upstream
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import CycleError, DependencyNotFoundError, InvalidInputError, InvalidTransitionError
from lineshaft.model import graph
from lineshaft.model.states import Status
from lineshaft.types import Submitted

_SQL = catalog.load(__name__)
#: Dependencies that an event names.
_NAMED = 20


class _Edge(Struct, frozen=True):
    task_id: str
    depends_on: str


class _NewEdge(Struct, frozen=True):
    depends_on: str
    #: The other task has completed.
    satisfied: bool


class TaskDependencies:
    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks

    async def add(self, task_id: str, depends_on: Sequence[str]) -> Status:
        """Make a task that isn't claimed yet wait for other tasks too."""
        names = list(dict.fromkeys(depends_on))

        async def work(connection: Connection) -> Status:
            await self.lock_edges(connection)
            upstream = await hold_upstream(connection, names)
            task = (await self._locks.lock(connection, [task_id])).get(task_id)
            if task is None or task.status not in {Status.PENDING, Status.READY}:
                status = await self._locks.end_status(connection, task_id) if task is None else task.status
                raise InvalidTransitionError(
                    f"Can't add a dependency to task {task_id}: it is {status}; only a PENDING or READY task "
                    "can wait for others."
                )
            added = await self._add_edges(connection, task_id, upstream, names)
            waits = sum(not edge.satisfied for edge in added)
            await connection.execute(_SQL["block_task"], {"id": task_id, "n": waits})
            await self.rekey_paths(connection, [task_id])
            if not added:
                return Status(task.status)
            effects = self._transitions.effects()
            effects.event(task, ["task.changed"], with_actor(_added(added)))
            if not waits:
                await effects.write(connection)
                return Status(task.status)
            # One of the new dependencies may have failed.
            effects.reconsider(task_id, task.dag_id)
            if task.status == Status.READY:
                effects.event(task, ["task.waiting"])
            await effects.write(connection)
            await reorder_parked(connection, task, self._transitions.now)
            return Status.PENDING

        return await self._database.run(work)

    async def add_inputs(self, connection: Connection, task_id: str, names: Sequence[str]) -> None:
        """Make a task that is about to be revived wait for the tasks that its new spec refers to."""
        if names:
            await self.lock_edges(connection)
            await self._add_edges(connection, task_id, await hold_upstream(connection, names), names)

    async def _add_edges(
        self,
        connection: Connection,
        task_id: str,
        upstream: Mapping[str, Status | None],
        names: Sequence[str],
    ) -> "list[_NewEdge]":
        """Under lock_edges, to tasks that are held; returns the edges that are new."""
        for name in names:
            if name not in upstream:
                fault = f"There is no task {name}"
                raise DependencyNotFoundError(
                    f"{fault}; nothing was changed.", errors=[("depends_on", fault)]
                )
            if upstream[name] is Status.CANCELLED:
                raise InvalidInputError(errors=[("depends_on", f"{name} was cancelled")])
        await self._refuse_cycle(connection, task_id, names)
        satisfied = [upstream[name] is Status.COMPLETED for name in names]
        return await fetch_rows(
            connection,
            _NewEdge,
            _SQL["insert_dependencies"],
            {"id": task_id, "depends_on": list(names), "satisfied": satisfied},
        )

    async def wait_for_children(
        self, connection: Connection, parent_id: str, children: Sequence[Submitted]
    ) -> int:
        """Make a parent wait for the end of its children; returns how many haven't ended."""
        names = list(dict.fromkeys(child.id for child in children))
        if any(child.duplicate for child in children) or await self._wait_for_others(connection, names):
            # An existing task may just be made to wait for others, in the end for the parent.
            await self.lock_edges(connection)
        upstream = await hold_upstream(connection, names)
        await self._refuse_cycle(connection, parent_id, names)
        ended = [upstream.get(name) is not None for name in names]
        await connection.execute(_SQL["insert_waits"], {"parent": parent_id, "ids": names, "ended": ended})
        return ended.count(False)

    async def lock_edges(self, connection: Connection) -> None:
        """Until the end of the transaction no other makes existing tasks wait for each other."""
        await connection.execute(_SQL["lock_edges"], {})

    async def refuse_cycle_above(self, connection: Connection, ids: Sequence[str]) -> None:
        """Raise if tasks that these wait for, directly or not, wait for each other."""
        graph.order(await self._upstream_of(connection, ids))

    async def rekey_paths(self, connection: Connection, ids: Sequence[str]) -> None:
        """Update the priority of tasks around these: their critical paths have changed."""
        await connection.execute(_SQL["rekey_paths"], {**self._database.now, "ids": list(ids)})

    async def _wait_for_others(self, connection: Connection, names: Sequence[str]) -> bool:
        upstream = await self._upstream_of(connection, names)
        return any(name not in names for above in upstream.values() for name in above)

    async def _upstream_of(self, connection: Connection, names: Sequence[str]) -> dict[str, list[str]]:
        """All tasks that these wait for, directly or not: for each task those that it waits for."""
        upstream: dict[str, list[str]] = {}
        for edge in await fetch_rows(connection, _Edge, _SQL["upstream_of"], {"ids": list(names)}):
            upstream.setdefault(edge.task_id, []).append(edge.depends_on)
        return upstream

    async def _refuse_cycle(self, connection: Connection, task_id: str, names: Sequence[str]) -> None:
        upstream = await self._upstream_of(connection, names)
        cycle = graph.closes_cycle(upstream, task_id, names)
        if cycle is not None:
            raise CycleError(cycle)


def _added(edges: Sequence[_NewEdge]) -> dict[str, Any]:
    names = [edge.depends_on for edge in edges]
    return {"depends_on": {"added": names[:_NAMED], "count": len(names)}}
