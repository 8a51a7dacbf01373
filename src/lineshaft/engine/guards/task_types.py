"""Defaults of types: what agents declare, what people set, and what follows from both.

A declaration belongs to an agent and the version of its program. The same one again writes nothing, however
often its processes restart; it ends when no process of that version is left and another version runs. Where
declarations differ, the stricter value counts; what a person sets wins over all of them.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import psycopg
from msgspec import UNSET
from psycopg.rows import class_row

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.guards.type_limits import LimitsOfTypes
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.postgres.session import connect_options
from lineshaft.errors import NotFoundError
from lineshaft.model.fields import check_fields
from lineshaft.model.tasks import LIMITS_OF_TYPES, TypeLimits
from lineshaft.model.type_defaults import (
    BY_HAND,
    Declared,
    Effective,
    TypeDefaults,
    changed,
    checked,
    differences,
    effective_limits,
)
from lineshaft.types.page import Page, check_limit
from lineshaft.types.task_types import DefaultsOfType, TypeInfo, UncappedClaim
from lineshaft.types.work import ClaimedTask

_SQL = catalog.load(__name__)
_log = logging.getLogger("lineshaft.engine")
#: Uncapped claims that are shown.
_SHOWN = 100
#: Fields that are shown, and don't apply to tasks.
_ABOUT = ("parameters_schema", "result_schema", "description")
_NOTHING = TypeDefaults()

_decode = msgspec.json.Decoder(TypeDefaults).decode
_decode_limits = msgspec.json.Decoder(TypeLimits).decode


class _Declaration(NamedTuple):
    type: str
    agent_id: str
    version: str
    #: JSON, as in the next.
    defaults: bytes


class _EndedDeclaration(NamedTuple):
    agent_id: str
    type: str
    version: str


class _DefaultsRow(NamedTuple):
    type: str
    limits: bytes
    set_by_hand: bytes


class _Served(NamedTuple):
    type: str
    agents: list[str]


class _StoredDefaults(NamedTuple):
    """What the database says about some types."""

    by_hand: dict[str, TypeDefaults]
    #: The limits that apply.
    limits: dict[str, TypeLimits]
    #: What each agent declares, the newest version first.
    declared: dict[str, list[Declared]]

    def effective(self, type_: str) -> Effective:
        return effective_limits(self.by_hand.get(type_, _NOTHING), self.declared.get(type_, []))


class TaskTypes:
    def __init__(self, database: Database, limits: LimitsOfTypes) -> None:
        self._database = database
        self._limits = limits
        #: Uncapped claims that this process has reported, by agent and type.
        self._reported: set[tuple[str, str]] = set()

    # Registration.

    async def declare(
        self,
        connection: Connection,
        agent_id: str,
        version: str | None,
        declared: Mapping[str, TypeDefaults],
    ) -> list[str]:
        """What an agent says about all its types; returns those whose limits change.

        An agent that says nothing changes nothing. Comes first in its transaction, because it may take an
        advisory lock.
        """
        if not declared:
            return []
        running = version or ""
        asked = {**self._database.now, "agent_id": agent_id, "running": running}
        known = await fetch_rows(connection, _Declaration, _SQL["declared_by"], asked)
        before = {row.type: _decode(row.defaults) for row in known if row.version == running}
        after = {type_: defaults for type_, defaults in declared.items() if defaults != _NOTHING}
        new = {type_: defaults for type_, defaults in after.items() if before.get(type_) != defaults}
        old = [_EndedDeclaration(agent_id, type_, running) for type_ in before if type_ not in after]
        if any(row.version != running for row in known):
            old += await fetch_rows(connection, _EndedDeclaration, _SQL["ended"], asked)
        if not new and not old:
            return []
        await connection.execute(_SQL["lock_types"])
        if new:
            rows = {"types": [*new], "defaults": [_json(defaults) for defaults in new.values()]}
            await connection.execute(_SQL["declare"], {**asked, **rows})
        await self._withdraw(connection, old)
        return await self._settle(connection, {*new, *(row.type for row in old)}, agent_id=agent_id)

    async def _withdraw(self, connection: Connection, old: Sequence[_EndedDeclaration]) -> None:
        if old:
            agents, types, versions = map(list, zip(*old, strict=True))
            asked = {"agents": agents, "types": types, "versions": versions}
            await connection.execute(_SQL["withdraw"], asked)

    async def warnings(self, declared: Mapping[str, TypeDefaults]) -> list[str]:
        """What of these declarations doesn't count."""
        if not declared:
            return []
        async with self._database.connection() as connection:
            state = await self._read(connection, [*declared])
        return [
            warning
            for type_, defaults in declared.items()
            for warning in differences(type_, defaults, state.effective(type_))
        ]

    async def apply(self, types: Iterable[str]) -> None:
        """Give waiting tasks of these types the present limits."""
        await self._limits.apply(types)

    async def correct(self, tasks: Sequence[ClaimedTask]) -> None:
        """Give tasks that were just claimed the present limits."""
        await self._limits.correct(tasks)

    async def forget_ended(self) -> None:
        """Remove declarations of versions that were replaced, and of agents that are gone."""
        asked = {**self._database.now, "agent_id": None, "running": None}
        async with self._database.connection() as connection:
            if not await fetch_rows(connection, _EndedDeclaration, _SQL["ended"], asked):
                return

        async def work(connection: Connection) -> list[str]:
            await connection.execute(_SQL["lock_types"])
            old = await fetch_rows(connection, _EndedDeclaration, _SQL["ended"], asked)
            await self._withdraw(connection, old)
            return await self._settle(connection, {row.type for row in old})

        await self.apply(await self._database.run(work))

    # People.

    async def set(self, type_: str, changes: Mapping[str, Any], *, reason: str | None = None) -> TypeInfo:
        """Set what is in `changes`; None: as agents declare it."""
        check_fields(type=type_)
        values = {name: value for name, value in changes.items() if value is not UNSET}
        checked(TypeDefaults(**values), "")

        async def work(connection: Connection) -> list[str]:
            await connection.execute(_SQL["lock_types"])
            state = await self._read(connection, [type_])
            by_hand = checked(msgspec.structs.replace(state.by_hand.get(type_, _NOTHING), **values), "")
            return await self._settle(
                connection, [type_], by_hand={type_: by_hand}, act=with_actor(reason=reason)
            )

        await self.apply(await self._database.run(work))
        return await self.read(type_)

    async def _settle(
        self,
        connection: Connection,
        types: Collection[str],
        *,
        by_hand: Mapping[str, TypeDefaults] | None = None,
        agent_id: str | None = None,
        act: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Write what applies now; returns the types whose limits change. Changes of types must be locked."""
        if not types:
            return []
        state = await self._read(connection, sorted(types))
        before = state.by_hand
        state = state._replace(by_hand={**before, **(by_hand or {})})
        changes = []
        for type_ in sorted(types):
            hand, limits = state.by_hand.get(type_, _NOTHING), state.effective(type_).limits
            difference = changed(state.limits.get(type_, _NOTHING), limits)
            if not difference and hand == before.get(type_, _NOTHING):
                continue
            row = {"type": type_, "limits": _json(limits), "set_by_hand": _json(hand)}
            await connection.execute(_SQL["write_type"], {**self._database.now, **row})
            data = _json({"type": type_, **difference, **(act or {})})
            logged = {**self._database.now, "agent_id": agent_id, "data": data}
            await connection.execute(_SQL["log_type"], logged)
            if difference:
                changes.append(type_)
        return changes

    # Reads.

    async def read(self, type_: str) -> TypeInfo:
        async with self._database.connection() as connection:
            found = [info for info in await self._all(connection) if info.type == type_]
        if not found:
            raise NotFoundError(f"There is no task type {type_!r}: no task, agent or person has named it.")
        return found[0]

    async def page(self, *, limit: int, cursor: str | None) -> Page[TypeInfo]:
        """By name."""
        check_limit(limit)
        async with self._database.connection() as connection:
            infos = [info for info in await self._all(connection) if cursor is None or info.type > cursor]
        items = infos[:limit]
        return Page(items, items[-1].type if len(infos) > limit else None)

    async def _all(self, connection: Connection) -> list[TypeInfo]:
        state = await self._read(connection, None)
        served = await fetch_rows(connection, _Served, _SQL["served"], self._database.now)
        agents = {row.type: row.agents for row in served}
        submitted = await fetch_column(connection, _SQL["submitted"], {})
        uncapped = await fetch_rows(connection, UncappedClaim, _SQL["uncapped"], {"limit": _SHOWN})
        names = {*state.by_hand, *state.declared, *agents, *submitted}
        return [
            _info(name, state, agents.get(name, []), [str(claim) for claim in uncapped if claim.type == name])
            for name in sorted(names)
        ]

    async def _read(self, connection: Connection, types: list[str] | None) -> _StoredDefaults:
        rows = await fetch_rows(connection, _DefaultsRow, _SQL["read_types"], {"types": types})
        declarations = await fetch_rows(connection, _Declaration, _SQL["declarations"], {"types": types})
        declared: dict[str, list[Declared]] = {}
        for row in declarations:
            declared.setdefault(row.type, []).append(Declared(row.agent_id, _decode(row.defaults)))
        return _StoredDefaults(
            {row.type: _decode(row.set_by_hand) for row in rows},
            {row.type: _decode_limits(row.limits) for row in rows},
            declared,
        )

    # Claims that no limit holds.

    async def report_uncapped(self, agent_id: str, types: Collection[str]) -> None:
        """An agent with a budget claimed tasks of these types that reserve nothing: log each type once."""
        new = [type_ for type_ in types if (agent_id, type_) not in self._reported]
        if not new:
            return
        asked = {**self._database.now, "agent_id": agent_id, "types": new}
        async with self._database.connection() as connection:
            first = await fetch_column(connection, _SQL["note_uncapped"], asked)
            claims = await fetch_rows(connection, UncappedClaim, _SQL["uncapped"], {"limit": _SHOWN})
        self._reported |= {(agent_id, type_) for type_ in new}
        for claim in claims:
            if claim.agent_id == agent_id and claim.type in first:
                _log.warning("%s", claim, extra={"agent_id": agent_id})

    async def uncapped(self) -> list[UncappedClaim]:
        """Where agents with a budget have claimed tasks that reserve nothing, and could do so again."""
        async with self._database.connection() as connection:
            return await fetch_rows(connection, UncappedClaim, _SQL["uncapped"], {"limit": _SHOWN})


def read_uncapped(dsn: str) -> list[UncappedClaim]:
    """As `TaskTypes.uncapped`, for a program that changes nothing."""
    with psycopg.connect(
        dsn, autocommit=True, row_factory=class_row(UncappedClaim), **connect_options(dsn)
    ) as own:
        return own.execute(_SQL["uncapped"], {"limit": _SHOWN}).fetchall()


def _info(type_: str, state: _StoredDefaults, agents: list[str], uncapped: list[str]) -> TypeInfo:
    effective, declared = state.effective(type_), state.declared.get(type_, [])
    values = {name: getattr(effective.limits, name) for name in LIMITS_OF_TYPES}
    if effective.limits.retry is not None:
        values["retry"] = msgspec.json.decode(msgspec.json.encode(effective.limits.retry))
    origins = dict(effective.origins)
    by_origin = [(BY_HAND, state.by_hand.get(type_, _NOTHING))]
    by_origin += [(f"agent:{one.agent_id}", one.defaults) for one in declared]
    for name in _ABOUT:
        for origin, defaults in by_origin:
            if (value := getattr(defaults, name)) is not None:
                values[name], origins[name] = value, origin
                break
    differing = [
        f"Agent {one.agent_id!r}: {warning}"
        for one in declared
        for warning in differences(type_, one.defaults, effective)
    ]
    return TypeInfo(
        type=type_,
        defaults=DefaultsOfType(**values),
        origins=origins,
        agents=agents,
        warnings=[*dict.fromkeys(differing), *uncapped],
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
