"""Removal of lanes that no task uses: otherwise their number would only grow."""

from datetime import datetime

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column

#: Between retiring and dating a lane. Much longer than `CACHED_SEC` of submit/lanes.py, and than any process
#: takes from reading its cache to the statement that uses it.
UNUSED_SEC = 3_600.0

_SQL = catalog.load(__name__)


async def remove_lanes(connection: Connection, now: dict[str, datetime | None]) -> int:
    """Take each unused lane one step further; returns how many were deleted."""
    await connection.execute(_SQL["plan_to_scan"])
    deleted = await fetch_column(connection, _SQL["delete_lanes"], {})
    await connection.execute(_SQL["date_lanes"], {**now, "after": UNUSED_SEC})
    await connection.execute(_SQL["retire_lanes"], now)
    return len(deleted)
