"""Artifacts: uploads, reads, deletion.

An upload first writes the bytes under a temporary key while it hashes them. Then it creates or locks the row
of that content, gives the object the key of its digest unless that exists, and inserts the artifact last. So
an upload that dies leaves a temporary key, or a content without an artifact, which the janitor deletes.

The janitor marks a content deleted under the lock of its row, commits, deletes the object under the lock, and
then the row. An upload that meets the mark writes the object again.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lineshaft.artifacts.store import CHUNK_BYTES, Store, StoreUnavailableError, content_key, temporary_key
from lineshaft.artifacts.verified import verified
from lineshaft.engine.artifacts.store_identity import StoreIdentity
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows, fetch_value
from lineshaft.engine.read.pages import decode_cursor, encode_cursor, refuse_unstorable
from lineshaft.errors import (
    InvalidInputError,
    InvalidTransitionError,
    LineshaftError,
    NotFoundError,
    PayloadTooLargeError,
    SettingsError,
    UnavailableError,
)
from lineshaft.ids import new_id
from lineshaft.model.file_names import media_type, stored_name
from lineshaft.types.artifacts import REF_PREFIX, Artifact, artifact_id
from lineshaft.types.page import Page, check_limit
from lineshaft.types.tasks import Task

#: Contents up to this size are written at once, without a temporary key.
_SMALL_BYTES = 1 << 20
#: Uploads that take longer than this are considered dead. One that isn't starts over.
CUT_OFF_SEC = 86_400.0
#: A temporary file that nothing was written to for so long is of a dead upload: the server closes connections
#: that bring so little.
STILL_SEC = 1_500.0
DEFAULT_MAX_BYTES = 1 << 30
#: Contents whose rows are locked while their objects are deleted: uploads of them wait.
_REMOVED_AT_ONCE = 100
#: What is read into memory at once.
MAX_DATA_BYTES = 64 << 20

_SQL = catalog.load(__name__)


class _ArtifactRow(NamedTuple):
    id: str
    name: str
    size: int
    sha256: str
    content_type: str
    task_id: str | None
    created_at: datetime

    @property
    def value(self) -> Artifact:
        return Artifact(ref=REF_PREFIX + self.id, **self._asdict())


class _Content(NamedTuple):
    #: Whether the object exists.
    stored: bool
    incarnation: int


class _Old(NamedTuple):
    id: str
    sha256: str
    used_at: datetime
    is_unused: bool


class _Before(msgspec.Struct, tag="artifacts", frozen=True):
    id: str


class _Upload:
    """The bytes of an upload: in memory while they are few, else under a temporary key."""

    def __init__(self, store: Store, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._digest = hashlib.sha256()
        self._small: bytes | None = None
        self._key: str | None = None
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    async def receive(self, chunks: AsyncIterable[bytes]) -> None:
        source = self._counted(_grouped(chunks))
        first = bytearray()
        async for chunk in source:
            first += chunk
            if len(first) > _SMALL_BYTES:
                self._key = temporary_key()
                await self._store.write(self._key, _chain(bytes(first), source))
                return
        self._small = bytes(first)

    async def _counted(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            self.size += len(chunk)
            if self.size > self._max_bytes:
                raise PayloadTooLargeError(
                    f"The artifact is larger than {self._max_bytes} bytes (LINESHAFT_MAX_ARTIFACT_BYTES)."
                )
            self._digest.update(chunk)
            yield chunk

    async def store(self, *, exists: bool) -> None:
        """Write the object under the key of its digest, unless it is there; `exists`: it probably is."""
        key = content_key(self.sha256)
        if exists and await self._store.size(key) == self.size:
            return
        if self._small is not None:
            await self._store.create(key, self._small)
        elif self._key is not None:
            with contextlib.suppress(FileNotFoundError):
                await self._store.promote(self._key, key)
        stored = await self._store.size(key)
        if stored is None:
            raise StoreUnavailableError("The content was deleted while it was uploaded. Upload it again.")
        if stored != self.size:
            raise LineshaftError(
                f"The artifact store, {self._store.describe()}, has {stored} bytes under {key} in place of "
                f"{self.size}. Delete that object and upload the artifact again."
            )

    async def discard(self) -> None:
        """Delete the temporary object; what remains is left to the janitor."""
        if self._key is not None:
            with contextlib.suppress(UnavailableError):
                await self._store.delete([self._key])


class ArtifactRegistry:
    def __init__(
        self, database: Database, store: Store | None, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        """`store`: None refuses everything that touches contents."""
        self._database = database
        self._given_store = store
        self._identity = None if store is None else StoreIdentity(database, store)
        self.max_bytes = max_bytes

    @property
    def _store(self) -> Store:
        if self._given_store is None:
            raise SettingsError("This process has no artifact store. Open it with settings that name one.")
        return self._given_store

    async def check_store(self) -> None:
        """Raise WrongStoreError unless the store is the one of this database."""
        assert self._store is not None  # noqa: S101 - raises if there is none
        if self._identity is not None:
            await self._identity.check()

    # Uploads.

    async def put(
        self,
        chunks: AsyncIterable[bytes],
        *,
        name: str,
        content_type: str | None = None,
        task_id: str | None = None,
    ) -> Artifact:
        await self._check_task(task_id)
        await self.check_store()
        upload = _Upload(self._store, self.max_bytes)
        try:
            await upload.receive(chunks)
            values = {
                "id": new_id("artifact"),
                "name": stored_name(name),
                "size": upload.size,
                "sha256": upload.sha256,
                "content_type": media_type(content_type, name),
                "task_id": task_id,
            }
            while True:
                content = await self._begin(upload)
                await upload.store(exists=content.stored)
                values["incarnation"] = content.incarnation
                made = await self._database.run(lambda own: self._end(own, values))
                if made is not None:
                    return made
        finally:
            await upload.discard()

    async def _check_task(self, task_id: str | None) -> None:
        if task_id is None:
            return
        refuse_unstorable(task_id=[task_id])
        async with self._database.connection() as connection:
            if not await fetch_value(connection, _SQL["task_exists"], {"task_id": task_id}):
                raise InvalidInputError(errors=[("task_id", f"{task_id!r} is not an existing task")])

    async def holder(self, task_id: str) -> str | None:
        """The agent that holds a task; None: none does."""
        refuse_unstorable(task_id=[task_id])
        async with self._database.connection() as connection:
            holders = await fetch_column(connection, _SQL["holder"], {"task_id": task_id})
        return holders[0] if holders else None

    async def _begin(self, upload: _Upload) -> _Content:
        parameters = {**self._database.now, "sha256": upload.sha256, "size": upload.size}
        async with self._database.connection() as connection:
            content = await fetch_row(connection, _Content, _SQL["begin_upload"], parameters)
        assert content is not None  # noqa: S101 - the statement always returns one
        return content

    async def _end(self, connection: Connection, values: dict[str, Any]) -> Artifact | None:
        """The new artifact. None: its content was deleted since the upload began."""
        parameters = {**self._database.now, **values}
        if not await fetch_column(connection, _SQL["end_upload"], parameters):
            return None
        row = await fetch_row(connection, _ArtifactRow, _SQL["insert_artifact"], parameters)
        assert row is not None  # noqa: S101 - the statement always returns one
        return row.value

    # Reads.

    async def get(self, ref: str) -> Artifact:
        name = artifact_id(ref)
        by_id = await self.find([name])
        if name not in by_id:
            raise NotFoundError(f"There is no artifact {name!r}. It may have been deleted.")
        return by_id[name]

    async def find(self, ids: Sequence[str]) -> dict[str, Artifact]:
        refuse_unstorable(id=ids)
        async with self._database.connection() as connection:
            return await read_artifacts(connection, ids)

    async def page(self, *, task_id: str | None, limit: int, cursor: str | None) -> Page[Artifact]:
        check_limit(limit)
        if task_id is not None:
            refuse_unstorable(task_id=[task_id])
        before = decode_cursor(cursor, _Before)
        parameters = {
            "task_id": task_id,
            "before": None if before is None else before.id,
            "limit": limit + 1,
        }
        statement = "list_artifacts" if task_id is None else "list_artifacts_of_task"
        async with self._database.connection() as connection:
            rows = await fetch_rows(connection, _ArtifactRow, _SQL[statement], parameters)
        more = encode_cursor(_Before(rows[limit - 1].id)) if len(rows) > limit else None
        return Page([row.value for row in rows[:limit]], more)

    async def read(
        self, artifact: Artifact, start: int = 0, stop: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Its bytes. If all are read, the last ones come only if the digest is right."""
        await self.check_store()
        end = artifact.size if stop is None else min(stop, artifact.size)
        start = min(start, end)
        chunks = self._store.read(content_key(artifact.sha256), start, end)
        try:
            async for chunk in verified(chunks, artifact.sha256, artifact.size, start, end):
                yield chunk
        except FileNotFoundError:
            raise LineshaftError(
                f"The content of {artifact.id} is missing in the artifact store, {self._store.describe()}. "
                "Restore the store from a backup of the same time as the database."
            ) from None

    async def data(self, ref: str) -> bytes:
        """The JSON that a reference in place of data stands for, in memory."""
        artifact = await self.get(ref)
        if artifact.size > MAX_DATA_BYTES:
            raise PayloadTooLargeError(
                f"The data is {artifact.size} bytes, more than {MAX_DATA_BYTES}. Read the artifact "
                f"{artifact.ref} in pieces."
            )
        data = b"".join([chunk async for chunk in self.read(artifact)])
        try:
            msgspec.json.decode(data, type=msgspec.Raw)
        except msgspec.MsgspecError as error:
            fault = f"{ref} stands for it, but is not JSON: {error}"
            raise InvalidInputError(errors=[("output.data", fault)]) from None
        return data

    async def with_data(self, task: Task) -> Task:
        """The task with its output's data, also if that is large."""
        output = task.output
        if output.data_ref is None:
            return task
        data = msgspec.Raw(await self.data(output.data_ref))
        return replace(task, output=replace(output, data_json=data))

    async def link(self, artifact: Artifact, lifetime: timedelta) -> str | None:
        """A URL for a download without a token, if the store has such."""
        if not self._store.has_links:
            return None
        await self.check_store()
        return await self._store.link(content_key(artifact.sha256), lifetime)

    # Deletion.

    async def delete(self, ref: str) -> None:
        """Delete an artifact that no live task refers to."""
        artifact = await self.get(ref)
        await self.check_store()

        async def work(connection: Connection) -> None:
            values = {**self._database.now, "id": artifact.id, "digests": [artifact.sha256]}
            await fetch_column(connection, _SQL["lock_contents"], values)
            if not await fetch_column(connection, _SQL["lock_artifact"], values):
                return
            # After the locks: a task that refers to it was committed before them, or waits.
            if referrers := await fetch_column(connection, _SQL["live_referrer"], values):
                raise InvalidTransitionError(
                    f"Can't delete {artifact.id}: task {referrers[0]} refers to it and has not ended. Cancel "
                    "the task, or wait for its end."
                )
            await connection.execute(_SQL["delete_artifact"], values)
            await connection.execute(_SQL["mark_unused"], values)

        await self._database.run(work)
        # If the store is away, the janitor deletes the object.
        with contextlib.suppress(UnavailableError):
            await self._remove([artifact.sha256])

    async def delete_unreferenced(self, older_than_sec: float, limit: int) -> int:
        """Delete artifacts that no task has referred to for so long; returns how many."""
        deleted, after = 0, None
        while True:
            parameters = {
                **self._database.now,
                "older_than": older_than_sec,
                "after": None if after is None else after.used_at,
                "after_id": None if after is None else after.id,
                "limit": limit,
            }
            async with self._database.connection() as connection:
                page = await fetch_rows(connection, _Old, _SQL["read_old"], parameters)
            if candidates := [each for each in page if each.is_unused]:
                deleted += await self._delete_candidates(candidates, older_than_sec)
            if len(page) < limit:
                return deleted
            after = page[-1]

    async def _delete_candidates(self, candidates: Sequence[_Old], older_than_sec: float) -> int:
        async def work(connection: Connection) -> int:
            values = {**self._database.now, "older_than": older_than_sec}
            values["digests"] = sorted({each.sha256 for each in candidates})
            await fetch_column(connection, _SQL["lock_contents"], values)
            values["ids"] = [each.id for each in candidates]
            values["ids"] = await fetch_column(connection, _SQL["lock_artifacts"], values)
            gone = await fetch_column(connection, _SQL["delete_unreferenced"], values)
            await connection.execute(_SQL["mark_unused"], values)
            return len(gone)

        return await self._database.run(work)

    async def delete_contents(self, limit: int) -> int:
        """Delete what uploads that were cut off left behind, and contents without artifacts."""
        parameters = {**self._database.now, "older_than": CUT_OFF_SEC, "limit": limit}
        async with self._database.connection() as connection:
            await fetch_column(connection, _SQL["mark_cut_off"], parameters)
            marked = await fetch_column(connection, _SQL["marked"], parameters)
        removed = 0
        for start in range(0, len(marked), _REMOVED_AT_ONCE):
            removed += await self._remove(marked[start : start + _REMOVED_AT_ONCE])
        return removed

    async def _remove(self, digests: Sequence[str]) -> int:
        """Delete objects and their rows, those that are still marked; returns how many."""

        async def work(connection: Connection) -> int:
            locked = await fetch_column(connection, _SQL["lock_marked"], {"digests": list(digests)})
            if locked:
                await self._store.delete([content_key(each) for each in locked])
                await connection.execute(_SQL["delete_contents"], {"digests": locked})
            return len(locked)

        return await self._database.run(work, pipeline=False)

    async def clean_up(self, *, older_than_sec: float, limit: int) -> Counter[str]:
        """Everything that the janitor does; it does nothing before the first upload of an installation."""
        counts: Counter[str] = Counter()
        if self._identity is None or not await self._identity.is_known():
            return counts
        await self._identity.check()
        counts["artifacts deleted"] = await self.delete_unreferenced(older_than_sec, limit)
        while True:
            removed = await self.delete_contents(limit)
            counts["contents deleted"] += removed
            if removed < limit:
                break
        if old := await self._store.old_temporary(timedelta(seconds=STILL_SEC)):
            await self._store.delete(old)
            counts["temporary files deleted"] = len(old)
        return counts


async def read_artifacts(connection: Connection, ids: Sequence[str]) -> dict[str, Artifact]:
    rows = await fetch_rows(connection, _ArtifactRow, _SQL["read_artifacts"], {"ids": list(ids)})
    return {row.id: row.value for row in rows}


async def _grouped(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """In pieces that are worth a call of a thread; a network delivers smaller ones."""
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size >= CHUNK_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for start in range(0, len(first), CHUNK_BYTES):
        yield first[start : start + CHUNK_BYTES]
    async for chunk in rest:
        yield chunk
