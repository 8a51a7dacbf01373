"""A real server for tests of clients: uvicorn on loopback, in a thread of its own, one for the whole session.

Each test has its own service behind it, on its own database: what takes long to start is shared, what keeps
state is not. In a thread, because handlers under test block the event loop of the test on purpose.
"""

import asyncio
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from lineshaft.server.app import create_app, with_middleware
from lineshaft.server.server import listen
from lineshaft.server.service import Service
from lineshaft.settings import Settings

T = TypeVar("T")


class ServerThread:
    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._loop = asyncio.new_event_loop()
        self._bound = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        config = uvicorn.Config(
            self._dispatch, interface="asgi3", lifespan="off", log_config=None, access_log=False
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="test server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._uvicorn.serve(sockets=[self._bound]))

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None, "a call came after its test was over"
        await self._app(scope, receive, send)

    def wrap(self, wrapper: Callable[[ASGIApp], ASGIApp]) -> None:
        """Put something between the connections and the service of this test."""
        assert self._app is not None
        self._app = wrapper(self._app)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    @contextmanager
    def serving(self, dsn: str, *, auth: bool | str = False, **settings: Any) -> Iterator[str]:
        """The URL of a server on this database. Without duties: agents make it do what is due."""
        folder = tempfile.TemporaryDirectory(prefix="lineshaft-artifacts-")

        async def opened() -> Service:
            settings.setdefault("artifacts", folder.name)
            chosen = Settings(auth="required" if auth is True else auth or "auto", **settings)
            service = Service(dsn, chosen, max_connections=5)
            return await service.__aenter__()

        service = self.run(opened())
        self._app = with_middleware(create_app(service), service)
        try:
            yield self.url
        finally:
            self._app = None
            self.run(service.__aexit__())
            folder.cleanup()

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        self._loop.close()
        self._bound.close()
