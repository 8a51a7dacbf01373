"""Durable steps: a recorded step never runs again, whichever agent continues after a crash.

A step is identified by its name. Its result and its cost are stored in one transaction before the handler
goes on; a later attempt gets the stored result instead of running the step. Results pass through JSON also
the first time, so that a replay can't differ from the first run.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from lineshaft.agent.handlers import return_decoder
from lineshaft.agent.outcome import Fail, encoded
from lineshaft.errors import UnavailableError
from lineshaft.model.retry import FailureCategory
from lineshaft.types.work import SPAWN_STEP

T = TypeVar("T")

MAX_NAME = 500
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.1, 2.0


class Meter:
    """A running step: which steps it runs inside of, and what it has spent so far."""

    __slots__ = ("_name", "_outer", "_task_id", "cost")

    def __init__(self, task_id: str, name: str, outer: "Meter | None") -> None:
        self._task_id = task_id
        self._name = name
        self._outer = outer
        self.cost = Decimal(0)

    def is_within(self, task_id: str, name: str) -> bool:
        """Whether it is this step or runs inside of it."""
        step: Meter | None = self
        while step is not None:
            if (step._task_id, step._name) == (task_id, name):  # noqa: SLF001 - its own
                return True
            step = step._outer  # noqa: SLF001 - its own
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


def result_json(name: str, value: Any) -> bytes:
    try:
        return encoded(value, f"step {name!r}: its result")
    except ValueError as error:
        raise Fail(str(error), FailureCategory.INVALID_OUTPUT) from error


def restored(data: bytes, function: Callable[..., Any]) -> Any:
    """A stored result, as the type that the function is annotated to return."""
    decode = _decoder(function)
    if decode is not None:
        try:
            return decode(data)
        except msgspec.ValidationError:
            # The annotation is wrong, or the function was changed since.
            pass
    return msgspec.json.decode(data)


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


def same(one: Any, other: Any) -> bool:
    """Whether two calls have the same arguments, as far as they can be compared."""
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - arrays and the like don't compare to a bool
        return True


def is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function)


async def insist(call: Callable[[], Awaitable[T]], given_up: Callable[[], bool]) -> T:
    """Repeat a call while the database is unavailable, until `given_up`."""
    pause = _FIRST_PAUSE_SEC
    while True:
        try:
            return await call()
        except UnavailableError:
            if given_up():
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SEC)
