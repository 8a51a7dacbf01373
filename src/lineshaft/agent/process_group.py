"""What all agents of one process share: the heart, the upkeep, and when all of them are idle."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Protocol
from weakref import WeakKeyDictionary

from lineshaft.agent.lease_keeper import LeaseKeeper
from lineshaft.client.backend import Backend
from lineshaft.errors import UnavailableError

_log = logging.getLogger("lineshaft.agent")

#: After news of something that will be due, this soon and not sooner.
_NUDGED_SEC = 0.1


class Drainer(Protocol):
    """An agent that runs until there is nothing left to do."""

    def nudge(self) -> None:
        """Look again."""
        ...


class AgentProcess:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._members = 0
        self._heart: LeaseKeeper | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._nudged = asyncio.Event()
        self._disbanding = False
        #: When agents that may take certain things last found none.
        self._looked: dict[Hashable, float] = {}
        #: Grows with everything that agents of this process take or hand in.
        self.activity = 0
        #: For each agent that drains, the activity before it last found nothing.
        self._idle_since: dict[Drainer, int] = {}
        self._drained: set[Drainer] = set()

    @property
    def heart(self) -> LeaseKeeper:
        if self._heart is None:
            raise RuntimeError("Nobody is at work.")
        return self._heart

    @asynccontextmanager
    async def membership(self) -> AsyncIterator[None]:
        self._members += 1
        if self._members == 1:
            # One of this event loop's own: the last members may have been of another.
            self._nudged = asyncio.Event()
            self._heart = LeaseKeeper(self._backend.pulse())
            self._upkeep = asyncio.create_task(self._keep_up(), name="lineshaft upkeep")
        try:
            yield
        finally:
            self._members -= 1
            if self._members == 0:
                await self._disband()

    async def _disband(self) -> None:
        if self._upkeep is not None:
            # Not cancelled: it may be in the midst of a transaction.
            self._disbanding = True
            self._nudged.set()
            await asyncio.wait({self._upkeep})
            self._disbanding = False
        if self._heart is not None:
            await asyncio.to_thread(self._heart.close)
        self._upkeep = self._heart = None

    def expect_due(self) -> None:
        """Something was put off: find out for how long."""
        self._nudged.set()

    async def _keep_up(self) -> None:
        while not self._disbanding:
            self._nudged.clear()
            pause = self._backend.upkeep_interval_sec
            try:
                coming = await self._backend.upkeep()
            except UnavailableError as error:
                _log.debug("Maintenance has to wait: %s", error)
            except Exception:  # noqa: BLE001 - logged; without upkeep nothing would ever be due
                _log.exception("Maintenance failed; it is tried again in %s s", pause)
            else:
                pause = pause if coming is None else min(pause, coming)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._nudged.wait()
                    if not self._disbanding:
                        await asyncio.sleep(_NUDGED_SEC)

    # Looking for work.

    def found_nothing(self, interest: Hashable) -> None:
        self._looked[interest] = time.monotonic()

    def looked_since(self, interest: Hashable, seconds: float) -> bool:
        """Whether one who may take the same has found nothing, not longer ago than this."""
        return time.monotonic() - self._looked.get(interest, -math.inf) < seconds

    # Draining.

    def enter_drain(self, drainer: Drainer) -> None:
        self._idle_since[drainer] = -1

    def leave_drain(self, drainer: Drainer) -> None:
        self._idle_since.pop(drainer, None)
        self._drained.discard(drainer)
        # Whoever it kept from ending may end now.
        for other in self._idle_since:
            other.nudge()

    def all_idle(self, drainer: Drainer, since: int) -> bool:
        """Whether nobody here found anything since the last activity; `since` is when this one looked."""
        if drainer in self._drained:
            return True
        self._idle_since[drainer] = since
        behind = [other for other, looked in self._idle_since.items() if looked != self.activity]
        for other in behind:
            if other is not drainer:
                other.nudge()
        if behind:
            return False
        # All at once: what one of them does last must not send the others looking again.
        self._drained = set(self._idle_since)
        for other in self._drained:
            if other is not drainer:
                other.nudge()
        return True


_crews: "WeakKeyDictionary[Backend, AgentProcess]" = WeakKeyDictionary()


def crew_of(backend: Backend) -> AgentProcess:
    """The one of this process; agents that use the same Lineshaft belong together."""
    crew = _crews.get(backend)
    if crew is None:
        crew = _crews[backend] = AgentProcess(backend)
    return crew
