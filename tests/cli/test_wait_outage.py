"""`lineshaft wait` while the database is away."""

import asyncio

import pytest

from lineshaft import NewTask
from lineshaft.cli import wait
from lineshaft.client.blocking import SyncLineshaft
from lineshaft.engine.engine import Engine
from tests.agent.helpers import PATIENCE
from tests.proxy import proxied


@pytest.mark.slow("a call waits 10 s for a connection")
async def test_a_wait_outlasts_an_outage_and_says_so(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it ended with an error at the next look, and a script took the task for failed."""
    notes: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(wait, "_SILENT_SEC", 0.05)
    monkeypatch.setattr(wait, "print_note", lambda note: loop.call_soon_threadsafe(notes.put_nowait, note))

    def wait_for(url: str, task_id: str) -> int:
        with SyncLineshaft(url) as shaft:
            return wait.wait(shaft, [task_id], 4 * PATIENCE, as_json=False)

    async with proxied(dsn) as (through, proxy), Engine(dsn) as engine:
        (task,) = await engine.submission.submit([NewTask("t")])
        waiting = asyncio.create_task(asyncio.to_thread(wait_for, through, task.id))
        assert await notes.get() == f"Waiting for {task.id}"
        assert "it is READY" in await notes.get()

        proxy.cut()
        note = await notes.get()
        assert "database" in note
        assert note.endswith("Still waiting.")
        proxy.restore()
        await engine.cancel.cancel(task.id, "done")

        assert await waiting == 1
