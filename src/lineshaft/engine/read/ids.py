"""Which tasks and DAGs a short form or a prefix of an id means."""

from typing import Literal

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader
from lineshaft.model.short_ids import ranges
from lineshaft.model.storable import is_storable

#: More ids than this are not listed: a longer prefix is needed.
MOST_IDS = 20

_SQL = catalog.load(__name__)
_STATEMENTS = {"task": _SQL["task_ids"], "dag": _SQL["dag_ids"]}

IdKind = Literal["task", "dag"]


async def find_ids(reader: Reader, text: str, kinds: tuple[IdKind, ...]) -> list[str]:
    """The ids in order, at most `MOST_IDS` of each kind; an id that is complete means only itself."""
    if not is_storable(text):
        return []
    await reader.send(_SQL["plan_by_index"])
    found: list[str] = []
    for kind in kinds:
        places = ranges(kind, text)
        rows = await reader.rows(
            _STATEMENTS[kind],
            text=text,
            lows=[place.low for place in places],
            highs=[place.high for place in places],
            ends=[place.end for place in places],
            most=MOST_IDS,
        )
        found += [row["id"] for row in rows]
    return [text] if text in found else found
