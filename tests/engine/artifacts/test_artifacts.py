"""Uploads, reads and deletion, on a folder and on S3."""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import cast

import psycopg
import pytest
from msgspec.structs import fields

from lineshaft.artifacts import open_store
from lineshaft.artifacts.store import Store, StoreUnavailableError, content_key, temporary_key
from lineshaft.clock import MovableClock
from lineshaft.duties.janitor import Janitor
from lineshaft.engine.artifacts.artifacts import CUT_OFF_SEC
from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidInputError, LineshaftError, NotFoundError, PayloadTooLargeError
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from tests.engine.artifacts.helpers import content, count, is_stored, pieces, put

LARGE = os.urandom(9 << 20)
KEEP_SEC = 10 * 86_400.0


@pytest.mark.parametrize("data", [b"", b"x", b"some text", LARGE], ids=["empty", "byte", "text", "large"])
async def test_what_was_put_is_read_back(engine: Engine, store: Store, data: bytes) -> None:
    """R-247: the bytes are in the store, whatever their size."""
    made = await put(engine, data)

    assert (made.size, made.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (made.name, made.content_type, made.ref) == ("report.txt", "text/plain", f"artifact:{made.id}")
    assert await engine.artifacts.get(made.ref) == made == await engine.artifacts.get(made.id)
    assert await content(engine, made) == data
    assert await content(engine, made, 3, 8) == data[3:8]
    assert await store.old_temporary(timedelta(days=-1)) == []


async def test_the_same_content_is_stored_once(
    engine: Engine, store: Store, connection: psycopg.Connection
) -> None:
    first, second = await put(engine, LARGE, "one"), await put(engine, LARGE, "two")

    assert first.id != second.id
    assert first.sha256 == second.sha256
    assert count(connection, "content") == 1
    assert await store.old_temporary(timedelta(days=-1)) == []


async def test_a_repeated_attempt_gets_the_same_artifact_again(
    engine: Engine, connection: psycopg.Connection
) -> None:
    (task,) = await engine.submission.submit([NewTask("research")])

    first = await put(engine, b"notes", task_id=task.id)
    assert await put(engine, b"notes", task_id=task.id) == first
    other = await put(engine, b"other notes", task_id=task.id)

    page = await engine.artifacts.page(task_id=task.id, limit=50, cursor=None)
    assert page.items == [other, first]
    assert count(connection, "artifact") == 2


async def test_a_list_has_pages(engine: Engine) -> None:
    made = [await put(engine, bytes([n])) for n in range(5)]

    first = await engine.artifacts.page(task_id=None, limit=3, cursor=None)
    rest = await engine.artifacts.page(task_id=None, limit=3, cursor=first.next_cursor)

    assert [*first.items, *rest.items] == made[::-1]
    assert rest.next_cursor is None


async def test_an_artifact_that_is_too_large_leaves_nothing(
    engine: Engine, store: Store, connection: psycopg.Connection
) -> None:
    engine.artifacts.max_bytes = 10 << 20

    with pytest.raises(PayloadTooLargeError, match="LINESHAFT_MAX_ARTIFACT_BYTES"):
        await put(engine, LARGE + LARGE)

    assert count(connection, "content") == 0
    assert await store.old_temporary(timedelta(days=-1)) == []


async def test_an_upload_that_its_sender_breaks_off_leaves_nothing(
    engine: Engine, store: Store, connection: psycopg.Connection
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        async for piece in pieces(LARGE):
            yield piece
        raise ConnectionResetError("the sender is gone")

    with pytest.raises(ConnectionResetError):
        await engine.artifacts.put(broken(), name="broken")

    assert count(connection, "content") == count(connection, "artifact") == 0
    assert await store.old_temporary(timedelta(days=-1)) == []


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("../../etc/passwd", "../../etc/passwd"),
        ("x" * 5_000, "x" * 1_000),
        ("a\0b\nc", "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c"),
        ("", "unnamed"),
        ("\ud800.txt", "?.txt"),
    ],
)
async def test_a_hostile_name_is_only_data(engine: Engine, name: str, stored: str) -> None:
    made = await put(engine, b"<script>alert(1)</script>", name)

    assert made.name == stored
    assert await content(engine, made) == b"<script>alert(1)</script>"


