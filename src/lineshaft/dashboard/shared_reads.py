"""What several pages show, read once for all pages that are rendered at about the same time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from lineshaft.engine.engine import Engine

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

    async def get(self, *, recent: bool = True) -> T:
        """`recent`: what was read a moment ago will do."""
        async with self._reading:
            if self._known is None or not recent or time.monotonic() - self._at > self._fresh_sec:
                self._known = await self._read()
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
