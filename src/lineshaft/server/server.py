"""One server process: the API on a socket and, optionally, the duties beside it."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn

from lineshaft.dashboard.dashboard import Dashboard
from lineshaft.duties.loop import Duty
from lineshaft.duties.supervisor import all_duties, supervise
from lineshaft.errors import SettingsError
from lineshaft.integrations.officeplane.officeplane import Officeplane
from lineshaft.server.app import create_app, with_middleware
from lineshaft.server.framework.auth import check_exposure
from lineshaft.server.framework.connections import Connections
from lineshaft.server.service import Service
from lineshaft.server.source_file import apply_file

_log = structlog.get_logger("lineshaft.http")

#: Streams and waiting claims end when the server stops; other requests are cut off after this time.
GRACE_SEC = 10
_BACKLOG = 2048
_SPARE_FILES = 16
#: Connections accepted at once. More could exceed the limit of open files before the first of them is seen.
_ACCEPT_AT_ONCE = 16


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, opened before anything else is started, so that a port in use fails early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named; without it each response is delayed by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise SettingsError(
            f"Can't listen on {host} port {port}: {error.strerror or error}. "
            + (
                "Choose another with --port or LINESHAFT_PORT, or end the process that uses it."
                if error.errno == errno.EADDRINUSE
                else "Check --host and --port (LINESHAFT_HOST, LINESHAFT_PORT)."
            )
        ) from error
    bound.listen(_BACKLOG)
    bound.set_inheritable(True)
    return bound


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of a server process: uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - it doesn't exist everywhere
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class _Uvicorn(uvicorn.Server):
    """Calls `on_ready` when it listens, and `on_stop` before it waits for open connections to end."""

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        *,
        on_ready: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._on_ready = on_ready
        self._on_stop = on_stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The caller handles signals.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            for bound in sockets or ():
                # uvicorn has shortened the queue to the number that it accepts at once.
                bound.listen(_BACKLOG)
            sweep = self._connections.sweep(self.server_state.connections)
            self._sweeping = asyncio.create_task(sweep, name="lineshaft connections")
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        self._sweeping.cancel()
        await super().shutdown(sockets)


class Server:
    def __init__(self, service: Service, bound: socket.socket, *, duties: bool) -> None:
        self.service = service
        self.officeplane = Officeplane(service)
        self._dashboard = Dashboard(service)
        self._on_ready: Callable[[], None] = lambda: None
        self._bound = bound
        self.duties: list[Duty] = all_duties(service.engine, service.settings) if duties else []
        # Connections of the database, and as many again for its notifications and new ones that replace old.
        connections = Connections(2 * service.max_connections + _SPARE_FILES)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                with_middleware(create_app(service, self.officeplane, self._dashboard), service),
                http=connections.protocol,  # type: ignore[arg-type] # any factory of protocols will do
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_ACCEPT_AT_ONCE,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_SEC,
                # Longer than a long poll, so that agents can reuse the connection for the next one.
                timeout_keep_alive=75,
                # Clients send nothing on WebSockets. Messages are encoded once for all clients, so they can't
                # be compressed for each.
                ws_max_size=64 << 10,
                ws_per_message_deflate=False,
            ),
            connections,
            on_ready=self._notify_ready,
            on_stop=service.stop,
        )

    def _notify_ready(self) -> None:
        self._on_ready()

    def stop(self) -> None:
        """Finish open requests, then end; called again, end at once."""
        self._uvicorn.force_exit = self._uvicorn.should_exit
        self._uvicorn.should_exit = True

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until stopped."""
        self._on_ready = on_ready
        settings = self.service.settings
        async with self.service:
            await check_exposure(settings.host, settings.auth, self.service.tokens)
            if settings.auth == "off":
                _log.warning(
                    "LINESHAFT_AUTH=off: no call needs a token. Every account of this machine, and every "
                    "program of a task, may call everything."
                )
            if settings.sources is not None:
                await apply_file(self.service.engine.sources, settings.sources)
            stopped = asyncio.Event()
            working = asyncio.create_task(supervise(self.duties, stopped))
            try:
                await self._uvicorn.serve(sockets=[self._bound])
            finally:
                stopped.set()
                await self._dashboard.close()
                await self._finish(working)

    async def _finish(self, working: "asyncio.Task[None]") -> None:
        """Wait for the duties, but not for a database that doesn't answer: it rolls back."""
        if not (await asyncio.wait({working}, timeout=GRACE_SEC))[0]:
            self.service.engine.database.hang_up()
            await asyncio.wait({working}, timeout=1)
            # It can only be waiting for a connection.
            working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
