"""What became of the latest claims of an agent. Only the newest ends of all agents are searched."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader

#: Ends, and failures, of all agents that are searched.
SEARCHED = 2_000
#: How fast an agent spends follows from what it has spent in so many seconds.
_RATE_WINDOW_SEC = 600.0
#: One call of a model says nothing about it.
_SHORTEST_RATE_SEC = 30.0

_SQL = catalog.load(__name__)


class RecentClaim(Struct, frozen=True):
    task_id: str
    title: str | None
    type: str
    #: As of an attempt.
    outcome: str
    category: str | None
    #: At most 1,000 characters of it.
    error: str | None
    claimed_at: datetime
    ended_at: datetime

    @property
    def duration_sec(self) -> float:
        return (self.ended_at - self.claimed_at).total_seconds()


async def read_recent_claims(reader: Reader, agent_id: str, limit: int) -> list[RecentClaim]:
    rows = await reader.rows(_SQL["recent_claims"], agent_id=agent_id, limit=limit, scan=SEARCHED)
    return [RecentClaim(**row) for row in rows]


async def read_spending_rates(reader: Reader, agent_ids: Sequence[str]) -> dict[str, Decimal]:
    rows = await reader.rows(
        _SQL["spending_rates"], agent_ids=list(agent_ids), window_sec=_RATE_WINDOW_SEC, scan=SEARCHED
    )
    return {
        row["agent_id"]: row["usd"] * 3600 / Decimal(row["within_sec"])
        for row in rows
        if row["within_sec"] >= _SHORTEST_RATE_SEC
    }
