"""Document locks: how long they last, and their release by an operator.

Claims take locks, heartbeats renew them, and the ends of claims release them.
"""

from lineshaft.engine.feed.actor import act_json
from lineshaft.engine.live.parking import unpark_lock_waiters
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column
from lineshaft.errors import NotFoundError
from lineshaft.model.storable import is_storable

#: A lock expires this long after the last heartbeat of its holder, or later where heartbeats are rare.
LOCK_TTL_SEC = 600.0

_SQL = catalog.load(__name__)


class Locks:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def release(self, key: str, *, reason: str | None = None, holder: str | None = None) -> None:
        """Take a document lock away from its holder, or all its readers; the next waiter gets it.

        `holder`: only from this task.
        """
        who = "No task" if holder is None else f"Task {holder!r} no longer"
        unknown = NotFoundError(f"{who} holds a lock {key!r}.")
        if not is_storable(key) or not is_storable(holder or ""):
            raise unknown
        act = act_json(reason=reason)

        async def work(connection: Connection) -> None:
            parameters = {**self._database.now, "key": key, "holder": holder, "act": act}
            if not await fetch_column(connection, _SQL["delete_lock"], parameters):
                raise unknown
            await unpark_lock_waiters(connection, [key])

        await self._database.run(work)
