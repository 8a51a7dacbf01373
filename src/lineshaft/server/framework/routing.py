"""How a call is answered.

Each operation is a function with `call` and, where it takes them, `body` and `query`, whose annotations say
how they are read; `Routes` collects them with the scope they need. The same description makes the route and
its part of the OpenAPI document, so neither can be forgotten.

They are plain Starlette routes that read and write JSON with msgspec: FastAPI's own way of calling a function
costs more than most of our statements (dependencies and models are worked out for each request). FastAPI
is the frame around them: for parts that are added to the same application, and for its documentation pages.
"""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import structlog
from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from lineshaft.errors import DatabaseError, InvalidInputError, LineshaftError
from lineshaft.model.tasks import NewTask
from lineshaft.server.framework import limits, problems
from lineshaft.server.framework.auth import Principal
from lineshaft.server.service import Service
from lineshaft.types import Scope

_log = structlog.get_logger("lineshaft.http")
_encoder = msgspec.json.Encoder(decimal_format="number")
_JSON_TYPE = (b"content-type", b"application/json")


@dataclass(slots=True)
class Call:
    """One request on its way through an operation."""

    service: Service
    principal: Principal
    headers: Headers
    path: Mapping[str, str]
    receive: Receive
    request_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any = None
    status: int = 200


Handler = Callable[..., Awaitable[Answer | Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    method: str
    path: str
    #: None: anybody may call it.
    scope: Scope | None
    handler: Handler
    #: By status; None: it has no body.
    answers: Mapping[int, Any]
    #: Codes it may answer with besides those that every operation may.
    codes: Sequence[str]
    #: A body to try it with.
    example: Any
    body: Any = None
    query: Any = None
    #: What a body looks like that its handler reads by itself.
    body_shape: Any = None

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def all_codes(self) -> list[str]:
        """Every code that it may answer with."""
        codes = ["forbidden", "unavailable", *self.codes]
        if self.scope is not None:
            codes.append("unauthorized")
        if self.body is not None or self.query is not None:
            codes.append("invalid_input")
        if self.body is not None:
            codes.append("payload_too_large")
        return sorted(set(codes))

    @property
    def body_is_optional(self) -> bool:
        """Whether an empty body is one with all defaults."""
        if self.body is msgspec.Raw:
            return True
        return not any(found.required for found in msgspec.structs.fields(self.body))

    @property
    def area(self) -> str:
        return self.handler.__module__.rpartition(".")[2]


@dataclass(slots=True)
class Routes:
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
    ) -> Callable[[Handler], Handler]:
        """`answer` is the type of a 200, or types by status."""

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


class Endpoint:
    """An operation as an ASGI application."""

    def __init__(self, operation: Operation, service: Service) -> None:
        self._operation = operation
        self._service = service
        self._decoder = None if operation.body is None else msgspec.json.Decoder(operation.body)
        self._takes_tasks = operation.body is NewTask or (
            operation.body is not None and NewTask in get_args(get_type_hints(operation.body).get("tasks"))
        )

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        request_id = str(state.get("request_id", ""))
        try:
            answer = await self._answer(scope, receive, request_id)
        except ClientDisconnect:
            return
        except LineshaftError as error:
            if isinstance(error, DatabaseError):
                # Nothing that the client could mend.
                _log.error("The database can't be used", operation=self._operation.name, error=str(error))
            await send_problem(send, error, scope)
            return
        except Exception:  # noqa: BLE001 - logged with its traceback; the client learns only where to look
            _log.exception("A call failed in a way nobody foresaw", operation=self._operation.name)
            await send_problem(send, LineshaftError(_UNFORESEEN), scope)
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
        headers = Headers(scope=scope)
        principal = await self._service.authenticate(operation.scope, headers.get("authorization"))
        call = Call(self._service, principal, headers, scope["path_params"], receive, request_id)
        given: dict[str, Any] = {}
        if operation.query is not None:
            given["query"] = _read_query(scope["query_string"], operation.query)
        if self._decoder is not None:
            body = await read_body(receive)
            given["body"] = _decode(body, self._decoder, takes_tasks=self._takes_tasks)
        return await operation.handler(call, **given)


_UNFORESEEN = (
    "The server met an error that it didn't foresee. The call may have been carried out or not. Its log has "
    "the details under this request_id."
)


async def read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _decode(body: bytes, decoder: "msgspec.json.Decoder[Any]", *, takes_tasks: bool = False) -> Any:
    limits.check_depth(body)
    try:
        if not body.isascii():
            body.decode()
        if takes_tasks:
            limits.check_tasks(body)
        return decoder.decode(body or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise problems.unreadable(error) from None


def _read_query(text: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Fields that are lists take repeated parameters; a name nobody knows is refused like a body's."""
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
    request_id = scope.get("state", {}).get("request_id")
    status, headers, body = problems.rendered(error, request_id, scope["path"])
    await send_bytes(send, status, body, headers)


def routes(operations: Sequence[Operation], service: Service) -> list[Route]:
    return [
        Route(o.path, Endpoint(o, service), methods=[o.method], name=o.name, include_in_schema=False)
        for o in operations
    ]


def summary_of(operation: Operation) -> tuple[str, str]:
    """The first line of its docstring, and the rest."""
    first, _, rest = (inspect.getdoc(operation.handler) or operation.name).partition("\n")
    return first.strip().rstrip("."), rest.strip()
