"""Calls that must be awaited, with errors that say so when one is used as its result."""

import functools
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: What variables of these classes are called in the documentation.
_EXAMPLES = {"Lineshaft": "shaft", "TaskHandle": "handle"}
#: How methods are called that people often call with the arguments of another queue.
_FORMS = {
    "Lineshaft.submit": "shaft.submit(NewTask('TYPE', spec={…}))",
    "Lineshaft.submit_many": "shaft.submit_many([NewTask('TYPE', spec={…}), …])",
    "Lineshaft.submit_dag": "shaft.submit_dag('TITLE', [NewTask('TYPE', key='KEY'), …])",
}


def must_await(method: F) -> F:
    """Decorate a coroutine function. What it returns is awaited, scheduled and closed like a coroutine."""
    owner, _, name = method.__qualname__.rpartition(".")
    shown = f"{_EXAMPLES.get(owner, owner)}.{name}(…)"

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> _Call[Any]:
        try:
            coroutine = method(*args, **kwargs)
        except TypeError as error:  # only of wrong arguments: the method itself has not begun
            if (form := _FORMS.get(method.__qualname__)) is None:
                raise
            raise TypeError(f"{error}. Write: await {form}") from None
        return _Call(coroutine, shown)

    return call  # type: ignore[return-value]  # the same for callers


class _Call(Coroutine[Any, Any, T]):
    """A coroutine that explains itself."""

    __slots__ = ("__weakref__", "_call", "_shown")

    def __init__(self, call: Coroutine[Any, Any, T], shown: str) -> None:
        self._call = call
        self._shown = shown

    def __await__(self) -> Generator[Any, Any, T]:
        return self._call.__await__()

    def send(self, value: Any, /) -> Any:
        return self._call.send(value)

    def throw(
        self,
        kind: "type[BaseException] | BaseException",
        value: BaseException | object = None,
        trace: TracebackType | None = None,
        /,
    ) -> Any:
        if value is None and trace is None:
            return self._call.throw(kind)
        return self._call.throw(kind, value, trace)  # type: ignore[arg-type]  # as it was called

    def close(self) -> None:
        self._call.close()

    def _advice(self) -> str:
        return f"{self._shown} was not awaited. Write: await {self._shown}"

    def __repr__(self) -> str:
        return f"<{self._advice()}>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"There is no {name!r} yet: {self._advice()}", name=name)

    def __getitem__(self, key: object) -> Any:
        raise TypeError(f"There is no [{key!r}] yet: {self._advice()}")
