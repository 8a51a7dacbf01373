"""Quotas: set, listed and deleted by people; claims obey them (claims.sql)."""

from decimal import Decimal
from time import monotonic
from typing import Any

import msgspec

from lineshaft.engine.feed.actor import act_json
from lineshaft.engine.guards.quota_details import read_details
from lineshaft.engine.live.parking import look_at_quotas
from lineshaft.engine.live.waking import wake_all
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.read.pages import decode_cursor, encode_cursor
from lineshaft.engine.read.snapshot import Reader, in_snapshot
from lineshaft.errors import NotFoundError
from lineshaft.model.quotas import QuotaFields, RateUnit, check_quota, rate_amount
from lineshaft.model.storable import is_storable
from lineshaft.types.page import Page, check_limit
from lineshaft.types.quota_details import QuotaDetails
from lineshaft.types.quotas import MAX_HOLDERS, Quota, QuotaHolder, Rate

#: Waiting tasks that are counted.
_MOST_WAITING = 10_000
#: Keys that are looked at in one transaction.
_LOOKS_AT_ONCE = 100
#: Few tasks with a fair_key are hidden behind one that has left, and for no longer than this.
_TURNS_EVERY_SEC = 30.0
#: Slots of ended claims that one repair deletes.
_MOST_DEAD = 1_000
#: After so long, no claim is under way that doesn't know a quota.
_RECENT_SEC = 60.0

_SQL = catalog.load(__name__)


class _Use(msgspec.Struct, frozen=True):
    """What was used of a rate in a part of its window."""

    quota: str
    key: str
    part: int
    amount: Decimal


class _Due(msgspec.Struct, frozen=True):
    looked: int
    moved: int


class _QuotaKey(msgspec.Struct, frozen=True, array_like=True, tag="quota"):
    after: str


