"""The description of an operation."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from inspect import cleandoc
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import Struct, field

from lineshaft.operations.wire import Wire
from lineshaft.types.documents import Simplify
from lineshaft.types.tokens import Scope

__all__ = ["Engine", "Operation", "operation", "operations_in"]

if TYPE_CHECKING:
    from lineshaft.engine.engine import Engine
else:
    Engine = Any  # its module imports the database driver

Req = TypeVar("Req", bound=Struct)
Res = TypeVar("Res")
Run = Callable[[Any, Req], Coroutine[Any, Any, Res]]


class Operation(Struct, Generic[Req, Res], frozen=True, kw_only=True, dict=True, eq=False):
    method: str
    #: Names in braces are fields of the request; with `:path` they may contain slashes.
    path: str
    #: None: no token is needed.
    scope: Scope | None
    #: Takes the engine, or the call of a server, and the request.
    run: Run[Req, Res]
    #: Only a server can answer it: `run` takes its call in place of the engine.
    by_server: bool
    request: type[Req]
    response: Any
    #: Whether the response says that something was created: its status is 201 then.
    created: bool | Callable[[Res], bool] = False
    #: The documented types of responses by status, where they are not `response`.
    documented: Mapping[int, Any] = field(default_factory=dict)
    #: Error codes of this operation, besides those that every operation has.
    codes: Sequence[str] = ()
    #: A body for the documentation.
    example: Any = None
    #: Whether sending it twice has the effect of sending it once.
    repeatable: bool | Callable[[Req], bool] = True
    #: What a person does: its events have an actor.
    by_hand: bool = False
    #: The documented type of a body that the handler decodes.
    body_shape: Any = None
    #: Checks the encoded body before it is decoded.
    check_body: Callable[[bytes], None] | None = None
    #: Removes system-managed fields, if the body may be a document that has them.
    simplify: Simplify | None = None
    #: Values of the query's `format` whose bodies stay encoded (`Raw`): the operation converts them.
    formats: Sequence[str] = ()
    #: The handler reads the body, which may be anything.
    reads_body: bool = False
    #: As `reads_body`, of a file that is sent piece by piece.
    upload: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def area(self) -> str:
        return self.run.__module__.rpartition(".")[2]

    @cached_property
    def summary(self) -> tuple[str, str]:
        """The first line of its docstring, and the rest."""
        first, _, rest = cleandoc(self.run.__doc__ or self.name).partition("\n")
        return first.strip().rstrip("."), rest.strip()

    @cached_property
    def wire(self) -> Wire[Req]:
        return Wire(self.method, self.path, self.request, reads_body=self.reads_body or self.upload)

    @cached_property
    def decoder(self) -> "msgspec.json.Decoder[Res]":
        """What clients decode responses with."""
        return msgspec.json.Decoder(self.response)

    def may_repeat(self, request: Req) -> bool:
        return self.repeatable(request) if callable(self.repeatable) else self.repeatable

    def status_of(self, response: Res) -> int:
        if response is None:
            return 204
        if len(self.documented) == 1:
            return int(next(iter(self.documented)))
        created = self.created(response) if callable(self.created) else self.created
        return 201 if created else 200

    @cached_property
    def answers(self) -> Mapping[int, Any]:
        """The type of the response by status; None: no body."""
        if self.documented:
            return self.documented
        if self.response is None:
            return {204: None}
        statuses = (201, 200) if callable(self.created) else (201,) if self.created else (200,)
        return dict.fromkeys(statuses, self.response)

    @cached_property
    def all_codes(self) -> list[str]:
        """Every error code that it may answer with."""
        codes = ["forbidden", "unavailable", *self.codes]
        if self.scope is not None:
            codes.append("unauthorized")
        if self.wire.body is not None or self.wire.query is not None:
            codes.append("invalid_input")
        if self.wire.body is not None or self.upload:
            codes.append("payload_too_large")
        return sorted(set(codes))


_BY_HAND = {Scope.OPERATE, Scope.ADMIN}


def operation(
    route: str, scope: Scope | None, *, response: Any = ..., **about: Any
) -> Callable[[Run[Req, Res]], Operation[Req, Res]]:
    """Describe the decorated function, whose annotations are the types of the request and the response.

    `route` is method and path. `response` is the documented type, or types by status, of a function that
    returns another form. Only GET may be repeated, and what needs the scope operate or admin and isn't GET is
    an act by hand, unless `about` says otherwise.
    """
    method, _, path = route.partition(" ")

    def describe(run: Run[Req, Res]) -> Operation[Req, Res]:
        hints = run.__annotations__
        is_read = method == "GET"
        by_status = response if isinstance(response, dict) else {}
        return Operation(
            method=method,
            path=path,
            scope=scope,
            run=run,
            by_server="call" in hints,
            request=hints["request"],
            response=hints["return"] if response is ... or by_status else response,
            documented=by_status,
            **{"repeatable": is_read, "by_hand": scope in _BY_HAND and not is_read, **about},
        )

    return describe


def operations_in(*modules: ModuleType) -> list[Operation[Any, Any]]:
    """The operations of these modules, in their order."""
    found = [value for module in modules for value in vars(module).values()]
    return [value for value in found if isinstance(value, Operation)]
