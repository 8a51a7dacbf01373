"""Lanes: found or made, and remembered, because every new task needs the number of its lane."""

from collections.abc import Iterable, Mapping
from typing import cast

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import array_literal
from lineshaft.model.priority import Lane

#: A notification has 8,000 bytes at most; more lanes than this are all of them.
_NAMED = 700
#: They are few and never change; bounded in case somebody makes millions.
_REMEMBERED = 10_000


def named(lane_ids: Iterable[int]) -> str:
    """As the payload of a notification that these lanes have work."""
    ids = sorted(set(lane_ids))
    return ",".join(map(str, ids)) if len(ids) < _NAMED else "*"


class Lanes:
    def __init__(self) -> None:
        self._known: dict[Lane, int] = {}
        self._sql = catalog.load("submit/submission")

    async def find(self, connection: Connection, lanes: Iterable[Lane]) -> dict[Lane, int]:
        """The numbers of these lanes, made if need be, as part of the connection's transaction."""
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
            await connection.execute(self._sql["ensure_lanes"], columns)
            cursor = await connection.execute(self._sql["find_lanes"], columns)
            found |= {unknown[n - 1]: lane_id for n, lane_id in await cursor.fetchall()}
        return found

    def known(self, lanes: Iterable[Lane]) -> dict[Lane, int] | None:
        """Their numbers, if all of them were used before."""
        found = {lane: self._known.get(lane) for lane in lanes}
        return None if None in found.values() else cast("dict[Lane, int]", found)

    def remember(self, lanes: Mapping[Lane, int]) -> None:
        """To be called once they are committed: what is rolled back never existed."""
        if len(self._known) < _REMEMBERED:
            self._known.update(lanes)
