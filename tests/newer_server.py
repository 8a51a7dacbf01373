"""A real server whose answers are edited on their way out, as a newer or older version would write them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.http_server import ServerThread

#: Gets the path and the JSON of an answer, and returns the JSON to send.
Edit = Callable[[str, Any], Any]


@contextmanager
def edited_server(thread: ServerThread, dsn: str, edit: Edit) -> Iterator[str]:
    """The URL of a server on this database; `edit` changes the JSON of all its answers."""
    with thread.serving(dsn, auth="off") as url:
        thread.wrap(lambda app: _Editor(app, edit))
        yield url


class _Editor:
    def __init__(self, app: ASGIApp, edit: Edit) -> None:
        self._app = app
        self._edit = edit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin: Message = {}

        async def edited(message: Message) -> None:
            if message["type"] == "http.response.start":
                begin.update(message)
                return
            body = message["body"]
            if body:
                body = msgspec.json.encode(self._edit(scope["path"], msgspec.json.decode(body)))
            headers = [(name, value) for name, value in begin["headers"] if name.lower() != b"content-length"]
            if begin["status"] != 204:
                headers.append((b"content-length", str(len(body)).encode()))
            await send({**begin, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, edited)
