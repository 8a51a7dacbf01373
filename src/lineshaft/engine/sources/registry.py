"""The registry of sources: create, replace, change, delete and list them, and apply a whole file.

A file or an agent applies a definition: if it is the one that was last applied, nothing changes, whatever a
person has changed since; a pause by hand survives in any case. Every change is an event.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from lineshaft.engine.caller import caller
from lineshaft.engine.feed.actor import act_json, actor_name
from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows, fetch_value
from lineshaft.engine.read.pages import decode_cursor, encode_cursor, refuse_unstorable
from lineshaft.engine.sources.faults import SourceState, fault_of
from lineshaft.engine.sources.file_roots import FileRoots
from lineshaft.engine.sources.firing import unknown_source
from lineshaft.errors import AlreadyExistsError, InvalidInputError, InvalidTransitionError
from lineshaft.sources.definition import Definition, checked, compiled
from lineshaft.types.page import Page, check_limit
from lineshaft.types.problems import invalid_input
from lineshaft.types.sources import (
    DEFINED,
    Firing,
    FiringOutcome,
    NewSource,
    Source,
    SourceChange,
    SourceFields,
    SourceKind,
    definition_of,
)

_SQL = catalog.load(__name__)
#: Fields that decide about the ticks of a schedule.
_TIMING = ("cron", "every_sec", "timezone", "jitter_sec")
#: Fields that decide about the files of a file source.
_WATCHED = ("kind", "root", "patterns")
_LARGEST = 2**63 - 1
MAX_SOURCES_AT_ONCE = 10_000


class _Read(Struct, frozen=True):
    id: int
    version: int
    created_at: datetime
    updated_at: datetime
    updated_by: str | None
    next_at: datetime | None
    next_tick: datetime | None
    paused: bool
    name: str
    kind: str
    origin: str
    definition: bytes
    applied: bytes | None
    last_outcome: str | None
    last_fired_at: datetime | None
    open_tasks: int
    token_revoked: bool
    now: datetime
    watchers: bytes | None
    created_lately: int

    def source(self, *, by_server: bool) -> Source:
        stored = compiled(self.definition).source
        fields = definition_of(stored)
        state = SourceState(
            stored,
            self.paused,
            self.token_revoked,
            self.next_at,
            self.watchers,
            self.created_lately,
            self.now,
        )
        fields["enabled"] = fields["enabled"] and not self.paused
        fields |= {
            "origin": self.origin,
            "version": self.version,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "updated_by": self.updated_by,
            "next_at": self.next_at,
            "last_fired_at": self.last_fired_at,
            "last_outcome": self.last_outcome,
            "open_tasks": self.open_tasks,
            "fault": fault_of(state, by_server=by_server),
        }
        return msgspec.convert(fields, Source)


class _Locked(Struct, frozen=True):
    id: int
    version: int
    created_at: datetime
    updated_at: datetime
    updated_by: str | None
    next_at: datetime | None
    next_tick: datetime | None
    cursor: str | None
    paused: bool
    name: str
    origin: str
    definition: bytes
    applied: bytes | None
    now: datetime

    @property
    def source(self) -> NewSource:
        return compiled(self.definition).source


class _FiringRow(Struct, frozen=True):
    id: int
    at: datetime
    outcome: str
    task_ids: list[str]
    dag_id: str | None
    error: str | None


class _Total(Struct, frozen=True):
    name: str
    outcome: str
    firings: int


class _ByName(Struct, frozen=True, tag="sources"):
    name: str


class _ById(Struct, frozen=True, tag="firings"):
    id: int


class _WorkRow(Struct, frozen=True):
    created_at: datetime
    id: str
    deleted: bool


class SourceRegistry:
    def __init__(
        self, database: Database, *, folders: Sequence[str] | None = None, by_server: bool = False
    ) -> None:
        """`folders`: those that servers watch for file sources; None: this process doesn't know them."""
        self._database = database
        self._events = Events(database)
        self._roots = FileRoots(database, folders)
        self._by_server = by_server

    # Reading.

    async def get(self, name: str) -> Source:
        refuse_unstorable(name=[name])
        async with self._database.connection() as connection:
            parameters = {**self._database.now, "name": name}
            row = await fetch_row(connection, _Read, _SQL["read_source"], parameters)
        if row is None:
            raise unknown_source(name)
        return row.source(by_server=self._by_server)

    async def find(
        self, *, kind: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[Source]:
        """One page of sources by name."""
        check_limit(limit)
        if kind is not None and kind not in tuple(SourceKind):
            raise InvalidInputError(
                errors=[("kind", f"must be one of {', '.join(SourceKind)}, got {kind!r}")]
            )
        after = decode_cursor(cursor, _ByName)
        place = {"after": after.name if after else "", "kind": kind, "limit": limit + 1}
        parameters = {**self._database.now, **place}
        async with self._database.connection() as connection:
            rows = await fetch_rows(connection, _Read, _SQL["list_sources"], parameters)
        sources = [row.source(by_server=self._by_server) for row in rows[:limit]]
        more = len(rows) > limit
        return Page(sources, encode_cursor(_ByName(sources[-1].name)) if more else None)

    async def firings(self, name: str, *, limit: int = 50, cursor: str | None = None) -> Page[Firing]:
        """One page of the history of a source, newest first."""
        check_limit(limit)
        refuse_unstorable(name=[name])
        before = decode_cursor(cursor, _ById)
        async with self._database.connection() as connection:
            ids = await fetch_column(connection, _SQL["find_source_id"], {"name": name})
            if not ids:
                raise unknown_source(name)
            parameters = {
                "source_id": ids[0],
                "before": min(before.id, _LARGEST) if before else _LARGEST,
                "limit": limit + 1,
            }
            rows = await fetch_rows(connection, _FiringRow, _SQL["list_firings"], parameters)
        items = [
            Firing(
                at=row.at,
                outcome=FiringOutcome(row.outcome),
                task_ids=row.task_ids,
                dag_id=row.dag_id,
                error=row.error,
            )
            for row in rows[:limit]
        ]
        return Page(items, encode_cursor(_ById(rows[limit - 1].id)) if len(rows) > limit else None)

    async def totals(self) -> list[tuple[str, str, int]]:
        """The number of firings, by source and outcome."""
        async with self._database.connection() as connection:
            rows = await fetch_rows(connection, _Total, _SQL["totals"], {})
        return [(row.name, row.outcome, row.firings) for row in rows]

    async def lag(self) -> float:
        """How many seconds the oldest due tick is late."""
        async with self._database.connection() as connection:
            return float(await fetch_value(connection, _SQL["lag"], self._database.now) or 0.0)

    # Changing.

    async def create(self, source: NewSource) -> Source:
        """Create a source; raises AlreadyExistsError if there is one with its name."""
        definition = await asyncio.to_thread(checked, source)

        async def work(connection: Connection) -> None:
            if await self._lock(connection, source.name) is not None or not await self._insert(
                connection, definition, "api", None
            ):
                raise AlreadyExistsError(
                    f"There is a source {source.name!r} already. PUT /v1/sources/NAME replaces it."
                )

        await self._database.run(work, pipeline=False)
        return await self.get(source.name)

    async def put(
        self, source: NewSource, *, version: int | None = None, origin: str = "api"
    ) -> tuple[Source, bool]:
        """Create or replace a source; returns it and whether it is new.

        With a `version`, only that one is replaced: raises InvalidTransitionError if the source has changed
        since, and NotFoundError if it was deleted. Without `enabled`, an existing source stays as it is. With
        the origin `agent`, a definition that was applied before changes nothing.
        """
        definition = await asyncio.to_thread(checked, source)

        async def work(connection: Connection) -> bool:
            await connection.execute(_SQL["one_at_a_time"], {})
            row = await self._lock(connection, source.name, version)
            if row is None:
                applied = None if origin == "api" else definition_of(definition)
                await self._insert(connection, definition, origin, applied)
                return True
            if origin != "api":
                await self._apply(connection, row, definition, origin)
                return False
            after, paused = definition, False
            if source.enabled is UNSET:
                after, paused = msgspec.structs.replace(definition, enabled=row.source.enabled), row.paused
            await self._update(connection, row, after, paused=paused, origin=row.origin)
            return False

        made = await self._database.run(work, pipeline=False)
        return await self.get(source.name), made

    async def patch(self, name: str, changes: SourceFields, *, version: int | None = None) -> Source:
        """Change fields of a source. `enabled` false pauses it until it is enabled by hand.

        With a `version`, raises InvalidTransitionError if the source has changed since.
        """
        fields = definition_of(changes)

        async def work(connection: Connection) -> None:
            row = await self._lock(connection, name, version)
            if row is None:
                raise unknown_source(name)
            merged = {**definition_of(row.source), **fields}
            paused = row.paused
            if fields.get("enabled") is False:
                # The definition stays: a file that is applied again must not end the pause.
                merged["enabled"], paused = row.source.enabled, True
            elif fields.get("enabled") is True:
                paused = False
            after = await asyncio.to_thread(checked, _converted(merged))
            await self._update(connection, row, after, paused=paused, origin=row.origin)

        refuse_unstorable(name=[name])
        await self._database.run(work, pipeline=False)
        return await self.get(name)

    async def delete(self, name: str) -> None:
        """Delete a source and its history. Work that it has created stays."""

        async def work(connection: Connection) -> None:
            row = await self._lock(connection, name)
            if row is None:
                raise unknown_source(name)
            await self._delete(connection, row)

        refuse_unstorable(name=[name])
        await self._database.run(work, pipeline=False)

    async def apply(
        self, sources: Sequence[NewSource], *, origin: str, dry_run: bool = False, check_roots: bool = True
    ) -> list[SourceChange]:
        """Make the sources of an origin those of a file, all or nothing; returns the differences.

        Only sources that came from it are removed. Without `check_roots`, the watchers of new file sources
        may start later.
        """
        definitions = await asyncio.to_thread(_all_checked, sources)

        async def work(connection: Connection) -> list[SourceChange]:
            await connection.execute(_SQL["one_at_a_time"], {})
            changes = []
            for name, definition in definitions.items():
                row = await self._lock(connection, name)
                if row is None:
                    changes.append(SourceChange(name=name, change="create"))
                    if not dry_run:
                        applied = definition_of(definition)
                        await self._insert(connection, definition, origin, applied, check_root=check_roots)
                    continue
                fields = _difference(row.applied, row.source, definition)
                changes.append(
                    SourceChange(name=name, change="change" if fields else "unchanged", fields=fields)
                )
                if not dry_run:
                    await self._apply(connection, row, definition, origin, check_root=check_roots)
            parameters = {**self._database.now, "origin": origin}
            for row in await fetch_rows(connection, _Locked, _SQL["lock_of_origin"], parameters):
                if row.name not in definitions:
                    changes.append(SourceChange(name=row.name, change="remove"))
                    if not dry_run:
                        await self._delete(connection, row)
            return changes

        return await self._database.run(work, pipeline=False)

    # In a transaction.

    async def _lock(self, connection: Connection, name: str, version: int | None = None) -> _Locked | None:
        parameters = {**self._database.now, "name": name}
        row = await fetch_row(connection, _Locked, _SQL["lock_source"], parameters)
        if version is not None:
            if row is None:
                raise unknown_source(name)
            if row.version != version:
                by = "" if row.updated_by is None else f" by {row.updated_by}"
                raise InvalidTransitionError(
                    f"Source {name!r} was changed{by} at {row.updated_at:%Y-%m-%d %H:%M:%S} UTC: it has "
                    f"version {row.version}, and your change is based on version {version}. Nothing was "
                    "changed. Read the source again, and repeat your change with its new version."
                )
        return row

    async def _insert(
        self,
        connection: Connection,
        source: NewSource,
        origin: str,
        applied: Mapping[str, Any] | None,
        *,
        check_root: bool = True,
    ) -> bool:
        now: datetime = await fetch_value(connection, _SQL["read_now"], self._database.now)
        tick, at = _next(source, now, now) if source.enabled else (None, None)
        made = await fetch_column(
            connection,
            _SQL["insert_source"],
            {
                **self._database.now,
                "actor": actor_name(),
                "next_tick": tick,
                "next_at": at,
                "cursor": await self._start(source) if source.enabled else None,
                "name": source.name,
                "kind": source.kind.value,
                "origin": origin,
                "definition": _json(definition_of(source)),
                "applied": None if applied is None else _json(applied),
                "token_id": caller().token_id,
            },
        )
        if made and source.kind is SourceKind.FILES:
            await self._roots.record(connection, made[0], source, refuse=check_root)
        if made:
            await self._log(connection, "create", source.name, {"kind": source.kind.value})
        return bool(made)

    async def _apply(
        self,
        connection: Connection,
        row: _Locked,
        definition: NewSource,
        origin: str,
        *,
        check_root: bool = True,
    ) -> None:
        applied = definition_of(definition)
        if row.applied is not None and msgspec.json.decode(row.applied) == applied:
            await connection.execute(_SQL["set_token"], {"id": row.id, "token_id": caller().token_id})
            return
        await self._update(
            connection,
            row,
            definition,
            paused=row.paused,
            origin=origin,
            applied=applied,
            check_root=check_root,
        )

    async def _update(
        self,
        connection: Connection,
        row: _Locked,
        source: NewSource,
        *,
        paused: bool,
        origin: str,
        applied: Mapping[str, Any] | None = None,
        check_root: bool = True,
    ) -> None:
        before, after = definition_of(row.source), definition_of(source)
        changed = {name for name in DEFINED if before.get(name) != after.get(name)}
        if paused != row.paused:
            changed.add("enabled")
        if not changed and applied is None:
            return
        tick, at = row.next_tick, row.next_at
        was, runs = bool(row.source.enabled) and not row.paused, bool(source.enabled) and not paused
        if not runs:
            tick = at = None
        elif not was or changed.intersection(_TIMING) or "kind" in changed:
            tick, at = _next(source, row.created_at, row.now)
        cursor = None
        if runs and source.kind is SourceKind.EVENT:
            cursor = row.cursor if was and row.cursor is not None else await self._start(source)
        kept = None if row.applied is None else msgspec.json.decode(row.applied)
        applied = kept if applied is None else applied
        await connection.execute(
            _SQL["update_source"],
            {
                **self._database.now,
                "id": row.id,
                "actor": actor_name(),
                "next_tick": tick,
                "next_at": at,
                "cursor": cursor,
                "kind": source.kind.value,
                "origin": origin,
                "definition": _json(after),
                "applied": None if applied is None else _json(applied),
                "paused": paused,
                "token_id": caller().token_id,
            },
        )
        if source.kind is SourceKind.FILES and changed.intersection(_WATCHED):
            await self._roots.record(connection, row.id, source, refuse=check_root)
        if changed:
            about = {"fields": sorted(changed), "enabled": runs}
            await self._log(connection, "change", source.name, about)

    async def _start(self, source: NewSource) -> str | None:
        """Where an event source begins: with what happens from now on."""
        if source.kind is not SourceKind.EVENT:
            return None
        return (await self._events.read(NOW, limit=1)).next_cursor

    async def _delete(self, connection: Connection, row: _Locked) -> None:
        await connection.execute(_SQL["delete_source"], {"id": row.id})
        await self._log(connection, "remove", row.name, {})

    async def _log(self, connection: Connection, change: str, name: str, about: Mapping[str, Any]) -> None:
        data = act_json({"source": name, **about})
        await connection.execute(_SQL["log_change"], {**self._database.now, "change": change, "data": data})

    # Retention.

    async def forget(self, older_than_sec: float, limit: int) -> int:
        """Delete old firings and keys, what deleted sources left, and work that ended long ago."""
        parameters = {**self._database.now, "older_than": older_than_sec, "limit": limit}
        total = 0
        for statement in ("forget_firings", "forget_keys", "forget_orphans", "forget_orphaned_keys"):
            while True:
                async with self._database.connection() as connection:
                    deleted = (await connection.execute(_SQL[statement], parameters)).rowcount
                total += deleted
                if deleted < limit:
                    break
        return total + await self._forget_work(parameters, limit)

    async def _forget_work(self, parameters: Mapping[str, Any], limit: int) -> int:
        """Go through all work once: mark what has ended, delete what is old."""
        after, after_id, deleted = datetime.min.replace(tzinfo=UTC), "", 0
        while True:
            place = {"after": after, "after_id": after_id}
            async with self._database.connection() as connection:
                rows = await fetch_rows(connection, _WorkRow, _SQL["forget_work"], {**parameters, **place})
            deleted += sum(row.deleted for row in rows)
            if len(rows) < limit:
                return deleted
            after, after_id = rows[-1].created_at, rows[-1].id


def _next(source: NewSource, created_at: datetime, now: datetime) -> tuple[datetime | None, datetime | None]:
    """The next tick of a schedule, and when it fires."""
    if source.kind is not SourceKind.SCHEDULE:
        return None, None
    definition = Definition(source)
    tick = definition.ticks(created_at).after(now)
    return tick, definition.due_at(tick)


def _all_checked(sources: Sequence[NewSource]) -> dict[str, NewSource]:
    """The sources by name; raises InvalidInputError with the faults of all of them."""
    faults: list[tuple[str, str]] = []
    by_name: dict[str, NewSource] = {}
    names: set[str] = set()
    if len(sources) > MAX_SOURCES_AT_ONCE:
        raise InvalidInputError(errors=[("sources", f"must be at most {MAX_SOURCES_AT_ONCE}")])
    for number, source in enumerate(sources):
        place = f"sources[{number}]"
        if source.name in names:
            faults.append((f"{place}.name", f"{source.name!r} is used twice"))
        names.add(source.name)
        try:
            by_name[source.name] = checked(source)
        except InvalidInputError as error:
            faults += [(f"{place}.{field}" if field else place, fault) for field, fault in error.errors]
    if faults:
        raise InvalidInputError(errors=faults)
    return dict(sorted(by_name.items()))


def _difference(applied: bytes | None, current: NewSource, source: NewSource) -> dict[str, tuple[Any, Any]]:
    """Fields that applying changes, with the values before and after; none if it was applied before."""
    after = definition_of(source)
    if applied is not None and msgspec.json.decode(applied) == after:
        return {}
    before = definition_of(current)
    return {
        name: (before.get(name), after.get(name)) for name in DEFINED if before.get(name) != after.get(name)
    }


def _converted(fields: Mapping[str, Any]) -> NewSource:
    try:
        return msgspec.convert(fields, NewSource)
    except msgspec.ValidationError as error:
        raise invalid_input(error) from None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
