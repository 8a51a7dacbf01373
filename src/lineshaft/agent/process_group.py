"""What all agents of one process share: heartbeats, maintenance, and whether all of them are idle."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lineshaft.agent.lease_keeper import REFUSED, LeaseKeeper
from lineshaft.client.backend import Backend
from lineshaft.errors import LineshaftError, UnavailableError

if TYPE_CHECKING:
    from lineshaft.agent.claim_calls import ClaimCalls

_log = logging.getLogger("lineshaft.agent")

#: The pause between a nudge and the next maintenance.
_NUDGED_SEC = 0.1


class AgentProcess:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._members = 0
        self._lease_keeper: LeaseKeeper | None = None
        self._maintenance: asyncio.Task[None] | None = None
        self._nudged = asyncio.Event()
        self._closing = False
        #: When agents with an interest last found no work.
        self._looked: dict[Hashable, float] = {}
        #: Grows with every task that agents of this process claim or finish.
        self.activity = 0
        #: For each draining agent, the activity before it last found no work.
        self._idle_since: dict[ClaimCalls, int] = {}
        self._drained: set[ClaimCalls] = set()

    @property
    def lease_keeper(self) -> LeaseKeeper:
        if self._lease_keeper is None:
            raise RuntimeError("No agent is running.")
        return self._lease_keeper

    @asynccontextmanager
    async def membership(self) -> AsyncIterator[None]:
        self._members += 1
        if self._members == 1:
            # The last members may have run in another event loop.
            self._nudged = asyncio.Event()
            self._lease_keeper = LeaseKeeper(self._backend.heartbeats())
            self._maintenance = asyncio.create_task(self._maintain(), name="lineshaft maintenance")
        try:
            yield
        finally:
            self._members -= 1
            if self._members == 0:
                await self._close()

    async def _close(self) -> None:
        if self._maintenance is not None:
            # It isn't cancelled, as it may be in a transaction.
            self._closing = True
            self._nudged.set()
            await asyncio.wait({self._maintenance})
            self._closing = False
        if self._lease_keeper is not None:
            await asyncio.to_thread(self._lease_keeper.close)
        self._maintenance = self._lease_keeper = None

    def expect_due(self) -> None:
        """A task was postponed: find out when it is due."""
        self._nudged.set()

    async def _maintain(self) -> None:
        while not self._closing:
            self._nudged.clear()
            pause = self._backend.maintenance_interval_sec
            try:
                coming = await self._backend.maintain()
            except UnavailableError as error:
                _log.debug("Maintenance has to wait: %s", error)
            except Exception as error:  # noqa: BLE001 - logged; without it no retry would become due
                if isinstance(error, LineshaftError) and error.code in REFUSED:
                    # The agents end with this error.
                    _log.debug("Maintenance was refused: %s", error)
                else:
                    _log.exception("Maintenance failed; it is tried again in %s s", pause)
            else:
                pause = pause if coming is None else min(pause, coming)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._nudged.wait()
                    if not self._closing:
                        await asyncio.sleep(_NUDGED_SEC)

    # Looking for work.

    def record_activity(self) -> None:
        self.activity += 1

    def found_nothing(self, interest: Hashable) -> None:
        self._looked[interest] = time.monotonic()

    def looked_since(self, interest: Hashable, seconds: float) -> bool:
        """Whether an agent with the same interest found no work within this time."""
        return time.monotonic() - self._looked.get(interest, -math.inf) < seconds

    # Draining.

    def enter_drain(self, drainer: "ClaimCalls") -> None:
        self._idle_since[drainer] = -1

    def leave_drain(self, drainer: "ClaimCalls") -> None:
        self._idle_since.pop(drainer, None)
        self._drained.discard(drainer)
        # Agents that waited for it may end now.
        for other in self._idle_since:
            other.nudge()

    def all_idle(self, drainer: "ClaimCalls", since: int) -> bool:
        """Whether no agent found work since the last activity; `since`: the activity when this one looked."""
        if drainer in self._drained:
            return True
        self._idle_since[drainer] = since
        behind = [other for other, looked in self._idle_since.items() if looked != self.activity]
        for other in behind:
            if other is not drainer:
                other.nudge()
        if behind:
            return False
        # All at once: the last activity of one must not make the others look again.
        self._drained = set(self._idle_since)
        for other in self._drained:
            if other is not drainer:
                other.nudge()
        return True


_processes: "WeakKeyDictionary[Backend, AgentProcess]" = WeakKeyDictionary()


def agent_process(backend: Backend) -> AgentProcess:
    """The one of this process; agents that use the same Lineshaft share it."""
    process = _processes.get(backend)
    if process is None:
        process = _processes[backend] = AgentProcess(backend)
    return process
