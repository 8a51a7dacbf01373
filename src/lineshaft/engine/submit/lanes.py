"""Lanes, found or created, and cached: every new task needs the number of its lane.

The janitor deletes lanes that have not been used for an hour, so a cached number is valid for a few minutes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, cast

from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import caller_transaction, catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.lane_reports import MOST_WAKES
from lineshaft.engine.postgres.literals import array_literal
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows
from lineshaft.errors import RateLimitedError
from lineshaft.model.budget import attempt_limit
from lineshaft.model.priority import Lane
from lineshaft.types.work import Spent

#: The most lanes that may have claimable tasks when a submission needs another one.
MAX_LANES = 2_000
#: For each of those, so many lanes may be in use at all: tasks that wait may all become READY at once.
_EXISTING_FOR_EACH = 5
_MOST_CACHED = 10_000
#: How long a lane is cached. The janitor waits much longer (lane_removal.py) before it deletes one.
CACHED_SEC = 600.0
#: Attempts to find a lane that others delete and create.
_TRIES = 10

_SQL = catalog.load(__name__)


async def wake_lanes(connection: Connection, lane_ids: Iterable[int]) -> None:
    """Wake agents that wait for these lanes, one for each task, when the transaction commits."""
    tasks = Counter(lane_ids)
    lanes = [lane for lane, number in sorted(tasks.items()) for _ in range(min(number, MOST_WAKES))]
    if lanes:
        await connection.execute(_SQL["wake_lanes"], {"lanes": lanes})


class KnownLane(NamedTuple):
    id: int
    #: When it must be looked up again, by the cache's clock.
    until: float


class _FoundLane(NamedTuple):
    n: int
    id: int
    retired: bool


class _LaneRow(NamedTuple):
    type: str
    required_capabilities: list[str]
    models: list[str]
    boost_per_minute: float


class _LaneCounts(NamedTuple):
    waiting: int
    unretired: int


class Lanes:
    def __init__(self, max_lanes: int = MAX_LANES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_lanes = max_lanes
        self._clock = clock
        #: By age.
        self._known: dict[Lane, KnownLane] = {}

    async def find(
        self, connection: Connection, lanes: Iterable[Lane], *, for_new_tasks: bool = False
    ) -> dict[Lane, KnownLane]:
        """These lanes, created if necessary, in the connection's transaction.

        Refuses to create lanes `for_new_tasks` if there are too many; existing tasks go on in any case.
        """
        wanted = dict.fromkeys(lanes)
        now = self._clock()
        found = {lane: known for lane in wanted if (known := self._known.get(lane)) and known.until > now}
        unknown = [lane for lane in wanted if lane not in found]
        if not unknown:
            return found
        for _ in range(_TRIES):
            ids = await self._look_up(connection, unknown)
            found |= {lane: KnownLane(lane_id, now + CACHED_SEC) for lane, lane_id in ids.items()}
            unknown = [lane for lane in unknown if lane not in ids]
            if not unknown:
                return found
            if for_new_tasks:
                await self._check_number(connection, len(unknown))
            await connection.execute(_SQL["create_lanes"], _columns(unknown))
        raise AssertionError(f"lanes are deleted as soon as they are created: {unknown}")

    async def next(
        self, connection: Connection, task: LockedTask, spent: Spent, models: Sequence[str] | None = None
    ) -> int:
        """The lane of a task after an attempt: by what is left of its limit, and by other models, if any."""
        if task.max_total_cost_usd is None and models is None:
            return task.lane_id
        limit = attempt_limit(task.max_cost_usd, task.max_total_cost_usd, task.cost_usd + spent.cost(task))
        return await self.like(connection, task.lane_id, limit, models)

    async def like(
        self, connection: Connection, lane_id: int, limit: Decimal | None, models: Sequence[str] | None = None
    ) -> int:
        """The lane like this one for tasks with this limit; after failures its models are fallback models."""
        row = await fetch_row(connection, _LaneRow, _SQL["read_lane"], {"id": lane_id})
        if row is None:
            raise AssertionError("a live task has a lane")
        models = row.models if models is None else models
        lane = Lane.of(row.type, row.required_capabilities, models, row.boost_per_minute, limit)
        return (await self.find(connection, [lane]))[lane].id

    async def create_outside(self, connection: Connection, database: Database, lanes: Iterable[Lane]) -> None:
        """Create and cache what the caller's transaction needs, on another connection.

        A lane that is created in a transaction blocks every submission to that lane until the transaction
        ends, and the caller's may be open for long.
        """
        wanted = set(lanes)
        if self.known(wanted) is None:
            async with caller_transaction.outside(connection, database) as own:
                self.remember(await self.find(own, wanted, for_new_tasks=True))

    def known(self, lanes: Iterable[Lane]) -> dict[Lane, int] | None:
        """The numbers of these lanes, if all of them are cached."""
        now = self._clock()
        found = {
            lane: known.id if (known := self._known.get(lane)) and known.until > now else None
            for lane in lanes
        }
        return None if None in found.values() else cast("dict[Lane, int]", found)

    def remember(self, lanes: Mapping[Lane, KnownLane]) -> None:
        """Cache lanes, after the transaction that created them has committed."""
        for lane, known in lanes.items():
            if self._known.get(lane) != known:
                self._known.pop(lane, None)
                self._known[lane] = known
        while len(self._known) > _MOST_CACHED:
            del self._known[next(iter(self._known))]

    async def _look_up(self, connection: Connection, lanes: list[Lane]) -> dict[Lane, int]:
        rows = await fetch_rows(connection, _FoundLane, _SQL["find_lanes"], _columns(lanes))
        deleted = {row.id for row in rows if row.retired}
        if deleted:
            deleted -= set(await fetch_column(connection, _SQL["reuse_lanes"], {"ids": sorted(deleted)}))
        return {lanes[row.n - 1]: row.id for row in rows if row.id not in deleted}

    async def _check_number(self, connection: Connection, new: int) -> None:
        most = self._max_lanes * _EXISTING_FOR_EACH
        limits = {"limit": self._max_lanes, "most": most}
        counts = await fetch_row(connection, _LaneCounts, _SQL["count_lanes"], limits)
        if counts is None:
            raise AssertionError("count_lanes returns one row")
        if counts.waiting + new > self._max_lanes or counts.unretired + new > most:
            raise RateLimitedError(
                f"Tasks wait in {counts.waiting} lanes, and this call needs {new} more; at most "
                f"{self._max_lanes} are allowed (LINESHAFT_MAX_LANES), and {most} together with those that "
                "have other tasks, or had some within the last hours. Each combination of type, "
                "required_capabilities, model_preferences, priority_boost_per_minute and magnitude of "
                "max_cost_usd, or of what is left of max_total_cost_usd, is a lane: use fewer of them, or "
                "submit again when waiting tasks are done. Nothing was changed."
            )


def _columns(lanes: list[Lane]) -> dict[str, Any]:
    return {
        "types": [lane.type for lane in lanes],
        "capabilities": [array_literal(lane.required_capabilities) for lane in lanes],
        "models": [array_literal(lane.models) for lane in lanes],
        "boosts": [lane.boost_per_minute for lane in lanes],
        "costs": [lane.cost_from_usd for lane in lanes],
    }
