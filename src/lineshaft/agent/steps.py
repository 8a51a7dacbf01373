"""Durable steps: a recorded step never runs again, whichever agent continues after a crash.

A step is identified by its name. Its result and its cost are stored in one transaction before the handler
goes on; a later attempt gets the stored result instead of running the step. Results pass through JSON also
the first time, so that a replay can't differ from the first run.

A digest of the arguments is stored too. A replay with other arguments, as after a deployment, is refused as
`step_mismatch` unless the call says what to do (`on_change`): the recorded result answers another question.
"""

import hashlib
import inspect
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from functools import partial
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

from lineshaft.agent.handlers import return_decoder, return_type
from lineshaft.agent.outcome import Fail, encode_others, encoded
from lineshaft.model.retry import FailureCategory
from lineshaft.types.work import SPAWN_STEP

T = TypeVar("T")

#: What a replay with other arguments does: fail as `step_mismatch`, run the step again, or use its result.
OnChange = Literal["refuse", "rerun", "reuse"]

MAX_NAME = 500


class Meter:
    """A running step: which steps it runs inside of, and what it has spent so far."""

    __slots__ = ("_outer", "cost", "name", "task_id")

    def __init__(self, task_id: str, name: str, outer: "Meter | None") -> None:
        self.task_id = task_id
        self.name = name
        self._outer = outer
        self.cost = Decimal(0)

    def is_within(self, task_id: str, name: str) -> bool:
        """Whether it is this step or runs inside of it."""
        step: Meter | None = self
        while step is not None:
            if (step.task_id, step.name) == (task_id, name):
                return True
            step = step._outer  # noqa: SLF001 - of this class
        return False


#: The running step, which is charged for what its code spends.
current_meter: ContextVar[Meter | None] = ContextVar("lineshaft_step", default=None)


@contextmanager
def metered(task_id: str, name: str) -> Iterator[Meter]:
    meter = Meter(task_id, name, current_meter.get())
    token = current_meter.set(meter)
    try:
        yield meter
    finally:
        current_meter.reset(token)


def running_step(task_id: str) -> str | None:
    """The step of a task in which this code runs."""
    running = current_meter.get()
    return None if running is None or running.task_id != task_id else running.name


def check_not_within(task_id: str, name: str) -> None:
    running = current_meter.get()
    if running is not None and running.is_within(task_id, name):
        raise ValueError(
            f"Step {name!r} was called inside of step {name!r}, and would wait for itself. A step is "
            "identified by its name: give each its own, for instance with a number in it."
        )


def check_name(name: str, what: str) -> None:
    if not name.strip() or len(name) > MAX_NAME or "\0" in name:
        raise ValueError(f"A {what} needs a name of 1 to {MAX_NAME} characters, got {name!r}.")
    if name.startswith(SPAWN_STEP):
        raise ValueError(f"Names that begin with {SPAWN_STEP!r} are reserved, got {name!r}.")


class StepCall(Struct, frozen=True):
    """One call of a step."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Stands for the arguments; None: they stand for themselves.
    key: Any = None
    on_change: OnChange = "refuse"

    def __post_init__(self) -> None:
        if self.on_change not in get_args(OnChange):
            raise ValueError(f"on_change must be refuse, rerun or reuse, got {self.on_change!r}.")
        if self.key is not None or self.on_change != "refuse":
            _check_parameters(self.function)

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "StepCall":
        """`kwargs`: those of the function, and the options of the step."""
        key, on_change = kwargs.pop("key", None), kwargs.pop("on_change", "refuse")
        return cls(function, args, kwargs, key, on_change)

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def is_same(self, other: "StepCall") -> bool:
        """Whether two calls have the same arguments, as far as they can be compared."""
        if self.key is not None or other.key is not None:
            return _equal(self.key, other.key)
        return _equal((self.args, self.kwargs), (other.args, other.kwargs))

    def digest(self) -> str:
        """The same for the same arguments, in any process."""
        if self.key is not None:
            form = _form([self.key])
        else:
            named = {name: msgspec.Raw(_form(value)) for name, value in self.kwargs.items()}
            form = msgspec.json.encode(
                {"args": [msgspec.Raw(_form(value)) for value in self.args], "kwargs": named}, order="sorted"
            )
        return hashlib.sha256(form).hexdigest()[:_DIGEST_LENGTH]


_DIGEST_LENGTH = 32


def _check_parameters(function: Callable[..., Any]) -> None:
    """`key` and `on_change` would never reach a function with such a parameter."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions that are written in C
        return
    for name in ("key", "on_change"):
        if name in parameters:
            shown = getattr(function, "__qualname__", repr(function))
            raise ValueError(
                f"{shown} has a parameter {name!r}, which is also an option of ctx.step. Pass a lambda or a "
                "functools.partial that sets it."
            )


