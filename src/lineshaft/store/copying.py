"""Many rows into tables by COPY, written out here: most columns of a batch have one value, spelled once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import abc, errors, sql
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from lineshaft.store.database import Connection


@dataclass(frozen=True, slots=True)
class Same:
    """A column that has one value in all rows."""

    value: Any


Column = Sequence[Any] | Same


@dataclass(frozen=True, slots=True)
class Copy:
    statement: sql.Composed
    text: str


def written_out(table: LiteralString, columns: Mapping[str, Column], defaults: Mapping[str, Any]) -> Copy:
    """`defaults` are what the table puts in by itself: a column that has nothing else need not be sent.

    One column at least is a list.
    """
    names: list[str] = []
    texts: list[Iterable[str]] = []
    same: dict[str, str] = {}
    for name, column in columns.items():
        if isinstance(column, Same):
            value = column.value
        elif column.count(column[0]) == len(column) > 1:
            value = column[0]
        else:
            names.append(name)
            texts.append(_texts(column))
            continue
        if value != defaults.get(name):
            same[name] = _text(value)
    end = "".join(f"\t{text}" for text in same.values()) + "\n"
    statement = sql.SQL("COPY lineshaft.{} ({}) FROM STDIN").format(
        sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, [*names, *same]))
    )
    return Copy(statement, end.join(map("\t".join, zip(*texts, strict=True))) + end)


async def copy_in_turn(connection: Connection, copies: Sequence[Callable[[], Copy]]) -> None:
    """The next is written out while the server takes in the one before."""
    waiting = iter(copies)
    made: Copy | None = next(waiting)()
    while made is not None:
        following: list[Copy] = []
        make = next(waiting, None)
        statement = made.statement.as_bytes(connection)
        await connection.wait(_copying(connection.pgconn, statement, made.text.encode(), make, following))
        made = following[0] if following else None


def _copying(
    pgconn: PGconn,
    statement: bytes,
    data: bytes,
    make: Callable[[], Copy] | None,
    following: list[Copy],
) -> abc.PQGen[None]:
    """One COPY by libpq, which is given everything at once: in pieces the event loop is asked about each."""
    pgconn.send_query(statement)
    yield from _send(pgconn)
    result = yield from _result(pgconn)
    if result is not None and result.status == ExecStatus.COPY_IN:
        pgconn.put_copy_data(data)
        pgconn.put_copy_end()
        # As much as goes at once: the server has something to do.
        pgconn.flush()
        if make is not None:
            following.append(make())
        yield from _send(pgconn)
        result = yield from _result(pgconn)
    failed = None
    while result is not None:
        if result.status == ExecStatus.FATAL_ERROR:
            failed = result
        result = yield from _result(pgconn)
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
    if set(map(type, values)) == {str}:
        # Ids, mostly, in which nothing needs an escape: one look at all of them tells.
        together = "\n".join(values)
        if together.count("\n") == len(values) - 1 and not any(sign in together for sign in "\\\t\r"):
            return values
    return map(_text, values)


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
