"""File sources: a changed file fires once per path and content.

What a watcher has seen is kept per source and watcher name, so changes that were made while none ran are
found at the next start. One transaction remembers the content and fires.
"""

from typing import NamedTuple

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.sources.file_roots import FileRoots
from lineshaft.engine.sources.firing import Firings, Key, Occasion, unknown_source
from lineshaft.sources.definition import compiled
from lineshaft.types.sources import Fired, FiringOutcome, NewSource

_SQL = catalog.load(__name__)


class FileSource(Struct, frozen=True):
    id: int
    name: str
    definition: bytes

    @property
    def source(self) -> NewSource:
        return compiled(self.definition).source


class FileChange(NamedTuple):
    #: Relative to the root.
    path: str
    #: added, modified or deleted.
    change: str
    #: The digest and the size of the content; None: it was deleted.
    digest: str | None = None
    size: int | None = None


class _Seen(Struct, frozen=True):
    path: str
    digest: str


class FileSources:
    def __init__(self, database: Database, firings: Firings) -> None:
        self._database = database
        self._firings = firings
        self.roots = FileRoots(database, None)

    async def all(self) -> list[FileSource]:
        """The file sources that are enabled."""
        async with self._database.connection() as connection:
            found = await fetch_rows(connection, FileSource, _SQL["list_file_sources"], {})
        return [each for each in found if each.source.enabled]

    async def seen(self, source: FileSource, watcher: str) -> dict[str, str]:
        """Digests by path."""
        own = {"source_id": source.id, "watcher": watcher}
        async with self._database.connection() as connection:
            rows = await fetch_rows(connection, _Seen, _SQL["list_seen"], own)
        return {row.path: row.digest for row in rows}

    async def report(self, source: FileSource, watcher: str, news: FileChange) -> Fired | None:
        """Remember a change and fire; None: the source doesn't want it, or it was reported before."""
        path, change, digest, size = news
        own = {"source_id": source.id, "watcher": watcher, "path": path}

        async def work(connection: Connection) -> Fired:
            row = await self._firings.share(connection, source.name)
            if row is None or row.id != source.id:
                raise unknown_source(source.name)
            if digest is None:
                moved = await fetch_column(connection, _SQL["miss"], own)
            else:
                values = {**self._database.now, **own, "digest": digest}
                moved = await fetch_column(connection, _SQL["see"], values)
            if not moved or change not in (source.source.on or ()):
                return Fired()
            event = {
                "path": path,
                "root": source.source.root,
                "change": change,
                "digest": digest,
                "size": size,
            }
            # A file may be deleted again and again.
            keys = [] if digest is None else [Key(f"file:{path}:{digest}")]
            return await self._firings.fire_in(connection, row, Occasion(event, keys))

        fired = await self._firings.run(work)
        return fired if isinstance(fired.outcome, FiringOutcome) else None
