"""The objects that all operations of one server share, opened and closed with it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Self

from starlette.types import Scope as AsgiScope

from lineshaft import __version__, background
from lineshaft.artifacts import open_store
from lineshaft.checks.registry import Checks
from lineshaft.clock import Clock
from lineshaft.duties import loop
from lineshaft.duties.on_demand import OnDemand
from lineshaft.duties.presence import ServerPresence
from lineshaft.engine.caller import LOCAL_CALLER, Caller
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.lane_directory import LaneDirectory
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.guards.servers import ThisServer
from lineshaft.engine.metrics import MetricsReader
from lineshaft.engine.postgres.probe import check_writable
from lineshaft.errors import UnavailableError
from lineshaft.integrations.officeplane_redis import locks as document_locks
from lineshaft.integrations.redis.connection import dispatch_server
from lineshaft.server.framework import routing
from lineshaft.server.framework.auth import Authenticator
from lineshaft.server.framework.streams import Tail
from lineshaft.server.long_poll import LongPolls, OpeningsWatcher
from lineshaft.settings import Settings
from lineshaft.types import Scope

#: For so long a successful write proves that the database can be written to.
_WRITE_EVERY_SEC = 5.0
_LEAVE_WITHIN_SEC = 1.0


class Service:
    def __init__(
        self, dsn: str, settings: Settings, *, clock: Clock | None = None, max_connections: int = 10
    ) -> None:
        self.settings = settings
        self.max_connections = max_connections
        self.engine = Engine(
            dsn,
            clock=clock,
            max_connections=max_connections,
            read_connections=max(1, max_connections // 2),
            prepare=settings.sessions,
            fail_within_sec=settings.read_timeout_sec,
            rules=Rules.of(settings),
            checks=Checks.from_settings(settings),
            server=server_name(settings),
            source_folders=settings.source_folders,
            store=open_store(settings),
            max_artifact_bytes=settings.max_artifact_bytes,
            outside_locks=document_locks.of(settings, adopts=True),
            redis=dispatch_server(settings),
        )
        self.events = self.engine.events
        self.tokens = self.engine.tokens
        self.metrics = MetricsReader(self.engine.database, self.engine.read, self.engine.fleet)
        self.tail = Tail(self.events)
        self.directory = LaneDirectory(
            self.engine.database, listen=settings.sessions, redis=self.engine.dispatch
        )
        self.wakeups = self.directory.wakeups
        self.on_demand = OnDemand(self.engine, self.wakeups.wake_all)
        #: Claims take turns on half of the connections: when thousands of agents ask at once, submissions and
        #: completions don't wait behind them, and no request fails for lack of a connection.
        self.turns = asyncio.Semaphore(max(1, max_connections // 2))
        #: Set when the server stops: long polls and streams end then.
        self.stopping = asyncio.Event()
        self.long_polls = LongPolls(self.engine, self.directory, turns=self.turns, stopping=self.stopping)
        self.openings = OpeningsWatcher(self.engine.upcoming, self.engine.maintenance, self.wakeups)
        self._presence = ServerPresence(
            ThisServer(
                self.engine.database,
                server_name(settings),
                __version__,
                self.engine.rules.installation_limits,
            )
        )
        self._authenticator = Authenticator(self.tokens, auth=settings.auth, host=settings.host)
        self._first_token_code: str | None = None
        self._resources = AsyncExitStack()
        #: When the database was last seen to accept a write.
        self._wrote_at = -_WRITE_EVERY_SEC

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self.engine)
            self._first_token_code = await self._authenticator.start()
            await opening.enter_async_context(self.wakeups)
            opening.push_async_callback(self.directory.close)
            opening.push_async_callback(self.on_demand.close)
            opening.push_async_callback(self.tail.close)
            watching = asyncio.create_task(self.openings.run(), name="lineshaft openings watcher")
            opening.push_async_callback(background.stop, watching)
            await opening.enter_async_context(self._present())
            self._resources = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await self._resources.aclose()

    @contextlib.asynccontextmanager
    async def _present(self) -> AsyncIterator[None]:
        """People see that this server runs, and which limits its settings have."""
        with contextlib.suppress(UnavailableError):
            # Before it answers calls. It serves reads while the database can't be written to.
            await self._presence.run_once()
        reporting = asyncio.create_task(loop.run(self._presence, self.stopping), name="lineshaft presence")
        try:
            yield
        finally:
            await background.stop(reporting)
            # If the database doesn't answer, the row is forgotten later.
            with contextlib.suppress(UnavailableError, TimeoutError):
                async with asyncio.timeout(_LEAVE_WITHIN_SEC):
                    await self._presence.server.remove()

    def stop(self) -> None:
        """End long polls, without work, and streams."""
        self.stopping.set()
        self.wakeups.wake_all()

    async def check_database(self) -> None:
        """Raise UnavailableError unless the database answers, has been migrated and can be written to."""
        await self.tokens.exist()
        now = time.monotonic()
        # Callers need no token: writing at each call would make the disk busy.
        if now - self._wrote_at >= _WRITE_EVERY_SEC:
            await check_writable(self.engine.database)
            self._wrote_at = now

    @property
    def needs_tokens(self) -> bool:
        """Whether callers need a token; else the server's own account is trusted."""
        return self._authenticator.required

    def take_first_token_code(self) -> str | None:
        """The code that makes the first token, to be shown once; None: none is needed."""
        code, self._first_token_code = self._first_token_code, None
        return code

    def notice_token(self) -> None:
        """A token was created here: from now on calls need one."""
        self._authenticator.notice_token()

    async def account(self, request: AsgiScope) -> int | None:
        """The user id of this machine that calls; None: it isn't known."""
        return await self._authenticator.account(request)

    async def authenticate(self, scope: Scope | None, request: AsgiScope) -> Caller:
        """The caller; raises unless it has this scope. Without a scope it isn't known who calls."""
        if scope is None:
            return LOCAL_CALLER
        caller = await self._authenticator.caller(request, scope)
        caller.check(scope)
        return caller


def server_name(settings: Settings) -> str:
    """As people tell servers of one database apart."""
    return f"{socket.gethostname()}:{settings.port}"


Call = routing.Call[Service]
