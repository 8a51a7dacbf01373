"""Document locks that programs outside of Lineshaft hold too: what a claim asks, and the rows it leaves.

The engine knows no such program. It asks before a claimed task is handed out, gives tasks back whose lock is
refused, and keeps them from being claimed as long as a row says that somebody outside holds the lock.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from msgspec import Struct

from lineshaft.engine.live.parking import unpark_lock_waiters
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows, fetch_value
from lineshaft.engine.read.why import OUTSIDE

_SQL = catalog.load(__name__)


class GrantedLock(Struct, frozen=True):
    key: str
    holder_task_id: str
    token: int


class OutsideLocks(Protocol):
    async def open(self, rows: "OutsideRows") -> None: ...

    async def close(self) -> None: ...

    async def take(self, lock_keys: Collection[str]) -> Mapping[str, str]:
        """Take the locks of tasks that were just claimed; returns the holders of those that others hold."""
        ...

    async def mark(self, holders: Mapping[str, str]) -> None:
        """The tasks of these keys were given back."""
        ...


class OutsideRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def granted(self, lock_keys: Collection[str]) -> list[GrantedLock]:
        """Those of these locks that tasks hold."""
        if not lock_keys:
            return []
        async with self._database.connection() as connection:
            return await fetch_rows(connection, GrantedLock, _SQL["granted"], {"keys": list(lock_keys)})

    async def documents(self) -> list[str]:
        """All document locks that tasks hold: as many as there are such tasks in agents' hands."""
        async with self._database.connection() as connection:
            return list(await fetch_column(connection, _SQL["documents"], {}))

    async def is_task(self, name: str) -> bool:
        async with self._database.connection() as connection:
            return bool(await fetch_value(connection, _SQL["is_task"], {"id": name}))

    async def mark(self, holders: Mapping[str, str], seconds: float) -> None:
        """Somebody outside holds these locks, by key, for the next seconds; not those that tasks hold."""
        if not holders:
            return
        parameters = {
            **self._database.now,
            "keys": list(holders),
            "holders": [OUTSIDE + holder for holder in holders.values()],
            "seconds": seconds,
        }
        async with self._database.connection() as connection:
            await connection.execute(_SQL["mark"], parameters)

    async def unmark(self, lock_keys: Collection[str]) -> None:
        """These locks are free again outside: tasks that wait for them can be claimed."""

        async def work(connection: Connection) -> None:
            keys = await fetch_column(connection, _SQL["unmark"], {"keys": list(lock_keys)})
            if keys:
                await unpark_lock_waiters(connection, keys)

        await self._database.run(work)
