"""All reads of the HTTP API, the client and the command line, each from one snapshot of the database.

Nothing here counts or skips through a large table: see `listing` and `stats`. Nothing writes, except that
costs and throughput count the latest events first, as a scrape of metrics does.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from decimal import Decimal
from typing import TypeVar

from msgspec import Raw

from lineshaft.engine.postgres.database import Database
from lineshaft.engine.read.agent_history import RecentClaim, read_recent_claims, read_spending_rates
from lineshaft.engine.read.attention import read_attention
from lineshaft.engine.read.costs import read_costs
from lineshaft.engine.read.dags import DagTasks, read_dag_tasks, read_dags
from lineshaft.engine.read.ended import read_ended
from lineshaft.engine.read.guards import (
    read_breaker,
    read_breakers,
    read_locks,
    read_pauses,
    read_short_dags,
    read_slowdowns,
)
from lineshaft.engine.read.ids import IdKind, find_ids
from lineshaft.engine.read.listing import Keys, dag_keys, task_keys
from lineshaft.engine.read.outcomes import Outcomes, read_outcomes
from lineshaft.engine.read.relatives import Relatives, read_relatives
from lineshaft.engine.read.snapshot import Reader, in_snapshot
from lineshaft.engine.read.stats import Bounds, read_stats
from lineshaft.engine.read.tally import Tally
from lineshaft.engine.read.tasks import read_attempts, read_steps, read_tasks, read_tasks_by_id
from lineshaft.engine.read.throughput import read_throughput
from lineshaft.engine.read.waiting import read_waiting
from lineshaft.engine.read.why import read_reasons, read_refusal, read_why
from lineshaft.errors import InvalidInputError, LineshaftError, NotFoundError
from lineshaft.model.states import LIVE, Status
from lineshaft.model.storable import is_storable
from lineshaft.types import (
    Attempt,
    Attention,
    Breaker,
    Costs,
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
    ThroughputHistory,
    Waiting,
    Why,
)
from lineshaft.types.costs import DEFAULT_DAYS, check_days
from lineshaft.types.filters import names
from lineshaft.types.guards import ShortDag
from lineshaft.types.page import DEFAULT_LIMIT, check_limit

#: Ids that are read at once.
_IDS, _LIVE_IDS = 1_000, 20_000
ALL_TASKS = TaskFilter()
ALL_DAGS = DagFilter()

T = TypeVar("T")


class Queries:
    def __init__(self, database: Database, *, bounds: Bounds | None = None) -> None:
        self._database = database
        self._bounds = bounds or Bounds()
        self._tally = Tally(database)

    # Tasks.

    async def task(self, task_id: str) -> Task:
        found = await self.tasks_by_id([task_id])
        if not found:
            raise _unknown("task", task_id)
        return found[0]

    async def tasks_by_id(self, ids: Sequence[str]) -> list[Task]:
        """Those of these tasks that exist, in this order."""
        wanted = [name for name in ids if is_storable(name)]
        return await read_tasks_by_id(self._database, wanted) if wanted else []

    async def tasks(
        self,
        filters: TaskFilter = ALL_TASKS,
        *,
        order: str = TaskOrder.CREATED_AT,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Task]:
        """One page; continue with its `next_cursor` until that is None, even after a short page."""
        check_limit(limit)

        async def read(reader: Reader) -> Page[Task]:
            keys = await task_keys(reader, filters, order, limit, cursor)
            return Page(await read_tasks(reader, keys.ids), keys.next_cursor)

        return await in_snapshot(self._database, read, for_filters=True)

    async def task_ids(self, filters: TaskFilter) -> list[str]:
        """The ids of all tasks that match, page by page: newest first, or by priority if none has ended."""
        found: list[str] = []
        cursor: str | None = None
        # By priority, only live tasks are read, not the history; each page sorts all of them.
        statuses = {Status.parse(name) for name in names(filters.status)}
        only_live = bool(statuses) and statuses <= LIVE
        order, limit = (TaskOrder.PRIORITY, _LIVE_IDS) if only_live else (TaskOrder.CREATED_AT, _IDS)

        async def read(reader: Reader) -> Keys:
            return await task_keys(reader, filters, order, limit, cursor)

        while True:
            keys = await in_snapshot(self._database, read, for_filters=True)
            found += keys.ids
            cursor = keys.next_cursor
            if cursor is None:
                return found

    async def ended(self, ids: Sequence[str]) -> dict[str, str]:
        """For each id: `open`, ended as a `task` or as a `dag`, or `unknown`."""
        return await read_ended(self._database, ids)

    async def find_ids(self, text: str, kind: IdKind | None = None) -> list[str]:
        """The ids of tasks and DAGs that a short form or a prefix may mean, at most 20 of each."""
        kinds: tuple[IdKind, ...] = ("task", "dag") if kind is None else (kind,)
        return await in_snapshot(self._database, lambda reader: find_ids(reader, text, kinds))

    async def attempts(self, task_id: str, *, outputs: bool = True) -> list[Attempt]:
        """All claims, in order, including the current and the successful one."""

        async def read(reader: Reader, name: str) -> list[Attempt] | None:
            return await read_attempts(reader, name, outputs=outputs)

        return await self._of_task(task_id, read)

    async def steps(self, task_id: str) -> dict[str, Raw]:
        """Results of durable steps by name, in the order in which they were recorded."""
        return await self._of_task(task_id, read_steps)

    async def relatives(self, task_id: str) -> Relatives:
        """Dependencies, dependents, children and recorded steps, bounded; of an unknown task, nothing."""
        return await self._of_task(task_id, read_relatives)

    async def why(self, task_id: str) -> Why:
        """What a task is waiting for or doing, and whether the claim of any agent would get it."""

        async def read(reader: Reader, name: str) -> Why | None:
            return await read_why(reader, name)

        return await self._of_task(task_id, read)

    async def reasons(self, task_ids: Sequence[str]) -> dict[str, str]:
        """Why these tasks can't be claimed now, each in one sentence; those that can be are missing."""
        if not task_ids:
            return {}
        return await in_snapshot(self._database, lambda reader: read_reasons(reader, task_ids))

    async def why_not(self, task_id: str, agent_id: str, incarnation: int) -> LineshaftError:
        """Why this instance of an agent can't claim this task."""

        async def read(reader: Reader, name: str) -> LineshaftError | None:
            return await read_refusal(reader, name, agent_id, incarnation)

        return await self._of_task(task_id, read)

    async def _of_task(self, task_id: str, read: Callable[[Reader, str], Awaitable[T | None]]) -> T:
        if not is_storable(task_id):
            raise _unknown("task", task_id)
        found = await in_snapshot(self._database, lambda reader: read(reader, task_id))
        if found is None:
            raise _unknown("task", task_id)
        return found

    # DAGs.

    async def dag(self, dag_id: str) -> Dag:
        """A DAG, or the virtual DAG of a standalone task."""
        if not is_storable(dag_id):
            raise _unknown("DAG", dag_id)
        found = await in_snapshot(self._database, lambda reader: read_dags(reader, [dag_id]))
        if not found:
            raise _unknown("DAG", dag_id)
        return found[0]

    async def dag_tasks(self, dag_id: str, *, opened: Collection[str], most: int) -> DagTasks:
        """At most so many tasks of a DAG, and the children of its lists counted."""
        storable = [name for name in opened if is_storable(name)]
        return await in_snapshot(
            self._database, lambda reader: read_dag_tasks(reader, dag_id, storable, most)
        )

    async def dags(
        self, filters: DagFilter = ALL_DAGS, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Dag]:
        """Newest first; a virtual DAG is as old as its task."""
        check_limit(limit)

        async def read(reader: Reader) -> Page[Dag]:
            keys = await dag_keys(reader, filters, limit, cursor)
            return Page(await read_dags(reader, keys.ids), keys.next_cursor)

        return await in_snapshot(self._database, read, for_filters=True)

    # Agents.

    async def recent_claims(self, agent_id: str, *, limit: int = 20) -> list[RecentClaim]:
        """What became of its latest claims; only the newest ends of all agents are searched."""
        if not is_storable(agent_id):
            return []
        return await in_snapshot(self._database, lambda reader: read_recent_claims(reader, agent_id, limit))

    async def spending_rates(self, agent_ids: Sequence[str]) -> dict[str, Decimal]:
        """What agents spend an hour, by the last minutes; those that spend too little are missing."""
        return await in_snapshot(self._database, lambda reader: read_spending_rates(reader, agent_ids))

    # Guards.

    async def locks(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Lock]:
        """Document locks that are held, with the number of READY tasks that wait (up to 10,000)."""
        return await in_snapshot(self._database, lambda reader: read_locks(reader, limit, cursor))

    async def breakers(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Breaker]:
        """Breakers that have counted a failure; all others are closed."""
        return await in_snapshot(self._database, lambda reader: read_breakers(reader, limit, cursor))

    async def breaker(self, key: str) -> Breaker:
        return await in_snapshot(self._database, lambda reader: read_breaker(reader, key))

    async def slowdowns(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Slowdown]:
        """Slowdowns in force."""
        return await in_snapshot(self._database, lambda reader: read_slowdowns(reader, limit, cursor))

    async def pauses(self) -> list[Pause]:
        return await in_snapshot(self._database, read_pauses)

    async def short_dags(self, *, limit: int = DEFAULT_LIMIT) -> list[ShortDag]:
        """DAGs whose budget keeps READY tasks waiting."""
        check_limit(limit)
        return await in_snapshot(self._database, lambda reader: read_short_dags(reader, limit))

    # Figures.

    async def stats(self) -> Stats:
        """Depth by state and tier, oldest READY task, throughput, money; each figure says if it is exact."""

        async def read(reader: Reader) -> Stats:
            return await read_stats(reader, self._bounds)

        return await in_snapshot(self._database, read, for_filters=True)

    async def waiting(self) -> Waiting:
        """How many tasks wait for which reason; each figure says if it is exact."""

        async def read(reader: Reader) -> Waiting:
            return await read_waiting(reader, self._bounds)

        return await in_snapshot(self._database, read, for_filters=True)

    async def outcomes(self) -> Outcomes:
        """Dead letters that timed out, batches that run, and how long tasks take."""

        async def read(reader: Reader) -> Outcomes:
            return await read_outcomes(reader, self._bounds)

        return await in_snapshot(self._database, read)

    async def throughput(self) -> ThroughputHistory:
        """What ended in each minute of the last hour, and how long recent tasks had waited."""
        await self._tally.count_for_reading()
        return await in_snapshot(self._database, read_throughput)

    async def costs(
        self,
        *,
        days: int = DEFAULT_DAYS,
        type: str | None = None,  # noqa: A002 - the name of the field
        model: str | None = None,
        agent_id: str | None = None,
    ) -> Costs:
        """Costs of the last `days` UTC days; with a type, model or agent only of its attempts."""
        check_days(days)
        for name, value in (("type", type), ("model", model), ("agent_id", agent_id)):
            if value is not None and not is_storable(value):
                raise InvalidInputError(errors=[(name, f"must be text that can be stored, got {value!r}")])
        await self._tally.count_for_reading()

        async def read(reader: Reader) -> Costs:
            return await read_costs(reader, days=days, type_=type, model=model, agent_id=agent_id)

        return await in_snapshot(self._database, read, for_filters=True)

    async def attention(self) -> Attention:
        """What needs a person; cheap enough for every page."""
        return await in_snapshot(self._database, read_attention)


def _unknown(what: str, name: str) -> NotFoundError:
    return NotFoundError(f"There is no {what} {name if is_storable(name) else repr(name)}.")