async def test_unknown_tasks_and_artifacts_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="task_id"):
        await put(engine, b"x", task_id="task_unknown")
    with pytest.raises(NotFoundError, match="artifact_unknown"):
        await engine.artifacts.get("artifact:artifact_unknown")
    with pytest.raises(NotFoundError):
        await engine.artifacts.delete("artifact_unknown")


async def test_deleting_the_last_artifact_deletes_the_content(
    engine: Engine, store: Store, connection: psycopg.Connection
) -> None:
    first, second = await put(engine, b"same", "one"), await put(engine, b"same", "two")

    await engine.artifacts.delete(first.ref)
    assert await content(engine, second) == b"same"
    await engine.artifacts.delete(second.id)

    assert not await is_stored(store, second)
    assert count(connection, "content") == count(connection, "artifact") == 0


async def test_the_janitor_deletes_what_no_task_refers_to(
    engine: Engine, store: Store, clock: MovableClock, connection: psycopg.Connection
) -> None:
    used, unused = await put(engine, b"used"), await put(engine, b"unused")
    (task,) = await engine.submission.submit([NewTask("research")])
    draft = await put(engine, b"a draft of a live task", task_id=task.id)
    connection.execute("INSERT INTO lineshaft.artifact_ref VALUES (%s, %s)", [task.id, used.id])

    assert not (await engine.artifacts.clean_up(older_than_sec=KEEP_SEC, limit=1))["artifacts deleted"]
    clock.advance(KEEP_SEC + 1)
    counts = await engine.artifacts.clean_up(older_than_sec=KEEP_SEC, limit=1)

    assert (counts["artifacts deleted"], counts["contents deleted"]) == (1, 1)
    assert not await is_stored(store, unused)
    assert await content(engine, used) == b"used"
    await engine.cancel.cancel(task.id, "enough")
    counts = await engine.artifacts.clean_up(older_than_sec=KEEP_SEC, limit=1)
    assert counts["artifacts deleted"] == 1
    assert not await is_stored(store, draft)


async def test_the_janitor_deletes_what_a_killed_upload_left(
    engine: Engine, store: Store, clock: MovableClock, connection: psycopg.Connection
) -> None:
    kept = await put(engine, b"kept")
    digest = hashlib.sha256(b"lost").hexdigest()
    await store.create(content_key(digest), b"lost")
    connection.execute(
        "INSERT INTO lineshaft.content (sha256, size, used_at) VALUES (%s, 4, %s)", [digest, clock.now()]
    )

    assert not (await engine.artifacts.clean_up(older_than_sec=KEEP_SEC, limit=10))["contents deleted"]
    clock.advance(CUT_OFF_SEC + 1)
    counts = await engine.artifacts.clean_up(older_than_sec=KEEP_SEC, limit=10)

    assert counts["contents deleted"] == 1
    assert await store.size(content_key(digest)) is None
    assert await content(engine, kept) == b"kept"


async def test_temporary_files_of_killed_uploads_go_within_an_hour(
    engine: Engine, store: Store, tmp_path: Path
) -> None:
    """One that still gets data stays, however long it takes."""
    await put(engine, b"x")
    dead, alive = temporary_key(), temporary_key()
    for key in (dead, alive):
        await store.write(key, pieces(LARGE))
    files = {path.name: path for path in tmp_path.rglob("*") if path.is_file()}  # noqa: ASYNC240
    if dead.rpartition("/")[2] not in files:
        pytest.skip("only a folder's files can be made older")
    janitor = next(field for field in fields(Janitor) if field.name == "interval_sec")
    # At the worst, the janitor has just run when the file becomes old enough.
    at = time.time() - 3_600 + janitor.default
    os.utime(files[dead.rpartition("/")[2]], (at, at))

    counts = await engine.artifacts.clean_up(older_than_sec=KEEP_SEC, limit=10)

    assert counts["temporary files deleted"] == 1
    assert await store.old_temporary(timedelta(days=-1)) == [alive]


