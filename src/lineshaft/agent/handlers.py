"""Handlers: functions that get their arguments from a task's spec, by their signature."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw, Struct

from lineshaft.agent.outcome import Cancel, Fail, Result, Snooze, describe
from lineshaft.errors import InvalidInputError
from lineshaft.model.durations import Duration, seconds
from lineshaft.model.parts import Part, Source
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
    #: The signature without the context.
    signature: inspect.Signature
    #: How many tasks of this type may run at the same time in this agent; None: as many as it has slots.
    concurrency: int | None
    #: Seconds; None: only the task's own limit applies.
    time_limit_sec: float | None
    #: How long the handler may take to stop when asked. Until then no other agent gets the task.
    patience_sec: float
    _arguments: "_Bind | None"
    #: Decodes an output to the type that the function is annotated to return; None: anything may be one.
    _returned: Callable[[bytes], Any] | None = None

    def arguments(
        self, spec: bytes, inputs: Mapping[str, Raw] = _NO_INPUTS, upstream: Raw = NULL
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The handler's arguments; raises InvalidInputError if the spec or an input doesn't fit.

        A parameter that the spec doesn't have takes the input of its name. `upstream` says for errors which
        tasks the inputs are from.
        """
        return ((), {}) if self._arguments is None else self._arguments(spec, inputs, upstream)

    def output_fault(self, output: bytes) -> str | None:
        """Why an output, as JSON, doesn't fit the return annotation; None: it does."""
        if self._returned is None:
            return None
        try:
            self._returned(output)
        except Exception as error:  # noqa: BLE001 - user types may raise anything
            expected = _shown_annotation(self.signature.return_annotation)
            fault = str(error) if isinstance(error, msgspec.ValidationError) else describe(error)
            return (
                f"The handler's output doesn't fit its return type {expected}: {fault}. Return such a value, "
                "or correct the annotation."
            )
        return None


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
        # A handler annotated with None may still return something: the annotation only means "no result".
        _returned=return_decoder(function, untyped=(Any, object, NoneType)),
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
    names = frozenset(parameter.name for parameter in named)
    positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    keywords = [p.name for p in named if p.kind is not p.POSITIONAL_ONLY]
    try:
        decode = _decoder(function, named, takes_rest=takes_rest).decode
    except (TypeError, NameError) as error:
        raise TypeError(f"{shown} can't be the handler of {task_type!r}: {error}") from None

    def bind(spec: bytes, inputs: Mapping[str, Raw], upstream: Raw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        passed = _passed(spec, inputs, names)
        try:
            values = decode(msgspec.json.encode(_raw_fields(spec) | passed) if passed else spec)
        except msgspec.ValidationError as error:
            for parameter in named:
                if parameter.name in passed and _is_about(parameter.name, str(error)):
                    raise _misfit(parameter, shown, decoded_inputs(upstream), error) from None
            missing = _missing(inputs, decoded_inputs(upstream))
            raise InvalidInputError(f"The spec doesn't fit the handler {shown}: {error}{missing}") from None
        by_name = {name: value for name in keywords if (value := getattr(values, name)) is not msgspec.UNSET}
        if takes_rest:
            by_name |= {name: value for name, value in msgspec.json.decode(spec).items() if name not in names}
        if not positional:
            return (), by_name
        first = [getattr(values, name) for name in positional]
        return tuple(value for value in first if value is not msgspec.UNSET), by_name

    return bind


_raw_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def _passed(spec: bytes, inputs: Mapping[str, Raw], names: frozenset[str]) -> dict[str, Raw]:
    """The inputs that become arguments."""
    named = names.intersection(inputs)
    if not named:
        return {}
    fields = _raw_fields(spec)
    return {name: inputs[name] for name in named if name not in fields}


def _is_about(name: str, error: str) -> bool:
    """Whether the path at the end of an error of msgspec begins with this field."""
    path = error.rpartition(" - at `")[2]
    return re.match(rf"\$\.{re.escape(name)}(?![\w])", path) is not None


def _misfit(
    parameter: inspect.Parameter,
    shown: str,
    upstream: Mapping[str, Source | list[Source]],
    error: msgspec.ValidationError,
) -> InvalidInputError:
    of = upstream.get(parameter.name, "")
    expected = _shown_annotation(parameter.annotation)
    if isinstance(of, Part) and of.is_value:
        return InvalidInputError(
            f"Parameter {parameter.name!r} of {shown} expects {expected}, but the item of the list doesn't "
            f"fit: {error}. Correct the annotation and retry this task; or correct what the task that "
            "returns the list returns, and run that one again: lineshaft task rerun TASK --downstream."
        )
    sources = of if isinstance(of, list) else [of]
    source = ("task " if isinstance(of, str | Part) else "the tasks ") + ", ".join(map(str, sources[:_SHOWN]))
    first = sources[0]
    return InvalidInputError(
        f"Parameter {parameter.name!r} of {shown} expects {expected}, but the output of {source} doesn't "
        f"fit: {error}. Correct the annotation and retry this task; or correct what the upstream task "
        "returns, and run that one again: lineshaft task rerun "
        f"{first if isinstance(first, str) else first.task} --downstream."
    )


def _shown_annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _missing(inputs: Mapping[str, Raw], upstream: Mapping[str, Source | list[Source]]) -> str:
    """What an error adds about inputs."""
    left_out = [name for name in upstream if name not in inputs]
    parts = [f"{name} ({part})" for name in left_out if isinstance(part := upstream[name], Part)]
    if parts:
        return (
            f". Of its inputs, {', '.join(parts[:_SHOWN])} did not come along: the output has no such part, "
            f"or the inputs are larger than {MAX_INPUT_BYTES} bytes together"
        )
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
    shape = _shape(function, parameters, takes_rest=takes_rest)
    return msgspec.json.Decoder(shape, dec_hook=_decode_others)


def _shape(function: Function, parameters: list[inspect.Parameter], *, takes_rest: bool) -> type[Struct]:
    """The spec that fits a function."""
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
        names = {name for name, _, _ in fields}
        fields += [(name, Any, msgspec.field(default=msgspec.UNSET)) for name in _COMMON if name not in names]
    return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=not takes_rest)


