"""Figures for Prometheus: totals that only grow, and current values."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import NamedTuple

from lineshaft.engine.agents import Fleet
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_rows, fetch_value
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.sources.registry import Sources
from lineshaft.model.retry import FailureCategory
from lineshaft.types import AgentInfo, Stats

#: Ended tasks whose waits are read.
_WAITS = 1_000
#: Slices of the tally that one scrape counts, because a scrape times out after some seconds. Far more than
#: there are between two scrapes; after a long time without a scrape the totals catch up with the next ones.
_SLICES = 10
#: Agents that have been offline for longer are left out: an agent without an id of its own is a new one at
#: each start, so there may be thousands.
_SEEN_WITHIN_SEC = 86_400.0
_QUANTILES = ("p50", "p95", "p99")

_SQL = catalog.load(__name__)
_REASONS = {category.value: category.value for category in FailureCategory} | {
    FailureCategory.BUDGET_EXCEEDED: "budget"
}


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the database was created, except for events that were deleted before they were counted."""

    completed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    dead_lettered: int = 0
    #: Submissions that met a known idempotency key.
    duplicates: int = 0
    #: By type, agent and model.
    cost_usd: dict[tuple[str, str, str], Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    heartbeats_missed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    completed_by: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed_by: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def success_rate(self, agent_id: str) -> float | None:
        """The share of an agent's ended claims that succeeded; None: none has ended."""
        ended = self.completed_by[agent_id] + self.failed_by[agent_id]
        return self.completed_by[agent_id] / ended if ended else None


@dataclass(frozen=True, slots=True)
class Metrics:
    totals: Totals
    stats: Stats
    #: Without agents that have been offline for more than a day.
    agents: list[AgentInfo]
    #: Seconds from READY to the first start, by quantile.
    waits: dict[str, float]
    #: By agent: the share of time in which its processes held tasks.
    utilization: dict[str, float]
    #: (source, outcome, number).
    firings: list[tuple[str, str, int]]
    #: How many seconds the oldest due tick of a schedule is late.
    source_lag_sec: float


class Tally:
    def __init__(self, database: Database, *, most: int = 20_000) -> None:
        """`most`: events that one transaction counts; it must be short."""
        self._database = database
        self._most = most

    async def count(self, slices: int | None = None) -> None:
        """Count events since the last call, in at most `slices` transactions; None: all of them."""
        done = 0
        while slices is None or done < slices:
            if not await self._database.run(self._count_slice, pipeline=False):
                return
            done += 1

    async def _count_slice(self, connection: Connection) -> bool:
        """Whether there may be more to count. False while another process counts."""
        if not await fetch_value(connection, _SQL["try_tally"], {}):
            return False
        return bool(await fetch_value(connection, _SQL["tally"], {"most": self._most}))

    async def totals(self) -> Totals:
        async with self._database.connection() as connection:
            return _totals(await fetch_rows(connection, _Count, _SQL["read_tally"], {}))


class MetricsReader:
    def __init__(self, database: Database, queries: Queries, fleet: Fleet) -> None:
        self._sources = Sources(database)
        self._database = database
        self._queries = queries
        self._fleet = fleet
        self._tally = Tally(database)

    async def read(self) -> Metrics:
        await self._tally.count(_SLICES)
        async with self._database.connection() as connection:
            quantiles = await fetch_value(connection, _SQL["waits"], {"most": _WAITS})
        return Metrics(
            await self._tally.totals(),
            await self._queries.stats(),
            await self._fleet.read_all(seen_within_sec=_SEEN_WITHIN_SEC),
            dict(zip(_QUANTILES, quantiles or (), strict=False)),
            await self._fleet.utilization(),
            await self._sources.totals(),
            await self._sources.lag(),
        )


class _Count(NamedTuple):
    name: str
    labels: list[str]
    value: Decimal


def _totals(rows: Iterable[_Count]) -> Totals:
    totals = Totals()
    dead_lettered = duplicates = 0
    for name, labels, value in rows:
        if name == "completed":
            totals.completed[labels[0]] += int(value)
            totals.completed_by[labels[1]] += int(value)
        elif name == "failed":
            # Categories are free text: a thousand of them must not become a thousand series.
            totals.failed[_REASONS.get(labels[0], "other")] += int(value)
            totals.failed_by[labels[1]] += int(value)
        elif name == "heartbeat_missed":
            totals.heartbeats_missed[labels[0]] += int(value)
        elif name == "cost":
            totals.cost_usd[labels[0], labels[1], labels[2]] += value
        elif name == "duplicate":
            duplicates = int(value)
        else:
            dead_lettered += int(value)
    return replace(totals, dead_lettered=dead_lettered, duplicates=duplicates)
