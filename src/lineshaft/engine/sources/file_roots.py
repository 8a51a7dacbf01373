"""Roots of file sources: whether somebody watches them, and what is in them when a source is stored.

A watcher notices a new source after some seconds. Files that change or go in this time fire too, because what
was there is recorded with the source: not the contents, which would take long to read, but sizes and times.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column
from lineshaft.errors import InvalidInputError
from lineshaft.sources.files import FolderError, FoundFile, allowed_root, scan
from lineshaft.types.sources import NewSource

#: The name of all servers as watchers.
SERVER = "server"

_SQL = catalog.load(__name__)


class FileRoots:
    def __init__(self, database: Database, folders: Sequence[str] | None) -> None:
        """`folders`: those that servers watch; None: this process doesn't know them."""
        self._database = database
        self._folders = folders

    async def record(
        self, connection: Connection, source_id: int, source: NewSource, *, refuse: bool = True
    ) -> None:
        """Record the files of a new source, or of one with another root.

        With `refuse`, raises InvalidInputError if no process can watch its root.
        """
        if self._folders is None:
            return
        root = str(source.root)
        try:
            if not _is_in(root, self._folders):
                if refuse and not await self._is_watched_elsewhere(connection, root):
                    raise InvalidInputError(errors=[("root", unwatched(root))])
                return
            found = await asyncio.to_thread(_files, root, self._folders, source.patterns or [])
        except FolderError as error:
            if refuse:
                raise InvalidInputError(errors=[("root", str(error))]) from None
            return
        parameters = {
            **self._database.now,
            "source_id": source_id,
            "watcher": SERVER,
            "paths": [file.path for file in found],
            "digests": [unread(file) for file in found],
        }
        await connection.execute(_SQL["record_files"], parameters)

    async def _is_watched_elsewhere(self, connection: Connection, root: str) -> bool:
        others: list[list[str]] = await fetch_column(
            connection, _SQL["folders_elsewhere"], {"server": SERVER}
        )
        return any(_is_in(root, folders) for folders in others)

    async def looked(self, watcher: str, folders: Sequence[str], faults: dict[str, str]) -> None:
        """A watcher has looked; `faults` by source: why it can't watch its root."""
        parameters: dict[str, Any] = {**self._database.now, "name": watcher, "folders": list(folders)}
        parameters["faults"] = msgspec.json.encode(faults).decode()
        async with self._database.connection() as connection:
            await connection.execute(_SQL["looked"], parameters)


def unwatched(root: str) -> str:
    return (
        f"no process watches {root!r}: it is not in a folder of LINESHAFT_SOURCE_FOLDERS, which 'lineshaft "
        "up' watches. Set this variable for the server, or run 'lineshaft watch --folder DIR' where the "
        "files are"
    )


def unread(file: FoundFile) -> str:
    """In place of the digest of a file whose content no watcher has read yet."""
    return f"unread:{file.size}:{file.modified_ns}"


def _is_in(root: str, folders: Sequence[str]) -> bool:
    return any(Path(os.path.normpath(root)).is_relative_to(folder) for folder in folders)


def _files(root: str, folders: Sequence[str], patterns: Sequence[str]) -> list[FoundFile]:
    return list(scan(allowed_root(root, folders), patterns))
