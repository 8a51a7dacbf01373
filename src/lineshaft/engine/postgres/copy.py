"""Many rows into tables by COPY, written out here: most columns of a batch have one value, spelled once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

from psycopg import abc, errors, sql
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from lineshaft.engine.postgres.database import Connection


@dataclass(frozen=True, slots=True)
class Constant:
    """A column that has one value in all rows."""

    value: Any


Column = Sequence[Any] | Constant


@dataclass(frozen=True, slots=True)
class Copy:
    statement: sql.Composed
    #: The rows, in parts; the next is made while the server takes in the one before.
    parts: Iterable[bytes]


class Layout:
    """Rows of a table that differ in some columns, and have the same in all others."""

    def __init__(
        self,
        table: LiteralString,
        differ: Sequence[str],
        same: Mapping[str, Any],
        defaults: Mapping[str, Any],
    ) -> None:
        """`defaults` are what the table puts in by itself: that need not be sent."""
        told = {name: _text(value) for name, value in same.items() if value != defaults.get(name)}
        self._end = "".join(f"\t{text}" for text in told.values()) + "\n"
        self.statement = sql.SQL("COPY lineshaft.{} ({}) FROM STDIN").format(
            sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, [*differ, *told]))
        )

    def rows(self, *columns: Sequence[Any]) -> bytes:
        """One column at least; in the order of `differ`."""
        texts = map("\t".join, zip(*map(_texts, columns), strict=True))
        return (self._end.join(texts) + self._end).encode()


def copy_of(table: LiteralString, columns: Mapping[str, Column], defaults: Mapping[str, Any]) -> Copy:
    """All rows in one part. One column at least is a list."""
    differ: dict[str, Sequence[Any]] = {}
    same: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Constant):
            same[name] = column.value
        elif not isinstance(column[0], datetime) and column.count(column[0]) == len(column) > 1:
            # (Not times: two that Python calls equal may be an hour apart, when clocks are put back.)
            same[name] = column[0]
        else:
            differ[name] = column
    layout = Layout(table, list(differ), same, defaults)
    return Copy(layout.statement, [layout.rows(*differ.values())])


async def copy_all(connection: Connection, copies: Sequence[Callable[[], Copy]]) -> None:
    """The next is written out while the server takes in the one before."""
    waiting = iter(copies)
    made: Copy | None = next(waiting)()
    while made is not None:
        following: list[Copy] = []
        make = next(waiting, None)
        statement = made.statement.as_bytes(connection)
        await connection.wait(_copying(connection.pgconn, statement, made.parts, make, following))
        made = following[0] if following else None


def _copying(
    pgconn: PGconn,
    statement: bytes,
    parts: Iterable[bytes],
    make: Callable[[], Copy] | None,
    following: list[Copy],
) -> abc.PQGen[None]:
    """One COPY by libpq, which is given large parts: the event loop need not be asked about each row."""
    pgconn.send_query(statement)
    yield from _send(pgconn)
    result = yield from _result(pgconn)
    failed: PGresult | None = None
    refused: Exception | None = None
    if result is not None and result.status == ExecStatus.COPY_IN:
        try:
            for part in parts:
                pgconn.put_copy_data(part)
                # As much as goes at once: the server has something to do.
                pgconn.flush()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server must not wait for the rest
            refused = error
            pgconn.put_copy_end(b"given up")
        else:
            pgconn.put_copy_end()
        pgconn.flush()
        if make is not None and refused is None:
            following.append(make())
        yield from _send(pgconn)
        result = yield from _result(pgconn)
    while result is not None:
        if result.status == ExecStatus.FATAL_ERROR:
            failed = result
        result = yield from _result(pgconn)
    if refused is not None:
        raise refused
    if failed is not None:
        raise errors.error_from_result(failed)


def _send(pgconn: PGconn) -> abc.PQGen[None]:
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            # What is wrong may be told before everything is sent.
            pgconn.consume_input()


def _result(pgconn: PGconn) -> abc.PQGen[PGresult | None]:
    while pgconn.is_busy():
        if (yield Wait.R):
            pgconn.consume_input()
    return pgconn.get_result()


def _texts(values: Sequence[Any]) -> Iterable[str]:
    kinds = set(map(type, values))
    if kinds == {str}:
        # Ids, mostly, in which nothing needs an escape: one look at all of them tells.
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
    """COPY's text format: NULL is its own sign, and a few characters are escaped."""
    if value is None:
        return "\\N"
    if isinstance(value, bool):
        return "t" if value else "f"
    text = str(value)
    for sign, escaped in _ESCAPES:
        text = text.replace(sign, escaped)
    return text


#: The escape's own sign first: the others bring more of it.
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
