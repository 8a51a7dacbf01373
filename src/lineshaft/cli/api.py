"""How commands reach the queue: the HTTP API, of a server or, without one, within this process.

Every command is a call of the API, so there is one way to do a thing, whoever asks. With LINESHAFT_URL or
`--url` a server is called; else the same application is called directly, over the database that the
settings name, with no socket in between.
"""

import argparse
import contextlib
import json
import select
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, unquote, urlencode, urlsplit

from lineshaft.cli.output import add_json_flag
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.settings import Settings

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp, Message


_TIMEOUT_SEC = 60
#: A connection that was idle for longer is not used again: servers and proxies close them some time.
_KEEP_SEC = 30.0
_STRANGE = (
    "The answer, with status {}, is no JSON, so it is not from Lineshaft: perhaps from a proxy before it. "
    "Check LINESHAFT_URL or --url, and whether 'lineshaft up' is running behind it."
)
#: The same wording for every command that talks to the queue.
_WHERE = "Talks to the server that LINESHAFT_URL or --url names, else to the database of the settings."
Query = Mapping[str, object]


class ApiError(LineshaftError):
    """The API refused a call."""

    def __init__(self, problem: Mapping[str, Any], status: int) -> None:
        self.problem = dict(problem)
        self.status = status
        message = str(problem.get("detail") or problem.get("title") or f"The server answered {status}.")
        if problem.get("code") == "internal" and problem.get("request_id"):
            message += f" It is {problem['request_id']}."
        super().__init__(message)


class Caller(Protocol):
    """Something that answers requests."""

    def send(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]: ...


class Api:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def get(self, path: str, query: Query | None = None) -> Any:
        return self.call("GET", path, query=query)

    def post(self, path: str, body: Any = None) -> Any:
        return self.call("POST", path, body={} if body is None else body)

    def call(self, method: str, path: str, *, query: Query | None = None, body: Any = None) -> Any:
        """The answer's JSON; None if it has none. Raises ApiError."""
        asked = {name: value for name, value in (query or {}).items() if value not in (None, [], ())}
        target = path + ("?" + urlencode(asked, doseq=True) if asked else "")
        payload = None if body is None else json.dumps(body).encode()
        status, answer = self._caller.send(method, target, payload)
        try:
            found = json.loads(answer) if answer else None
        except ValueError:
            raise ApiError({"detail": _STRANGE.format(status)}, status) from None
        if status >= 400:  # noqa: PLR2004 - where errors begin
            raise ApiError(found if isinstance(found, dict) else {}, status)
        return found

    def pages(self, path: str, query: Query, *, most: int | None) -> Iterator[dict[str, Any]]:
        """Items of a list, page after page; `most` None is all."""
        cursor, left = query.get("cursor"), most
        while left is None or left > 0:
            limit = 500 if left is None else min(left, 500)
            page = self.get(path, {**query, "cursor": cursor, "limit": limit})
            yield from page["items"]
            left = None if left is None else left - len(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return


def segment(text: str) -> str:
    """A name as a part of a path."""
    return quote(text, safe="")


def add_flags(command: argparse.ArgumentParser) -> None:
    """What every command has that talks to the queue."""
    command.add_argument("--url", help="the server to call (LINESHAFT_URL)")
    command.epilog = " ".join(filter(None, (command.epilog, _WHERE)))
    add_json_flag(command)


@contextlib.contextmanager
def connect(args: argparse.Namespace) -> Iterator[Api]:
    settings = Settings.load()
    url = args.url or settings.url
    if url is not None:
        remote = _Remote(url, settings.token)
        try:
            yield Api(remote)
        finally:
            remote.close()
        return
    with _local(settings) as caller:
        yield Api(caller)


class _Remote:
    def __init__(self, url: str, token: str | None) -> None:
        import http.client  # noqa: PLC0415 - slow to import, for all that comes with it

        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in {"http", "https"} or parts.hostname is None:
            raise LineshaftError(f"--url must be http://HOST:PORT or https://HOST, got {url!r}.")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._connection = kind(parts.hostname, port, timeout=_TIMEOUT_SEC)
        self._used_at = 0.0
        self._prefix = parts.path.rstrip("/")
        self._faults = (OSError, http.client.HTTPException)
        self._headers = {"Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        self._connection.close()

    def send(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        if self._is_stale():
            self._connection.close()  # the request opens it again
        try:
            self._connection.request(method, self._prefix + target, body=body, headers=headers)
            response = self._connection.getresponse()
            answer = response.read()
        except self._faults as error:
            self._connection.close()
            raise UnavailableError(
                f"{self._place} doesn't answer: {error}. Is 'lineshaft up' running "
                "there? Check LINESHAFT_URL or --url."
            ) from error
        self._used_at = time.monotonic()
        return response.status, answer

    def _is_stale(self) -> bool:
        """Whether the connection was idle for too long, or the other side has closed it meanwhile."""
        idle = self._connection.sock
        if idle is None:
            return False
        # Nothing was asked, so all that there can be to read is the end.
        return time.monotonic() - self._used_at > _KEEP_SEC or bool(select.select([idle], [], [], 0)[0])


@contextlib.contextmanager
def _local(settings: Settings) -> "Iterator[_Local]":
    import asyncio  # noqa: PLC0415 - with all that follows, slow to import

    from lineshaft.engine.postgres import migrate  # noqa: PLC0415
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415
    from lineshaft.server.app import create_app  # noqa: PLC0415
    from lineshaft.server.service import Service  # noqa: PLC0415

    _log_to_stderr()
    with database(settings) as dsn, asyncio.Runner() as runner:
        if settings.database_url is None:
            # The embedded database is ours to migrate.
            migrate.up(dsn)

        async def opened() -> Service:
            service = Service(dsn, settings, auth_required=False, max_connections=2)
            return await service.__aenter__()

        service = runner.run(opened())
        try:
            yield _Local(create_app(service), runner)
        finally:
            runner.run(service.__aexit__(None, None, None))


def _log_to_stderr() -> None:
    """What the application logs is not for standard output, and has no values of variables: see logs.py."""
    import structlog  # noqa: PLC0415 - slow to import

    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[plain], logger_factory=structlog.stdlib.LoggerFactory())


class _Local:
    """Calls the application as a server would, one request at a time."""

    def __init__(self, app: "ASGIApp", runner: "asyncio.Runner") -> None:
        self._app = app
        self._runner = runner

    def send(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        return self._runner.run(self._send(method, target, body or b""))

    async def _send(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        path, _, query = target.partition("?")
        status = 0
        parts: list[bytes] = []

        async def receive() -> "Message":
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: "Message") -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }
        await self._app(scope, receive, send)
        return status, b"".join(parts)
