"""Endpoints: how a request is decoded, authorised and answered.

An operation of the table is answered by its function, with the engine of the service. One that needs the
connection (long polls, streams, bytes) takes a `Call` in place of the engine; `serves` registers such a
function for an operation that the table describes.

Routes are plain Starlette routes that decode and encode JSON with msgspec.
"""

import asyncio
import contextlib
import gc
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace
from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from lineshaft.engine.caller import Caller, set_caller
from lineshaft.engine.engine import Engine
from lineshaft.errors import DatabaseError, InvalidInputError, LineshaftError
from lineshaft.operations.operation import Operation
from lineshaft.server.framework import limits, problems
from lineshaft.types import Scope, documents

_log = structlog.get_logger("lineshaft.http")
_encoder = msgspec.json.Encoder(decimal_format="number")
_JSON_TYPE = (b"content-type", b"application/json")
_RAW = msgspec.json.Decoder(msgspec.Raw)


class Service(Protocol):
    """What the framework needs of the object that serves a group of routes."""

    @property
    def engine(self) -> Engine: ...

    async def authenticate(self, scope: Scope | None, request: AsgiScope) -> Caller:
        """The caller; raises unless it has this scope."""
        ...


S = TypeVar("S", bound=Service)


class Call(Struct, Generic[S]):
    """One request and the service that answers it."""

    service: S
    caller: Caller
    headers: Headers
    receive: Receive
    request_id: str
    #: The request as ASGI describes it.
    scope: AsgiScope

    @property
    def address(self) -> str:
        """The address of the client, or of the proxy in front of the server."""
        return str((self.scope.get("client") or ("",))[0])


class Answer(Struct, frozen=True):
    value: Any = None
    status: int = 200


class ItemsOf(Struct, frozen=True):
    """The documented type of a response `{"items": [...]}` whose items have one of these types."""

    kinds: tuple[Any, ...]


Handler = Callable[[Any, Any], Awaitable[Any]]
_handlers: dict[Operation[Any, Any], Handler] = {}


def serves(operation: Operation[Any, Any]) -> Callable[[Handler], Handler]:
    """Let the decorated function, which takes a `Call`, answer this operation on a server."""

    def register(handler: Handler) -> Handler:
        _handlers[operation] = handler
        return handler

    return register


#: Until the caller is known, nothing is changed.
_UNKNOWN = Caller(fails_soon=True)
_UNKNOWN_READER = Caller(fails_soon=True, only_reads=True)


class Endpoint(Generic[S]):
    """An operation as an ASGI application."""

    def __init__(self, operation: Operation[Any, Any], service: S) -> None:
        self._operation = operation
        self._service = service
        self._wire = wire = operation.wire
        self._handler = _handlers.get(operation, operation.run)
        self._takes_call = operation.by_server or operation in _handlers
        self._decoder = None if wire.body is None else msgspec.json.Decoder(wire.body)
        small = wire.body is not None and limits.has_only_small_fields(wire.body)
        self._max_body_bytes = limits.SMALL_BODY_BYTES if small else None
        # Health checks are not delayed by readers either.
        self._only_reads = operation.method == "GET" and operation.scope is not None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except ClientDisconnect:
            return
        except LineshaftError as error:
            if isinstance(error, DatabaseError):
                # The client can't fix it, so the operator has to know.
                _log.error("The database is not usable", operation=self._operation.name, error=str(error))
            await send_problem(send, error, scope)
            return
        except Exception:  # noqa: BLE001 - logged with its traceback; the client gets the request id
            _log.exception("Unexpected error in an operation", operation=self._operation.name)
            await send_problem(send, LineshaftError(INTERNAL_ERROR), scope)
            return
        if isinstance(answer, Response):
            with contextlib.suppress(ClientDisconnect):
                await answer(scope, receive, send)
            return
        if not isinstance(answer, Answer):
            answer = Answer(answer, self._operation.status_of(answer))
        if answer.value is None:
            await send_bytes(send, answer.status, b"", [])
        else:
            await send_bytes(send, answer.status, _encoder.encode(answer.value), [_JSON_TYPE])

    async def _answer(self, scope: AsgiScope, receive: Receive) -> Any:
        headers = Headers(scope=scope)
        caller = await self._find_caller(scope)
        request = await self._request(scope, headers, receive)
        if not self._takes_call:
            return await self._handler(self._service.engine, request)
        request_id = str(scope.get("state", {}).get("request_id", ""))
        call = Call(self._service, caller, headers, receive, request_id, scope)
        return await self._handler(call, request)

    async def _find_caller(self, request: AsgiScope) -> Caller:
        set_caller(_UNKNOWN_READER if self._only_reads else _UNKNOWN)
        caller = await self._service.authenticate(self._operation.scope, request)
        if self._operation.method == "GET":
            caller = replace(caller, only_reads=self._only_reads, fails_soon=True)
        set_caller(caller)
        return caller

    async def _request(self, scope: AsgiScope, headers: Headers, receive: Receive) -> Any:
        wire, query, body = self._wire, None, None
        if wire.query is not None:
            query = read_query(scope["query_string"], wire.query)
        if self._decoder is not None:
            encoded = await read_body(receive, self._max_body_bytes)
            is_other = getattr(query, "format", None) in self._operation.formats
            decoder: msgspec.json.Decoder[Any] = _RAW if is_other else self._decoder
            if len(encoded) > limits.LARGE_BODY_BYTES:
                # In a thread: megabytes of brackets would block the event loop.
                body = await asyncio.to_thread(_decode_large, encoded, decoder, self._operation)
            else:
                body = _decode(encoded, decoder, self._operation)
        key = headers.get("idempotency-key") if wire.takes_key else None
        return wire.request(scope["path_params"], query, body, key)


