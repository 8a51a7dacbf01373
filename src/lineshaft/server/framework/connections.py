"""Connections: deadlines for slow clients, and a limit below the number of files that the process may open.

A connection costs the server a file descriptor whether or not it sends anything. The headers of a request
have to arrive within some seconds, and a body has to keep arriving. At the limit, the connection that has
waited longest for its client, for a request or for the rest of a body, makes room. If none waits, the new
connection gets 503.
"""

import asyncio
import logging
import resource
import time
from typing import TYPE_CHECKING, Any

from lineshaft.server.framework.http_protocol import HttpProtocol

if TYPE_CHECKING:
    from collections.abc import Iterable

#: From the connection, or from the first byte of the next request, until all headers are there.
HEADERS_SEC = 10.0
#: A body must bring at least this many bytes in each such period.
BODY_SEC, BODY_BYTES = 10.0, 16 << 10
_SWEEP_EVERY_SEC = 1.0
#: Files besides connections of clients and of the database: libraries, pipes of gates, the log, and
#: connections that were accepted but not yet counted, or closed but not yet forgotten.
_OTHER_FILES = 64
MOST_CONNECTIONS = 20_000
_LOG_EVERY_SEC = 60.0

_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 34\r\n\r\nToo many connections; retry later."
)
_log = logging.getLogger("lineshaft.http")


def max_connections(reserved: int) -> int:
    """How many clients may connect; `reserved` files are for the database."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(8, min(MOST_CONNECTIONS, soft - reserved - _OTHER_FILES))


class Connections:
    """The limits of one server. `protocol` makes the protocol of each connection."""

    def __init__(self, reserved_files: int) -> None:
        self._reserved_files = reserved_files
        self._most: int | None = None
        self._reported_at = -_LOG_EVERY_SEC
        self._refused = 0

    def protocol(self, *args: Any, **options: Any) -> "Protocol":
        return Protocol(self, *args, **options)

    def make_room(self, newest: "Protocol") -> bool:
        """Whether a new connection may stay."""
        if self._most is None:
            # Not before: the process raises its limit of open files when it starts to serve.
            self._most = max_connections(self._reserved_files)
        if len(newest.connections) <= self._most:
            return True
        self._report()
        candidates: Iterable[Protocol] = (
            found
            for found in newest.connections
            if isinstance(found, Protocol) and found is not newest and (found.is_idle or found.lacks_body)
        )
        oldest = min(candidates, key=lambda found: found.idle_since, default=None)
        if oldest is None:
            return False
        oldest.abort()
        return True

    def _report(self) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._reported_at >= _LOG_EVERY_SEC:
            _log.warning(
                "All %d connections are in use: %d were closed or refused. Raise the limit of open files "
                "(ulimit -n) if these are your own clients.",
                self._most,
                self._refused,
            )
            self._reported_at, self._refused = now, 0

    async def sweep(self, open_connections: set[Any]) -> None:
        """Close the connections that miss their deadlines, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_EVERY_SEC)
            now = time.monotonic()
            for found in list(open_connections):
                if isinstance(found, Protocol) and found.is_late(now):
                    found.abort()


class Protocol(HttpProtocol):
    """An HTTP connection that knows how long it has been waiting for its client."""

    def __init__(self, limits: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self.idle_since = time.monotonic()
        #: When headers began to be awaited, if they are.
        self._headers_since: float | None = self.idle_since
        self._body_since: float | None = None
        self._body_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether it is open and has no request in progress."""
        return not self.transport.is_closing() and not self.is_answering

    @property
    def lacks_body(self) -> bool:
        """Whether its request is waiting for the rest of its body."""
        return self.is_answering and self.lacks_data and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._limits.make_room(self):
            transport.write(_UNAVAILABLE)
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._body_bytes += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        super().on_response_complete()

    def is_late(self, now: float) -> bool:
        if self.is_idle:
            self._body_since = None
            if self.is_between_requests:
                self._headers_since = None
                return now - self.idle_since > self.timeout_keep_alive
            if self._headers_since is None:
                self._headers_since = now
            return now - self._headers_since > HEADERS_SEC
        self._headers_since = None
        if not self.lacks_body or self.flow.read_paused:
            self._body_since = None
            return False
        if self._body_since is None:
            self._body_since, self._body_bytes = now, 0
            return False
        if now - self._body_since < BODY_SEC:
            return False
        is_slow = self._body_bytes < BODY_BYTES
        self._body_since, self._body_bytes = now, 0
        return is_slow

    def abort(self) -> None:
        """Close at once; the operation, if one is waiting for the body, sees a disconnected client."""
        self.transport.abort()


class RepeatedLines(logging.Filter):
    """Lets a line pass once a minute: asyncio logs each connection that it has no file for."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if "out of system resource" not in str(record.msg):
            return True
        now = time.monotonic()
        if now - self._passed.get(record.name, -_LOG_EVERY_SEC) < _LOG_EVERY_SEC:
            return False
        self._passed[record.name] = now
        record.exc_info = None
        return True
