"""An asyncpg connection with the part of psycopg's interface that submission uses.

asyncpg is never imported: the caller brings the connection. Its errors reach the caller as they are.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Self

from psycopg.rows import dict_row, scalar_row, tuple_row

from lineshaft.engine.postgres.pipeline import PLACEHOLDER, as_text


def is_asyncpg(given: Any) -> bool:
    """A connection, one from a pool, or a subclass."""
    return any(base.__module__.partition(".")[0] == "asyncpg" for base in type(given).__mro__)


class AsyncpgConnection:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @asynccontextmanager
    async def nested(self) -> AsyncIterator[None]:
        """A savepoint in the caller's transaction; outside one, a transaction."""
        if not self._connection.is_in_transaction():
            async with self._connection.transaction():
                yield
            return
        # Not by asyncpg's transaction(), which refuses a transaction that was begun by an SQL statement.
        await self._connection.execute("SAVEPOINT lineshaft")
        try:
            yield
        except BaseException:
            if not self._connection.is_closed():
                await self._connection.execute("ROLLBACK TO SAVEPOINT lineshaft")
                await self._connection.execute("RELEASE SAVEPOINT lineshaft")
            raise
        await self._connection.execute("RELEASE SAVEPOINT lineshaft")

    async def execute(self, statement: str, parameters: Mapping[str, Any]) -> "_Cursor":
        return await self.cursor().execute(statement, parameters)

    def cursor(self, *, row_factory: Any = tuple_row) -> "_Cursor":
        return _Cursor(self._connection, _ROWS[row_factory])

    async def copy(self, table: str, columns: Sequence[str], parts: Iterable[bytes]) -> None:
        async def source() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        await self._connection.copy_to_table(
            table, schema_name="lineshaft", columns=columns, source=source(), format="text"
        )


class _Cursor:
    def __init__(self, connection: Any, make_row: Callable[[Any], Any]) -> None:
        self._connection = connection
        self._make_row = make_row
        self._rows: list[Any] = []

    async def execute(self, statement: str, parameters: Mapping[str, Any]) -> Self:
        text, names = _numbered(statement)
        found = await self._connection.fetch(text, *(_decoded(as_text(parameters[name])) for name in names))
        self._rows = [self._make_row(record) for record in found]
        return self

    async def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    async def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


#: The row factories that submission uses.
_ROWS: Mapping[Any, Callable[[Any], Any]] = {
    tuple_row: tuple,
    dict_row: dict,
    scalar_row: lambda record: record[0],
}


@cache
def _numbered(statement: str) -> tuple[str, list[str]]:
    """The statement with parameters by number, and their names in order.

    All parameters are sent as text, which the casts in the statement convert: asyncpg would want each in the
    Python type that it has for the PostgreSQL type.
    """
    names: list[str] = []

    def number(placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        if name is None:
            return "%"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}::text"

    return PLACEHOLDER.sub(number, statement), names


def _decoded(text: bytes | None) -> str | None:
    return None if text is None else text.decode()
