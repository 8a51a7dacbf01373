"""Responses of any size, streamed: ranges, ETags, and headers that keep a browser from running them."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from urllib.parse import quote

import structlog
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_log = structlog.get_logger("lineshaft.http")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)
#: More digits than any size has; Python refuses to read thousands of them.
_MAX_DIGITS = 18


class RangeNotSatisfiable(Exception):  # noqa: N818 - the name of the status
    """The range starts behind the end."""


def wanted_range(headers: Headers, size: int, etag: str) -> tuple[int, int] | None:
    """First and last byte plus one. None: everything, as for several ranges or an invalid one."""
    given = _RANGE.fullmatch(headers.get("range", "").strip())
    if given is None or not any(given.groups()) or any(len(part) > _MAX_DIGITS for part in given.groups()):
        return None
    if headers.get("if-range", etag) != etag:
        return None
    first, last = given.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= size:
        raise RangeNotSatisfiable
    return start, stop


def attachment(file_name: str) -> str:
    """Content-Disposition for a name that is safe as a file name."""
    plain = re.sub(r'[^ -~]|["\\%]', "_", file_name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(file_name, safe='')}"


#: A browser neither guesses another type nor runs what it gets.
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cache-Control": "private, no-cache",
}


class Download(Response):
    """A response whose body is read piece by piece while it is sent.

    If reading fails halfway the connection is closed, so the client notices that bytes are missing.
    """

    def __init__(self, chunks: AsyncIterator[bytes], status: int, headers: dict[str, str]) -> None:
        super().__init__(status_code=status, headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        gone = asyncio.create_task(_until_disconnected(receive))
        try:
            if scope["method"] == "HEAD":
                await send(start)
                await send({"type": "http.response.body"})
                return
            await send(start)
            async for chunk in self._chunks:
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
        except Exception as error:  # noqa: BLE001 - the status is sent; what remains is to end the connection
            _log.error("A download was cut off", error=str(error))
        finally:
            gone.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await gone
            if (close := getattr(self._chunks, "aclose", None)) is not None:
                await close()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
