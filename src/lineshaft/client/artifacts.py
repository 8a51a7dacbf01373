"""`shaft.artifacts`: files that tasks read and write, over a database or over HTTP."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from lineshaft.client.backend import Backend
from lineshaft.client.handles import TaskRef, id_of
from lineshaft.client.large_data import metadata
from lineshaft.operations import artifacts
from lineshaft.types import Artifact, Page
from lineshaft.types.artifacts import artifact_id
from lineshaft.types.page import DEFAULT_LIMIT
from lineshaft.types.request import ById

#: What can be uploaded: bytes, the path of a file, an open file, or pieces as they come.
Content = bytes | bytearray | memoryview | os.PathLike[str] | BinaryIO | AsyncIterable[bytes]
#: Called with the number of bytes so far.
Progress = Callable[[int], None]

_CHUNK = 1 << 20


class ArtifactReader:
    """The content of an artifact, piece by piece.

        async with shaft.artifacts.open(ref) as reader:
            async for chunk in reader: ...

    If all of it is read, its SHA-256 is checked.
    """

    def __init__(self, backend: Backend, ref: str, start: int, stop: int | None) -> None:
        self._backend = backend
        self._ref = ref
        self._start, self._stop = start, stop
        self._artifact: Artifact | None = None
        self._chunks: AsyncGenerator[bytes, None] | None = None
        self._rest = b""

    @property
    def artifact(self) -> Artifact:
        if self._artifact is None:
            raise RuntimeError("Use 'async with shaft.artifacts.open(ref) as reader'.")
        return self._artifact

    async def __aenter__(self) -> Self:
        self._artifact = artifact = await metadata(self._backend, self._ref)
        stop = artifact.size if self._stop is None else min(self._stop, artifact.size)
        self._chunks = self._backend.read_artifact(artifact, min(self._start, stop), stop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._chunks is not None:
            await self._chunks.aclose()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self._next():
            yield chunk

    async def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes, fewer only at the end; without a size everything, in memory."""
        parts, count = [], 0
        while size < 0 or count < size:
            chunk = await self._next()
            if not chunk:
                break
            parts.append(chunk)
            count += len(chunk)
        data = b"".join(parts)
        if 0 <= size < len(data):
            data, self._rest = data[:size], data[size:]
        return data

    async def _next(self) -> bytes:
        chunk, self._rest = self._rest, b""
        if not chunk:
            assert self.artifact is not None  # noqa: S101 - raises unless it is open
            assert self._chunks is not None  # noqa: S101 - set together
            chunk = await anext(self._chunks, b"")
        return chunk


class Artifacts:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def put(
        self,
        name: str,
        content: Content,
        *,
        content_type: str | None = None,
        task: TaskRef | None = None,
        progress: Progress | None = None,
    ) -> Artifact:
        """Upload a file: bytes, the path of a file, an open file or pieces of bytes.

        `name` is what readers see; the media type is guessed from it unless it is given. With `task`, the
        task that made it, the same file again is the same artifact. `progress` is called with the number of
        bytes so far.
        """
        chunks, size = _pieces(content)
        return await self._backend.put_artifact(
            chunks if progress is None else _reporting(chunks, progress),
            name=name,
            content_type=content_type,
            task_id=None if task is None else id_of(task),
            size=size,
        )

    def open(self, ref: str, *, start: int = 0, stop: int | None = None) -> ArtifactReader:
        """Read an artifact (`artifact:ID` or its id), or the bytes from `start` to before `stop`."""
        return ArtifactReader(self._backend, ref, start, stop)

    async def read(self, ref: str) -> bytes:
        """The whole content, in memory."""
        async with self.open(ref) as reader:
            return await reader.read()

    async def save(self, ref: str, path: os.PathLike[str], *, progress: Progress | None = None) -> Artifact:
        """Write the content to a file, which appears, or is replaced, when it is complete."""
        target = Path(path)
        async with self.open(ref) as reader:
            handle, name = await asyncio.to_thread(_create_beside, target)
            try:
                with os.fdopen(handle, "wb") as file:
                    done = 0
                    async for chunk in reader:
                        await asyncio.to_thread(file.write, chunk)
                        done += len(chunk)
                        if progress is not None:
                            progress(done)
                await asyncio.to_thread(os.replace, name, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(name).unlink()  # noqa: ASYNC240 - quick
                raise
            return reader.artifact

    async def get(self, ref: str) -> Artifact:
        """The metadata of an artifact."""
        return await metadata(self._backend, ref)

    async def delete(self, ref: str) -> None:
        """Delete an artifact that no live task refers to."""
        await self._backend.call(artifacts.delete_artifact, ById(id=artifact_id(ref)))

    async def list(
        self, *, task: TaskRef | None = None, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Artifact]:
        """One page of artifacts, newest first; with `task` those that it made."""
        task_id = None if task is None else id_of(task)
        request = artifacts.ListArtifacts(task_id=task_id, limit=limit, cursor=cursor)
        return await self._backend.call(artifacts.list_artifacts, request)


def _create_beside(target: Path) -> tuple[int, str]:
    """A new file with the rights that any other new file gets; mkstemp gives it to its owner only."""
    name = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}")
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), str(name)


def _pieces(content: Content) -> tuple[AsyncIterable[bytes], int | None]:
    """The pieces, and their size if it is known."""
    if isinstance(content, bytes | bytearray | memoryview):
        data = bytes(content)
        return _of_bytes(data), len(data)
    if isinstance(content, os.PathLike):
        return _of_path(Path(content)), Path(content).stat().st_size
    if isinstance(content, AsyncIterable):
        return content, None
    if hasattr(content, "read"):
        return _of_file(content), None
    raise TypeError(
        "The content of an artifact must be bytes, a pathlib.Path, a file opened as binary or an async "
        f"iterable of bytes, got {type(content).__qualname__}."
    )


async def _of_bytes(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


async def _of_path(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        async for chunk in _of_file(file):
            yield chunk


async def _of_file(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, _CHUNK):
        yield chunk


async def _reporting(chunks: AsyncIterable[bytes], progress: Progress) -> AsyncIterator[bytes]:
    done = 0
    async for chunk in chunks:
        yield chunk
        done += len(chunk)
        progress(done)
