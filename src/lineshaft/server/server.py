"""One server process: the API on a socket and, if wanted, the duties beside it."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from lineshaft.duties.loop import Duty
from lineshaft.duties.supervisor import all_duties, supervise
from lineshaft.errors import SettingsError
from lineshaft.server.app import create_app, gated
from lineshaft.server.framework.auth import check_exposure
from lineshaft.server.service import Service

#: Streams and waiting claims end by themselves when the server stops; whatever else takes longer is cut.
GRACE_SEC = 10
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; taken before anything else is started, so that a taken port costs nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: only then does asyncio send at once what is written (TCP_NODELAY). Otherwise
    # each answer waits for 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise SettingsError(
            f"Can't listen on {host} port {port}: {error.strerror or error}. Choose another with --port or "
            "LINESHAFT_PORT, or end the process that has it."
        ) from error
    bound.listen(_BACKLOG)
    bound.set_inheritable(True)
    return bound


class _Uvicorn(uvicorn.Server):
    """Tells when it is ready; and tells the service to stop before it waits for open connections to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.on_ready: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are the business of whoever runs the process.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_stop()
        await super().shutdown(sockets)


class Server:
    def __init__(self, service: Service, bound: socket.socket, *, duties: bool) -> None:
        self.service = service
        #: Whoever adds parts to the API adds them to this, before it runs.
        self.app: FastAPI = create_app(service)
        self._bound = bound
        self.duties: list[Duty] = all_duties(service.engine, service.settings) if duties else []
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                gated(self.app, service),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_SEC,
                # Agents that ask again right after a long wait find the connection open.
                timeout_keep_alive=75,
                # Nobody has anything to say to us there. What we say is written down once for all, not packed
                # anew for each.
                ws_max_size=64 << 10,
                ws_per_message_deflate=False,
            )
        )
        self._uvicorn.on_stop = service.stop

    def stop(self) -> None:
        """Finish what is under way, then end; asked again, end at once."""
        self._uvicorn.force_exit = self._uvicorn.should_exit
        self._uvicorn.should_exit = True

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Until it is stopped."""
        self._uvicorn.on_ready = on_ready
        async with self.service:
            await check_exposure(self.service.settings.host, self.service.tokens)
            stopped = asyncio.Event()
            working = asyncio.create_task(supervise(self.duties, stopped))
            try:
                await self._uvicorn.serve(sockets=[self._bound])
            finally:
                stopped.set()
                await self._finish(working)

    async def _finish(self, working: "asyncio.Task[None]") -> None:
        """A database that went silent is not waited for: what was begun there is undone."""
        if not (await asyncio.wait({working}, timeout=GRACE_SEC))[0]:
            self.service.engine.database.hang_up()
            await asyncio.wait({working}, timeout=1)
            # Waits for a connection, if anything.
            working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
