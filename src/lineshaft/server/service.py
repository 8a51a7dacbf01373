"""The objects that all operations of one server share, opened and closed with it."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Self

from starlette.datastructures import Headers

from lineshaft.artifacts import open_store
from lineshaft.checks.registry import Checks
from lineshaft.clock import Clock
from lineshaft.duties.on_demand import OnDemand
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.events import Events
from lineshaft.engine.feed.lane_directory import LaneDirectory
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.postgres.probe import check_writable
from lineshaft.engine.read.metrics import MetricsReader
from lineshaft.server.framework import routing
from lineshaft.server.framework.auth import LOCAL_CALLER, Authenticator, Principal
from lineshaft.server.framework.streams import Tail
from lineshaft.server.long_poll import GuardWatcher, LongPolls
from lineshaft.settings import Settings
from lineshaft.types import Scope

#: For so long a successful write proves that the database can be written to.
_WRITE_EVERY_SEC = 5.0


class Service:
    def __init__(
        self,
        dsn: str,
        settings: Settings,
        *,
        clock: Clock | None = None,
        max_connections: int = 10,
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
            by_server=True,
            store=open_store(settings),
            max_artifact_bytes=settings.max_artifact_bytes,
        )
        self.events = Events(self.engine.database)
        self.tokens = self.engine.tokens
        self.metrics = MetricsReader(self.engine.database, self.engine.read, self.engine.fleet)
        self.tail = Tail(self.events)
        self.directory = LaneDirectory(self.engine.database, listen=settings.sessions)
        self.wakeups = self.directory.wakeups
        self.on_demand = OnDemand(self.engine, self.wakeups.wake_all)
        #: Claims take turns on half of the connections: when thousands of agents ask at once, submissions and
        #: completions don't wait behind them, and no request fails for lack of a connection.
        self.turns = asyncio.Semaphore(max(1, max_connections // 2))
        #: Set when the server stops: long polls and streams end then.
        self.stopping = asyncio.Event()
        self.long_polls = LongPolls(self.engine, self.directory, turns=self.turns, stopping=self.stopping)
        self._guard_watcher = GuardWatcher(self.engine.schedule, self.wakeups)
        self._authenticator = Authenticator(self.tokens, auth=settings.auth, host=settings.host)
        self._resources = AsyncExitStack()
        #: When the database was last seen to accept a write.
        self._wrote_at = -_WRITE_EVERY_SEC

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self.engine)
            await self._authenticator.refresh()
            await opening.enter_async_context(self.wakeups)
            opening.push_async_callback(self.directory.close)
            opening.push_async_callback(self.on_demand.close)
            opening.push_async_callback(self.tail.close)
            watching = asyncio.create_task(self._guard_watcher.run(), name="lineshaft guard watcher")
            opening.push_async_callback(_end, watching)
            self._resources = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await self._resources.aclose()

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
        """Whether callers need a token; without one, those on loopback are trusted."""
        return self._authenticator.required

    def notice_token(self) -> None:
        """A token was created here: from now on calls need one."""
        self._authenticator.notice_token()

    async def authenticate(self, scope: Scope | None, headers: Headers) -> Principal:
        """The caller; raises unless it has this scope."""
        if scope is None:
            return LOCAL_CALLER
        principal = await self._authenticator.principal(headers)
        principal.check(scope)
        return principal


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})


Call = routing.Call[Service]
