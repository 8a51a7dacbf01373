"""Many rows into a table by COPY. The rows are formatted here: a column with one value is formatted once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, LiteralString

from msgspec import Struct
from psycopg import abc, errors, sql
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from lineshaft.engine.postgres.asyncpg_connection import AsyncpgConnection
from lineshaft.engine.postgres.database import Connection


class Constant(Struct, frozen=True):
    """A column that has the same value in all rows."""

    value: Any


Column = Sequence[Any] | Constant


class Copy(Struct, frozen=True):
    table: LiteralString
    columns: Sequence[str]
    #: The rows, in parts; a part is made while the server processes the one before.
    parts: Iterable[bytes]

    @property
    def statement(self) -> sql.Composed:
        return sql.SQL("COPY lineshaft.{} ({}) FROM STDIN").format(
            sql.Identifier(self.table), sql.SQL(", ").join(map(sql.Identifier, self.columns))
        )


class RowFormat:
    """Rows of a table that differ in some columns and share the values of all others."""

    def __init__(
        self,
        table: LiteralString,
        differ: Sequence[str],
        same: Mapping[str, Any],
        defaults: Mapping[str, Any],
    ) -> None:
        """`defaults` are the table's own defaults, which need not be sent."""
        sent = {name: _text(value) for name, value in same.items() if value != defaults.get(name)}
        self._end = "".join(f"\t{text}" for text in sent.values()) + "\n"
        self._table = table
        self._columns = [*differ, *sent]

    def copy(self, parts: Iterable[bytes]) -> Copy:
        return Copy(self._table, self._columns, parts)

    def rows(self, *columns: Sequence[Any]) -> bytes:
        """Takes the columns in the order of `differ`, at least one."""
        texts = map("\t".join, zip(*map(_texts, columns), strict=True))
        return (self._end.join(texts) + self._end).encode()


def copy_of(table: LiteralString, columns: Mapping[str, Column], defaults: Mapping[str, Any]) -> Copy:
    """All rows in one part. At least one column is a list."""
    differ: dict[str, Sequence[Any]] = {}
    same: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Constant):
            same[name] = column.value
        elif not isinstance(column[0], datetime) and column.count(column[0]) == len(column) > 1:
            # Not times: Python compares by wall clock, so equal times may be an hour apart in autumn.
            same[name] = column[0]
        else:
            differ[name] = column
    row_format = RowFormat(table, list(differ), same, defaults)
    return row_format.copy([row_format.rows(*differ.values())])


async def copy_all(connection: Connection, copies: Sequence[Callable[[], Copy]]) -> None:
    """One after the other; each is formatted while the server processes the one before."""
    other_driver: object = connection
    if isinstance(other_driver, AsyncpgConnection):
        for make in copies:
            copy = make()
            await other_driver.copy(copy.table, copy.columns, copy.parts)
        return
    remaining = iter(copies)
    current: Copy | None = next(remaining)()
    while current is not None:
        following: list[Copy] = []
        make_next = next(remaining, None)
        statement = current.statement.as_bytes(connection)
        await connection.wait(_copy(connection.pgconn, statement, current.parts, make_next, following))
        current = following[0] if following else None


def _copy(
    pgconn: PGconn,
    statement: bytes,
    parts: Iterable[bytes],
    make_next: Callable[[], Copy] | None,
    following: list[Copy],
) -> abc.PQGen[None]:
    """One COPY by libpq, in large parts: the event loop is not visited for each row."""
    pgconn.send_query(statement)
    yield from _send(pgconn)
    result = yield from _result(pgconn)
    failed: PGresult | None = None
    rejected: Exception | None = None
    if result is not None and result.status == ExecStatus.COPY_IN:
        try:
            for part in parts:
                pgconn.put_copy_data(part)
                # Send as much as the socket takes, so that the server is busy while the next part is made.
                pgconn.flush()
        except Exception as error:  # noqa: BLE001 - on any error the server must not wait for the rest
            rejected = error
            pgconn.put_copy_end(b"given up")
        else:
            pgconn.put_copy_end()
        pgconn.flush()
        if make_next is not None and rejected is None:
            following.append(make_next())
        yield from _send(pgconn)
        result = yield from _result(pgconn)
    while result is not None:
        if result.status == ExecStatus.FATAL_ERROR:
            failed = result
        result = yield from _result(pgconn)
    if rejected is not None:
        raise rejected
    if failed is not None:
        raise errors.error_from_result(failed)


def _send(pgconn: PGconn) -> abc.PQGen[None]:
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            # The server may report an error before everything is sent.
            pgconn.consume_input()


def _result(pgconn: PGconn) -> abc.PQGen[PGresult | None]:
    while pgconn.is_busy():
        if (yield Wait.R):
            pgconn.consume_input()
    return pgconn.get_result()


def _texts(values: Sequence[Any]) -> Iterable[str]:
    kinds = set(map(type, values))
    if kinds == {str}:
        # Mostly ids, which need no escapes: one check for all of them.
        together = "\n".join(values)
        if together.count("\n") == len(values) - 1 and not any(sign in together for sign in "\\\t\r"):
            return values
    elif kinds <= _FEW_VALUES and len(kinds - {type(None)}) == 1:
        spelled = {value: _text(value) for value in set(values)}
        return [spelled[value] for value in values]
    return map(_text, values)


#: Types of columns that mostly have a few values in many rows.
_FEW_VALUES = frozenset({int, bool, float, type(None)})


def _text(value: Any) -> str:
    """COPY's text format."""
    if value is None:
        return "\\N"
    if isinstance(value, bool):
        return "t" if value else "f"
    text = str(value)
    for sign, escaped in _ESCAPES:
        text = text.replace(sign, escaped)
    return text


#: The backslash first: the other escapes contain one.
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
