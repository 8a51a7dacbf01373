"""What became of the latest claims of an agent. Only the newest ends of all agents are searched."""

from datetime import datetime

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader

#: Ends, and failures, of all agents that are searched.
SEARCHED = 2_000

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
