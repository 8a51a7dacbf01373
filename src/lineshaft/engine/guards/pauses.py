"""Pauses: no claims of a type, or of any type, until it is resumed."""

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column
from lineshaft.engine.transition.changes import wake_all
from lineshaft.model.fields import check_fields

_SQL = catalog.load(__name__)
_ALL_TYPES = "*"


class Pauses:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def pause(self, type_: str | None = None) -> None:
        if type_ is not None:
            check_fields(type=type_)
        async with self._database.connection() as connection:
            await connection.execute(_SQL["pause"], {**self._database.now, "type": type_ or _ALL_TYPES})

    async def resume(self, type_: str | None = None) -> bool:
        """Whether it was paused."""

        async def work(connection: Connection) -> bool:
            resumed = await fetch_column(connection, _SQL["resume"], {"type": type_ or _ALL_TYPES})
            if resumed:
                await wake_all(connection)
            return bool(resumed)

        return await self._database.run(work)
