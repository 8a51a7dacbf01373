"""Lanes, found or created, and cached: every new task needs the number of its lane."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

from lineshaft.engine.postgres import caller_transaction, catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import array_literal
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.model.priority import Lane

#: A notification has at most 8,000 bytes; with more lanes than this, it names all lanes.
_MOST_NAMED = 700
#: Lanes are few and never change; bounded in case of a runaway caller.
_MOST_CACHED = 10_000

_SQL = catalog.load(__name__)


async def wake_lanes(connection: Connection, lane_ids: Iterable[int]) -> None:
    """Notify agents that wait for these lanes, when the transaction commits."""
    if payload := wakeup_payload(lane_ids):
        await connection.execute(_SQL["wake_lanes"], {"lanes": payload})


def wakeup_payload(lane_ids: Iterable[int]) -> str:
    ids = sorted(set(lane_ids))
    return ",".join(map(str, ids)) if len(ids) < _MOST_NAMED else "*"


class _FoundLane(NamedTuple):
    n: int
    id: int


class Lanes:
    def __init__(self) -> None:
        self._known: dict[Lane, int] = {}

    async def find(self, connection: Connection, lanes: Iterable[Lane]) -> dict[Lane, int]:
        """The numbers of these lanes, created if necessary, in the connection's transaction."""
        wanted = dict.fromkeys(lanes)
        found = {lane: self._known[lane] for lane in wanted if lane in self._known}
        unknown = [lane for lane in wanted if lane not in found]
        if unknown:
            columns = {
                "types": [lane.type for lane in unknown],
                "capabilities": [array_literal(lane.required_capabilities) for lane in unknown],
                "models": [array_literal(lane.models) for lane in unknown],
                "boosts": [lane.boost_per_minute for lane in unknown],
                "costs": [lane.max_cost_usd for lane in unknown],
            }
            await connection.execute(_SQL["ensure_lanes"], columns)
            rows = await fetch_rows(connection, _FoundLane, _SQL["find_lanes"], columns)
            found |= {unknown[row.n - 1]: row.id for row in rows}
        return found

    async def create_outside(self, connection: Connection, database: Database, lanes: Iterable[Lane]) -> None:
        """Create and cache what the caller's transaction needs, on another connection.

        A lane that is created in a transaction blocks every submission to that lane until the transaction
        ends, and the caller's may be open for long.
        """
        unknown = {lane for lane in lanes if lane not in self._known}
        if unknown:
            async with caller_transaction.outside(connection, database) as own:
                self.remember(await self.find(own, unknown))

    def known(self, lanes: Iterable[Lane]) -> dict[Lane, int] | None:
        """The numbers of these lanes, if all of them are cached."""
        found = {lane: self._known.get(lane) for lane in lanes}
        return None if None in found.values() else cast("dict[Lane, int]", found)

    def remember(self, lanes: Mapping[Lane, int]) -> None:
        """Cache lanes, after the transaction that created them has committed."""
        if len(self._known) < _MOST_CACHED:
            self._known.update(lanes)
