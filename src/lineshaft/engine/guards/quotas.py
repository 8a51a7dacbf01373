"""Quotas: set, listed and deleted by people; claims obey them (claims.sql)."""

from typing import Any

import msgspec

from lineshaft.engine.feed.actor import act_json
from lineshaft.engine.guards.quota_details import read_details
from lineshaft.engine.live.waking import wake_all
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column
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

_SQL = catalog.load(__name__)


class _QuotaKey(msgspec.Struct, frozen=True, array_like=True, tag="quota"):
    after: str


class Quotas:
    def __init__(self, database: Database) -> None:
        self._database = database

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
            await connection.execute(_SQL["write_quota"], {**self._database.now, **values})
            await self._changed(connection, act)

        await self._database.run(work)
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
            await self._changed(connection, act)

        await self._database.run(work)

    async def page(self, *, limit: int, cursor: str | None) -> Page[Quota]:
        """By name."""
        check_limit(limit)
        key = decode_cursor(cursor, _QuotaKey)
        quotas = await self._read(None, None if key is None else key.after, limit + 1)
        items = quotas[:limit]
        return Page(items, encode_cursor(_QuotaKey(items[-1].name)) if len(quotas) > limit else None)

    async def _changed(self, connection: Connection, act: str) -> None:
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
