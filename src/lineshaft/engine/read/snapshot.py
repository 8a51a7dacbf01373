"""What all parts of the read model have in common: one snapshot for each answer, pages and cursors."""

import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, TypeVar

import msgspec
from psycopg import AsyncCursor
from psycopg.rows import dict_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.model.storable import is_storable

T = TypeVar("T")


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """Runs named statements within one snapshot."""

    connection: Connection
    sql: dict[str, LiteralString]
    now: dict[str, Any]

    async def send(self, name: str, **parameters: Any) -> AsyncCursor[Row]:
        """Without waiting: statements that are sent together are answered in one round trip."""
        cursor = self.connection.cursor(row_factory=dict_row)
        await cursor.execute(self.sql[name], {**self.now, **parameters})
        return cursor

    async def rows(self, name: str, **parameters: Any) -> list[Row]:
        return await (await self.send(name, **parameters)).fetchall()


async def in_snapshot(
    database: Database, work: Callable[[Reader], Awaitable[T]], *, for_filters: bool = False
) -> T:
    async def read(connection: Connection) -> T:
        reader = Reader(connection, catalog.load("read/queries", "read/listing", "read/stats"), database.now)
        await connection.execute(reader.sql["snapshot"], {})
        if for_filters:
            await connection.execute(reader.sql["plan_for_filters"], {})
        return await work(reader)

    return await database.run(read)


def refuse_unstorable(**filters: Sequence[str]) -> None:
    faults = [
        (name, f"must be text that PostgreSQL can hold, got {shown(value)}")
        for name, values in filters.items()
        for value in values
        if not is_storable(value)
    ]
    if faults:
        raise InvalidInputError(errors=faults)


# Cursors: the key of the last row that was passed, as JSON in URL-safe base 64. The tag of its type says
# which list it belongs to.

Key = TypeVar("Key", bound=msgspec.Struct)


def encode_cursor(key: msgspec.Struct) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).rstrip(b"=").decode("ascii")


def decode_cursor(text: str | None, kind: type[Key]) -> Key | None:
    if text is None:
        return None
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        key = msgspec.json.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=kind)
        if not all(is_storable(value) for value in msgspec.structs.astuple(key) if isinstance(value, str)):
            raise ValueError  # noqa: TRY301 - one message for all that is no cursor
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        fault = f"must be the next_cursor of the same list and order, as it was given, got {shown(text)}"
        raise InvalidInputError(errors=[("cursor", fault)]) from None
    return key
