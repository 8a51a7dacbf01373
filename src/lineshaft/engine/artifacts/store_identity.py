"""The store of a database is recognised by an id that both have.

A process with another store, for instance a folder of its own machine, would write files that no other
process can read. So the ids are compared before anything is written.
"""

from typing import NamedTuple

from lineshaft.artifacts.store import Store, WrongStoreError
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_row
from lineshaft.ids import new_id

_SQL = catalog.load(__name__)


class _KnownStore(NamedTuple):
    id: str
    place: str


class StoreIdentity:
    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store
        self._is_checked = False

    async def is_known(self) -> bool:
        """Whether the database has a store."""
        async with self._database.connection() as connection:
            return await fetch_row(connection, _KnownStore, _SQL["read_store"], {}) is not None

    async def check(self) -> None:
        """Raise WrongStoreError unless this is the store of the database; the first store becomes it."""
        if self._is_checked:
            return
        async with self._database.connection() as connection:
            known = await fetch_row(connection, _KnownStore, _SQL["read_store"], {})
        if known is None:
            known = await self._database.run(self._introduce, pipeline=False)
        found = await self._store.read_id()
        if found != known.id:
            raise WrongStoreError(
                f"The artifact store of this process, {self._store.describe()}, has "
                f"{'no id' if found is None else f'the id {found}'}; the database belongs to the store "
                f"{known.id}, which was first used as {known.place}. Set LINESHAFT_ARTIFACTS to that store, "
                "or use a server (LINESHAFT_URL), which has it."
            )
        self._is_checked = True

    async def _introduce(self, connection: Connection) -> _KnownStore:
        """Give both the same id. Other processes wait for this transaction."""
        place = self._store.describe()
        existing = await self._store.read_id()
        store_id = existing or new_id("store")
        values = {"id": store_id, "place": place}
        if not await fetch_column(connection, _SQL["insert_store"], values):
            known = await fetch_row(connection, _KnownStore, _SQL["read_store"], {})
            if known is None:
                raise AssertionError("the row is there: another transaction inserted it")
            return known
        # A process that died after writing the id had stored nothing yet.
        if existing is not None and not await self._store.is_empty():
            raise WrongStoreError(
                f"The artifact store {place} has the id {existing} and contents, but this database has no "
                "store yet: it belongs to another database. Set LINESHAFT_ARTIFACTS to an empty folder or "
                "another prefix."
            )
        if existing is None and (created := await self._store.create_id(store_id)) != store_id:
            raise WrongStoreError(
                f"Another database took the artifact store {place} at this moment (id {created}). Set "
                "LINESHAFT_ARTIFACTS to another folder or prefix."
            )
        return _KnownStore(store_id, place)
