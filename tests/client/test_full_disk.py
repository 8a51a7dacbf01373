"""A store on a disk that is full: a clear error, nothing left behind, and the task is retried."""

import os
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, RetrySpec, Status, TaskContext
from lineshaft.artifacts import open_store
from lineshaft.artifacts.store import StoreUnavailableError
from lineshaft.client import large_data
from lineshaft.settings import Settings
from tests.engine.artifacts.helpers import count

pytestmark = [
    pytest.mark.alike_over_http,
    pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root, who may mount a tmpfs"),
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A mebibyte, where the store of the test is."""
    folder = tmp_path / "artifacts"
    folder.mkdir()
    mount = ["/usr/bin/env", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["/usr/bin/env", "umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("size", [600 << 10, 8 << 20], ids=["small", "large"])
async def test_an_upload_to_a_full_disk(
    disk: Path, shaft: Lineshaft, connection: psycopg.Connection, size: int
) -> None:
    kept = await shaft.artifacts.put("kept", os.urandom(600 << 10))

    with pytest.raises(StoreUnavailableError, match=f"{disk}, can't be used: No space left on device"):
        await shaft.artifacts.put("lost", os.urandom(size))

    assert [each.id for each in (await shaft.artifacts.list()).items] == [kept.id]
    assert count(connection, "artifact") == 1
    store = open_store(Settings(artifacts=str(disk)))
    assert await store.old_temporary(timedelta(days=-1)) == []
    assert len(await shaft.artifacts.read(kept.ref)) == kept.size


async def test_a_task_is_retried_with_the_reason(
    disk: Path, shaft: Lineshaft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both a file that its handler stores and a large output."""
    monkeypatch.setattr(large_data, "PATIENCE_SEC", 0.2)
    agent = Agent("a")
    filler = disk / "filler"
    filler.write_bytes(bytes(1000 << 10))

    @agent.task("make")
    async def make(ctx: TaskContext) -> str:
        if ctx.attempt == 1:
            await ctx.put_artifact("report", os.urandom(300 << 10))
        elif ctx.attempt == 2:
            return "x" * (2 << 20)
        filler.unlink()
        await ctx.put_artifact("report", os.urandom(300 << 10))
        return "done"

    retry = RetrySpec(initial_delay_sec=0, jitter=False)
    handle = await shaft.submit(NewTask("make", retry=retry, max_attempts=3))
    await agent.run(shaft, until_idle=True)

    task = await handle.task()
    assert task.status is Status.COMPLETED, task.failure_history
    assert [failed.category for failed in task.failure_history] == ["error", "error"]
    for failed in task.failure_history:
        assert "No space left on device" in str(failed.error)
    assert len(task.output.artifacts) == 1
