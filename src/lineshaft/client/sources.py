"""`shaft.sources`: schedules, webhooks and other rules that create work."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from lineshaft.client.backend import Backend
from lineshaft.types.page import DEFAULT_LIMIT, Page
from lineshaft.types.sources import Fired, Firing, NewSource, Source, SourceChange, SourceFields

T = TypeVar("T")


class Sources:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def put(self, source: NewSource, *, version: int | None = None) -> Source:
        """Create or replace a source. Without `enabled`, an existing one stays paused or not.

        With the `version` that was read, raises InvalidTransitionError if the source has changed since.
        """
        return await self._backend.put_source(source, version=version)

    async def get(self, name: str) -> Source:
        return await self._backend.source(name)

    async def list(
        self, *, kind: str | None = None, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Source]:
        """One page of sources by name."""
        return await self._backend.sources(kind=kind, limit=limit, cursor=cursor)

    async def create(self, source: NewSource) -> Source:
        """Create a source; raises AlreadyExistsError if there is one with its name."""
        return await self._backend.create_source(source)

    async def patch(self, name: str, changes: SourceFields, *, version: int | None = None) -> Source:
        """Change fields of a source. `enabled` false pauses it until it is enabled by hand.

        With the `version` that was read, raises InvalidTransitionError if the source has changed since.
        """
        return await self._backend.patch_source(name, changes, version=version)

    async def delete(self, name: str) -> None:
        """Delete a source and its history. Work that it has created stays."""
        await self._backend.delete_source(name)

    async def fire(
        self, name: str, event: Mapping[str, Any] | None = None, *, dry_run: bool = False
    ) -> Fired:
        """Fire a source now. A dry run returns the tasks that would be created, and creates nothing."""
        return await self._backend.fire_source(name, event, dry_run=dry_run)

    async def firings(
        self, name: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Firing]:
        """One page of the history of a source, newest first."""
        return await self._backend.source_firings(name, limit=limit, cursor=cursor)

    async def apply(
        self, sources: Sequence[NewSource], *, origin: str, dry_run: bool = False
    ) -> Sequence[SourceChange]:
        """Make the sources of an origin (`file:NAME`) these, all or nothing; returns what changes.

        Sources of other origins stay. A dry run only returns the differences.
        """
        return await self._backend.apply_sources(sources, origin=origin, dry_run=dry_run)


class _Runner(Protocol):
    """Runs coroutines for code without an event loop."""

    def run(self, work: Coroutine[Any, Any, T]) -> T: ...


class SyncSources:
    """`shaft.sources` for code without an event loop."""

    def __init__(self, sources: Sources, loop: Any) -> None:
        self._sources = sources
        self._loop: _Runner = loop

    def put(self, source: NewSource, *, version: int | None = None) -> Source:
        return self._loop.run(self._sources.put(source, version=version))

    def get(self, name: str) -> Source:
        return self._loop.run(self._sources.get(name))

    def list(
        self, *, kind: str | None = None, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Source]:
        return self._loop.run(self._sources.list(kind=kind, limit=limit, cursor=cursor))

    def create(self, source: NewSource) -> Source:
        return self._loop.run(self._sources.create(source))

    def patch(self, name: str, changes: SourceFields, *, version: int | None = None) -> Source:
        return self._loop.run(self._sources.patch(name, changes, version=version))

    def delete(self, name: str) -> None:
        self._loop.run(self._sources.delete(name))

    def fire(self, name: str, event: Mapping[str, Any] | None = None, *, dry_run: bool = False) -> Fired:
        return self._loop.run(self._sources.fire(name, event, dry_run=dry_run))

    def firings(self, name: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Firing]:
        return self._loop.run(self._sources.firings(name, limit=limit, cursor=cursor))

    def apply(
        self, sources: Sequence[NewSource], *, origin: str, dry_run: bool = False
    ) -> Sequence[SourceChange]:
        return self._loop.run(self._sources.apply(sources, origin=origin, dry_run=dry_run))


for _name in ("put", "list", "create", "patch", "delete", "fire", "firings", "apply"):
    getattr(SyncSources, _name).__doc__ = getattr(Sources, _name).__doc__