INTERNAL_ERROR = (
    "Internal error. The request may or may not have taken effect; search the server log for this request_id."
)


async def body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    """The body of an upload, as it arrives."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            return


async def read_body(receive: Receive, max_bytes: int | None = None) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if max_bytes is not None and size > max_bytes:
            raise limits.too_large(max_bytes)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _decode_large(body: bytes, decoder: "msgspec.json.Decoder[Any]", operation: Operation[Any, Any]) -> Any:
    # Collections would take most of the time: they visit all new objects again and again, and find nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _decode(body, decoder, operation)
    finally:
        if collects:
            gc.enable()


def _decode(body: bytes, decoder: "msgspec.json.Decoder[Any]", operation: Operation[Any, Any]) -> Any:
    limits.check_structure(body)
    try:
        if not body.isascii():
            body.decode()
        if operation.check_body is not None and decoder is not _RAW:
            operation.check_body(body)
        return documents.decode(body or b"{}", decoder, operation.simplify)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise problems.unreadable(error) from None


def read_query(text: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Decode a query. Fields that are lists take repeated parameters; unknown names are refused."""
    listed = _listed(kind)
    given: dict[str, Any] = {}
    lists: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in QueryParams(text).multi_items():
        lists[name].append(value)
    for name, values in lists.items():
        if name in listed:
            given[name] = values
        elif len(values) > 1:
            raise InvalidInputError(errors=[(name, f"must be given once, got {len(values)} times")])
        else:
            given[name] = values[0]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise problems.unreadable(error) from None


@cache
def _listed(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The fields that are lists."""
    return frozenset(
        field.encode_name
        for field in msgspec.structs.fields(kind)
        if any(get_origin(part) in {tuple, Sequence} for part in (field.type, *get_args(field.type)))
    )


async def send_bytes(send: Send, status: int, body: bytes, headers: problems.Headers) -> None:
    length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]  # noqa: PLR2004
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})


async def send_problem(send: Send, error: LineshaftError, scope: AsgiScope) -> None:
    await send_bytes(send, *problems.response(error, scope))


def routes(operations: Sequence[Operation[Any, Any]], service: S) -> list[Route]:
    return [_route(operation, service) for operation in operations]


def _route(operation: Operation[Any, Any], service: S) -> Route:
    endpoint = Endpoint(operation, service)
    route = Route(operation.path, endpoint, methods=[operation.method], name=operation.name)
    # Keys and names may contain line ends.
    route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
    return route
