"""What agents at work ask for besides claiming and ending tasks: steps, histories, what opens next."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.transition.lifecycle import Lifecycle
from lineshaft.model.storable import check_json
from lineshaft.types.work import ClaimRef, PastAttempt, RemainingBudgets


@dataclass(frozen=True, slots=True)
class Openings:
    """Seconds until something comes back by itself; below zero: it is overdue; None: nothing will."""

    due_sec: float | None
    lease_sec: float | None
    guard_sec: float | None
    now: datetime
    #: A slow-down was over, a breaker could be probed, or a new day's money was there, since the last look.
    opened: bool


@dataclass(frozen=True, slots=True)
class LaneInfo:
    id: int
    type: str
    required_capabilities: list[str]
    models: list[str]


class Working:
    def __init__(self, database: Database, lifecycle: Lifecycle, *, daily_budget: bool = False) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._daily_budget = daily_budget
        self._sql = catalog.load("transition/working")

    async def record_step(
        self, claim: ClaimRef, name: str, data: bytes, *, cost_usd: Decimal, cost_so_far_usd: Decimal
    ) -> tuple[bytes, RemainingBudgets]:
        """Record a step's result and what it cost; gives the result that counts, which is the first."""
        check_json(data=data)
        values = {"name": name, "data": data.decode(), "cost": cost_usd, "cost_so_far": cost_so_far_usd}

        async def work(connection: Connection) -> tuple[bytes, RemainingBudgets]:
            cursor = await connection.execute(
                self._sql["record_step"],
                {**self._database.now, "id": claim.id, "epoch": claim.epoch, **values},
            )
            row = await cursor.fetchone()
            if row is None:
                await self._lifecycle.hold(connection, claim, "record a step of")
                raise AssertionError("a claim that is held can record its steps")
            return bytes(row[0] or b"null"), RemainingBudgets(*row[1:])

        return await self._database.run_alone(work)

    async def past_attempts(self, ids: Sequence[str]) -> dict[str, list[PastAttempt]]:
        found: defaultdict[str, list[PastAttempt]] = defaultdict(list)
        for row in await self._rows("past_attempts", ids=list(ids)):
            found[row[0]].append(PastAttempt(*row[1:]))
        return found

    async def drain(self, agent_id: str, incarnation: int) -> None:
        await self._rows("drain", agent_id=agent_id, incarnation=incarnation)

    async def leave(self, agent_id: str, incarnation: int) -> None:
        await self._rows("leave", agent_id=agent_id, incarnation=incarnation)

    async def openings(self, since: datetime | None = None) -> Openings:
        """`since` is the `now` of the last look; None: this is the first."""
        return Openings(*(await self._rows("openings", since=since, daily=self._daily_budget))[0])

    async def retry_within(self, types: Sequence[str], within_sec: float) -> float | None:
        rows = await self._rows("retry_within", types=list(types), within=within_sec)
        return rows[0][0] if rows else None

    async def lanes_of(self, types: Sequence[str] | None) -> list[LaneInfo]:
        """None: of all types."""
        wanted = None if types is None else list(types)
        return [LaneInfo(*row) for row in await self._rows("lanes_of", types=wanted)]

    async def finished(self, ids: Sequence[str]) -> dict[str, str]:
        """For each id: open, or ended as a `task` or as a `dag`, or unknown."""
        return dict(await self._rows("finished", ids=list(ids)))

    async def _rows(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        async with self._database.connection() as connection:
            cursor = await connection.execute(self._sql[statement], {**self._database.now, **parameters})
            return await cursor.fetchall() if cursor.description else []