class Quotas:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._turns_at = 0.0

    async def set(self, quota: QuotaFields, *, reason: str | None = None) -> Quota:
        check_quota(quota)
        rate = quota.rate
        values = {
            "name": quota.name,
            "match": quota.match,
            "each": quota.each,
            "max_running": quota.max_running,
            "max_waiting": quota.max_waiting,
            "rate_amount": None if rate is None else rate_amount(rate),
            "rate_unit": None if rate is None else str(rate.unit),
            "rate_per_sec": None if rate is None else float(rate.per_sec),
            "weight": float(quota.weight),
        }
        act = act_json(values, reason)

        async def work(connection: Connection) -> None:
            await connection.execute(_SQL["lock_quotas"], {})
            if kept := await fetch_rows(connection, _Use, _SQL["forget_counts"], values):
                columns = {
                    "quotas": [use.quota for use in kept],
                    "keys": [use.key for use in kept],
                    "parts": [use.part for use in kept],
                    "amounts": [use.amount for use in kept],
                }
                await connection.execute(_SQL["keep_uses"], columns)
            await connection.execute(_SQL["write_quota"], {**self._database.now, **values})
            await connection.execute(_SQL["give_slots"], self._of(quota.name))
            await self._changed(connection, quota.name, act)

        await self._database.run(work)
        # Those that were claimed in the meantime.
        await self._give_slots(quota.name)
        await self.look_at_due()
        return (await self._read(quota.name, None, 1))[0]

    async def delete(self, name: str, *, reason: str | None = None) -> None:
        unknown = _unknown(name)
        if not is_storable(name):
            raise unknown
        act = act_json({"name": name, "deleted": True}, reason)

        async def work(connection: Connection) -> None:
            await connection.execute(_SQL["lock_quotas"], {})
            if not await fetch_column(connection, _SQL["delete_quota"], {"name": name}):
                raise unknown
            await self._changed(connection, name, act)

        await self._database.run(work)
        await self.look_at_due()

    async def page(self, *, limit: int, cursor: str | None) -> Page[Quota]:
        """By name."""
        check_limit(limit)
        key = decode_cursor(cursor, _QuotaKey)
        quotas = await self._read(None, None if key is None else key.after, limit + 1)
        items = quotas[:limit]
        return Page(items, encode_cursor(_QuotaKey(items[-1].name)) if len(quotas) > limit else None)

    # Duties.

    async def look_at_due(self) -> int:
        """Let waiting tasks be claimed where there is room by now; returns how many."""
        moved = 0
        while True:
            parameters = {**self._database.now, "limit": _LOOKS_AT_ONCE}
            async with self._database.connection() as connection:
                (due,) = await fetch_rows(connection, _Due, _SQL["look_at_due"], parameters)
            moved += due.moved
            if due.looked < _LOOKS_AT_ONCE and not due.moved:
                return moved

    async def repair(self) -> int:
        """Do what processes that died have left undone; returns the number of slots of ended claims.

        A process at a time does this. Tasks that were claimed while a quota was set get their slots here.
        """

        async def work(connection: Connection) -> int:
            if not await fetch_column(connection, _SQL["try_keep"], {}):
                return 0
            await connection.execute(_SQL["fair_tasks_ended"])
            if monotonic() >= self._turns_at:
                self._turns_at = monotonic() + _TURNS_EVERY_SEC
                await connection.execute(_SQL["repair_turns"])
            await self._give_slots(None, connection)
            dead = await fetch_column(connection, _SQL["dead_slots"], {"limit": _MOST_DEAD})
            if dead:
                look_at_quotas(connection, self._database.now, ids=dead)
            return len(dead)

        return await self._database.run(work)

    async def forget_uses(self) -> None:
        """Delete what has left the windows of rates."""
        async with self._database.connection() as connection:
            await connection.execute(_SQL["forget_uses"], self._database.now)

    def _of(self, name: str | None) -> dict[str, Any]:
        return {**self._database.now, "name": name, "within_sec": _RECENT_SEC if name is None else None}

    async def _give_slots(self, name: str | None, connection: Connection | None = None) -> None:
        """Of one quota, or of those that were set within the last seconds."""
        if connection is None:
            await self._database.run(lambda own: self._give_slots(name, own))
            return
        await connection.execute(_SQL["give_slots"], self._of(name))
        await connection.execute(_SQL["mark_held"], self._of(name))

    async def _changed(self, connection: Connection, name: str, act: str) -> None:
        await connection.execute(_SQL["look_soon"], {**self._database.now, "name": name})
        await connection.execute(_SQL["write_kinds"], {})
        await connection.execute(_SQL["log_quota"], {**self._database.now, "data": act})
        await wake_all(connection)

    async def details(self, name: str) -> QuotaDetails:
        """A quota with its keys and tasks."""

        async def work(reader: Reader) -> QuotaDetails | None:
            quotas = await _quotas(reader, name, None, 1)
            return await read_details(reader, quotas[0]) if quotas else None

        details = await in_snapshot(self._database, work) if is_storable(name) else None
        if details is None:
            raise _unknown(name)
        return details

    async def _read(self, name: str | None, after: str | None, limit: int) -> list[Quota]:
        return await in_snapshot(self._database, lambda reader: _quotas(reader, name, after, limit))


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"There is no quota {name!r}; 'lineshaft quotas' lists them.")


async def _quotas(reader: Reader, name: str | None, after: str | None, limit: int) -> list[Quota]:
    rows = await reader.rows(
        _SQL["quotas"], name=name, after=after, limit=limit, most=_MOST_WAITING, holders=MAX_HOLDERS
    )
    return [_quota(row) for row in rows]


def _quota(row: dict[str, Any]) -> Quota:
    amount, unit, per_sec = row.pop("rate_amount"), row.pop("rate_unit"), row.pop("rate_per_sec")
    rate = None if amount is None else Rate(amount.normalize(), RateUnit(unit), per_sec)
    holders = msgspec.json.decode(row.pop("holders"), type=list[QuotaHolder])
    return Quota(rate=rate, holders=holders, **row)
