"""Guards: what keeps agents from running into walls. So far slow-downs after a rate limit (R-214, R-218)."""

from collections.abc import Sequence
from dataclasses import dataclass

from lineshaft.sql import catalog
from lineshaft.store.database import Connection, Database

MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class RateLimited:
    """A task met a rate limit: whoever uses the same model shall slow down."""

    agent_id: str | None
    model: str | None
    slowdown_sec: float
    reason: str


class Guards:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = catalog.load("guards")

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
