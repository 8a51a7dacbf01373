"""The read model: everything that the HTTP API, the dashboard, the command line and metrics show.

Each answer is read in one snapshot of the database. Nothing here writes, and nothing counts or skips through
a large table: see `listing` for lists, `stats` for figures, `why` for why a task waits.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.postgres.pipeline import read_in_snapshot
from lineshaft.engine.read.listing import dag_keys, task_keys
from lineshaft.engine.read.rows import attempt_from_row, dag_from_rows, dead_above, task_from_rows
from lineshaft.engine.read.snapshot import (
    Reader,
    Row,
    decode_cursor,
    encode_cursor,
    in_snapshot,
)
from lineshaft.engine.read.stats import Bounds, read_stats
from lineshaft.engine.read.why import explain, refusal
from lineshaft.errors import LineshaftError, NotFoundError
from lineshaft.model.states import Status
from lineshaft.model.storable import is_storable
from lineshaft.types import (
    Attempt,
    Breaker,
    Dag,
    DagFilter,
    Lock,
    Page,
    Pause,
    Slowdown,
    Stats,
    Task,
    TaskFilter,
    TaskOrder,
    Why,
)
from lineshaft.types.json import raw
from lineshaft.types.page import DEFAULT_LIMIT, check_limit

ALL_TASKS = TaskFilter()
ALL_DAGS = DagFilter()
#: Open dependencies upstream of a page of tasks that are followed in search of dead letters.
_MOST_UPSTREAM = 20_000
#: Waiters for one lock that are counted.
_MOST_WAITING = 10_000

View = TypeVar("View", bound=msgspec.Struct)


class _NameKey(msgspec.Struct, frozen=True, array_like=True, tag="name"):
    #: Which list.
    of: str
    after: str


class Queries:
    def __init__(
        self, database: Database, *, bounds: Bounds | None = None, daily_budget_usd: Decimal | None = None
    ) -> None:
        self._database = database
        self._bounds = bounds or Bounds()
        self._daily_budget = daily_budget_usd

    # Tasks.

    async def task(self, task_id: str) -> Task:
        found = await self.tasks_by_id([task_id])
        if not found:
            raise _no_task(task_id)
        return found[0]

    async def tasks_by_id(self, ids: Sequence[str]) -> list[Task]:
        """Those of these ids that exist, in this order.

        Every call of an agent is answered with its task, so this takes one round trip, unless a task waits
        for others: then those are looked at too.
        """
        wanted = [name for name in ids if is_storable(name)]
        if not wanted:
            return []
        sql = catalog.load("read/queries")
        parameters = {**self._database.now, "ids": wanted}
        found, edges, failures = await self._database.run_alone(
            lambda own: read_in_snapshot(own, *((sql[name], parameters) for name in _OF_TASKS))
        )
        if not any(_waits(row) for row in found):
            return _tasks(wanted, found, edges, failures, {})

        async def read(reader: Reader) -> list[Task]:
            return await _read_tasks(reader, wanted)

        return await in_snapshot(self._database, read)

    async def tasks(
        self,
        filters: TaskFilter = ALL_TASKS,
        *,
        order: str = TaskOrder.CREATED_AT,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Task]:
        """One page; go on with its `next_cursor` until that is None, past short pages too."""
        check_limit(limit)

        async def read(reader: Reader) -> Page[Task]:
            keys = await task_keys(reader, filters, order, limit, cursor)
            return Page(await _read_tasks(reader, keys.ids), keys.next_cursor)

        return await in_snapshot(self._database, read, for_filters=True)

    async def attempts(self, task_id: str) -> list[Attempt]:
        """Every claim there was, in order, with the one under way and the one that succeeded."""
        rows = await self._of_task("attempts", task_id)
        return [attempt_from_row(row) for row in rows]

    async def steps(self, task_id: str) -> dict[str, Raw]:
        """Results of durable steps by name, in the order in which they were recorded."""
        rows = await self._of_task("steps", task_id)
        return {row["name"]: raw(row["data"]) for row in rows}

    async def _of_task(self, statement: str, task_id: str) -> list[Row]:
        _check_name(task_id, "task")

        async def read(reader: Reader) -> list[Row]:
            rows = await reader.rows(statement, id=task_id)
            if not rows and not await reader.rows("task_exists", id=task_id):
                raise _no_task(task_id)
            return rows

        return await in_snapshot(self._database, read)

    async def why(self, task_id: str) -> Why:
        """Why a task is not running, and whether any agent's claim would get it."""
        _check_name(task_id, "task")

        async def read(reader: Reader) -> Why:
            return explain(*await self._read_why(reader, task_id))

        return await in_snapshot(self._database, read)

    async def why_not(self, task_id: str, agent_id: str) -> LineshaftError:
        """Why this agent can't have this task."""

        async def read(reader: Reader) -> LineshaftError:
            task, upstream, models, agents = await self._read_why(reader, task_id)
            own = [agent for agent in agents if agent["id"] == agent_id]
            return refusal(explain(task, upstream, models, own), own[0])

        return await in_snapshot(self._database, read)

    async def _read_why(self, reader: Reader, task_id: str) -> tuple[Row, list[Row], list[Row], list[Row]]:
        """The task, its edges, models that are held back, and all agents."""
        found = await reader.send("why_task", id=task_id, daily_budget=self._daily_budget)
        edges = await reader.send("upstream", ids=[task_id], most=_MOST_UPSTREAM)
        models = await reader.send("why_models")
        agents = await reader.send("why_agents")
        rows = await found.fetchall()
        if not rows:
            raise _no_task(task_id)
        return rows[0], await edges.fetchall(), await models.fetchall(), await agents.fetchall()

    # DAGs.

    async def dag(self, dag_id: str) -> Dag:
        """A DAG, also a virtual one: a standalone task's, which has no row."""
        _check_name(dag_id, "DAG")

        async def read(reader: Reader) -> list[Dag]:
            return await _read_dags(reader, [dag_id])

        found = await in_snapshot(self._database, read)
        if not found:
            raise NotFoundError(f"There is no DAG {dag_id}.")
        return found[0]

    async def dags(
        self, filters: DagFilter = ALL_DAGS, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Dag]:
        """Newest first; a virtual one stands where its task does."""
        check_limit(limit)

        async def read(reader: Reader) -> Page[Dag]:
            keys = await dag_keys(reader, filters, limit, cursor)
            return Page(await _read_dags(reader, keys.ids), keys.next_cursor)

        return await in_snapshot(self._database, read, for_filters=True)

    # Guards.

    async def locks(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Lock]:
        """Document locks that are held, with how many READY tasks want each (up to 10,000)."""
        return await self._named("locks", Lock, limit, cursor, most=_MOST_WAITING)

    async def breakers(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Breaker]:
        """Breakers that ever counted a failure; any other is closed."""
        return await self._named("breakers", Breaker, limit, cursor)

    async def breaker(self, key: str) -> Breaker:
        """One of them, also if it never counted a failure."""

        async def read(reader: Reader) -> list[Breaker]:
            return [Breaker(**row) for row in await reader.rows("breaker", key=key)]

        found = await in_snapshot(self._database, read)
        return found[0] if found else Breaker(key, "closed", 0, None, None, None, None, forced=False)

    async def slowdowns(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Slowdown]:
        """Those in force."""
        return await self._named("slowdowns", Slowdown, limit, cursor)

    async def pauses(self) -> list[Pause]:
        async def read(reader: Reader) -> list[Pause]:
            return [Pause(**row) for row in await reader.rows("pauses")]

        return await in_snapshot(self._database, read)

    async def _named(
        self, statement: str, view: type[View], limit: int, cursor: str | None, **parameters: Any
    ) -> Page[View]:
        """A page of a list that is sorted by its key."""
        check_limit(limit)
        after = decode_cursor(cursor, _NameKey)
        if after is not None and after.of != statement:
            decode_cursor("", _NameKey)  # of another list: refused like any other text

        async def read(reader: Reader) -> Page[View]:
            place = {"after": after and after.after, "limit": limit + 1}
            rows = await reader.rows(statement, **place, **parameters)
            more = len(rows) > limit
            items = [view(**row) for row in rows[:limit]]
            next_cursor = encode_cursor(_NameKey(statement, rows[limit - 1]["key"])) if more else None
            return Page(items, next_cursor)

        return await in_snapshot(self._database, read)

    # Figures.

    async def stats(self) -> Stats:
        """Depth by state and tier, the oldest READY task, throughput, money; each says if it is exact."""

        async def read(reader: Reader) -> Stats:
            return await read_stats(reader, self._bounds)

        return await in_snapshot(self._database, read, for_filters=True)


