"""Operations: how a request is decoded, authorised and answered.

Each operation is a function with `call` and, where it takes them, `body` and `query`; their annotations say
how they are decoded. `Routes` collects operations with the scope that each needs. The same description makes
the route and its part of the OpenAPI document, so neither can be forgotten.

Routes are plain Starlette routes that decode and encode JSON with msgspec.
"""

import asyncio
import contextlib
import gc
import inspect
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import structlog
from msgspec import Struct, field
from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from lineshaft.engine.feed.actor import acting
from lineshaft.engine.postgres.database import fails_soon, only_reads
from lineshaft.engine.submit.columns import submitting_token
from lineshaft.errors import DatabaseError, InvalidInputError, LineshaftError
from lineshaft.server.framework import limits, problems
from lineshaft.server.framework.auth import Principal
from lineshaft.types import Scope, documents

_log = structlog.get_logger("lineshaft.http")
_encoder = msgspec.json.Encoder(decimal_format="number")
_JSON_TYPE = (b"content-type", b"application/json")


class Service(Protocol):
    """What the framework needs of the object that serves a group of routes."""

    async def authenticate(self, scope: Scope | None, headers: Headers) -> Principal:
        """The caller; raises unless it has this scope."""
        ...


S = TypeVar("S", bound=Service)


class Call(Struct, Generic[S]):
    """One request and the service that answers it."""

    service: S
    principal: Principal
    headers: Headers
    path: Mapping[str, str]
    receive: Receive
    request_id: str
    #: Of the client, or of the proxy in front of the server.
    address: str = ""


class Answer(Struct, frozen=True):
    value: Any = None
    status: int = 200


@dataclass(frozen=True)
class ItemsOf:
    """The documented type of a response `{"items": [...]}` whose items have one of these types."""

    kinds: tuple[Any, ...]

    def __init__(self, *kinds: Any) -> None:
        object.__setattr__(self, "kinds", kinds)


Handler = Callable[..., Awaitable[Answer | Response]]


class Operation(Struct, frozen=True, kw_only=True):
    method: str
    path: str
    #: None: no token is needed.
    scope: Scope | None
    handler: Handler
    #: The type of the response by status; None: no body.
    answers: Mapping[int, Any]
    #: Error codes of this operation, besides those that every operation has.
    codes: Sequence[str]
    #: A body for the documentation.
    example: Any
    body: Any = None
    query: Any = None
    #: The documented type of a body that the handler decodes.
    body_shape: Any = None
    #: Checks the encoded body before it is decoded.
    check_body: Callable[[bytes], None] | None = None
    #: Removes system-managed fields, if the body may be a document that has them.
    simplify: documents.Simplify | None = None
    #: The body is bytes of any kind, which the handler reads piece by piece.
    upload: bool = False

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def all_codes(self) -> list[str]:
        """Every error code that it may answer with."""
        codes = ["forbidden", "unavailable", *self.codes]
        if self.scope is not None:
            codes.append("unauthorized")
        if self.body is not None or self.query is not None:
            codes.append("invalid_input")
        if self.body is not None or self.upload:
            codes.append("payload_too_large")
        return sorted(set(codes))

    @property
    def body_is_optional(self) -> bool:
        """Whether an empty body means one with all defaults."""
        if self.body is msgspec.Raw:
            return True
        return not any(found.required for found in msgspec.structs.fields(self.body))

    @property
    def area(self) -> str:
        return self.handler.__module__.rpartition(".")[2]


class Routes(Struct):
    operations: list[Operation] = field(default_factory=list)

    def add(
        self,
        method: str,
        path: str,
        scope: Scope | None,
        answer: Any,
        *,
        codes: Sequence[str] = (),
        example: Any = None,
        body_shape: Any = None,
        check_body: Callable[[bytes], None] | None = None,
        simplify: documents.Simplify | None = None,
        upload: bool = False,
    ) -> Callable[[Handler], Handler]:
        """Register the decorated function. `answer` is the type of a 200 response, or types by status."""

        def register(handler: Handler) -> Handler:
            hints = get_type_hints(handler)
            self.operations.append(
                Operation(
                    method=method,
                    path=path,
                    scope=scope,
                    handler=handler,
                    answers=answer if isinstance(answer, dict) else {200: answer},
                    codes=codes,
                    example=example,
                    body=hints.get("body"),
                    query=hints.get("query"),
                    body_shape=body_shape,
                    check_body=check_body,
                    simplify=simplify,
                    upload=upload,
                )
            )
            return handler

        return register

    def get(self, path: str, scope: Scope | None, answer: Any, **about: Any) -> Callable[[Handler], Handler]:
        return self.add("GET", path, scope, answer, **about)

    def post(self, path: str, scope: Scope | None, answer: Any, **about: Any) -> Callable[[Handler], Handler]:
        return self.add("POST", path, scope, answer, **about)

    def put(self, path: str, scope: Scope | None, answer: Any, **about: Any) -> Callable[[Handler], Handler]:
        return self.add("PUT", path, scope, answer, **about)

    def patch(
        self, path: str, scope: Scope | None, answer: Any, **about: Any
    ) -> Callable[[Handler], Handler]:
        return self.add("PATCH", path, scope, answer, **about)

    def delete(self, path: str, scope: Scope | None, **about: Any) -> Callable[[Handler], Handler]:
        return self.add("DELETE", path, scope, {204: None}, **about)


