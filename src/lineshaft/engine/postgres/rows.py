"""Rows by name: a value, a column or typed rows of a statement."""

from collections.abc import Mapping
from typing import Any, LiteralString, TypeVar

from psycopg import AsyncCursor
from psycopg.rows import dict_row, namedtuple_row, scalar_row

from lineshaft.engine.postgres.database import Connection

Row = TypeVar("Row")


async def fetch_value(connection: Connection, statement: LiteralString, parameters: Mapping[str, Any]) -> Any:
    """The value of a statement that always returns one row with one column."""
    async with connection.cursor(row_factory=scalar_row) as cursor:
        await cursor.execute(statement, parameters)
        return await cursor.fetchone()


async def fetch_column(
    connection: Connection, statement: LiteralString, parameters: Mapping[str, Any]
) -> list[Any]:
    """The first column of all rows."""
    async with connection.cursor(row_factory=scalar_row) as cursor:
        await cursor.execute(statement, parameters)
        return await cursor.fetchall()


async def fetch_rows(
    connection: Connection, kind: type[Row], statement: LiteralString, parameters: Mapping[str, Any]
) -> list[Row]:
    """All rows, as objects that have the columns as fields."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(statement, parameters)
        return [kind(**row) for row in await cursor.fetchall()]


async def fetch_row(
    connection: Connection, kind: type[Row], statement: LiteralString, parameters: Mapping[str, Any]
) -> Row | None:
    """The first row, if there is one."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(statement, parameters)
        row = await cursor.fetchone()
        return None if row is None else kind(**row)


async def send(
    connection: Connection, statement: LiteralString, parameters: Mapping[str, Any]
) -> AsyncCursor[Any]:
    """Send a statement of a pipeline. Its rows, which are fetched later, are named tuples of its columns."""
    return await connection.cursor(row_factory=namedtuple_row).execute(statement, parameters)
