"""Upstream tasks: locked as they are until new edges to them are committed."""

from collections.abc import Iterable

from psycopg.rows import dict_row, scalar_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.model.states import Status

_SQL = catalog.load(__name__)


async def hold_upstream(connection: Connection, names: Iterable[str]) -> dict[str, Status | None]:
    """Until the end of the transaction these tasks neither end nor are revived.

    Returns how each has ended; None: it is live. Unknown tasks are missing.
    """
    parameters = {"ids": list(names)}
    held: set[str] = set()
    while True:
        # All three are sent before the first result is awaited.
        ended, live = connection.cursor(row_factory=scalar_row), connection.cursor(row_factory=scalar_row)
        await ended.execute(_SQL["lock_ended_upstream"], parameters)
        await live.execute(_SQL["lock_upstream"], parameters)
        upstream = connection.cursor(row_factory=dict_row)
        await upstream.execute(_SQL["read_upstream"], parameters)
        held |= {*await ended.fetchall(), *await live.fetchall()}
        statuses = {
            task["id"]: None if task["status"] is None else Status(task["status"])
            for task in await upstream.fetchall()
        }
        # A task that ended, or was revived, under the lock of another transaction isn't held yet.
        if held >= statuses.keys():
            return statuses
