"""OfficePlane's WebSockets: a greeting, a message for every change of a task's state, and a heartbeat.

A client that sends `ping`, as text or as `{"type": "ping"}`, gets a pong: a page can't see the pings of the
protocol itself.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from lineshaft import background
from lineshaft.errors import LineshaftError
from lineshaft.integrations.officeplane.officeplane import Detail, Officeplane
from lineshaft.integrations.officeplane.updates import Listener
from lineshaft.server.framework import problems, streams
from lineshaft.types import Scope as TokenScope
from lineshaft.types.json import encode

#: OfficePlane's documentation shows neither; its clients use both.
PATHS = ("/ws", "/api/ws")
SCOPE = TokenScope.READ

#: From the registry of RFC 6455: reconnect, the server restarts; reconnect later, the client is too slow.
_RESTART, _TRY_LATER = 1012, 1013
_REFUSED = 1008
HEARTBEAT_SEC = 30.0
#: The time to send the closing message.
_CLOSE_SEC = 2.0


class UpdatesSocket:
    """One connection as an ASGI application."""

    def __init__(self, officeplane: Officeplane) -> None:
        self._officeplane = officeplane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        async with contextlib.AsyncExitStack() as open_while:
            try:
                allow = partial(self._officeplane.authenticate, SCOPE, scope)
                token_id = (await allow()).token_id
                address = (scope.get("client") or ("",))[0]
                listening = self._officeplane.updates.listener(token_id, address)
                listener = await open_while.enter_async_context(listening)
            except LineshaftError as error:
                await _refuse(scope, send, error)
                return
            await send({"type": "websocket.accept"})
            await self._serve(listener, receive, send, allow)

    async def _serve(self, listener: Listener, receive: Receive, send: Send, allow: streams.Allow) -> None:
        listener.put(_message("connection", status="connected", message="Connected to Lineshaft"))
        beating = asyncio.create_task(_beat(listener))
        disconnected = asyncio.create_task(_disconnect(receive, listener))
        stopping = asyncio.create_task(self._officeplane.stopping.wait())
        lost = asyncio.create_task(listener.lost.wait())
        sending = asyncio.create_task(_send_all(listener, send))
        refused = asyncio.create_task(_refusal(allow))
        tasks = {beating, disconnected, stopping, lost, sending, refused}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await background.stop(*tasks)
        # Sending fails once the client has disconnected.
        if _ended(disconnected) or _ended(sending):
            return
        code, reason = _TRY_LATER, "too slow"
        if _ended(stopping):
            code, reason = _RESTART, "the server stops"
        elif _ended(refused):
            code, reason = _REFUSED, "the token was revoked"
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSE_SEC):
                await send({"type": "websocket.close", "code": code, "reason": reason})


def routes(officeplane: Officeplane) -> Sequence[WebSocketRoute]:
    return [WebSocketRoute(path, UpdatesSocket(officeplane)) for path in PATHS]


async def _disconnect(receive: Receive, listener: Listener) -> None:
    """Returns when the client disconnects; of its messages only a ping is answered."""
    while (message := await receive())["type"] != "websocket.disconnect":
        if _is_ping(message.get("text") or ""):
            listener.put(_message("pong"))


def _is_ping(text: str) -> bool:
    if text == "ping":
        return True
    with contextlib.suppress(msgspec.MsgspecError):
        said = msgspec.json.decode(text)
        return isinstance(said, dict) and said.get("type") == "ping"
    return False


async def _beat(listener: Listener) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SEC)
        listener.put(_message("heartbeat"))


def _message(kind: str, **more: str) -> bytes:
    return encode({"type": kind, **more, "timestamp": datetime.now(UTC)})


async def _refusal(allow: streams.Allow) -> None:
    """Returns when the client's token is revoked."""
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
    """Send an HTTP response to the request that asked for a socket."""
    found = problems.problem(error)
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _REFUSED})
        return
    headers = [(b"content-type", b"application/json"), *problems.headers_of(error)]
    await send({"type": "websocket.http.response.start", "status": found.status, "headers": headers})
    body = msgspec.json.encode(Detail(found.detail))
    await send({"type": "websocket.http.response.body", "body": body})
