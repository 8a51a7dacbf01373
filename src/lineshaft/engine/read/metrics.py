"""What Prometheus is told: totals that only grow, and how things are just now."""

from collections import defaultdict
from dataclasses import dataclass, field
from decimal import Decimal

from lineshaft.engine.agents import Fleet
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.read.queries import Queries
from lineshaft.model.retry import FailureCategory
from lineshaft.types import AgentInfo, Stats

#: Ended tasks whose wait is looked at.
_WAITS = 1_000
#: Of the tally, while somebody waits for the answer: a scrape is given up after some seconds. Many more than
#: ever happen between two scrapes; after a long time without any the totals catch up with the next ones.
_SLICES = 10
#: Agents that have been offline for longer are not told of: whoever has no id of its own is a new one at each
#: start, and those of years would be more than anybody can read.
_SEEN_WITHIN_SEC = 86_400.0
_QUANTILES = ("p50", "p95", "p99")
_REASONS = {category.value: category.value for category in FailureCategory} | {
    FailureCategory.BUDGET_EXCEEDED: "budget"
}


@dataclass(frozen=True, slots=True)
class Totals:
    """Since this database began, as far as its events were kept until they were counted."""

    completed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    dead_lettered: int = 0
    #: By type, agent and model.
    cost_usd: dict[tuple[str, str, str], Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    heartbeats_missed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    completed_by: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed_by: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def success_rate(self, agent_id: str) -> float | None:
        """How many of an agent's claims that came to an end ended well; None: none has."""
        ended = self.completed_by[agent_id] + self.failed_by[agent_id]
        return self.completed_by[agent_id] / ended if ended else None


@dataclass(frozen=True, slots=True)
class Metrics:
    totals: Totals
    stats: Stats
    #: Without those that have been offline for more than a day.
    agents: list[AgentInfo]
    #: Seconds from READY to the first start, by quantile.
    waits: dict[str, float]


class Tally:
    def __init__(self, database: Database, *, most: int = 20_000) -> None:
        """`most`: events that are counted in one transaction, which must not take long."""
        self._database = database
        self._most = most
        self._sql = catalog.load(__name__)

    async def count(self, slices: int | None = None) -> None:
        """Count what happened since the last time, in at most so many transactions; None: all of it."""
        done = 0
        while slices is None or done < slices:
            if not await self._database.run(self._count_slice, pipeline=False):
                return
            done += 1

    async def _count_slice(self, connection: Connection) -> bool:
        """Whether there may be more to do. Not while another does it."""
        cursor = await connection.execute(self._sql["try_tally"], {})
        if not (await cursor.fetchall())[0][0]:
            return False
        cursor = await connection.execute(self._sql["tally"], {"most": self._most})
        return bool((await cursor.fetchall())[0][0])

    async def totals(self) -> Totals:
        async with self._database.connection() as connection:
            cursor = await connection.execute(self._sql["read_tally"], {})
            return _totals(await cursor.fetchall())


class MetricsReader:
    def __init__(self, database: Database, queries: Queries, fleet: Fleet) -> None:
        self._database = database
        self._queries = queries
        self._fleet = fleet
        self._tally = Tally(database)
        self._sql = catalog.load(__name__)

    async def read(self) -> Metrics:
        await self._tally.count(_SLICES)
        async with self._database.connection() as connection:
            cursor = await connection.execute(self._sql["waits"], {"most": _WAITS})
            ((quantiles,),) = await cursor.fetchall()
        return Metrics(
            await self._tally.totals(),
            await self._queries.stats(),
            await self._fleet.read_all(seen_within_sec=_SEEN_WITHIN_SEC),
            dict(zip(_QUANTILES, quantiles or (), strict=False)),
        )


def _totals(rows: list[tuple[str, list[str], Decimal]]) -> Totals:
    totals = Totals()
    dead_lettered = 0
    for name, labels, value in rows:
        if name == "completed":
            totals.completed[labels[0]] += int(value)
            totals.completed_by[labels[1]] += int(value)
        elif name == "failed":
            # Categories are free text: whoever makes up a thousand of them must not make a thousand series.
            totals.failed[_REASONS.get(labels[0], "other")] += int(value)
            totals.failed_by[labels[1]] += int(value)
        elif name == "heartbeat_missed":
            totals.heartbeats_missed[labels[0]] += int(value)
        elif name == "cost":
            totals.cost_usd[labels[0], labels[1], labels[2]] += value
        else:
            dead_lettered += int(value)
    return Totals(
        totals.completed,
        totals.failed,
        dead_lettered,
        totals.cost_usd,
        totals.heartbeats_missed,
        totals.completed_by,
        totals.failed_by,
    )
