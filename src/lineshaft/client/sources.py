"""`shaft.sources`: schedules, webhooks and other rules that create work."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from lineshaft.client.backend import Backend
from lineshaft.operations import sources as operations
from lineshaft.types import Fired, Firing, NewSource, Page, Source, SourceChange, SourceFields
from lineshaft.types.page import DEFAULT_LIMIT


class Sources:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def put(self, source: NewSource, *, version: int | None = None) -> Source:
        """Create or replace a source. Without `enabled`, an existing one stays paused or not.

        With the `version` that was read, raises InvalidTransitionError if the source has changed since.
        """
        body = operations.PutSource(kind=source.kind, version=version, **operations.fields_of(source))
        return await self._backend.call(
            operations.put_source, operations.ReplaceSource(name=source.name, source=body)
        )

    async def get(self, name: str) -> Source:
        return await self._backend.call(operations.get_source, operations.ByName(name=name))

    async def list(
        self, *, kind: str | None = None, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Source]:
        """One page of sources by name."""
        request = operations.ListSources(kind=kind, limit=limit, cursor=cursor)
        return await self._backend.call(operations.list_sources, request)

    async def create(self, source: NewSource) -> Source:
        """Create a source; raises AlreadyExistsError if there is one with its name."""
        return await self._backend.call(operations.create_source, source)

    async def patch(self, name: str, changes: SourceFields, *, version: int | None = None) -> Source:
        """Change fields of a source. `enabled` false pauses it until it is enabled by hand.

        With the `version` that was read, raises InvalidTransitionError if the source has changed since.
        """
        change = operations.ChangeSource(version=version, **operations.fields_of(changes))
        return await self._backend.call(
            operations.change_source, operations.PatchSource(name=name, change=change)
        )

    async def delete(self, name: str) -> None:
        """Delete a source and its history. Work that it has created stays."""
        await self._backend.call(operations.delete_source, operations.ByName(name=name))

    async def fire(
        self, name: str, event: Mapping[str, Any] | None = None, *, dry_run: bool = False
    ) -> Fired:
        """Fire a source now. A dry run returns the tasks that would be created, and creates nothing."""
        request = operations.FireSource(
            name=name, event=UNSET if event is None else dict(event), dry_run=dry_run
        )
        return await self._backend.call(operations.fire_source, request)

    async def firings(
        self, name: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Firing]:
        """One page of the history of a source, newest first."""
        request = operations.ListFirings(name=name, limit=limit, cursor=cursor)
        return await self._backend.call(operations.list_source_firings, request)

    async def apply(
        self, sources: Sequence[NewSource], *, origin: str, dry_run: bool = False
    ) -> Sequence[SourceChange]:
        """Make the sources of an origin (`file:NAME`) these, all or nothing; returns what changes.

        Sources of other origins stay. A dry run only returns the differences.
        """
        request = operations.ApplySources(origin=origin, sources=[*sources], dry_run=dry_run)
        return (await self._backend.call(operations.apply_sources, request)).items
