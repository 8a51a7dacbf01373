"""New tasks that join an existing DAG: the one of their parent, or the one they name.

The row of the DAG is locked while it counts them in, so that it can't end in the meantime. The DAG of a
standalone task has no row; it gets one first, under the lock of that task.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from msgspec import Struct

from lineshaft.engine.live.task_locks import TaskLocks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.submit.dags import give_dags_rows
from lineshaft.engine.submit.drafts import Draft
from lineshaft.errors import InvalidInputError, InvalidTransitionError, LineshaftError, NotFoundError
from lineshaft.model.states import Status

_SQL = catalog.load(__name__)
_DAG_STATUS = {Status.COMPLETED: "completed", Status.CANCELLED: "cancelled"}


class _DagMember(Struct, frozen=True):
    id: str
    dag_id: str


class _EndedDag(Struct, frozen=True):
    id: str
    status: str


class Joining:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._locks = TaskLocks(database)

    async def join(self, connection: Connection, new: Sequence[Draft]) -> None:
        """Put drafts that join a DAG, and their children, into it; it counts them from now on."""
        own = {draft.id for draft in new}
        parents = await self._parents(
            connection, {d.parent_id for d in new if d.parent_id is not None and d.parent_id not in own}
        )
        joined: dict[str, str] = {}
        for draft in new:
            if draft.joins:
                joined[draft.id] = _wanted_dag(draft, parents)
            elif draft.parent_id in joined:
                joined[draft.id] = joined[draft.parent_id]
        if not joined:
            return
        await self._give_rows(connection, sorted(set(joined.values())), new)
        await self._count(connection, Counter(joined.values()))
        for draft in new:
            if draft.id in joined:
                draft.dag_id = draft.live_dag_id = joined[draft.id]

    async def _parents(self, connection: Connection, ids: Collection[str]) -> dict[str, str]:
        """The DAGs of existing parents."""
        if not ids:
            return {}
        found = await fetch_rows(connection, _DagMember, _SQL["read_parents"], {"ids": sorted(ids)})
        parents = {parent.id: parent.dag_id for parent in found}
        if missing := sorted(set(ids) - parents.keys()):
            raise NotFoundError(f"There is no task {missing[0]} (parent_id); nothing was changed.")
        return parents

    async def _give_rows(self, connection: Connection, dag_ids: Sequence[str], new: Sequence[Draft]) -> None:
        """Make virtual DAGs real ones."""
        while missing := await self._without_row(connection, dag_ids):
            members = await fetch_rows(connection, _DagMember, _SQL["standalone_tasks"], {"dag_ids": missing})
            if unknown := sorted(set(missing) - {member.dag_id for member in members}):
                raise _unknown_dag(unknown[0], new)
            dags = {member.id: member.dag_id for member in members}
            locked = await self._locks.lock(connection, sorted(dags))
            ended = await fetch_rows(connection, _EndedDag, _SQL["lock_ended"], {"ids": sorted(dags)})
            for task in ended:
                if task.status != Status.DEAD_LETTERED:
                    raise _ended_dag(dags[task.id], _DAG_STATUS[Status(task.status)])
            # Another submission may have created the row while this one waited for the task; and a task that
            # ended, or was revived, in the meantime isn't locked yet.
            still_missing = set(await self._without_row(connection, missing))
            held = {*locked, *(task.id for task in ended)}
            virtual = [name for name, dag in dags.items() if name in held and dag in still_missing]
            if virtual:
                await give_dags_rows(connection, self._database.now, virtual)

    async def _without_row(self, connection: Connection, dag_ids: Sequence[str]) -> list[str]:
        return await fetch_column(connection, _SQL["without_row"], {"dag_ids": list(dag_ids)})

    async def _count(self, connection: Connection, added: Counter[str]) -> None:
        ids = sorted(added)
        counted = await fetch_column(
            connection, _SQL["count_joined"], {"dag_ids": ids, "added": [added[name] for name in ids]}
        )
        for name in ids:
            if name not in counted:
                (status,) = await fetch_column(connection, _SQL["dag_status"], {"id": name})
                raise _ended_dag(name, status)


def _wanted_dag(draft: Draft, parents: dict[str, str]) -> str:
    if draft.parent_id is None:
        return draft.dag_id
    found = parents[draft.parent_id]
    if draft.names_dag and draft.dag_id != found:
        fault = (
            f"is {draft.dag_id!r}, but the parent {draft.parent_id} belongs to {found!r}; give one of them"
        )
        raise InvalidInputError(errors=[(_place(draft, "dag_id"), fault)])
    return found


def _unknown_dag(dag_id: str, new: Sequence[Draft]) -> LineshaftError:
    place = next(
        (_place(draft, "dag_id") for draft in new if draft.joins and draft.dag_id == dag_id), "dag_id"
    )
    return InvalidInputError(errors=[(place, f"there is no DAG {dag_id}")])


def _ended_dag(dag_id: str, status: str) -> LineshaftError:
    return InvalidTransitionError(
        f"Can't add a task to DAG {dag_id}: it is {status}. Submit the task on its own, or in a new DAG; "
        "nothing was changed."
    )


def _place(draft: Draft, name: str) -> str:
    return f"{draft.place}.{name}" if draft.place else name