class Endpoint(Generic[S]):
    """An operation as an ASGI application."""

    def __init__(self, operation: Operation, service: S) -> None:
        self._operation = operation
        self._service = service
        self._decoder = None if operation.body is None else msgspec.json.Decoder(operation.body)
        small = operation.body is not None and limits.has_only_small_fields(operation.body)
        self._max_body_bytes = limits.SMALL_BODY_BYTES if small else None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        request_id = str(state.get("request_id", ""))
        try:
            answer = await self._answer(scope, receive, request_id)
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
        elif answer.value is None:
            await send_bytes(send, answer.status, b"", [])
        else:
            await send_bytes(send, answer.status, _encoder.encode(answer.value), [_JSON_TYPE])

    async def _answer(self, scope: AsgiScope, receive: Receive, request_id: str) -> Answer | Response:
        operation = self._operation
        # Health checks are not delayed by readers either.
        only_reads.set(operation.method == "GET" and operation.scope is not None)
        # Until the caller is known, nothing is changed.
        fails_soon.set(True)
        headers = Headers(scope=scope)
        principal = await self._service.authenticate(operation.scope, headers)
        fails_soon.set(operation.method == "GET")
        submitting_token.set(None if principal.token_id is None else principal.name)
        # Without a scope, the caller isn't authenticated.
        acting.set(None if operation.scope is None else principal.name)
        address = (scope.get("client") or ("",))[0]
        call = Call(self._service, principal, headers, scope["path_params"], receive, request_id, address)
        given: dict[str, Any] = {}
        if operation.query is not None:
            given["query"] = read_query(scope["query_string"], operation.query)
        if self._decoder is not None:
            body = await read_body(receive, self._max_body_bytes)
            if len(body) > limits.LARGE_BODY_BYTES:
                # In a thread: megabytes of brackets would block the event loop.
                decoding = asyncio.to_thread(_decode_large, body, self._decoder, operation)
                given["body"] = await decoding
            else:
                given["body"] = _decode(body, self._decoder, operation)
        return await operation.handler(call, **given)


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


def _decode_large(body: bytes, decoder: "msgspec.json.Decoder[Any]", operation: Operation) -> Any:
    # Collections would take most of the time: they visit all new objects again and again, and find nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _decode(body, decoder, operation)
    finally:
        if collects:
            gc.enable()


def _decode(body: bytes, decoder: "msgspec.json.Decoder[Any]", operation: Operation) -> Any:
    limits.check_structure(body)
    try:
        if not body.isascii():
            body.decode()
        if operation.check_body is not None:
            operation.check_body(body)
        return documents.decode(body or b"{}", decoder, operation.simplify)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise problems.unreadable(error) from None


def read_query(text: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Decode a query. Fields that are lists take repeated parameters; unknown names are refused."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    given: dict[str, Any] = {}
    lists: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in QueryParams(text).multi_items():
        lists[name].append(value)
    for name, values in lists.items():
        if _is_list(fields.get(name)):
            given[name] = values
        elif len(values) > 1:
            raise InvalidInputError(errors=[(name, f"must be given once, got {len(values)} times")])
        else:
            given[name] = values[0]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise problems.unreadable(error) from None


def _is_list(kind: Any) -> bool:
    return any(get_origin(part) in {tuple, Sequence} for part in (kind, *get_args(kind)))


async def send_bytes(send: Send, status: int, body: bytes, headers: problems.Headers) -> None:
    length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]  # noqa: PLR2004
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})


async def send_problem(send: Send, error: LineshaftError, scope: AsgiScope) -> None:
    await send_bytes(send, *problems.response(error, scope))


def routes(operations: Sequence[Operation], service: S) -> list[Route]:
    return [_route(operation, service) for operation in operations]


def _route(operation: Operation, service: S) -> Route:
    endpoint = Endpoint(operation, service)
    route = Route(operation.path, endpoint, methods=[operation.method], name=operation.name)
    # Keys and names may contain line ends.
    route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
    return route


def summary_of(operation: Operation) -> tuple[str, str]:
    """The first line of its docstring, and the rest."""
    first, _, rest = (inspect.getdoc(operation.handler) or operation.name).partition("\n")
    return first.strip().rstrip("."), rest.strip()
