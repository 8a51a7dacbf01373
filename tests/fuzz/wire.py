"""One connection to the server that is kept open, and counts nothing but what it gets."""

import asyncio
from typing import Self

from tests.fuzz.generator import Request
from tests.server.client import Reply, read_head


class Wire:
    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def call(self, request: Request) -> Reply:
        """The reply. A connection that the server has closed between two calls is opened again."""
        fresh = self._streams is None
        try:
            return await self._call(request)
        except (OSError, EOFError):
            self._close()
            if fresh:
                raise
            return await self._call(request)

    async def _call(self, request: Request) -> Reply:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._streams
        headers = {"Host": f"127.0.0.1:{self._port}", **request.headers}
        if request.body:
            headers["Content-Length"] = str(len(request.body))
        lines = [f"{request.method} {request.target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + request.body)
        await writer.drain()
        status, found = await read_head(reader)
        length = int(found.get("content-length", 0))
        reply = Reply(status, found, await reader.readexactly(length))
        if found.get("connection") == "close" or "transfer-encoding" in found:
            self._close()
        return reply
