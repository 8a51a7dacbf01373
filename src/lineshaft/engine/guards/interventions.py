"""What an operator takes away by hand: a document lock, a slow-down."""

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.errors import NotFoundError
from lineshaft.model.storable import is_storable


class Interventions:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = catalog.load("guards/interventions")
        self._unpark = catalog.load("transition/changes")["unpark_lock_waiters"]
        self._wake_everybody = catalog.load("transition/operations")["wake_everybody"]

    async def release_lock(self, key: str) -> None:
        """Take a document lock from whoever holds it; the next waiter gets it."""

        async def work(connection: Connection) -> None:
            await self._delete(connection, "delete_lock", key, f"Nobody holds a lock {key!r}.")
            await connection.execute(self._unpark, {"keys": [key]})

        await self._database.run(work)

    async def end_slowdown(self, key: str) -> None:
        """`model:NAME`, or * for everybody."""

        async def work(connection: Connection) -> None:
            await self._delete(connection, "delete_slowdown", key, f"There is no slow-down {key!r} in force.")
            await connection.execute(self._wake_everybody, {})

        await self._database.run(work)

    async def _delete(self, connection: Connection, statement: str, key: str, missing: str) -> None:
        if not is_storable(key):
            raise NotFoundError(missing)
        cursor = await connection.execute(self._sql[statement], {**self._database.now, "key": key})
        if await cursor.fetchone() is None:
            raise NotFoundError(missing)
