"""Which tasks and DAGs have ended."""

from collections.abc import Sequence

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.postgres.rows import fetch_rows

_SQL = catalog.load(__name__)


class _EndRow(Struct, frozen=True):
    id: str
    state: str


async def read_ended(database: Database, ids: Sequence[str]) -> dict[str, str]:
    """For each id: `open`, ended as a `task` or as a `dag`, or `unknown`."""
    async with database.connection() as connection:
        found = await fetch_rows(connection, _EndRow, _SQL["ended"], {"ids": list(ids)})
    return {row.id: row.state for row in found}
