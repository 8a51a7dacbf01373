"""Many rows into a table by COPY, written out here: most columns of a batch have one value, spelled once."""

from collections.abc import Mapping, Sequence
from typing import Any, LiteralString

from psycopg import sql

from lineshaft.store.database import Connection


async def copy_rows(
    connection: Connection,
    table: LiteralString,
    columns: Sequence[str],
    defaults: Mapping[str, Any],
    rows: Sequence[tuple[Any, ...]],
) -> None:
    """`defaults` are what the table puts in by itself: a column that has nothing else need not be sent."""
    names = []
    texts = []
    for name, values in zip(columns, zip(*rows, strict=True), strict=True):
        same = values.count(values[0]) == len(values)
        if same and values[0] == defaults.get(name):
            continue
        names.append(name)
        texts.append([_text(values[0])] * len(values) if same else map(_text, values))
    statement = sql.SQL("COPY lineshaft.{} ({}) FROM STDIN").format(
        sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, names))
    )
    async with connection.cursor().copy(statement) as copy:
        await copy.write("\n".join(map("\t".join, zip(*texts, strict=True))) + "\n")


def _text(value: Any) -> str:
    """COPY's text format: NULL is its own sign, and a few characters are escaped."""
    if value is None:
        return "\\N"
    if isinstance(value, bool):
        return "t" if value else "f"
    text = str(value)
    if "\\" in text or "\t" in text or "\n" in text or "\r" in text:
        return text.translate(_ESCAPES)
    return text


_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
