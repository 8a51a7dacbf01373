"""Handlers: functions that get their arguments from a task's spec, by their signature."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw, Struct

from lineshaft.agent.outcome import Cancel, Fail, Result, Snooze
from lineshaft.errors import InvalidInputError
from lineshaft.model.durations import Duration, seconds
from lineshaft.types.json import NULL
from lineshaft.types.work import MAX_INPUT_BYTES, decoded_inputs

Function = Callable[..., Any]
_Bind = Callable[[bytes, Mapping[str, Raw], Raw], tuple[tuple[Any, ...], dict[str, Any]]]
_NO_INPUTS: Mapping[str, Raw] = MappingProxyType({})

#: Keys of a spec that Lineshaft uses; a handler may have parameters for them but need not.
_COMMON = ("constraints", "context_refs")
#: Names in an error.
_SHOWN = 10
_CONTEXT_NAMES = frozenset({"ctx", "context"})


class Handler(Struct, frozen=True):
    type: str
    function: Function
    is_async: bool
    takes_context: bool
    #: Without the context.
    signature: inspect.Signature
    #: How many tasks of this type may run at the same time in this agent; None: as many as it has slots.
    concurrency: int | None
    #: Seconds; None: only the task's own limit applies.
    time_limit_sec: float | None
    #: How long the handler may take to stop when asked. Until then no other agent gets the task.
    patience_sec: float
    _arguments: "_Bind | None"

    def arguments(
        self, spec: bytes, inputs: Mapping[str, Raw] = _NO_INPUTS, upstream: Raw = NULL
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The handler's arguments; raises InvalidInputError if the spec or an input doesn't fit.

        A parameter that the spec doesn't have takes the input of its name. `upstream` says for errors which
        tasks the inputs are from.
        """
        return ((), {}) if self._arguments is None else self._arguments(spec, inputs, upstream)


def make_handler(
    task_type: str, function: Function, *, concurrency: int | None, time_limit_sec: Duration | None
) -> Handler:
    time_limit_sec = seconds(time_limit_sec)
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency of handler {task_type!r} must be at least 1, got {concurrency}.")
    if time_limit_sec is not None and not time_limit_sec > 0:
        raise ValueError(f"time_limit_sec of handler {task_type!r} must be above 0, got {time_limit_sec}.")
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"The handler of {task_type!r} must be a function, got {function!r}.")
    plain = _plain(function)
    shown = getattr(plain, "__qualname__", plain)
    if inspect.isasyncgenfunction(plain) or inspect.isgeneratorfunction(plain):
        raise TypeError(
            f"{shown} can't be the handler of {task_type!r}: it contains a yield, so calling it runs "
            "nothing. Return the output; report progress with ctx.progress."
        )
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    takes_context = bool(parameters) and _is_context(parameters[0])
    if takes_context:
        parameters = parameters[1:]
    if fault := _signature_fault(task_type, parameters):
        raise TypeError(f"{shown} can't be the handler of {task_type!r}: {fault}")
    return Handler(
        type=task_type,
        function=function,
        is_async=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004 - an object with an async __call__
        takes_context=takes_context,
        signature=signature.replace(parameters=parameters),
        concurrency=concurrency,
        time_limit_sec=time_limit_sec,
        patience_sec=getattr(function, "patience_sec", 0.0),
        _arguments=_binder(task_type, function, parameters) if parameters else None,
    )


def _signature_fault(task_type: str, parameters: list[inspect.Parameter]) -> str | None:
    """`parameters`: without the context."""
    if parameters and parameters[0].name == "self":
        return f"it is a method of a class. Register an object's: agent.task({task_type!r})(object.method)."
    for parameter in parameters:
        if parameter.name == "ctx" or _is_annotated_as_context(parameter):
            return f"{parameter.name} must be the first parameter, and there is only one: (ctx, …)."
    return None


def _is_context(parameter: inspect.Parameter) -> bool:
    if parameter.kind in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY}:
        return False
    return parameter.name in _CONTEXT_NAMES or _is_annotated_as_context(parameter)


