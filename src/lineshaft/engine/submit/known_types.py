"""The defaults of all types, cached by each process.

A submission sends the revision that it was prepared with, and the statement that writes it refuses another
one than the database has: the process reads the defaults again, and repeats the submission. So a cache is
never out of date for longer than one submission, and costs no round trip. What a submission can't see yet,
because the change commits later, is corrected when its tasks are claimed (guards/type_limits.py).
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec

from lineshaft.engine.postgres import caller_transaction, catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.errors import UnavailableError
from lineshaft.model.tasks import KnownType, KnownTypes, TypeLimits

_SQL = catalog.load(__name__)
#: As `refuse_stale_types_1` raises it.
_STALE = "LS002"
#: As `refuse_unchecked_1` raises it.
_UNCHECKED = "LS003"
#: Defaults change when agents with new code start: rarely more than once while a submission runs.
_TRIES = 20
T = TypeVar("T")


class _TypeRow(NamedTuple):
    type: str
    revision: int
    limits: str


class TypeCache:
    def __init__(self, database: Database) -> None:
        self._database = database
        #: None: not read yet.
        self._types: KnownTypes | None = None
        self._checks_waiting = False

    async def submit(
        self, write: Callable[[KnownTypes], Awaitable[T]], connection: Connection | None = None
    ) -> T:
        """Write with the defaults of types, and again if they have changed in the meantime.

        `connection`: of the transaction that the submission is part of. Its snapshot may be older than the
        cache, so it reads the defaults itself.
        """
        types = self._types or await self._read(connection)
        for _ in range(_TRIES):
            try:
                return await write(types)
            except Exception as error:
                state = caller_transaction.sqlstate(error)
                if state not in {_STALE, _UNCHECKED}:
                    raise
                self._checks_waiting = self._checks_waiting or state == _UNCHECKED
            types = await self._read(connection)
        raise UnavailableError("Defaults of types are changing all the time. Nothing was changed; try again.")

    async def _read(self, theirs: Connection | None) -> KnownTypes:
        if theirs is None:
            async with self._database.connection() as connection:
                rows = await fetch_rows(connection, _TypeRow, _SQL["read_types"], {})
        else:
            rows = await fetch_rows(theirs, _TypeRow, _SQL["read_types"], {})
        by_name = {row.type: KnownType(_decode(row.limits), row.revision) for row in rows}
        revision = max((row.revision for row in rows), default=0)
        self._types = KnownTypes(by_name, revision, self._checks_waiting)
        return self._types

    def forget_waiting(self) -> None:
        """No quota bounds waiting tasks any more."""
        self._checks_waiting, self._types = False, None


_decode = msgspec.json.Decoder(TypeLimits).decode
