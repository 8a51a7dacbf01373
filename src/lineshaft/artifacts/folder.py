"""A store in a folder of this machine, or on a file system that all processes share.

Files are complete before they get their name: they are written under a temporary one, synchronized to disk
and renamed. Only their owner can read them.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from lineshaft.artifacts.store import (
    CHUNK_BYTES,
    CONTENTS,
    ID_KEY,
    TEMPORARY,
    StoreUnavailableError,
    temporary_key,
)
from lineshaft.errors import LineshaftError

T = TypeVar("T")

_LISTED_AT_ONCE = 1_000
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700


class FolderStore:
    has_links = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def describe(self) -> str:
        return f"the folder {self._root}"

    async def read_id(self) -> str | None:
        def read() -> str | None:
            try:
                return (self._root / ID_KEY).read_text(encoding="ascii").strip()
            except FileNotFoundError:
                return None

        return await self._in_thread(read)

    async def create_id(self, store_id: str) -> str:
        def create() -> None:
            _make_folder(self._root / TEMPORARY)
            self._create(ID_KEY, f"{store_id}\n".encode())

        await self._in_thread(create)
        return await self.read_id() or store_id

    async def is_empty(self) -> bool:
        def look() -> bool:
            return not any((self._root / CONTENTS).glob("*/*"))

        return await self._in_thread(look)

    async def write(self, key: str, chunks: AsyncIterable[bytes]) -> None:
        file = await self._opened(lambda: self._open_new(key), or_else=self._path(key).unlink)
        try:
            async for chunk in chunks:
                await self._in_thread(lambda data=chunk: _write_all(file, data))  # type: ignore[misc]
            await self._in_thread(lambda: os.fsync(file))
        except BaseException:
            with contextlib.suppress(OSError):
                self._path(key).unlink()
            raise
        finally:
            os.close(file)

    async def create(self, key: str, data: bytes) -> None:
        await self._in_thread(lambda: self._create(key, data))

    async def promote(self, key: str, to: str) -> None:
        await self._in_thread(lambda: self._promote(key, to))

    async def size(self, key: str) -> int | None:
        def measure() -> int | None:
            try:
                return self._path(key).stat().st_size
            except FileNotFoundError:
                return None

        return await self._in_thread(measure)

    async def read(self, key: str, start: int, stop: int) -> AsyncIterator[bytes]:
        file = await self._opened(lambda: os.open(self._path(key), os.O_RDONLY))
        try:
            while start < stop:
                data = await self._in_thread(
                    lambda at=start: os.pread(file, min(CHUNK_BYTES, stop - at), at)  # type: ignore[misc]
                )
                if not data:
                    break
                start += len(data)
                yield data
        finally:
            os.close(file)

    async def delete(self, keys: Sequence[str]) -> None:
        def unlink() -> None:
            self._check_mounted()
            for key in keys:
                self._path(key).unlink(missing_ok=True)

        await self._in_thread(unlink)

    async def old_temporary(self, age: timedelta) -> list[str]:
        def look() -> list[str]:
            before = time.time() - age.total_seconds()
            found = []
            with contextlib.suppress(FileNotFoundError), os.scandir(self._root / TEMPORARY) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.stat().st_mtime < before:
                            found.append(TEMPORARY + entry.name)
                    if len(found) == _LISTED_AT_ONCE:
                        break
            return found

        return await self._in_thread(look)

    async def link(self, key: str, lifetime: timedelta) -> str:  # noqa: ARG002 - there are none
        raise LineshaftError(f"{self.describe()} has no signed URLs; only S3 has.")

    # In a thread.

    async def _in_thread(self, work: Callable[[], T]) -> T:
        with _reporting(self.describe()):
            working = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                # A thread can't be stopped, and it uses the file that the caller closes next.
                await asyncio.wait({working})
                raise

    async def _opened(self, work: Callable[[], int], or_else: Callable[[], None] | None = None) -> int:
        """Open a file. If the caller is cancelled meanwhile, it is closed, and `or_else` is called."""
        opened: list[int] = []
        try:
            await self._in_thread(lambda: opened.append(work()))
        except asyncio.CancelledError:
            for file in opened:
                os.close(file)
                if or_else is not None:
                    or_else()
            raise
        return opened[0]

    def _path(self, key: str) -> Path:
        return self._root / key

    def _make_parent(self, path: Path) -> None:
        if not path.parent.is_dir():
            self._check_mounted()
            _make_folder(path.parent)

    def _check_mounted(self) -> None:
        """The disk of the folder may have gone since the id was compared: an empty folder takes its place."""
        if not (self._root / ID_KEY).exists():
            raise StoreUnavailableError(
                f"The artifact store, {self.describe()}, has lost its file {ID_KEY}. Check that its disk is "
                "mounted, or restore it from a backup."
            )

    def _open_new(self, key: str) -> int:
        path = self._path(key)
        self._make_parent(path)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)

    def _create(self, key: str, data: bytes) -> None:
        path, temporary = self._path(key), temporary_key()
        if path.exists():
            return
        file = self._open_new(temporary)
        try:
            try:
                _write_all(file, data)
                os.fsync(file)
            finally:
                os.close(file)
            self._promote(temporary, key)
        finally:
            self._path(temporary).unlink(missing_ok=True)

    def _promote(self, key: str, to: str) -> None:
        source, target = self._path(key), self._path(to)
        self._make_parent(target)
        try:
            # Fails if it exists, unlike a rename: of two processes that write the id, one wins.
            os.link(source, target)
        except FileExistsError:
            return
        except FileNotFoundError:
            raise
        except OSError:
            # Some file systems have no links.
            if target.exists():
                return
            source.rename(target)
        _sync_folder(target.parent)


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _make_folder(path: Path) -> None:
    missing = [path, *(parent for parent in path.parents if not parent.exists())]
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    for made in missing:
        with contextlib.suppress(PermissionError):
            made.chmod(_FOLDER_MODE)
        _sync_folder(made.parent)


def _sync_folder(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def _reporting(place: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreUnavailableError(
            f"The artifact store, {place}, can't be used: {error.strerror or error}. Check the disk and the "
            "permissions, or choose another place with LINESHAFT_ARTIFACTS."
        ) from error