def _is_annotated_as_context(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.endswith("TaskContext")


def _binder(task_type: str, function: Function, parameters: list[inspect.Parameter]) -> _Bind:
    """Decode specs, and inputs, into arguments."""
    shown = f"{getattr(function, '__qualname__', function)}({', '.join(map(str, parameters))})"
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes_rest = len(named) < len(parameters)
    own = frozenset(parameter.name for parameter in named)
    positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    keywords = [p.name for p in named if p.kind is not p.POSITIONAL_ONLY]
    try:
        decode = _decoder(function, named, takes_rest=takes_rest).decode
    except (TypeError, NameError) as error:
        raise TypeError(f"{shown} can't be the handler of {task_type!r}: {error}") from None

    def bind(spec: bytes, inputs: Mapping[str, Raw], upstream: Raw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        passed = _passed(spec, inputs, own)
        try:
            values = decode(msgspec.json.encode(_raw_fields(spec) | passed) if passed else spec)
        except msgspec.ValidationError as error:
            for parameter in named:
                if parameter.name in passed and _is_about(parameter.name, str(error)):
                    raise _misfit(parameter, shown, decoded_inputs(upstream), error) from None
            missing = _missing(inputs, decoded_inputs(upstream))
            raise InvalidInputError(f"The spec doesn't fit the handler {shown}: {error}{missing}") from None
        given = {name: value for name in keywords if (value := getattr(values, name)) is not msgspec.UNSET}
        if takes_rest:
            given |= {name: value for name, value in msgspec.json.decode(spec).items() if name not in own}
        if not positional:
            return (), given
        first = [getattr(values, name) for name in positional]
        return tuple(value for value in first if value is not msgspec.UNSET), given

    return bind


_raw_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def _passed(spec: bytes, inputs: Mapping[str, Raw], own: frozenset[str]) -> dict[str, Raw]:
    """The inputs that become arguments."""
    named = own.intersection(inputs)
    if not named:
        return {}
    given = _raw_fields(spec)
    return {name: inputs[name] for name in named if name not in given}


def _is_about(name: str, error: str) -> bool:
    """Whether the path at the end of an error of msgspec begins with this field."""
    path = error.rpartition(" - at `")[2]
    return re.match(rf"\$\.{re.escape(name)}(?![\w])", path) is not None


def _misfit(
    parameter: inspect.Parameter,
    shown: str,
    upstream: Mapping[str, str | list[str]],
    error: msgspec.ValidationError,
) -> InvalidInputError:
    of = upstream.get(parameter.name, "")
    source = f"task {of}" if isinstance(of, str) else f"the tasks {', '.join(of[:_SHOWN])}"
    wanted = parameter.annotation
    expected = wanted if isinstance(wanted, str) else inspect.formatannotation(wanted)
    return InvalidInputError(
        f"Parameter {parameter.name!r} of {shown} expects {expected}, but the output of {source} doesn't "
        f"fit: {error}. Correct the annotation, or what the upstream task returns."
    )


def _missing(inputs: Mapping[str, Raw], upstream: Mapping[str, str | list[str]]) -> str:
    """What an error adds about inputs."""
    left_out = [name for name in upstream if name not in inputs]
    if left_out:
        return (
            f". Of its inputs, {', '.join(left_out[:_SHOWN])} did not come along: together they are larger "
            f"than {MAX_INPUT_BYTES} bytes. Pass a reference instead, or read them with Lineshaft.get"
        )
    return f". Its inputs are: {', '.join([*upstream][:_SHOWN])}" if upstream else ""


def _plain(function: Function) -> Function:
    """The function behind a partial or a callable object: it has the annotations."""
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__annotations__") or isinstance(function, type):
        function = type(function).__call__
    return function


def _decoder(
    function: Function, parameters: list[inspect.Parameter], *, takes_rest: bool
) -> "msgspec.json.Decoder[Any]":
    hints = get_type_hints(_plain(function), include_extras=True)
    fields: list[tuple[str, Any, Any]] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(
                f"it takes *{parameter.name}, but a spec has only named values; name its parameters"
            )
        # The function's own default applies when a spec leaves it out.
        default = msgspec.NODEFAULT if parameter.default is parameter.empty else msgspec.UNSET
        fields.append((parameter.name, hints.get(parameter.name, Any), msgspec.field(default=default)))
    if not takes_rest:
        own = {name for name, _, _ in fields}
        fields += [(name, Any, msgspec.field(default=msgspec.UNSET)) for name in _COMMON if name not in own]
    shape = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=not takes_rest)
    return msgspec.json.Decoder(shape, dec_hook=_decode_others)


def return_type(function: Function) -> Any:
    """What the function is annotated to return; of an awaitable, what it is awaited for."""
    annotation = get_type_hints(_plain(function), include_extras=True).get("return", Any)
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Awaitable) and get_args(annotation):
        return get_args(annotation)[-1]
    return annotation


def return_decoder(function: Function) -> Callable[[bytes], Any] | None:
    """Decodes JSON to the type that the function is annotated to return; None: to the types of JSON."""
    try:
        wanted = _without_wishes(return_type(function))
        return (
            None if wanted in {Any, object} else msgspec.json.Decoder(wanted, dec_hook=_decode_others).decode
        )
    except (TypeError, NameError):
        return None


def _without_wishes(annotation: Any) -> Any:
    """An output is never a wish such as Snooze, and a Result may hold anything."""
    if annotation is Result:
        return Any
    if get_origin(annotation) not in {Union, UnionType}:
        return annotation
    kept = [kind for kind in get_args(annotation) if kind not in {Cancel, Fail, Snooze}]
    return Any if Result in kept else Union[tuple(kept)] if kept else NoneType  # noqa: UP007 - of a tuple


def _decode_others(wanted: Any, value: Any) -> Any:
    """Pydantic models, which msgspec doesn't know."""
    validate = getattr(wanted, "model_validate", None)
    if validate is None:
        raise TypeError(f"a {wanted!r} can't be made from JSON")
    return validate(value)
