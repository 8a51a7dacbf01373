"""Counts events, each once, however late its transaction commits: totals, costs by day, figures by minute.

Counted when figures are read, and by the janitor before events are deleted.
"""

from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal
from typing import NamedTuple

import psycopg
from msgspec import Struct, field
from msgspec.structs import replace

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_rows, fetch_value
from lineshaft.engine.read.snapshot import Reader
from lineshaft.errors import DatabaseError, UnavailableError
from lineshaft.model.retry import FailureCategory

#: Slices that one read counts: a scrape of metrics times out after some seconds. Far more than there are
#: between two reads; after a long time without one the figures catch up with the next ones.
SLICES = 10
#: Groups of type, agent and model that a day has in the table of costs; the rest are one group.
GROUPS = 500
#: How long costs by day are kept.
KEEP_DAYS = 400

_SQL = catalog.load(__name__)
_REASONS = {category.value: category.value for category in FailureCategory} | {
    FailureCategory.BUDGET_EXCEEDED: "budget"
}


class Totals(Struct, frozen=True):
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


class Tally:
    def __init__(self, database: Database, *, most: int = 20_000, groups: int = GROUPS) -> None:
        """`most`: events that one transaction counts; it must be short."""
        self._database = database
        self._most = most
        self._groups = groups

    async def count(self, slices: int | None = None) -> None:
        """Count events since the last call, in at most `slices` transactions; None: all of them."""
        done = 0
        while slices is None or done < slices:
            if not await self._database.run(self._count_slice, pipeline=False):
                return
            done += 1

    async def count_for_reading(self) -> None:
        """Count before figures are read, if the database accepts writes; else they are as old as they say."""
        try:
            await self.count(SLICES)
        except (DatabaseError, UnavailableError) as error:
            # Read-only, a full disk, a role that may only read: it answers reads all the same.
            if not (isinstance(error.__cause__, psycopg.Error) and error.__cause__.sqlstate):
                raise

    async def _count_slice(self, connection: Connection) -> bool:
        """Whether there may be more to count. False while another process counts."""
        if not await fetch_value(connection, _SQL["try_tally"], {}):
            return False
        limits = {"most": self._most, "groups": self._groups}
        return bool(await fetch_value(connection, _SQL["tally"], {**self._database.now, **limits}))

    async def forget(self) -> int:
        """Delete figures that are no longer kept."""

        async def delete(connection: Connection) -> int:
            values = {**self._database.now, "keep_days": KEEP_DAYS}
            return int(await fetch_value(connection, _SQL["forget_old"], values))

        return await self._database.run(delete, pipeline=False)

    async def totals(self) -> Totals:
        async with self._database.connection() as connection:
            return _totals(await fetch_rows(connection, _Count, _SQL["read_tally"], {}))


async def figures_age_sec(reader: Reader) -> float:
    """How long ago the oldest event happened that isn't counted; 0: the figures are complete."""
    (row,) = await reader.rows(_SQL["figures_age"])
    return float(row["age_sec"])


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
