"""Pauses: no claims of a type, or of any type, until it is resumed."""

from typing import Any

from lineshaft.engine.feed.actor import act_json
from lineshaft.engine.live import velocity
from lineshaft.engine.live.waking import wake_all
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column
from lineshaft.model.fields import check_fields

_SQL = catalog.load(__name__)
_ALL_TYPES = "*"


class Pauses:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def pause(self, type_: str | None = None, *, reason: str | None = None) -> None:
        """What is paused already keeps its reason."""
        if type_ is not None:
            check_fields(type=type_)
        async with self._database.connection() as connection:
            await connection.execute(_SQL["pause"], self._parameters(type_, reason))

    async def resume(self, type_: str | None = None, *, reason: str | None = None) -> bool:
        """Whether it was paused."""
        parameters = self._parameters(type_, reason)

        async def work(connection: Connection) -> bool:
            resumed = await fetch_column(connection, _SQL["resume"], parameters)
            if _ALL_TYPES in resumed:
                # Money that was spent before doesn't trigger the velocity limit again.
                await velocity.begin(connection, self._database.now)
            if resumed:
                await wake_all(connection)
            return bool(resumed)

        return await self._database.run(work)

    def _parameters(self, type_: str | None, reason: str | None) -> dict[str, Any]:
        return {**self._database.now, "type": type_ or _ALL_TYPES, "act": act_json(reason=reason)}
