"""Limits of the installation: rows of the database, so that every process obeys the same ones.

A limit that a person has set stays until that person, or another, returns it to the settings. Any other limit
is what the settings of the server say that started last. Every other process sets a limit only where there is
none, and obeys what it finds.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.live import velocity
from lineshaft.engine.live.waking import wake_all
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.model.retry import number_fault, raise_faults
from lineshaft.types.limits import DEFAULT_JUDGE_MAX_COST, SETTINGS, Limits, ServerLimits

_SQL = catalog.load(__name__)
_MONEY = frozenset({"daily_budget_usd", "velocity_usd", "default_max_cost_usd"})
_AMOUNTS = _MONEY | {"crash_cost_fraction", "judge_max_cost_usd"}
_ACTIONS = frozenset({"stop", "pause"})
MAX_WINDOW_SEC = 86_400.0
#: A server that hasn't reported for so long doesn't run.
SILENT_SEC = 90.0

_log = logging.getLogger("lineshaft.guards")


class _LimitsRow(Struct, frozen=True, kw_only=True):
    """By default, the values of a new installation."""

    daily_budget_usd: Decimal | None = None
    velocity_usd: Decimal | None = None
    velocity_window_sec: float = 600.0
    velocity_action: str = "stop"
    default_max_cost_usd: Decimal | None = None
    crash_cost_fraction: Decimal = Decimal(0)
    judge_max_cost_usd: Decimal = DEFAULT_JUDGE_MAX_COST
    #: JSON, as the next two.
    breakers: bytes | None = None
    applied: bytes = b"{}"
    by_hand: bytes = b"{}"

    def shown(self, name: str) -> Any:
        return _shown(getattr(self, name))


_NEW = _LimitsRow()


class _ReadRow(_LimitsRow, frozen=True, kw_only=True):
    spent_today_usd: Decimal
    reserved_usd: Decimal


class _ServerRow(Struct, frozen=True):
    name: str
    version: str
    started_at: datetime
    limits: bytes


class _LimitsState(Struct):
    """The limits, and where each of them comes from."""

    row: _LimitsRow
    #: The settings that were applied last, by name.
    applied: dict[str, Any]
    #: What people have set: the value, and the setting that was applied last then.
    by_hand: dict[str, tuple[Any, Any]]
    changes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: _LimitsRow) -> "_LimitsState":
        return cls(row, msgspec.json.decode(row.applied), msgspec.json.decode(row.by_hand))

    def is_by_hand(self, name: str) -> bool:
        """Processes of older versions don't record it: then the value isn't the setting that was applied."""
        return name in self.by_hand or self.row.shown(name) != self.applied.get(name, _NEW.shown(name))

    def replaced(self, name: str) -> bool:
        """A server of an older version, when it started, has replaced what a person had set."""
        if name not in self.by_hand:
            return False
        value, applied = self.by_hand[name]
        now = self.applied.get(name)
        return bool(now != applied and self.row.shown(name) == now != value)

    def set_by_hand(self, name: str, value: Any) -> None:
        self.changes[name] = value
        self.by_hand[name] = _shown(value), self.applied.get(name)

    def set_by_settings(self, name: str, value: Any) -> None:
        self.changes[name] = value
        self.applied[name] = _shown(value)
        self.by_hand.pop(name, None)

    @property
    def changed(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"from": self.row.shown(name), "to": _shown(value)}
            for name, value in self.changes.items()
            if self.row.shown(name) != _shown(value)
        }


class InstallationLimits:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self) -> Limits:
        async with self._database.connection() as connection:
            (row,) = await fetch_rows(connection, _ReadRow, _SQL["read_limits"], self._database.now)
            servers = await self._servers(connection)
        state = _LimitsState.of(row)
        values = asdict(row)
        return Limits(
            **{
                name: values[name]
                for name in Limits.__struct_fields__
                if name in values and name != "by_hand"
            },
            by_hand=[name for name in SETTINGS if state.is_by_hand(name)],
            servers=servers,
        )

    async def _servers(self, connection: Connection) -> list[ServerLimits]:
        parameters = {**self._database.now, "silent_sec": SILENT_SEC}
        return [
            ServerLimits(
                name=row.name,
                version=row.version,
                started_at=row.started_at,
                limits=msgspec.json.decode(row.limits),
            )
            for row in await fetch_rows(connection, _ServerRow, _SQL["running_servers"], parameters)
        ]

    async def patch(
        self,
        changes: Mapping[str, Any],
        *,
        from_settings: Sequence[str] = (),
        reason: str | None = None,
    ) -> Limits:
        """Change limits by name; None: no limit.

        Those `from_settings` are no longer set by hand: the settings of the server that started last count,
        or, if no running server has any, the next one that starts and has.
        """
        checked = _checked(changes)
        _check_names(from_settings, changes)
        act = with_actor(reason=reason)
        if from_settings:
            act["from_settings"] = list(from_settings)

        async def work(connection: Connection) -> None:
            state = await self._lock(connection)
            for name, value in checked.items():
                state.set_by_hand(name, value)
            servers = await self._servers(connection) if from_settings else []
            for name in from_settings:
                values = [server.limits[name] for server in servers if name in server.limits]
                state.set_by_settings(name, _stored(name, values[0]) if values else getattr(state.row, name))
            await self._write(connection, state, act)

        await self._database.run(work)
        return await self.read()

    async def apply(self, values: Mapping[str, Any], *, server: str | None) -> None:
        """Take limits from the settings of a process; `server` is its name, if it is one."""
        checked = _checked(values)
        if not checked:
            return
        act = {"actor": "settings"} if server is None else {"actor": "settings", "server": server}

        async def work(connection: Connection) -> _LimitsState:
            state = await self._lock(connection)
            for name in [name for name in state.by_hand if server is not None and state.replaced(name)]:
                state.set_by_hand(name, _stored(name, state.by_hand[name][0]))
            for name, value in checked.items():
                is_free = server is not None or state.row.shown(name) == _NEW.shown(name)
                if is_free and not state.is_by_hand(name) and state.row.shown(name) != _shown(value):
                    state.set_by_settings(name, value)
            if state.changes:
                await self._write(connection, state, act)
            return state

        _log_applied(await self._database.run(work), checked, server)

    async def _lock(self, connection: Connection) -> _LimitsState:
        (row,) = await fetch_rows(connection, _LimitsRow, _SQL["lock_limits"], {})
        return _LimitsState.of(row)

    async def _write(self, connection: Connection, state: _LimitsState, act: Mapping[str, Any]) -> None:
        values = asdict(state.row) | state.changes
        values |= {
            "applied": msgspec.json.encode(state.applied).decode(),
            "by_hand": msgspec.json.encode(state.by_hand).decode(),
            "breakers": None if values["breakers"] is None else values["breakers"].decode(),
        }
        await connection.execute(_SQL["write_limits"], {**self._database.now, **values})
        if (state.row.velocity_usd is None) != (values["velocity_usd"] is None):
            await velocity.begin(connection, self._database.now)
        if state.changed or "from_settings" in act:
            data = msgspec.json.encode({"limits": state.changed, **act}).decode()
            await connection.execute(_SQL["log_limits"], {**self._database.now, "data": data})
        if state.changed:
            # There may be money for waiting tasks.
            await wake_all(connection)


def _log_applied(state: _LimitsState, values: Mapping[str, Any], server: str | None) -> None:
    changed = state.changed
    for name, change in changed.items():
        _log.warning(
            "%s is %s now, and was %s: %s",
            name,
            change["to"],
            change["from"],
            f"as {SETTINGS[name]} says"
            if name not in state.by_hand
            else "a person had set it, and a server of an older version had replaced it",
        )
    ignored = {
        name: _shown(value)
        for name, value in values.items()
        if name not in changed and state.row.shown(name) != _shown(value)
    }
    if ignored and server is None:
        _log.warning(
            "These settings differ from the limits of the installation, which count: %s. "
            "'lineshaft limits' shows them and 'lineshaft limits set' changes them",
            ", ".join(ignored),
        )
    elif ignored:
        _log.warning(
            "A person has set these limits, so these settings don't count: %s. "
            "'lineshaft limits set --from-settings NAME' returns to the settings",
            ", ".join(
                f"{name} is {state.row.shown(name)}, {SETTINGS[name]} says {value}"
                for name, value in ignored.items()
            ),
        )


def limits_as_shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Limits as JSON has them."""
    return {name: _shown(value) for name, value in _checked(values).items()}


def _shown(value: Any) -> Any:
    """For comparisons and for people: amounts without trailing zeros."""
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return msgspec.json.decode(value) if isinstance(value, bytes) else value


def _stored(name: str, value: Any) -> Any:
    """The reverse of `_shown`."""
    if value is None:
        return None
    if name == "breakers":
        return msgspec.json.encode(value)
    return Decimal(value) if name in _AMOUNTS else value


def _check_names(names: Iterable[str], changes: Mapping[str, Any]) -> None:
    for name in names:
        if name not in SETTINGS:
            fault = f"unknown limit {name!r}; there are {', '.join(SETTINGS)}"
            raise InvalidInputError(errors=[("from_settings", fault)])
        if name in changes:
            fault = f"{name} can't be set and returned to the settings at once"
            raise InvalidInputError(errors=[("from_settings", fault)])


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
        elif name == "judge_max_cost_usd":
            checked[name] = money(value, name)
        elif name == "breakers":
            checked[name] = value
        else:
            raise InvalidInputError(errors=[(name, "unknown limit")])
    return checked