def return_type(function: Function) -> Any:
    """What the function is annotated to return; of an awaitable, what it is awaited for."""
    annotation = get_type_hints(_plain(function), include_extras=True).get("return", Any)
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Awaitable) and get_args(annotation):
        return get_args(annotation)[-1]
    return annotation


def parameters_schema(handler: Handler) -> dict[str, Any] | None:
    """The JSON Schema of the specs that a handler takes; None: its parameters have none."""
    parameters = list(handler.signature.parameters.values())
    named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    try:
        shape = _shape(handler.function, named, takes_rest=len(named) < len(parameters))
        return _schema(shape)
    except (TypeError, NameError):
        return None


def result_schema(handler: Handler) -> dict[str, Any] | None:
    """The JSON Schema of its outputs; None: its annotation says nothing."""
    try:
        kind = _without_wishes(return_type(handler.function))
        return None if kind in {Any, object} else _schema(kind)
    except (TypeError, NameError):
        return None


def _schema(kind: Any) -> dict[str, Any]:
    return msgspec.json.schema(kind, schema_hook=_schema_of_others)


def _schema_of_others(kind: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic model, which msgspec doesn't know."""
    schema = getattr(kind, "model_json_schema", None)
    if schema is None:
        raise TypeError(f"{kind!r} has no JSON Schema")
    described: dict[str, Any] = schema()
    return described


def return_decoder(
    function: Function, *, untyped: tuple[Any, ...] = (Any, object)
) -> Callable[[bytes], Any] | None:
    """Decodes JSON to the type that the function is annotated to return; None: to the types of JSON.

    `untyped`: annotations that say nothing about an output.
    """
    try:
        kind = _without_wishes(return_type(function))
        return None if kind in untyped else msgspec.json.Decoder(kind, dec_hook=_decode_others).decode
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


def _decode_others(kind: Any, value: Any) -> Any:
    """Pydantic models, which msgspec doesn't know, and `object`, which everything is."""
    if kind is object:
        return value
    validate = getattr(kind, "model_validate", None)
    if validate is None:
        raise TypeError(f"a {kind!r} can't be made from JSON")
    if isinstance(value, dict):
        # What a model makes of itself (outcome.py) has computed fields, and names of fields for aliases.
        computed = getattr(kind, "model_computed_fields", ())
        value = {name: part for name, part in value.items() if name not in computed}
    try:
        return validate(value, by_alias=True, by_name=True)
    except TypeError:
        # An older version.
        return validate(value)
