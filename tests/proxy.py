"""A proxy between clients and the database, or a server, that can lose what passes: a network for tests."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict, make_conninfo

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: Closing a socket with this says "connection reset" to the other side, instead of a proper end.
_RESET = struct.pack("ii", 1, 0)
#: How a statement begins, but nothing that is sent while connecting: for `drops`.
STATEMENTS = (b"Q", b"P")
#: How much is kept of the beginning of what a client has sent: enough for its name.
_KEPT = 2_000
_FIELDS = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
#: The last message of a session of PostgreSQL that is terminated.
_TERMINATED = b"E" + (len(_FIELDS) + 4).to_bytes(4, "big") + _FIELDS


class Proxy:
    def __init__(self, connect: Callable[[], Awaitable[Streams]]) -> None:
        """`connect` opens a connection to whatever is behind it at that moment."""
        self._connect = connect
        self._tasks: set[asyncio.Task[None]] = set()
        self._pairs: dict[int, tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = {}
        self._refusing = False
        #: Connections made before this number are silent: what is sent on them goes nowhere.
        self._silent_below = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        #: Answers wait on connections that didn't begin with this; None: none waits.
        self._answers_only: bytes | None = None
        self._answering = asyncio.Event()
        #: The beginning of what each client has sent.
        self._beginnings: dict[int, bytes] = {}
        self._number = 0
        self._resets = 0
        #: Data that begins with one of these goes nowhere.
        self.drops: tuple[bytes, ...] = ()
        #: PostgreSQL is terminated when it has answered this.
        self.terminated_after: bytes | None = None
        #: How long each piece of data is on its way.
        self.delay_sec = 0.0
        self.refused = 0
        self.refusal = asyncio.Condition()

    def cut(self) -> None:
        """The server is away: connections break, and new ones are refused."""
        self._refusing = True
        self.reset()

    def reset(self) -> None:
        """Connections that exist are reset; new ones work."""
        self._resets += 1
        for pair in self._pairs.values():
            for writer in pair:
                _reset(writer)
        self._pairs.clear()

    def hold(self) -> None:
        """Nothing passes, on old connections or new ones, until it is restored; then all of it arrives."""
        self._flowing.clear()

    def hold_answers(self, *, but: bytes) -> None:
        """Answers wait until it is restored, except to clients that have this in the first they sent."""
        self._answering.clear()
        self._answers_only = but

    def restore(self) -> None:
        self._refusing = False
        self._flowing.set()
        self._answers_only = None
        self._answering.set()

    def swallow(self) -> None:
        """Connections that exist go silent without any error; new ones work."""
        self._silent_below = self._number

    async def refuses(self, times: int) -> None:
        """Returns after so many more attempts to connect."""
        goal = self.refused + times
        async with self.refusal:
            await self.refusal.wait_for(lambda: self.refused >= goal)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            await self._refuse(writer)
            return
        number, self._number = self._number, self._number + 1
        resets = self._resets
        try:
            server_reader, server_writer = await self._connect()
        except OSError:
            await self._refuse(writer)
            return
        if self._resets != resets:
            # Its client had connected before.
            _reset(writer)
            _reset(server_writer)
            return
        self._pairs[number] = (writer, server_writer)
        for source, target in ((reader, server_writer), (server_reader, writer)):
            is_answer = target is writer
            task = asyncio.create_task(self._pass_on(number, source, target, is_answer=is_answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _refuse(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        self.refused += 1
        async with self.refusal:
            self.refusal.notify_all()

    async def _pass_on(
        self, number: int, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                beginning = self._beginnings.get(number, b"")
                if not is_answer:
                    self._beginnings[number] = (beginning + data)[:_KEPT]
                await self._flowing.wait()
                if is_answer and self._answers_only is not None and self._answers_only not in beginning:
                    await self._answering.wait()
                await asyncio.sleep(self.delay_sec)
                if is_answer and self.terminated_after is not None and self.terminated_after in data:
                    answered, _, _ = data.partition(self.terminated_after)
                    target.write(answered + self.terminated_after + _TERMINATED)
                    break
                if number >= self._silent_below and not data.startswith(self.drops):
                    target.write(data)
                    await target.drain()
        if number >= self._silent_below:
            target.close()
            pair = self._pairs.get(number, ())
            if all(writer.is_closing() for writer in pair):
                self._pairs.pop(number, None)

    async def close(self) -> None:
        self.restore()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    opened = writer.get_extra_info("socket")
    if opened is not None and opened.family in {socket.AF_INET, socket.AF_INET6}:
        with contextlib.suppress(OSError):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@asynccontextmanager
async def listening(proxy: Proxy, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port on which it listens."""
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, family=socket.AF_INET, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()


def _password(passfile: Path) -> str:
    """Its lines are for the socket, not for the proxy's address."""
    return passfile.read_text().strip().rsplit(":", 1)[1]


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[tuple[str, Proxy]]:
    """A DSN that leads through the proxy."""
    parts = conninfo_to_dict(dsn)
    password = _password(Path(str(parts["passfile"])))
    path = f"{parts['host']}/.s.PGSQL.{parts['port']}"
    proxy = Proxy(lambda: asyncio.open_unix_connection(path))
    async with listening(proxy) as port:
        through = make_conninfo(
            "", host="127.0.0.1", port=port, user=parts["user"], dbname=parts["dbname"], password=password
        )
        yield through, proxy


@asynccontextmanager
async def proxied_url(url: str) -> AsyncIterator[tuple[str, Proxy]]:
    """A URL that leads through the proxy."""
    parts = urlsplit(url)
    proxy = Proxy(lambda: asyncio.open_connection(parts.hostname, parts.port))
    async with listening(proxy) as port:
        yield f"{parts.scheme}://127.0.0.1:{port}", proxy
