"""Figures for Prometheus: totals that only grow, and current values."""

from msgspec import Struct

from lineshaft.engine.agents import Fleet
from lineshaft.engine.guards.quotas import Quotas
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.read.snapshot import Reader, in_snapshot
from lineshaft.engine.read.tally import Tally, Totals, figures_age_sec
from lineshaft.engine.read.throughput import read_waits
from lineshaft.engine.sources.registry import SourceRegistry
from lineshaft.types import AgentInfo, Quota, Stats
from lineshaft.types.page import MAX_LIMIT
from lineshaft.types.stats import Waits

#: Agents that have been offline for longer are left out: an agent without an id of its own is a new one at
#: each start, so there may be thousands.
_SEEN_WITHIN_SEC = 86_400.0


class Metrics(Struct, frozen=True):
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
    #: How long ago the oldest event happened that the totals lack.
    totals_age_sec: float
    #: The first ones by name.
    quotas: list[Quota]


class MetricsReader:
    def __init__(self, database: Database, queries: Queries, fleet: Fleet) -> None:
        self._sources = SourceRegistry(database)
        self._quotas = Quotas(database)
        self._database = database
        self._queries = queries
        self._fleet = fleet
        self._tally = Tally(database)

    async def read(self) -> Metrics:
        await self._tally.count_for_reading()

        async def read(reader: Reader) -> tuple[Waits, float]:
            return await read_waits(reader), await figures_age_sec(reader)

        waits, totals_age_sec = await in_snapshot(self._database, read)
        quantiles = {"p50": waits.p50_sec, "p95": waits.p95_sec, "p99": waits.p99_sec}
        return Metrics(
            await self._tally.totals(),
            await self._queries.stats(),
            await self._fleet.read_all(seen_within_sec=_SEEN_WITHIN_SEC),
            {name: value for name, value in quantiles.items() if value is not None},
            await self._fleet.utilization(),
            await self._sources.totals(),
            await self._sources.lag(),
            totals_age_sec,
            (await self._quotas.page(limit=MAX_LIMIT, cursor=None)).items,
        )
