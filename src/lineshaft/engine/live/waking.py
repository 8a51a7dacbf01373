"""Notifications for processes that wait for work."""

from collections.abc import Sequence

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection

_SQL = catalog.load(__name__)


async def wake_ready(connection: Connection, ids: Sequence[str]) -> None:
    """Notify processes that wait for work about tasks that have just become READY."""
    await connection.execute(_SQL["wake_ready"], {"ids": list(ids)})


async def wake_all(connection: Connection) -> None:
    """Notify all processes that wait for work."""
    await connection.execute(_SQL["wake_all"], {})
