"""A store in a folder."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from lineshaft.artifacts.folder import FolderStore
from lineshaft.artifacts.store import temporary_key


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
    writing = asyncio.create_task(store.write(temporary_key(), _endless()))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert (tmp_path / "temporary").is_dir(), "it was opened"
    assert await store.old_temporary(timedelta(days=-1)) == []
