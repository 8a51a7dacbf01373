"""Servers that run. Each reports the limits in its settings, so that people see which disagree."""

from collections.abc import Mapping
from typing import Any

import msgspec

from lineshaft import ids
from lineshaft.engine.guards.limits import limits_as_shown
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database

_SQL = catalog.load(__name__)


class ThisServer:
    """The row of one server process."""

    def __init__(self, database: Database, name: str, version: str, limits: Mapping[str, Any]) -> None:
        self._database = database
        self._values = {
            "id": ids.new_id("server"),
            "name": name,
            "version": version,
            "limits": msgspec.json.encode(limits_as_shown(limits)).decode(),
        }

    async def report(self) -> None:
        """The server runs."""
        async with self._database.connection() as connection:
            await connection.execute(_SQL["report_server"], {**self._database.now, **self._values})

    async def remove(self) -> None:
        async with self._database.connection() as connection:
            await connection.execute(_SQL["remove_server"], self._values)
