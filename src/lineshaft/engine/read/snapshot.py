"""Statements that read from one snapshot of the database."""

from collections.abc import Awaitable, Callable
from typing import Any, LiteralString, TypeVar

from msgspec import Struct
from psycopg import AsyncCursor
from psycopg.rows import dict_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database

T = TypeVar("T")
Row = dict[str, Any]

_SQL = catalog.load(__name__)


class Reader(Struct, frozen=True):
    """Runs statements within one snapshot."""

    connection: Connection
    now: dict[str, Any]

    async def send(self, statement: LiteralString, **parameters: Any) -> AsyncCursor[Row]:
        """Send without waiting for the result: statements sent together take one round trip."""
        cursor = self.connection.cursor(row_factory=dict_row)
        await cursor.execute(statement, {**self.now, **parameters})
        return cursor

    async def rows(self, statement: LiteralString, **parameters: Any) -> list[Row]:
        return await (await self.send(statement, **parameters)).fetchall()


async def in_snapshot(
    database: Database, work: Callable[[Reader], Awaitable[T]], *, for_filters: bool = False
) -> T:
    async def read(connection: Connection) -> T:
        await connection.execute(_SQL["snapshot"], {})
        if for_filters:
            await connection.execute(_SQL["plan_for_filters"], {})
        return await work(Reader(connection, database.now))

    return await database.run(read)
