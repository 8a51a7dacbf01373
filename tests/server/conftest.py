"""A server in this process, on a real socket and a real database, for every test."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from lineshaft.clock import Clock
from lineshaft.server.server import Server, listen
from lineshaft.server.service import Service
from lineshaft.settings import Settings
from tests.server.client import Client

Serve = Callable[..., AbstractAsyncContextManager["Served"]]


class Served:
    def __init__(self, server: Server, running: "asyncio.Task[None]", port: int) -> None:
        self.server = server
        self.service = server.service
        self.running = running
        self.client = Client(port)

    async def stop(self) -> None:
        self.server.stop()
        await self.running


@asynccontextmanager
async def serving(
    dsn: str,
    *,
    auth: bool | str = False,
    clock: Clock | None = None,
    duties: bool = False,
    max_connections: int = 4,
    **settings: Any,
) -> AsyncIterator[Served]:
    bound: socket.socket = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    settings["auth"] = "required" if auth is True else auth or "auto"
    folder = tempfile.TemporaryDirectory(prefix="lineshaft-artifacts-")
    settings.setdefault("artifacts", folder.name)
    service = Service(dsn, Settings(port=port, **settings), clock=clock, max_connections=max_connections)
    server = Server(service, bound, duties=duties)
    ready = asyncio.Event()
    running = asyncio.create_task(server.run(ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        if running.done():
            await running
        yield Served(server, running, port)
    finally:
        server.stop()
        try:
            await running
        finally:
            bound.close()
            folder.cleanup()


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not check():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


@pytest.fixture
def serve(dsn: str) -> Serve:
    """Makes servers on the test's database; by default one that needs no tokens until there is one."""

    def start(**options: Any) -> AbstractAsyncContextManager[Served]:
        return serving(dsn, **options)

    return start


@pytest.fixture
async def served(dsn: str) -> AsyncIterator[Served]:
    async with serving(dsn) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Client:
    return served.client
