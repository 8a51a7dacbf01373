"""A store in a folder."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from lineshaft.artifacts.folder import FolderStore
from lineshaft.artifacts.store import ID_KEY, StoreUnavailableError, content_key, temporary_key


async def _endless() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_a_reader_that_is_cancelled_while_the_file_is_opened_closes_it(tmp_path: Path) -> None:
    """A pipe is opened when both ends are."""
    os.mkfifo(tmp_path / "pipe")
    reading = asyncio.ensure_future(anext(FolderStore(tmp_path).read("pipe", 0, 1)))
    await asyncio.sleep(0)
    reading.cancel()
    writer = await asyncio.to_thread(os.open, tmp_path / "pipe", os.O_WRONLY)
    try:
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"x")
    finally:
        os.close(writer)


async def test_a_writer_that_is_cancelled_while_the_file_is_opened_deletes_it(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    await store.create_id("store_1")
    writing = asyncio.create_task(store.write(temporary_key(), _endless()))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await store.old_temporary(timedelta(days=-1)) == []


async def test_nothing_is_written_or_forgotten_while_the_disk_is_not_mounted(tmp_path: Path) -> None:
    """The mount point is an empty folder then: files would be lost below the disk that comes back."""
    mounted, unmounted = tmp_path / "store", tmp_path / "disk"
    store, key = FolderStore(mounted), content_key("ab" * 32)
    await store.create_id("store_1")
    await store.create(key, b"x")
    mounted.rename(unmounted)
    mounted.mkdir()

    for call in (
        store.write(temporary_key(), _endless()),
        store.create(key, b"x"),
        store.delete([key]),
    ):
        with pytest.raises(StoreUnavailableError, match=f"has lost its file {ID_KEY}"):
            await call
    assert list(mounted.iterdir()) == []
    mounted.rmdir()
    unmounted.rename(mounted)
    await store.delete([key])
    assert await store.size(key) is None
