"""Request middleware: checks Host, Origin and size, assigns a request id and logs the request.

A web page can make a browser send requests to any address. Its script can't read the response, but a
request that changes something still takes effect; and through a name of its own that resolves to 127.0.0.1
(DNS rebinding) a page can read responses too. Therefore the Host must be a name of this server, and an
Origin, which browsers send with requests of scripts and forms, must be this server's own. Browsers send no
Origin with plain GET requests; then Sec-Fetch-Site shows that the page is of another site. Following a link
from there (GET or HEAD) is allowed; sending a form is not. Origins that a setting names may call the API all
the same: see origins.py.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lineshaft.errors import ForbiddenError, LineshaftError
from lineshaft.ids import new_id
from lineshaft.server.framework import limits
from lineshaft.server.framework.auth import is_loopback
from lineshaft.server.framework.origins import SETTING, AllowedOrigins, Origin, is_preflight
from lineshaft.server.framework.problems import ErrorFormats
from lineshaft.server.framework.routing import send_problem

_log = structlog.get_logger("lineshaft.http")
#: A valid request id from the client; any other is replaced.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Another port of this machine counts as the same site, but it serves other pages.
_FOREIGN_SITES = frozenset({b"cross-site", b"same-site"})
#: How much of a refused body is read, so that its sender gets to read the response, and how long the server
#: waits for the next part of it. Connections that send slowly have other limits.
_DROP_BYTES, DROP_SEC = 64 << 20, 5.0
#: For load balancers, which call by address or by a name of their own.
_ANY_HOST = frozenset({"/healthz", "/readyz"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


class AllowedHosts:
    """The names of this server."""

    def __init__(self, host: str, allowed: Collection[str] = ()) -> None:
        self._exposed = not is_loopback(host)
        self._names = {host.lower(), "localhost", *(name.lower() for name in allowed)}
        if self._exposed:
            self._names.add(socket.gethostname().lower())

    def allow(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # Unlike a name, an address can't be made to resolve elsewhere.
        return self._exposed or address.is_loopback


class BodyLimit(NamedTuple):
    max_bytes: int
    setting: str


class RequestMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: AllowedHosts,
        max_body_bytes: int,
        error_formats: ErrorFormats,
        open_prefix: str,
        origins: AllowedOrigins | None = None,
        uploads: Mapping[str, BodyLimit] | None = None,
    ) -> None:
        """`open_prefix`: paths that are authenticated otherwise, and may be called by any name.

        `uploads`: paths whose POST takes a body of another size, which is never held in memory.
        """
        self._app = app
        self._hosts = hosts
        self._body_limit = BodyLimit(max_body_bytes, "LINESHAFT_MAX_BODY_BYTES")
        self._uploads = uploads or {}
        self._error_formats = error_formats
        self._open_prefix = open_prefix
        self._origins = origins or AllowedOrigins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["error_format"] = self._error_formats.of(scope["path"])
        # Until the end of the task that answers this request.
        structlog.contextvars.bind_contextvars(request_id=request_id)
        if scope["type"] == "websocket":
            await self._open_socket(scope, headers, receive, send)
        else:
            await self._answer(scope, headers, receive, send)

    async def _open_socket(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        try:
            self._check_origin(headers, "GET", scope["path"], self._origins.find(headers, scope["path"]))
        except ForbiddenError:
            # Before the socket is accepted, this is a 403.
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        began = time.perf_counter()
        status = 0
        limit = self._body_limit
        if scope["method"] == "POST":
            limit = self._uploads.get(scope["path"], limit)
        body = _Body(receive, headers, limit)
        origin = self._origins.find(headers, scope["path"])
        added = [(b"x-request-id", request_id.encode()), *(() if origin is None else origin.headers)]
        if self._origins.varies(scope["path"]):
            added.append((b"vary", b"origin"))

        async def send_and_log(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            elif not message.get("more_body", False) and not body.is_read:
                # The server closes the connection after the response. With data that was not read, the
                # client would get a reset in place of the response.
                await send({**message, "more_body": True})
                await body.drop()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            self._check_origin(headers, scope["method"], scope["path"], origin)
            if origin is not None and is_preflight(scope["method"], headers):
                added = [*added[:1], *origin.preflight(headers), (b"vary", b"origin")]
                await send_and_log({"type": "http.response.start", "status": 204, "headers": []})
                await send_and_log({"type": "http.response.body"})
                return
            body.check_length()
            await self._app(scope, body.receive, send_and_log)
        except LineshaftError as error:
            await send_problem(send_and_log, error, scope)
        finally:
            _log_request(scope, status, time.perf_counter() - began)

    def _check_origin(
        self, headers: dict[bytes, bytes], method: str, path: str, allowed: Origin | None
    ) -> None:
        """Refuse pages of other sites; `allowed`: the origin that may call this path all the same."""
        if path.startswith(self._open_prefix):
            return
        host = headers.get(b"host", b"").decode("latin-1")
        name, port = _split(host)
        if path not in _ANY_HOST and not self._hosts.allow(name):
            raise ForbiddenError(
                f"Host {host!r} is not allowed. Add it to LINESHAFT_ALLOWED_HOSTS, or call the server by its "
                "address."
            )
        if allowed is not None:
            return
        follows_link = headers.get(b"sec-fetch-mode") == b"navigate" and method in {"GET", "HEAD"}
        origin = headers.get(b"origin", b"").decode("latin-1")
        if headers.get(b"sec-fetch-site") in _FOREIGN_SITES and not follows_link:
            if origin:
                self._origins.log_refusal(origin)
            raise ForbiddenError(
                "The request comes from a page of another site (Sec-Fetch-Site). Pages of other sites "
                f"can't call this server, unless {SETTING} names their origin."
            )
        if b"origin" not in headers:
            return
        scheme, _, from_host = origin.partition("://")
        default = _DEFAULT_PORTS.get(scheme.lower())
        if default is None or _split(from_host) not in {(name, port), (name, port or default)}:
            self._origins.log_refusal(origin)
            raise ForbiddenError(
                f"The request comes from a page of {origin!r}, not of this server ({host}). Pages of other "
                f"sites can't call it, unless {SETTING} names their origin."
            )


class _Body:
    """The body of a request, up to the limit of the server."""

    def __init__(self, receive: Receive, headers: dict[bytes, bytes], limit: BodyLimit) -> None:
        self._receive = receive
        self._limit = limit
        self._received = 0
        length = headers.get(b"content-length", b"0")
        self._length = int(length) if length.isdigit() else 0
        self.is_read = self._length == 0 and b"transfer-encoding" not in headers

    def check_length(self) -> None:
        if self._length > self._limit.max_bytes:
            raise limits.too_large(*self._limit)

    async def receive(self) -> Message:
        message = await self._next()
        if self._received > self._limit.max_bytes:
            raise limits.too_large(*self._limit)
        return message

    async def _next(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            self.is_read = True
        return message

    async def drop(self) -> None:
        """Read the rest, within limits, and forget it."""
        now = asyncio.get_running_loop().time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DROP_SEC) as limit:
                while not self.is_read and self._received < _DROP_BYTES:
                    await self._next()
                    limit.reschedule(now() + DROP_SEC)


def _split(host: str) -> tuple[str, int | None]:
    """The name in lower case and the port, if one is given."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return "", None
    return parts.hostname or "", port


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else new_id("req")


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    """Log one line per request, without its contents."""
    about: dict[str, Any] = {}
    path = scope["path"]
    params = scope.get("path_params", {})
    if "id" in params:
        kind = path.split("/")[2].rstrip("s") if path.startswith("/v1/") else "task"
        about[f"{kind}_id"] = params["id"]
    _log.info(
        "request",
        method=scope["method"],
        path=path,
        status=status,
        duration_ms=round(seconds * 1000, 1),
        **about,
    )
