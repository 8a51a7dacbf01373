"""`TaskType`: a reference to a handler that builds tasks for it, checked by the type checker."""

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Never,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

from lineshaft.agent.context import SyncTaskContext, TaskContext
from lineshaft.agent.handlers import Function, Handler, parameters_schema, result_schema, return_decoder
from lineshaft.agent.outcome import encode_others
from lineshaft.client.handles import TaskReference
from lineshaft.model.durations import in_seconds
from lineshaft.model.tasks import LIMITS_OF_TYPES, NewTask, TaskDefaults
from lineshaft.model.type_defaults import MAX_DESCRIPTION, MAX_SCHEMA_BYTES, TypeDefaults
from lineshaft.types.tasks import Task
from lineshaft.types.typed_task import TypedTask

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)

#: How other queues submit a call of a function.
_OTHER_QUEUES = frozenset({"delay", "apply_async", "s", "si", "signature", "submit", "send"}) | frozenset(
    {"send_with_options", "enqueue", "defer"}
)


class TaskType(Generic[P, R_co]):
    """A type of tasks: `P` are the handler's parameters without its context, `R` is what it returns."""

    def __init__(self, name: str, handler: Handler, **defaults: Unpack[TaskDefaults]) -> None:
        self.name = name
        self._handler = handler
        self._defaults = in_seconds(defaults)
        # An unknown field raises here, not with the first task.
        NewTask(name, **self._defaults)
        self._signature = handler.signature
        self._decode = return_decoder(handler.function)

    def declaration(self) -> TypeDefaults:
        """What its agent declares about the type when it registers."""
        limits = {name: self._defaults.get(name) for name in LIMITS_OF_TYPES}
        described = inspect.getdoc(self._handler.function) or ""
        return TypeDefaults(
            **limits,
            parameters_schema=_of_bearable_size(parameters_schema(self._handler)),
            result_schema=_of_bearable_size(result_schema(self._handler)),
            description=described[:MAX_DESCRIPTION] or None,
        )

    def new(self, *args: P.args, **kwargs: P.kwargs) -> TypedTask[R_co]:
        """Build a task with these arguments for its handler. Nothing is submitted.

        A value may be anything that JSON has, a dataclass, a `msgspec` struct or a pydantic model. It may be
        the output of another task, or a list of such: `TypedTask.as_input` or `TaskHandle.as_input`.
        """
        try:
            arguments = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            takes = self._signature.replace(return_annotation=inspect.Signature.empty)
            raise TypeError(
                f"A task of type {self.name!r} can't be built: {error}. Its handler takes {takes}."
            ) from None
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                self._refuse_upstream(rest := arguments.pop(parameter.name, {}))
                arguments |= rest
        inputs = {name: of for name, value in arguments.items() if (of := _upstream(value)) is not None}
        values = {name: value for name, value in arguments.items() if name not in inputs}
        spec = msgspec.to_builtins(values, enc_hook=encode_others)
        return TypedTask.returning(
            self._decode, self.name, spec=spec, inputs=inputs or None, **self._defaults
        )

    if not TYPE_CHECKING:  # type checkers report it on their own

        def __getattr__(self, name: str) -> Never:
            advice = ""
            if name in _OTHER_QUEUES:
                called = getattr(self.__dict__.get("_function"), "__name__", "HANDLER")
                advice = f" To submit a task, write: await shaft.submit({called}.new(…))"
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}.{advice}", name=name, obj=self)

    def _refuse_upstream(self, rest: Mapping[str, Any]) -> None:
        for name, value in rest.items():
            if _upstream(value) is not None:
                raise TypeError(
                    f"A task of type {self.name!r} can't be built: {name!r} is the output of another task, "
                    "but its handler has no parameter of that name."
                )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def _of_bearable_size(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """A schema is for people: an agent that has a huge one does without."""
    return None if schema is None or len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES else schema


def _upstream(value: Any) -> str | list[str] | None:
    """The key or id of the task, or tasks, whose output this stands for; None: it is a value."""
    if isinstance(value, NewTask):
        if value.key is None:
            raise TypeError(
                f"The output of a new task of type {value.type!r} can't be an argument: the task has no key. "
                "Give it one with .with_options(key=…), and submit both with submit_dag."
            )
        return value.key
    if isinstance(value, TaskReference | Task):
        return value.id
    if isinstance(value, list | tuple) and any(map(_is_upstream, value)):
        if not all(map(_is_upstream, value)):
            raise TypeError("A list can't hold outputs of other tasks together with values.")
        return [str(_upstream(one)) for one in value]
    return None


def _is_upstream(value: Any) -> bool:
    return isinstance(value, NewTask | TaskReference | Task)


class TaskFunction(TaskType[P, R_co], Generic[P, R_co, F_co]):
    """What `@agent.task` returns: a task type that can still be called as the function it decorates."""

    __name__: str

    def __init__(
        self, name: str, function: Function, handler: Handler, **defaults: Unpack[TaskDefaults]
    ) -> None:
        super().__init__(name, handler, **defaults)
        self._function = function
        functools.update_wrapper(self, function, updated=())

    @property
    def __call__(self) -> F_co:
        function: F_co = self._function  # type: ignore[assignment]  # `TaskDecorator` says which one
        return function


class TaskDecorator(Protocol):
    """Makes a function the handler of a task type."""

    # A coroutine is also a value, so that the first two overlap with the last: the first match counts.

    @overload
    def __call__(  # type: ignore[overload-overlap]  # see above
        self, function: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R, Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[SyncTaskContext, P], R], /
    ) -> TaskFunction[P, R, Callable[Concatenate[SyncTaskContext, P], R]]: ...

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R, Callable[P, Coroutine[Any, Any, R]]]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> TaskFunction[P, R, Callable[P, R]]: ...


def plain_function(function: Function) -> Function:
    """The function itself, if it is a handler of another agent or type already."""
    while isinstance(function, TaskFunction):
        function = function._function  # noqa: SLF001 - of this module
    return function
