"""HTTP/1.1 on one connection: uvicorn's protocol on httptools, one request at a time and strict.

The parser gets one request at a time. Requests that a client sends ahead wait unparsed until the one before
them has been answered, so they take no memory beyond what one read brings, and an invalid one can't affect
the response before it. What the parser accepts but proxies could read in another way is refused here.
"""

import asyncio
import urllib.parse
from typing import TYPE_CHECKING, Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from lineshaft.server.framework.peers import PEER, Peer
from lineshaft.types import Problem

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent, HTTPResponseBodyEvent, HTTPResponseStartEvent, HTTPScope

#: The request line and all headers; also the trailers, or the extensions of a chunk.
MAX_HEAD_BYTES = 64 << 10
#: More digits than any length has.
_MAX_LENGTH_DIGITS = 20
_END = b"\r\n\r\n"
_VERSIONS = {"1.0", "1.1"}
_WITHOUT_BODY = {204, 304}


class _BadRequestError(Exception):
    """A request that is refused although the parser accepts it."""


class HttpProtocol(HttpToolsProtocol):
    cycle: "Cycle | None"  # type: ignore[assignment] # uvicorn's is None at first, too

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: What arrived after a request that is not answered yet.
        self._ahead = b""
        #: The head so far, as it was sent.
        self._head = b""
        #: Up to three bytes that may begin the end of a head or of a chunked body.
        self._tail = b""
        #: Bytes of the body that are still to come; None: its end is found by parsing.
        self._left: int | None = None
        self._overhead = 0
        #: Whether the rest of a request is still to come, after its headers.
        self.lacks_data = False

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_between_requests(self) -> bool:
        """Whether a request was answered, and nothing of the next one has arrived."""
        return self.cycle is not None and not self.is_answering and not self._head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = Peer(self.client, self.server)

    # Reading.

    def data_received(self, data: bytes) -> None:
        if self._ahead or (self.is_answering and not self.lacks_data):
            self._ahead += data
            self.flow.pause_reading()
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            if self.is_answering and not self.lacks_data:
                self._ahead = data
                self.flow.pause_reading()
                return
            end = self._end_of_part(data)
            part, data = (data, b"") if end >= len(data) else (data[:end], data[end:])
            if not self.lacks_data:
                self._head += part
                if len(self._head) > MAX_HEAD_BYTES:
                    self._refuse()
                    return
            self._overhead += len(part)
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade:
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                    return
                self._ignore_upgrade()
            except httptools.HttpParserError:
                self._refuse()
                return
            if self._overhead > MAX_HEAD_BYTES:
                self._refuse()

    def _end_of_part(self, data: bytes) -> int:
        """Where the head or the body may end: no part has anything of the next request."""
        if self._left is not None:
            return self._left
        found = self._tail + data
        end = found.find(_END)
        if end < 0:
            self._tail = found[-len(_END) + 1 :]
            return len(data)
        end += len(_END) - len(self._tail)
        self._tail = b""
        return end

    def _refuse(self) -> None:
        self.lacks_data = False
        if self.cycle is not None and self.is_answering:
            # The operation sees a client that has disconnected.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        self.send_400_response("The request is not valid HTTP/1.1. Check the client, or the proxy before it.")

    def send_400_response(self, msg: str) -> None:
        body = msgspec.json.encode(
            Problem(
                type="urn:lineshaft:error:invalid_input",
                title="Invalid input",
                status=400,
                detail=msg,
                code="invalid_input",
                retryable=False,
            )
        )
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def _ignore_upgrade(self) -> None:
        """Read the request as if it didn't offer another protocol.

        The parser takes what follows for the other protocol, so a new one gets the request without the offer.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version()
        head = [b"%b %b HTTP/%b\r\n" % (method, self.url, version.encode())]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._head = b"".join([*head, b"\r\n"])
        self.parser.feed_data(self._head)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are dropped: they come when the operation has seen the headers.
        if not self.lacks_data:
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        parser = self.parser
        method, version = parser.get_method(), parser.get_http_version()
        self._check(method, version)
        self._head = b""
        self.scope = cast(
            "HTTPScope",
            {
                "type": "http",
                "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
                "http_version": version,
                "server": self.server,
                "client": self.client,
                "scheme": self.scheme,
                "root_path": self.root_path,
                "headers": self.headers,
                "state": self.app_state.copy(),
                "method": method.decode(),
                PEER: self._peer,
            },
        )
        if parser.should_upgrade():
            return
        path, _, query = self.url.partition(b"?")
        self.scope["path"] = urllib.parse.unquote(path.decode())
        self.scope["raw_path"] = path
        self.scope["query_string"] = query
        self.lacks_data = True
        self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self._expects_100,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self._start_asgi_task(self.cycle, self.app)

    def _check(self, method: bytes, version: str) -> None:
        """Refuse what others could read in another way, and note how the body is sent."""
        found = dict(self.headers)
        hosts = sum(name == b"host" for name, _ in self.headers)
        length, encoding = found.get(b"content-length"), found.get(b"transfer-encoding")
        if (
            version not in _VERSIONS
            # No empty lines before it, one space between its parts, and no other protocol.
            or not self._head.startswith(b"%b %b HTTP/%b\r\n" % (method, self.url, version.encode()))
            or method == b"CONNECT"
            or hosts > 1
            or (hosts == 0 and version == "1.1")
            or (encoding is not None and encoding.lower() != b"chunked")
            or (length is not None and len(length) > _MAX_LENGTH_DIGITS)
        ):
            raise _BadRequestError
        self._left = None if length is None else int(length)
        self._expects_100 = found.get(b"expect", b"").lower() == b"100-continue"

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        assert cycle is not None  # noqa: S101 - bodies come after headers
        self._overhead = 0
        if self._left is not None:
            self._left -= len(body)
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._left, self._overhead = None, 0
        if self.lacks_data and self.cycle is not None:
            self.lacks_data = False
            self.cycle.more_body = False
            self.cycle.message_event.set()

    # Answering.

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.lacks_data:
            # Nothing was going to read the rest of the body.
            self.transport.close()
            return
        self.flow.resume_reading()
        ahead, self._ahead = self._ahead, b""
        self._parse(ahead)


class Cycle(RequestResponseCycle):
    """One request and its response."""

    #: Bytes of the body that are still to be sent; None: unknown.
    _unsent: int | None = None
    #: The head, until it is sent with the body: each write is a system call.
    _response_head = b""

    async def send(self, message: "ASGISendEvent") -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._send_head(message)
        elif message["type"] == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message)
        else:
            raise RuntimeError(f"The application sent {message['type']} at the wrong time.")

    def _send_head(self, message: "HTTPResponseStartEvent") -> None:
        self.response_started, self.waiting_for_100_continue = True, False
        status = message["status"]
        lines = [STATUS_LINE[status]]
        length = None
        for name, value in [*self.default_headers, *message.get("headers", ())]:
            if HEADER_VALUE_RE.search(value):
                raise RuntimeError(f"The response header {name.decode()} has a control character.")
            if name == b"content-length":
                length = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        if self.scope["method"] == "HEAD" or status in _WITHOUT_BODY:
            length = 0
        self.chunked_encoding = length is None and self.scope["http_version"] != "1.0"
        # Without a length, HTTP/1.0 ends a body by closing the connection.
        self._unsent = length
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._response_head = b"".join(lines)
        if length is None:
            # A stream: its first part may come much later.
            self._write(b"")

    def _send_body(self, message: "HTTPResponseBodyEvent") -> None:
        body = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._write(chunk + b"0\r\n\r\n" if is_last else chunk)
        else:
            self._write(body)
        if self._unsent is not None:
            self._unsent -= len(body)
            if self._unsent < 0 or (is_last and self._unsent):
                raise RuntimeError("The response body doesn't have the length of its content-length.")
        if is_last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _write(self, data: bytes) -> None:
        head, self._response_head = self._response_head, b""
        self.transport.write(head + data)
