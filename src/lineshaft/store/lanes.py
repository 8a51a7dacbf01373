"""Lanes: found or made, and remembered, because every new task needs the number of its lane."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from lineshaft.model.priority import Lane
from lineshaft.sql import catalog
from lineshaft.store.database import Connection

#: They are few and never change; bounded in case somebody makes millions.
_REMEMBERED = 10_000


class Lanes:
    def __init__(self) -> None:
        self._known: dict[Lane, int] = {}
        self._sql = catalog.load("submission")

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


def array_literal(values: Sequence[object]) -> str:
    """PostgreSQL's text form of an array.

    Arrays of different lengths can't be elements of one array parameter, and for long ones this is many times
    quicker than the driver's own way.
    """
    if not values:
        return "{}"
    nones = values.count(None)
    if nones == len(values):
        return "{" + "NULL," * (nones - 1) + "NULL}"
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return "{" + ",".join(map(str, values)) + "}"
    if kinds == {str}:
        # Ids, mostly, in which nothing needs an escape: one look at all of them tells.
        joined = '","'.join(cast("Sequence[str]", values))
        if "\\" not in joined and joined.count('"') == 2 * (len(values) - 1):
            return '{"' + joined + '"}'
    return "{" + ",".join([_element(value) for value in values]) + "}"


def column_literal(values: Sequence[object]) -> str | None:
    """For an array that is one of several in an `unnest`, which fills up the shorter ones with NULLs."""
    return None if values.count(None) == len(values) else array_literal(values)


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    if not isinstance(value, str):
        return str(value)
    if "\\" in value or '"' in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{value}"'
