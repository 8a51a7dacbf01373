"""The recorded verdicts of gates, as the database has them."""

from dataclasses import dataclass
from datetime import datetime

import msgspec

from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres.rows import fetch_rows


class RecordedVerdict(msgspec.Struct, frozen=True, kw_only=True):
    gate: int
    method: str
    passed: bool
    at: datetime
    reasons: list[str] = []
    score: float | None = None
    cost_usd: float | None = None
    model: str | None = None
    by: str | None = None


_VERDICTS = msgspec.json.Decoder(list[RecordedVerdict])


@dataclass(frozen=True, slots=True)
class GatedAttempt:
    outcome: str
    #: The method of the gate that it waits for now.
    waits_for: str | None
    #: How often that gate was started, and why it reached no verdict.
    runs: int
    last_error: str | None
    verdict_json: bytes | None

    @property
    def verdicts(self) -> list[RecordedVerdict]:
        return _VERDICTS.decode(self.verdict_json) if self.verdict_json else []


async def gated_attempts(engine: Engine, task_id: str) -> list[GatedAttempt]:
    async with engine.database.connection() as connection:
        return await fetch_rows(
            connection,
            GatedAttempt,
            "SELECT outcome, CASE WHEN outcome = 'validating' THEN gate END AS waits_for,"
            " gate_runs AS runs, gate_error AS last_error, verdicts AS verdict_json FROM lineshaft.attempt"
            " WHERE task_id = %(id)s AND (verdicts IS NOT NULL OR gate IS NOT NULL) ORDER BY epoch",
            {"id": task_id},
        )
