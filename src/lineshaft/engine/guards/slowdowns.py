"""Slow-downs after a rate limit (R-214, R-218): claims leave a model, a provider or everything alone.

The latest signal decides, even when it is the shorter one. Agents hear of it with claims and heartbeats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.transition.changes import wake_all
from lineshaft.errors import NotFoundError
from lineshaft.model.retry import LONGEST_DELAY_SEC, fault_in, number_fault, raise_faults
from lineshaft.model.storable import is_storable, replace_unstorable

MAX_REASON = 500
MAX_KEY = 500
EVERYONE = "*"
_PREFIXES = ("model:", "provider:")


@dataclass(frozen=True, slots=True)
class RateLimited:
    """A task met a rate limit: whoever uses the same model shall slow down."""

    agent_id: str | None
    model: str | None
    slowdown_sec: float
    reason: str


class Slowdowns:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = catalog.load(__name__)

    async def signal_slowdowns(self, connection: Connection, limits: Sequence[RateLimited]) -> None:
        """As part of the transaction that records the rate limits."""
        told = [limit for limit in limits if limit.slowdown_sec > 0]
        if not told:
            return
        await connection.execute(
            self._sql["signal_slowdowns"],
            {
                **self._database.now,
                "agent_ids": [limit.agent_id for limit in told],
                "models": [limit.model for limit in told],
                "waits": [limit.slowdown_sec for limit in told],
                "reasons": [limit.reason[:MAX_REASON] for limit in told],
            },
        )

    async def slow_down(self, key: str, wait_sec: float, reason: str | None = None) -> datetime | None:
        """Broadcast a slow-down of `model:NAME`, of all models `NAME/…` (`provider:NAME`), or of all (`*`).

        Gives when it is over; None: a newer signal is in force.
        """
        faults = {"key": _key_fault(key), "wait_sec": number_fault(wait_sec, 0, LONGEST_DELAY_SEC)}
        raise_faults(faults)
        told = None if reason is None else replace_unstorable(reason[:MAX_REASON])
        async with self._database.connection() as connection:
            cursor = await connection.execute(
                self._sql["broadcast_slowdown"],
                {**self._database.now, "key": key, "wait": wait_sec, "reason": told},
            )
            row = await cursor.fetchone()
        return None if row is None else row[0]

    async def end(self, key: str) -> None:
        """End a slowdown that is in force; agents look for work again at once."""
        unknown = NotFoundError(f"There is no slowdown {key!r} in force.")
        if not is_storable(key):
            raise unknown

        async def work(connection: Connection) -> None:
            cursor = await connection.execute(self._sql["end_slowdown"], {**self._database.now, "key": key})
            if await cursor.fetchone() is None:
                raise unknown
            await wake_all(connection)

        await self._database.run(work)


def _key_fault(key: str) -> str | None:
    named = key.startswith(_PREFIXES) and not key.endswith(":")
    ok = (key == EVERYONE or named) and len(key) <= MAX_KEY and is_storable(key)
    return fault_in(key, "must be model:NAME, provider:NAME or *", ok=ok)