async def test_temporary_objects_are_found_by_their_age(store: Store) -> None:
    await store.create_id("store_1")
    key = temporary_key()
    await store.write(key, pieces(LARGE))

    assert await store.old_temporary(timedelta(days=1)) == []
    assert await store.old_temporary(timedelta(days=-1)) == [key]


async def test_a_content_that_was_changed_is_an_error_at_its_end(engine: Engine, store: Store) -> None:
    made = await put(engine, LARGE)
    await store.delete([content_key(made.sha256)])
    with pytest.raises(LineshaftError, match="is missing in the artifact store"):
        await content(engine, made)
    await store.write(content_key(made.sha256), pieces(LARGE[:-1] + b"?"))

    received = bytearray()

    async def receive() -> None:
        async for chunk in engine.artifacts.read(made):
            received.extend(chunk)

    with pytest.raises(LineshaftError, match="not what was uploaded"):
        await receive()
    assert len(received) < made.size


async def test_an_upload_repairs_a_content_that_the_store_lost(engine: Engine, store: Store) -> None:
    made = await put(engine, LARGE)
    await store.delete([content_key(made.sha256)])

    again = await put(engine, LARGE)

    assert await content(engine, made) == await content(engine, again) == LARGE


@pytest.mark.slow("many uploads")
async def test_many_uploads_of_one_content_make_one_object(
    engine: Engine, store: Store, connection: psycopg.Connection
) -> None:
    data = LARGE[: 3 << 19]
    made = await asyncio.gather(*(put(engine, data, f"copy {n}") for n in range(50)))

    assert len({each.id for each in made}) == 50
    assert count(connection, "content") == 1
    assert await content(engine, made[0]) == data
    assert await store.old_temporary(timedelta(days=-1)) == []


async def test_usage_counts_each_content_once(engine: Engine) -> None:
    for name in ("one", "two"):
        await put(engine, b"12345", name)

    usage = (await engine.read.stats()).artifacts
    assert (usage.contents, usage.bytes, usage.exact) == (1, 5, True)


async def test_a_store_that_refuses_is_named(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if place.startswith("s3:"):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        refusing = open_store(Settings(artifacts=place))
    else:
        file = tmp_path_factory.mktemp("refusing") / "file"
        file.write_text("not a folder")
        refusing = open_store(Settings(artifacts=str(file)))

    with pytest.raises(StoreUnavailableError, match="artifact store") as refused:
        await refusing.create("sha256/ab/cd", b"x")
    assert "wrong" not in str(refused.value)


class _Counting:
    """Counts the requests that delete objects."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.deletions: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def delete(self, keys: Sequence[str]) -> None:
        self.deletions.append(len(keys))
        await self._store.delete(keys)


@pytest.mark.slow("a thousand uploads")
async def test_many_small_artifacts_are_listed_in_pages_and_deleted_in_batches(
    dsn: str, clock: MovableClock, store: Store, connection: psycopg.Connection
) -> None:
    many, counting = 1_000, _Counting(store)
    async with Engine(dsn, clock=clock, store=cast("Store", counting)) as engine:
        waiting = iter(range(many))

        async def upload() -> None:
            for n in waiting:
                await put(engine, b"content %d" % n, f"{n}.txt")

        await asyncio.gather(*(upload() for _ in range(8)))
        (used,) = (await engine.artifacts.page(task_id=None, limit=1, cursor=None)).items
        await engine.submission.submit([NewTask("research", spec={"context_refs": [used.ref]})])

        seen: list[str] = []
        cursor: str | None = None
        while not seen or cursor is not None:
            page = await engine.artifacts.page(task_id=None, limit=300, cursor=cursor)
            assert len(page.items) <= 300
            seen += [each.id for each in page.items]
            cursor = page.next_cursor
        assert len(seen) == len(set(seen)) == many
        assert seen == sorted(seen, reverse=True)

        clock.advance(KEEP_SEC + 1)
        counts = await engine.artifacts.clean_up(older_than_sec=KEEP_SEC, limit=200)

        assert counts["artifacts deleted"] == counts["contents deleted"] == many - 1
        assert len(counting.deletions) == 10
        assert await content(engine, used) == b"content " + used.name.removesuffix(".txt").encode()
    assert count(connection, "artifact") == count(connection, "content") == 1
