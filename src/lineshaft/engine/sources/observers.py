"""Observers: a group of tasks that fails too often becomes an improvement task, with the evidence.

The share of failed attempts in a window is computed for each group: a type, a model, an agent or a tag. A
group at the threshold fires once per cooldown, which is a key, so that two servers don't both fire. Work of
the observer itself doesn't count.
"""

from collections import Counter
from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows
from lineshaft.engine.sources.firing import Firings, Key, Occasion, SourceRow, TooMuchOpenError
from lineshaft.model.error_pattern import error_pattern

_SQL = catalog.load(__name__)

#: Failures and successes that are looked at, the latest first.
_MOST = 50_000
_GROUPS = 20
_SAMPLES = 200
_ERROR_GROUPS = 5
_SAMPLE_IDS = 5
_TAG = "tag:"
_TRIES = 5

Counts = Counter[str]


class Rate(Struct, frozen=True):
    name: str
    attempts: int
    failures: int
    cost_usd: Decimal


class _Failed(Struct, frozen=True):
    task_id: str
    category: str | None
    error: str | None


class Observers:
    def __init__(self, database: Database, firings: Firings) -> None:
        self._database = database
        self._firings = firings

    async def all(self) -> list[str]:
        async with self._database.connection() as connection:
            found: list[str] = await fetch_column(connection, _SQL["list_observers"], {})
        return found

    async def observe(self, name: str) -> Counts:
        """Fire for every group that fails too often and hasn't fired within the cooldown."""

        async def work(connection: Connection) -> Counts:
            own = {**self._database.now, "name": name}
            row = await fetch_row(connection, SourceRow, _SQL["lock_observer"], own)
            counts: Counts = Counter()
            if row is None or not row.is_enabled:
                return counts
            for rate in await self._news(connection, row):
                counts[await self._fire(connection, row, rate)] += 1
            return counts

        for _ in range(_TRIES):
            try:
                return await self._database.run(work, pipeline=False)
            except TooMuchOpenError as full:
                await self._firings.make_room(full)
        return Counter()

    async def _news(self, connection: Connection, row: SourceRow) -> list[Rate]:
        source = row.compiled.source
        wanted = {
            **_group(row),
            **self._database.now,
            "source_id": row.id,
            "min_attempts": source.min_attempts,
            "failure_rate": source.failure_rate,
            "most": _MOST,
            "groups": _GROUPS,
        }
        found = await fetch_rows(connection, Rate, _SQL["rates"], wanted)
        keys = {"keys": [_key(row, rate).text for rate in found], "source_id": row.id}
        cooling = set(await fetch_column(connection, _SQL["cooling"], {**self._database.now, **keys}))
        return [rate for rate in found if _key(row, rate).text not in cooling]

    async def _fire(self, connection: Connection, row: SourceRow, rate: Rate) -> str:
        wanted = {**_group(row), **self._database.now, "name": rate.name, "most": _MOST, "samples": _SAMPLES}
        failed = await fetch_rows(connection, _Failed, _SQL["evidence"], wanted)
        occasion = Occasion(_event(row, rate, failed), [_key(row, rate)])
        return str((await self._firings.fire_in(connection, row, occasion)).outcome)


def _group(row: SourceRow) -> dict[str, Any]:
    source = row.compiled.source
    by = str(source.group_by)
    prefix = by.removeprefix(_TAG) if by.startswith(_TAG) else None
    return {"group_by": by if prefix is None else "tag", "prefix": prefix, "window": source.window_sec}


def _key(row: SourceRow, rate: Rate) -> Key:
    cooldown = row.compiled.source.cooldown_sec
    return Key(f"group:{rate.name}", float(cooldown or 0.0))


def _event(row: SourceRow, rate: Rate, failed: list[_Failed]) -> dict[str, Any]:
    """What is known about the failures: rates, groups of like errors with samples, and their cost."""
    groups: dict[str, list[_Failed]] = {}
    for each in failed:
        groups.setdefault(error_pattern(each.error or ""), []).append(each)
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))[:_ERROR_GROUPS]
    source = row.compiled.source
    return {
        "group_by": source.group_by,
        "group": rate.name,
        "window_sec": source.window_sec,
        "attempts": rate.attempts,
        "failures": rate.failures,
        "failure_rate": round(rate.failures / rate.attempts, 3),
        "cost_usd": float(rate.cost_usd),
        "errors": [
            {
                "pattern": pattern,
                "count": len(members),
                "category": members[0].category,
                "example": (members[0].error or "")[:1_000],
                "task_ids": list(dict.fromkeys(each.task_id for each in members))[:_SAMPLE_IDS],
            }
            for pattern, members in largest
        ],
        "task_ids": list(dict.fromkeys(each.task_id for each in failed))[: 2 * _SAMPLE_IDS],
    }
