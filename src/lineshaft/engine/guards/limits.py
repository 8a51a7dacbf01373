"""Limits of the installation: rows of the database, so that every process obeys the same ones.

A server applies its settings when it starts, each value once: a limit that was changed by hand since stays.
Every other process sets a limit only where there is none, and obeys what it finds.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.engine.transition.changes import wake_all
from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.model.retry import number_fault, raise_faults
from lineshaft.types.limits import Limits

_SQL = catalog.load(__name__)
_MONEY = frozenset({"daily_budget_usd", "velocity_usd", "default_max_cost_usd"})
_ACTIONS = frozenset({"stop", "pause"})
MAX_WINDOW_SEC = 86_400.0


class _Row(Struct, frozen=True):
    daily_budget_usd: Decimal | None
    velocity_usd: Decimal | None
    velocity_window_sec: float
    velocity_action: str
    default_max_cost_usd: Decimal | None
    crash_cost_fraction: Decimal
    #: JSON, as the next.
    breakers: bytes | None
    applied: bytes


#: The values of a new installation.
_DEFAULTS = _Row(None, None, 600.0, "stop", None, Decimal(0), None, b"{}")


class InstallationLimits:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self) -> Limits:
        async with self._database.connection() as connection:
            (found,) = await fetch_rows(connection, Limits, _SQL["read_limits"], self._database.now)
        return found

    async def patch(self, changes: Mapping[str, Any], *, reason: str | None = None) -> Limits:
        """Change limits by name; None: no limit."""
        checked = _checked(changes)
        act = with_actor(reason=reason)

        async def work(connection: Connection) -> None:
            row = await self._lock(connection)
            await self._write(connection, row, checked, {}, act)

        await self._database.run(work)
        return await self.read()

    async def apply(self, values: Mapping[str, Any], *, by_server: bool) -> list[str]:
        """Take limits from the settings of a process; returns the names of those that it must not change."""
        checked = _checked(values)
        if not checked:
            return []
        ignored: list[str] = []

        async def work(connection: Connection) -> None:
            ignored.clear()
            row = await self._lock(connection)
            applied = msgspec.json.decode(row.applied)
            changes = {}
            for name, value in checked.items():
                current = getattr(row, name)
                if by_server:
                    is_news = applied.get(name) != _text(value)
                else:
                    is_news = name not in applied and current == getattr(_DEFAULTS, name)
                if is_news:
                    changes[name] = value
                elif _text(current) != _text(value):
                    ignored.append(name)
            if changes:
                await self._write(connection, row, changes, changes, {"actor": "settings"})

        await self._database.run(work)
        return ignored

    async def _lock(self, connection: Connection) -> _Row:
        (row,) = await fetch_rows(connection, _Row, _SQL["lock_limits"], {})
        return row

    async def _write(
        self,
        connection: Connection,
        row: _Row,
        changes: Mapping[str, Any],
        applied: Mapping[str, Any],
        act: Mapping[str, Any],
    ) -> None:
        before = asdict(row)
        known = msgspec.json.decode(row.applied)
        known |= {name: _text(value) for name, value in applied.items()}
        values = {**before, **changes, "applied": msgspec.json.encode(known)}
        for name in ("breakers", "applied"):
            values[name] = None if values[name] is None else values[name].decode()
        await connection.execute(_SQL["write_limits"], {**self._database.now, **values})
        changed = {
            name: {"from": _text(before[name]), "to": _text(value)}
            for name, value in changes.items()
            if _text(before[name]) != _text(value)
        }
        if changed:
            data = msgspec.json.encode({"limits": changed, **act}).decode()
            await connection.execute(_SQL["log_limits"], {**self._database.now, "data": data})
            # There may be money for waiting tasks.
            await wake_all(connection)


def _text(value: Any) -> Any:
    """For comparisons and for people: amounts without trailing zeros."""
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return msgspec.json.decode(value) if isinstance(value, bytes) else value


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name in _MONEY:
            checked[name] = None if value is None else money(value, name)
        elif name == "velocity_window_sec":
            raise_faults({name: number_fault(value, 1, MAX_WINDOW_SEC)})
            checked[name] = float(value)
        elif name == "velocity_action":
            if value not in _ACTIONS:
                raise InvalidInputError(errors=[(name, f"must be stop or pause, got {value!r}")])
            checked[name] = value
        elif name == "crash_cost_fraction":
            raise_faults({name: number_fault(value, 0, 1)})
            checked[name] = Decimal(str(value)).quantize(Decimal("0.000001"))
        elif name == "breakers":
            checked[name] = value
        else:
            raise InvalidInputError(errors=[(name, "unknown limit")])
    return checked
