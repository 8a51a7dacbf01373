"""What tests of artifacts do again and again."""

import asyncio
from collections.abc import AsyncIterator

import psycopg

from lineshaft.artifacts.store import Store, content_key
from lineshaft.engine.engine import Engine
from lineshaft.types.artifacts import Artifact


async def pieces(data: bytes, size: int = 1 << 20) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def put(engine: Engine, data: bytes, name: str = "report.txt", task_id: str | None = None) -> Artifact:
    return await engine.artifacts.put(pieces(data), name=name, task_id=task_id)


async def content(engine: Engine, artifact: Artifact, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join([chunk async for chunk in engine.artifacts.read(artifact, start, stop)])


async def is_stored(store: Store, artifact: Artifact) -> bool:
    return await store.size(content_key(artifact.sha256)) == artifact.size


def count(connection: psycopg.Connection, table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM lineshaft.{table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


class Pausing:
    """A store that stops before or after one of its methods, until the test lets it go on."""

    def __init__(self, store: Store, method: str, *, after: bool = False) -> None:
        self._store = store
        self._method = method
        self._after = after
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        found = getattr(self._store, name)
        if name != self._method:
            return found

        async def paused(*args: object, **options: object) -> object:
            early = await found(*args, **options) if self._after else None
            self.reached.set()
            await self.go_on.wait()
            return early if self._after else await found(*args, **options)

        return paused
