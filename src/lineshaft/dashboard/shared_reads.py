"""What several pages show, read once for all pages that are rendered at about the same time."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from lineshaft.engine.engine import Engine
from lineshaft.errors import UnavailableError

T = TypeVar("T")

#: Agents that were silent for longer are left out.
_SEEN_WITHIN_SEC = 86_400.0


class Shared(Generic[T]):
    def __init__(self, read: Callable[[], Awaitable[T]], fresh_sec: float) -> None:
        self._read = read
        self._fresh_sec = fresh_sec
        self._reading = asyncio.Lock()
        self._known: T | None = None
        self._at = 0.0
        self._failure: UnavailableError | None = None
        self._failed_at = -math.inf

    async def get(self, *, recent: bool = True) -> T:
        """`recent`: what was read a moment ago will do.

        A read that failed fails for all who waited for it: otherwise each would wait for the limit in turn.
        """
        asked_at = time.monotonic()
        async with self._reading:
            if self._failure is not None and self._failed_at >= asked_at:
                raise self._failure
            if self._known is None or not recent or time.monotonic() - self._at > self._fresh_sec:
                try:
                    self._known = await self._read()
                except UnavailableError as error:
                    self._failure, self._failed_at = error, time.monotonic()
                    raise
                self._at = time.monotonic()
            return self._known

    def forget(self) -> None:
        self._known = None


class SharedReads:
    def __init__(self, engine: Engine) -> None:
        #: On every page.
        self.attention = Shared(engine.read.attention, 1.0)
        self.waiting = Shared(engine.read.waiting, 3.0)
        self.agents = Shared(partial(engine.fleet.read_all, seen_within_sec=_SEEN_WITHIN_SEC), 3.0)

    def forget(self) -> None:
        """Something was changed here: the next page shows it."""
        for shared in (self.attention, self.waiting, self.agents):
            shared.forget()
