"""Watches the folders of file sources, and fires for files that were added, modified or deleted."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from watchfiles import awatch

from lineshaft.duties.loop import Counts
from lineshaft.engine.sources.file_roots import SERVER, unread
from lineshaft.engine.sources.file_sources import FileChange, FileSource, FileSources
from lineshaft.sources.files import FolderError, FoundFile, allowed_root, digest, scan

_log = logging.getLogger("lineshaft.duties")

#: New sources are noticed after this time, and changes that the operating system doesn't report.
_LOOK_AGAIN_SEC = 10.0


class FileWatcher(Struct, frozen=True):
    sources: FileSources
    #: Folders that may be watched.
    folders: Sequence[str]
    #: Under this name it remembers what it has seen.
    watcher: str = SERVER
    interval_sec: float = 0.1
    interruptible: bool = True
    name: str = "file watcher"
    #: Size and time of files whose content is known, by source and path.
    _known: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    #: When the last look was recorded, and its faults.
    _looked: dict[str, Any] = field(default_factory=dict)

    async def run_once(self) -> Counts:
        """Look through all folders, then wait for a change."""
        counts, roots, settling_sec = await self.look()
        await _change(roots, _LOOK_AGAIN_SEC if settling_sec is None else settling_sec)
        return counts

    async def look(self) -> tuple[Counter[str], list[Path], float | None]:
        """What was fired, the folders, and the seconds until files that still change may be settled."""
        counts: Counter[str] = Counter()
        roots: list[Path] = []
        settling: list[float] = []
        faults: dict[str, str] = {}
        for source in await self.sources.all():
            try:
                root = allowed_root(str(source.source.root), self.folders)
                found = await asyncio.to_thread(lambda: list(scan(root, source.source.patterns or [])))  # noqa: B023
            except FolderError as error:
                faults[source.name] = str(error)
                self._refuse(source, str(error))
                continue
            roots.append(root)
            waits = (source.source.debounce_ms or 0) / 1000
            if await self._compare(source, root, found, waits, counts):
                settling.append(waits)
        await self._report_look(faults)
        return counts, roots, min(settling, default=None)

    async def _report_look(self, faults: dict[str, str]) -> None:
        """Record, for those who wonder why a source doesn't fire; seldom, unless something has changed."""
        now = time.monotonic()
        if self._looked.get("faults") != faults or now - self._looked["at"] >= _LOOK_AGAIN_SEC:
            self._looked.update(faults=faults, at=now)
            await self.sources.roots.looked(self.watcher, self.folders, faults)

    async def _compare(
        self, source: FileSource, root: Path, found: list[FoundFile], waits: float, counts: Counter[str]
    ) -> bool:
        """Report differences to what was seen; returns whether some files have changed too lately."""
        seen = await self.sources.seen(source, self.watcher)
        unsettled = False
        for file in found:
            key, about = (source.id, file.path), (file.size, file.modified_ns)
            if file.path in seen and self._known.get(key) == about:
                continue
            # A time in the future says nothing.
            if 0 <= time.time() - file.modified_ns / 1e9 < waits:
                unsettled = True
                continue
            content = await asyncio.to_thread(digest, root, file.path)
            if content is None:
                continue
            known = seen.get(file.path)
            if known != content:
                # What no watcher has read yet is new, unless it has changed since the source was stored.
                change = "added" if known in {None, unread(file)} else "modified"
                await self._report(source, FileChange(file.path, change, content, file.size), counts)
            self._known[key] = about
        present = {file.path for file in found}
        for path in seen.keys() - present:
            self._known.pop((source.id, path), None)
            await self._report(source, FileChange(path, "deleted"), counts)
        return unsettled

    async def _report(self, source: FileSource, news: FileChange, counts: Counter[str]) -> None:
        fired = await self.sources.report(source, self.watcher, news)
        if fired is not None:
            counts[f"files {fired.outcome}"] += 1

    def _refuse(self, source: FileSource, reason: str) -> None:
        if self._refused.get(source.name) != reason:
            self._refused[source.name] = reason
            _log.warning("Source %s isn't watched: %s", source.name, reason)


async def _change(roots: Sequence[Path], within_sec: float) -> None:
    """Wait for a change in one of these folders, but not for longer than this."""
    try:
        async with asyncio.timeout(within_sec):
            if not roots:
                await asyncio.sleep(within_sec)
            async for _ in awatch(*roots, debounce=50, step=20):
                return
    except TimeoutError:
        return
