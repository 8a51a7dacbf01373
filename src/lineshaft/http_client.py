"""Requests to a server over connections that are kept open; nothing but asyncio and h11.

Not by a client library: those are three times as much work for each request, log addresses, and follow
redirects, which would carry the token to somewhere else.

**A call is made again by itself only where that is safe.** A connection that was kept may have been closed by
the server just when it is used. Whoever says that a call may be made `again` (it reads, or a claim's epoch
fences it) never notices; for any other call the caller is told that nobody knows whether it was carried out.
"""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

import h11

from lineshaft.errors import InvalidInputError, UnavailableError

_CHUNK = 1 << 18
#: A connection that was idle for longer is not used again: servers and proxies close them some time.
_KEEP_SEC = 30.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    is_secure: bool
    #: As the header Host has it.
    authority: str
    #: What stands before every path, behind a proxy.
    prefix: str

    @classmethod
    def of(cls, url: str) -> "Address":
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == -1:
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


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes


@cache
def trusted() -> ssl.SSLContext:
    """The certificates that this machine trusts, read once."""
    return ssl.create_default_context()


class _LostError(Exception):
    """The connection broke."""

    def __init__(self, why: str, *, sent: bool) -> None:
        #: The request may have arrived.
        self.sent = sent
        super().__init__(why)


class Connection:
    """One connection, opened when it is first used; one request at a time, in the event loop of its user."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = [("Host", address.authority), *headers.items()]
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._protocol = h11.Connection(h11.CLIENT)
        #: Since when nobody uses it, by the monotonic clock; None: it was not used yet.
        self._idle_since: float | None = None

    @property
    def was_used(self) -> bool:
        return self._idle_since is not None

    @property
    def is_usable(self) -> bool:
        """Whether another request may be tried on it."""
        if self._streams is None or self._idle_since is None:
            return False
        reader, writer = self._streams
        fresh = time.monotonic() - self._idle_since < _KEEP_SEC
        return fresh and not reader.at_eof() and not writer.transport.is_closing()

    async def request(self, method: str, target: str, body: bytes | None) -> Answer:
        sent = False
        try:
            reader, writer = self._streams or await self._open()
            data = self._encoded(method, self._address.prefix + target, body)
            sent = True
            writer.write(data)
            await writer.drain()
            answer = await self._read(reader)
        except (OSError, h11.RemoteProtocolError) as error:
            self.abort()
            raise _LostError(_words(error), sent=sent) from None
        except BaseException:
            # Cancelled in the middle: what is still to come would be taken for the next answer.
            self.abort()
            raise
        if self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE:
            self._protocol.start_next_cycle()
            self._idle_since = time.monotonic()
        else:
            self.abort()
        return answer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._address
        context = trusted() if address.is_secure else None
        self._protocol, self._idle_since = h11.Connection(h11.CLIENT), None
        self._streams = await asyncio.open_connection(address.host, address.port, ssl=context, limit=_CHUNK)
        return self._streams

    def _encoded(self, method: str, target: str, body: bytes | None) -> bytes:
        headers = self._headers
        if body is not None:
            headers = [
                *headers,
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
            ]
        events = [h11.Request(method=method, target=target, headers=headers), h11.EndOfMessage()]
        if body:
            events.insert(1, h11.Data(data=body))
        return b"".join(self._protocol.send(event) or b"" for event in events)

    async def _read(self, reader: asyncio.StreamReader) -> Answer:
        status, parts = 0, []
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(_CHUNK)
                if not data and not status:
                    raise ConnectionResetError("the connection was closed without an answer")
                self._protocol.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return Answer(status, b"".join(parts))
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the connection was closed in the middle of an answer")

    def abort(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()


class Pool:
    """The connections of one client. A request waits for a free one, within its time."""

    def __init__(self, address: Address, headers: Mapping[str, str], *, size: int) -> None:
        self.address = address
        self._headers = dict(headers)
        self._size = size
        self.open()
        self._idle: list[Connection] = []
        #: Connections that wait for an answer to a call which may be made again.
        self._repeatable: set[Connection] = set()

    def open(self) -> None:
        """For the event loop that is to use it: it may have been another before."""
        self._free = asyncio.Semaphore(self._size)

    def connection(self) -> Connection:
        """One for a use of its own, not of the pool."""
        return Connection(self.address, self._headers)

    async def request(
        self, method: str, target: str, body: bytes | None = None, *, within_sec: float, again: bool
    ) -> Answer:
        """`again`: the call may be made twice. Raises UnavailableError when there is no answer in time."""
        try:
            async with asyncio.timeout(within_sec), self._free:
                while True:
                    connection = self._take()
                    was_used = connection.was_used
                    if again:
                        self._repeatable.add(connection)
                    try:
                        answer = await connection.request(method, target, body)
                    except _LostError as lost:
                        given_up = again and connection not in self._repeatable
                        if given_up or (was_used and (again or not lost.sent)):
                            continue
                        raise self._unavailable(lost, again=again) from None
                    finally:
                        self._repeatable.discard(connection)
                    if connection.is_usable:
                        self._idle.append(connection)
                    return answer
        except TimeoutError:
            raise UnavailableError(
                f"{self.address} didn't answer {method} {target.partition('?')[0]} within {within_sec:g} s."
            ) from None

    async def request_on(
        self, connection: Connection, target: str, body: bytes, *, within_sec: float
    ) -> Answer:
        """POST on a connection that is the caller's own; it is opened anew if it must be."""
        try:
            async with asyncio.timeout(within_sec):
                if connection.was_used and not connection.is_usable:
                    connection.abort()
                return await connection.request("POST", target, body)
        except _LostError as lost:
            raise self._unavailable(lost, again=True) from None
        except TimeoutError:
            raise UnavailableError(
                f"{self.address} didn't answer POST {target} within {within_sec:g} s."
            ) from None

    def _take(self) -> Connection:
        # The one used last first: those that are not needed grow old.
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return self.connection()

    def start_anew(self) -> None:
        """The next requests get new connections, as those that are there may lead nowhere.

        Calls that may be made again are, now; the others wait for as long as they would have.
        """
        self._forget_idle()
        waiting, self._repeatable = self._repeatable, set()
        for connection in waiting:
            connection.abort()

    def _forget_idle(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def close(self) -> None:
        self._forget_idle()
        # Sockets are closed with the next turn of the loop, which may be its last.
        await asyncio.sleep(0)

    def _unavailable(self, lost: _LostError, *, again: bool) -> UnavailableError:
        doubt = (
            "" if again or not lost.sent else " Nobody knows whether the call was carried out: look first."
        )
        return UnavailableError(
            f"{self.address} doesn't answer: {lost}.{doubt} Is 'lineshaft up' running there? Check the URL "
            "(LINESHAFT_URL)."
        )


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); SSL_CERT_FILE names one that is"
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror | ssl.SSLError):
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
