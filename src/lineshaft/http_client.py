"""HTTP requests on asyncio and h11: a pool of open connections to one server, and single POST requests.

No client library: those cost three times as much CPU per request, log URLs, which may hold secrets, and
follow redirects, which would send the token or the signed body elsewhere. Proxies named in the environment
are not used.

**A request is repeated automatically only where that is safe.** The server may close an idle connection at
the moment when it is used again. A request marked `again` (it only reads, or a claim's epoch fences it) is
then repeated on a new connection; for any other, the error says that it may have been processed.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import h11
from msgspec import Struct

from lineshaft.errors import InvalidInputError, UnavailableError

_CHUNK = 1 << 18
#: The longest response to an upload.
_MAX_ANSWER = 1 << 20
#: A connection that was idle for longer is not reused: servers and proxies close idle connections.
_KEEP_SEC = 30.0


class Address(Struct, frozen=True):
    """The address of a server."""

    host: str
    port: int
    is_secure: bool
    #: The value of the Host header.
    authority: str
    #: The start of every path, behind a proxy.
    prefix: str

    @classmethod
    def of(cls, url: str) -> "Address":
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidInputError(errors=[("url", "must be http://HOST:PORT or https://HOST")])
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            fault = "must have nothing but host, port and path; a token is given as token= or LINESHAFT_TOKEN"
            raise InvalidInputError(errors=[("url", fault)])
        secure = parts.scheme == "https"
        return cls(
            parts.hostname, port or (443 if secure else 80), secure, parts.netloc, parts.path.rstrip("/")
        )

    def __str__(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.authority}{self.prefix}"


class Response(Struct, frozen=True):
    status: int
    body: bytes


@cache
def trusted() -> ssl.SSLContext:
    """The certificates that this machine trusts, read once."""
    return ssl.create_default_context()


class NoResponseError(Exception):
    """The connection failed. The text gives the cause, without the URL."""

    def __init__(self, cause: str, *, sent: bool) -> None:
        #: The request may have arrived.
        self.sent = sent
        super().__init__(cause)


class Connection:
    """One connection, opened by its first request. It serves one request at a time, in one event loop."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        given = {name.lower() for name in headers}
        self._headers = [*([] if "host" in given else [("Host", address.authority)]), *headers.items()]
        self._has_content_type = "content-type" in given
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._protocol = h11.Connection(h11.CLIENT)
        #: The end of the last request, by the monotonic clock; None before the first.
        self._idle_since: float | None = None

    @property
    def was_used(self) -> bool:
        return self._idle_since is not None

    @property
    def is_usable(self) -> bool:
        """Whether another request can be sent on it."""
        if self._streams is None or self._idle_since is None:
            return False
        reader, writer = self._streams
        fresh = time.monotonic() - self._idle_since < _KEEP_SEC
        return fresh and not reader.at_eof() and not writer.transport.is_closing()

    async def request(
        self,
        method: str,
        target: str,
        body: bytes | None,
        *,
        headers: Sequence[tuple[str, str]] = (),
        max_body: int | None = None,
    ) -> Response:
        """Send a request. A response body longer than `max_body` is cut off there, unread."""
        sent = False
        try:
            reader, writer = self._streams or await self._open()
            data = self._encoded(method, self._address.prefix + target, body, headers)
            sent = True
            writer.write(data)
            await writer.drain()
            response = await self._read(reader, max_body)
        except (OSError, h11.RemoteProtocolError) as error:
            self.abort()
            raise NoResponseError(_cause(error), sent=sent) from None
        except BaseException:
            # Cancelled halfway: the rest of this response would be read as the next one.
            self.abort()
            raise
        if self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE:
            self._protocol.start_next_cycle()
            self._idle_since = time.monotonic()
        else:
            self.abort()
        return response

    async def upload(
        self,
        target: str,
        chunks: AsyncIterable[bytes],
        headers: Mapping[str, str],
        *,
        step_sec: float,
        end_sec: float,
    ) -> Response:
        """POST a body piece by piece, each sent within `step_sec`; the response comes within `end_sec`."""
        answering: asyncio.Future[Response] | None = None
        try:
            async with asyncio.timeout(step_sec):
                reader, writer = await self._open()
            request = h11.Request(
                method="POST",
                target=self._address.prefix + target,
                headers=[*self._headers, *headers.items()],
            )
            writer.write(self._protocol.send(request) or b"")
            # A server that refuses the upload answers before it has all of it.
            answering = asyncio.ensure_future(self._read(reader, _MAX_ANSWER))
            with contextlib.suppress(ConnectionError):
                await self._send_all(writer, chunks, answering, step_sec)
            async with asyncio.timeout(end_sec):
                return await answering
        except TimeoutError:
            raise NoResponseError("it didn't go on in time", sent=answering is not None) from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise NoResponseError(_cause(error), sent=answering is not None) from None
        finally:
            if answering is not None:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
            self.abort()

    async def _send_all(
        self,
        writer: asyncio.StreamWriter,
        chunks: AsyncIterable[bytes],
        answering: "asyncio.Future[Response]",
        step_sec: float,
    ) -> None:
        async for chunk in chunks:
            if answering.done():
                return
            writer.write(self._protocol.send(h11.Data(data=chunk)) or b"")
            draining = asyncio.ensure_future(writer.drain())
            try:
                async with asyncio.timeout(step_sec):
                    both: set[asyncio.Future[Any]] = {draining, answering}
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if draining.done():
                    draining.result()
            finally:
                draining.cancel()
                await asyncio.gather(draining, return_exceptions=True)
        if not answering.done():
            writer.write(self._protocol.send(h11.EndOfMessage()) or b"")

    @contextlib.asynccontextmanager
    async def download(
        self, target: str, headers: Mapping[str, str], *, step_sec: float
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """GET a body piece by piece, each received within `step_sec`: the status and the pieces."""
        try:
            async with asyncio.timeout(step_sec):
                reader, writer = await self._open()
            request = h11.Request(
                method="GET", target=self._address.prefix + target, headers=[*self._headers, *headers.items()]
            )
            events = [request, h11.EndOfMessage()]
            writer.write(b"".join(self._protocol.send(event) or b"" for event in events))
            received = self._receive(reader, step_sec)
            status = (await anext(received)).status_code
            yield status, (bytes(event.data) async for event in received)
        except TimeoutError:
            raise NoResponseError("it didn't go on in time", sent=True) from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise NoResponseError(_cause(error), sent=True) from None
        finally:
            self.abort()

    async def _receive(self, reader: asyncio.StreamReader, step_sec: float) -> AsyncIterator[Any]:
        """The response, then its data."""
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(step_sec):
                    self._protocol.receive_data(await reader.read(_CHUNK))
            elif isinstance(event, h11.Response | h11.Data):
                yield event
            elif isinstance(event, h11.EndOfMessage):
                return
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the connection was closed in the middle of a response")

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._address
        context = trusted() if address.is_secure else None
        self._protocol, self._idle_since = h11.Connection(h11.CLIENT), None
        try:
            self._streams = await asyncio.open_connection(
                address.host, address.port, ssl=context, limit=_CHUNK
            )
        except UnicodeError:
            raise socket.gaierror(socket.EAI_NONAME, "a part of it is empty or too long") from None
        return self._streams

    def _encoded(
        self, method: str, target: str, body: bytes | None, more: Sequence[tuple[str, str]]
    ) -> bytes:
        headers = [*self._headers, *more] if more else self._headers
        if body is not None:
            headers = [*headers, ("Content-Length", str(len(body)))]
            if not self._has_content_type:
                headers.append(("Content-Type", "application/json"))
        events = [h11.Request(method=method, target=target, headers=headers), h11.EndOfMessage()]
        if body:
            events.insert(1, h11.Data(data=body))
        return b"".join(self._protocol.send(event) or b"" for event in events)

    async def _read(self, reader: asyncio.StreamReader, max_body: int | None) -> Response:
        status, size, parts = 0, 0, []
        while not status or max_body is None or size < max_body:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(_CHUNK)
                if not data and not status:
                    raise ConnectionResetError("the connection was closed without a response")
                self._protocol.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the connection was closed in the middle of a response")
        return Response(status, b"".join(parts)[:max_body])

    def abort(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()


class HttpPool:
    """The connections of one client. A request waits for a free one, within its time limit."""

    def __init__(self, address: Address, headers: Mapping[str, str], *, size: int) -> None:
        self.address = address
        self._headers = dict(headers)
        self._size = size
        self.open()
        self._idle: list[Connection] = []
        #: Connections that wait for the response to a request which may be repeated.
        self._repeatable: set[Connection] = set()

    def open(self) -> None:
        """Prepare for the running event loop, which may differ from the one before."""
        self._free = asyncio.Semaphore(self._size)

    def connection(self) -> Connection:
        """A connection outside the pool, for one purpose."""
        return Connection(self.address, self._headers)

    async def request(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        headers: Sequence[tuple[str, str]] = (),
        within_sec: float,
        again: bool,
    ) -> Response:
        """Send a request; `again` allows repeating it. Raises UnavailableError without a response in time."""
        try:
            async with asyncio.timeout(within_sec), self._free:
                while True:
                    connection = self._take()
                    was_used = connection.was_used
                    if again:
                        self._repeatable.add(connection)
                    try:
                        response = await connection.request(method, target, body, headers=headers)
                    except NoResponseError as lost:
                        given_up = again and connection not in self._repeatable
                        if given_up or (was_used and (again or not lost.sent)):
                            continue
                        raise self.unavailable(lost, again=again) from None
                    finally:
                        self._repeatable.discard(connection)
                    if connection.is_usable:
                        self._idle.append(connection)
                    return response
        except TimeoutError:
            raise UnavailableError(
                f"{self.address} didn't answer {method} {target.partition('?')[0]} within {within_sec:g} s."
            ) from None

    async def request_on(
        self, connection: Connection, target: str, body: bytes, *, within_sec: float
    ) -> Response:
        """POST on a connection of the caller's, which is reopened if needed."""
        try:
            async with asyncio.timeout(within_sec):
                if connection.was_used and not connection.is_usable:
                    connection.abort()
                return await connection.request("POST", target, body)
        except NoResponseError as lost:
            raise self.unavailable(lost, again=True) from None
        except TimeoutError:
            raise UnavailableError(
                f"{self.address} didn't answer POST {target} within {within_sec:g} s."
            ) from None

    def _take(self) -> Connection:
        # The most recently used first, so that surplus connections expire.
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return self.connection()

    def reconnect(self) -> None:
        """Use new connections for the next requests, because the open ones may be dead.

        Pending requests that may be repeated are repeated now; the others keep waiting.
        """
        self._close_idle()
        waiting, self._repeatable = self._repeatable, set()
        for connection in waiting:
            connection.abort()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def close(self) -> None:
        self._close_idle()
        # Sockets close in the next iteration of the event loop, which may be its last.
        await asyncio.sleep(0)

    def unavailable(self, lost: NoResponseError, *, again: bool) -> UnavailableError:
        """The error of a request that got no response; `again`: it may be repeated."""
        doubt = (
            "" if again or not lost.sent else " The request may have been processed; check before retrying."
        )
        return UnavailableError(
            f"{self.address} doesn't answer: {lost}.{doubt} Is 'lineshaft up' running there? Check the URL "
            "(LINESHAFT_URL)."
        )


async def post(
    url: str, body: bytes, *, headers: Mapping[str, str], timeout_sec: float, max_body: int
) -> Response:
    """Send one POST request on a connection of its own, and read at most `max_body` bytes of the response.

    Raises NoResponseError, whose text doesn't contain the URL.
    """
    parts = urlsplit(url)
    address = Address.of(urlunsplit((parts.scheme, parts.netloc, "", "", "")))
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = Connection(address, {"Connection": "close", **headers})
    try:
        async with asyncio.timeout(timeout_sec):
            return await connection.request("POST", target, body, max_body=max_body)
    except TimeoutError:
        raise NoResponseError(f"no response within {timeout_sec:g} s", sent=True) from None
    finally:
        connection.abort()


def _cause(error: Exception) -> str:
    if isinstance(error, h11.RemoteProtocolError):
        return "the response is not valid HTTP"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); SSL_CERT_FILE names one that is"
    if isinstance(error, ssl.SSLError):
        return f"no secure connection ({error.reason or type(error).__name__})"
    if isinstance(error, socket.gaierror):
        return f"its host name can't be resolved ({error.strerror})"
    # The text that asyncio gives such an error contains the address.
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
