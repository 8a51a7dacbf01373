"""A proxy between clients and the database that can lose what passes: a network for tests."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Proxy:
    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._tasks: set[asyncio.Task[None]] = set()
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._refusing = False
        #: Connections made before this number are silent: what is sent on them goes nowhere.
        self._silent_below = 0
        self._number = 0
        self.refused = 0
        self.refusal = asyncio.Condition()

    def cut(self) -> None:
        """The server is away: connections break, and new ones are refused."""
        self._refusing = True
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()
        self._pairs.clear()

    def mend(self) -> None:
        self._refusing = False

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
            writer.transport.abort()
            self.refused += 1
            async with self.refusal:
                self.refusal.notify_all()
            return
        number, self._number = self._number, self._number + 1
        server_reader, server_writer = await asyncio.open_unix_connection(self._path)
        self._pairs.append((writer, server_writer))
        for source, target in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._pass_on(number, source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, number: int, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if number >= self._silent_below:
                    target.write(data)
                    await target.drain()
        if number >= self._silent_below:
            target.close()

    async def close(self) -> None:
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _password(passfile: Path) -> str:
    """Its lines are for the socket, not for the proxy's address."""
    return passfile.read_text().strip().rsplit(":", 1)[1]


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[tuple[str, Proxy]]:
    """A DSN that leads through the proxy."""
    parts = conninfo_to_dict(dsn)
    password = _password(Path(str(parts["passfile"])))
    proxy = Proxy(f"{parts['host']}/.s.PGSQL.{parts['port']}")
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, family=socket.AF_INET)
    port = server.sockets[0].getsockname()[1]
    try:
        yield (
            make_conninfo(
                "", host="127.0.0.1", port=port, user=parts["user"], dbname=parts["dbname"], password=password
            ),
            proxy,
        )
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
