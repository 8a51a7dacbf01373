"""The WebSockets of document 003: an update for every transition of a task."""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.datastructures import Headers
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from lineshaft.errors import LineshaftError
from lineshaft.integrations.officeplane.updates import Listener
from lineshaft.server.framework import problems, streams
from lineshaft.server.service import Service
from lineshaft.types import Scope as TokenScope

#: Document 003 shows neither; clients are known to use both.
PATHS = ("/ws", "/api/ws")
SCOPE = TokenScope.READ

#: RFC 6455's registry: the server restarts, so come back; the client is too slow, so come back later.
_RESTART, _TRY_LATER = 1012, 1013
_REFUSED = 1008
#: For the good-bye of a client that may not read any more.
_GOODBYE_SEC = 2.0


class UpdatesSocket:
    """One connection as an ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # its wish to connect
        authorization = Headers(scope=scope).get("authorization")
        async with contextlib.AsyncExitStack() as open_while:
            try:
                allow = partial(self._service.authenticate, SCOPE, authorization)
                await allow()
                listener = await open_while.enter_async_context(self._service.updates.listener())
            except LineshaftError as error:
                await _refuse(scope, send, error)
                return
            await send({"type": "websocket.accept"})
            await self._serve(listener, receive, send, allow)

    async def _serve(self, listener: Listener, receive: Receive, send: Send, allow: streams.Allow) -> None:
        leaving = asyncio.create_task(_departure(receive))
        stopping = asyncio.create_task(self._service.stopping.wait())
        lost = asyncio.create_task(listener.lost.wait())
        sending = asyncio.create_task(_send_all(listener, send))
        refused = asyncio.create_task(_refusal(allow))
        tasks = {leaving, stopping, lost, sending, refused}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        # Whoever has left makes sending fail.
        if _ended(leaving) or _ended(sending):
            return
        code, reason = _TRY_LATER, "too slow"
        if _ended(stopping):
            code, reason = _RESTART, "the server stops"
        elif _ended(refused):
            code, reason = _REFUSED, "the token is not in force any more"
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_GOODBYE_SEC):
                await send({"type": "websocket.close", "code": code, "reason": reason})


def routes(service: Service) -> Sequence[WebSocketRoute]:
    return [WebSocketRoute(path, UpdatesSocket(service)) for path in PATHS]


async def _departure(receive: Receive) -> None:
    """Until the client has left; whatever else it says is not for us."""
    while (await receive())["type"] != "websocket.disconnect":
        pass


async def _refusal(allow: streams.Allow) -> None:
    """Until the client may not listen any more."""
    while True:
        await asyncio.sleep(streams.PING_EVERY_SEC)
        if await streams.is_refused(allow):
            return


async def _send_all(listener: Listener, send: Send) -> None:
    while True:
        await send({"type": "websocket.send", "text": (await listener.next()).decode()})


def _ended(task: "asyncio.Task[object]") -> bool:
    return not task.cancelled()


async def _refuse(scope: Scope, send: Send, error: LineshaftError) -> None:
    """As an HTTP answer to the request that wanted to become a socket."""
    found = problems.problem(error)
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _REFUSED})
        return
    headers = [(b"content-type", b"application/json"), *problems.headers_of(error)]
    await send({"type": "websocket.http.response.start", "status": found.status, "headers": headers})
    body = msgspec.json.encode(problems.Detail(found.detail))
    await send({"type": "websocket.http.response.body", "body": body})