async def _read_tasks(reader: Reader, ids: Sequence[str]) -> list[Task]:
    """The tasks with these ids, in this order; those that don't exist are left out."""
    if not ids:
        return []
    wanted = list(ids)
    sent = [await reader.send(name, ids=wanted) for name in _OF_TASKS]
    found, edges, failures = [await cursor.fetchall() for cursor in sent]
    waiting = {row["id"] for row in found if _waits(row)}
    upstream = await reader.rows("upstream", ids=sorted(waiting), most=_MOST_UPSTREAM) if waiting else []
    dead = {name: above for name, above in dead_above(upstream).items() if name in waiting}
    return _tasks(wanted, found, edges, failures, dead)


#: What a task is put together from.
_OF_TASKS = ("read_tasks", "read_edges", "read_failures")


def _waits(row: Row) -> bool:
    return bool(row["status"] == Status.PENDING and row["blocked"])


def _tasks(
    wanted: Sequence[str],
    found: Iterable[Row],
    edges: Iterable[Row],
    failures: Iterable[Row],
    dead: Mapping[str, Sequence[str]],
) -> list[Task]:
    rows = {row["id"]: row for row in found}
    edges_of, failures_of = _grouped(edges, "task_id"), _grouped(failures, "task_id")
    return [
        task_from_rows(rows[name], edges_of[name], failures_of[name], dead.get(name, ()))
        for name in wanted
        if name in rows
    ]


async def _read_dags(reader: Reader, ids: Sequence[str]) -> list[Dag]:
    if not ids:
        return []
    wanted = list(ids)
    found = await reader.send("read_dags", ids=wanted)
    members = await reader.send("dag_members", ids=wanted)
    edges = await reader.send("dag_edges", ids=wanted)
    rows = {row["id"]: row for row in await found.fetchall()}
    members_of = _grouped(await members.fetchall(), "dag_id")
    depends_on: defaultdict[str, list[str]] = defaultdict(list)
    for edge in await edges.fetchall():
        depends_on[edge["task_id"]].append(edge["depends_on"])
    return [
        dag_from_rows(name, rows.get(name), members_of[name], depends_on)
        for name in wanted
        if name in rows or members_of[name]
    ]


def _grouped(rows: Iterable[Row], name: str) -> defaultdict[str, list[Row]]:
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[name]].append(row)
    return groups


def _check_name(name: str, what: str) -> None:
    if not is_storable(name):
        raise NotFoundError(f"There is no {what} {name!r}.")


def _no_task(task_id: str) -> NotFoundError:
    return NotFoundError(f"There is no task {task_id}.")
