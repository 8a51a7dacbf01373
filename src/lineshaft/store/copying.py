"""Many rows into tables by COPY, written out here: most columns of a batch have one value, spelled once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import sql

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
    made = copies[0]()
    for make in (*copies[1:], None):
        async with connection.cursor().copy(made.statement) as copy:
            await copy.write(made.text)
            if make is not None:
                made = make()


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
