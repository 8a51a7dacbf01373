"""When something becomes claimable without a notification: delays end, leases expire, guards open."""

from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.types.work import DueRetries, LeftBehind

_SQL = catalog.load(__name__)


class Openings(Struct, frozen=True):
    """Seconds until each opens; below zero: overdue; None: never."""

    due_sec: float | None
    lease_sec: float | None
    guard_sec: float | None
    now: datetime
    #: Since the last call a slowdown ended, a breaker could be probed, or a new day's budget began.
    opened: bool


class Upcoming:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def openings(self, since: datetime | None = None) -> Openings:
        """`since` is the `now` of the last call; None: this is the first."""
        parameters = {**self._database.now, "since": since}
        async with self._database.connection() as connection:
            (openings,) = await fetch_rows(connection, Openings, _SQL["openings"], parameters)
        return openings

    async def retry_within(self, types: Sequence[str], within_sec: float) -> DueRetries:
        """Retries of these types that are due within `within_sec`."""
        parameters = {**self._database.now, "types": list(types), "within": within_sec}
        async with self._database.connection() as connection:
            (retries,) = await fetch_rows(connection, DueRetries, _SQL["retry_within"], parameters)
        return retries

    async def left_behind(self, types: Sequence[str]) -> LeftBehind:
        parameters = {**self._database.now, "types": list(types)}
        async with self._database.connection() as connection:
            (tasks,) = await fetch_rows(connection, LeftBehind, _SQL["left_behind"], parameters)
        return tasks