def _form(value: Any) -> bytes:
    """Canonical JSON; what has no form in JSON counts by the name of its type."""
    try:
        return msgspec.json.encode(value, enc_hook=_encode_by_type, order="sorted")
    except Exception:  # noqa: BLE001 - models of others may raise anything; keys that aren't texts
        try:
            return _slow_form(value)
        except Exception:  # noqa: BLE001 - such as a list that contains itself
            return msgspec.json.encode(_type_name(value))


def _slow_form(value: Any) -> bytes:
    """Also of dicts with any keys, and sets of anything."""
    if isinstance(value, dict):
        return b"{%s}" % b",".join(
            sorted(b"%s:%s" % (_form(key), _slow_form(item)) for key, item in value.items())
        )
    if isinstance(value, list | tuple):
        return b"[%s]" % b",".join(map(_slow_form, value))
    if isinstance(value, set | frozenset):
        return b"[%s]" % b",".join(sorted(map(_slow_form, value)))
    try:
        return msgspec.json.encode(value, enc_hook=_encode_by_type, order="sorted")
    except Exception:  # noqa: BLE001 - models of others may raise anything
        return msgspec.json.encode(_type_name(value))


def _encode_by_type(value: Any) -> Any:
    try:
        return encode_others(value)
    except Exception:  # noqa: BLE001 - models of others may raise anything
        return _type_name(value)


def _type_name(value: Any) -> dict[str, str]:
    return {"type": type(value).__qualname__}


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - arrays and the like don't compare to a bool
        return True


def other_arguments(name: str, task_id: str) -> Fail:
    """The error for a replay with other arguments."""
    return Fail(
        f"Step {name!r} was recorded by an earlier attempt with other arguments, so its result may be wrong "
        f"for these. {advice(name, task_id)} To decide in code, pass on_change='rerun' or "
        "on_change='reuse' to ctx.step.",
        FailureCategory.STEP_MISMATCH,
    )


def advice(name: str, task_id: str) -> str:
    """What to do about a recorded step that doesn't fit."""
    again = retry_without(name, task_id)
    return f"To run it again, {again} To use the recorded result, deploy code that fits it, and retry."


def retry_without(name: str, task_id: str) -> str:
    return (
        f"retry the dead letter without the recorded result: lineshaft dlq resolve {task_id} --resolution "
        f"retry --forget-step {shlex.quote(name)}."
    )


def result_json(name: str, value: Any, function: Callable[..., Any] | None = None) -> bytes:
    """The result as JSON; it must fit the annotation of the function."""
    try:
        data = encoded(value, f"step {name!r}: its result")
    except ValueError as error:
        raise Fail(str(error), FailureCategory.INVALID_OUTPUT) from error
    decode = None if function is None else _decoder(function)
    if decode is not None and function is not None:
        try:
            decode(data)
        except msgspec.ValidationError as error:
            raise Fail(
                f"Step {name!r} returned {_shape(value_of(data))}, which doesn't fit "
                f"{_shown_type(function)}: {error}. Correct the annotation or the result.",
                FailureCategory.INVALID_OUTPUT,
            ) from error
    return data


def restored(name: str, task_id: str, data: bytes, function: Callable[..., Any]) -> Any:
    """A stored result, as the type that the function is annotated to return."""
    decode = _decoder(function)
    if decode is None:
        return value_of(data)
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise Fail(
            f"The recorded result of step {name!r} is {_shape(value_of(data))}, which doesn't fit "
            f"{_shown_type(function)}: {error}. {advice(name, task_id)}",
            FailureCategory.STEP_MISMATCH,
        ) from error


value_of = msgspec.json.decode
#: Keys of an object that an error names.
_NAMED_KEYS = 10


def _shape(value: Any) -> str:
    """The form of a value from JSON, for a message."""
    match value:
        case dict():
            keys = [*map(repr, list(value)[:_NAMED_KEYS]), *(["…"] if len(value) > _NAMED_KEYS else [])]
            return f"an object with {', '.join(keys)}" if keys else "an empty object"
        case list():
            return f"a list of {len(value)}, the first {_shape(value[0])}" if value else "an empty list"
        case str():
            return "a text"
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case _:
            return "a number"


def _shown_type(function: Callable[..., Any]) -> str:
    shown = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{inspect.formatannotation(return_type(function))}, the return type of {shown}"


_Decode = Callable[[bytes], Any]
_decoders: "WeakKeyDictionary[Callable[..., Any], _Decode | None]" = WeakKeyDictionary()


def _decoder(function: Callable[..., Any]) -> _Decode | None:
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    try:
        if function not in _decoders:
            _decoders[function] = return_decoder(function)
        return _decoders[function]
    except TypeError:  # an object without weak references has no annotations either
        return None


def is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function)
