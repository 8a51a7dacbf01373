"""The calls that get work for one agent: a claim, a completion that claims the next task, a wait."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from lineshaft.agent.process_group import AgentProcess
from lineshaft.agent.slots import Slots
from lineshaft.client.backend import Backend, WorkWaiter
from lineshaft.clock import lease_time
from lineshaft.errors import UnavailableError
from lineshaft.types.assignments import Assignment
from lineshaft.types.work import ClaimedTask, Completion, Moved, Presence

_log = logging.getLogger("lineshaft.agent")


class Claimed(Struct, frozen=True):
    """Tasks that were claimed by a call."""

    assignments: Sequence[Assignment[ClaimedTask]]
    #: When the call was sent, by the clock of leases. The claim came later, so its lease ends later.
    asked_at: float


class ClaimCalls:
    def __init__(self, backend: Backend, presence: Presence, slots: Slots, process: AgentProcess) -> None:
        self._backend = backend
        self._presence = presence
        self.slots = slots
        self._process = process
        self._loop = asyncio.get_running_loop()
        #: Nothing is claimed any more: the agent stops.
        self.closed = False
        #: Set when there is a reason to look for work at once.
        self.nudged = asyncio.Event()
        #: The wait for work that is under way, and the coroutine that waits.
        self._waiting: tuple[WorkWaiter, asyncio.Task[Any] | None] | None = None
        self._wait_aborted = False
        #: How long the last claim took.
        self._round_trip_sec = 0.0
        #: When a claim was first sent that is under way together with a completion, or may have been made
        #: without an answer: a repeated call returns the claim of the first one. None: there is none.
        self._uncertain_since: float | None = None
        #: No task may be claimed together with a completion now.
        self._claims_alone = False

    def forbid(self) -> None:
        """Claim nothing from now on. From any thread."""
        self.closed = True

    def close(self) -> None:
        self.forbid()
        self.nudge()

    def nudge(self) -> None:
        """End a wait for work, because there is a reason to look again."""
        self.nudged.set()
        self.slots.announce()
        if self._waiting is not None:
            self._waiting[0].interrupt()

    async def pause(self, seconds: float) -> None:
        """Sleep, unless there is a reason to look again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.nudged.wait()

    async def claim(self, types: Sequence[str], limit: int) -> Claimed:
        asked_at = lease_time()
        agent = self._presence
        assignments = await self._backend.claim(agent.agent_id, agent.incarnation, limit=limit, types=types)
        self._round_trip_sec = lease_time() - asked_at
        return self._claimed(assignments, asked_at)

    async def complete_and_claim(self, completion: Completion) -> tuple[Moved, Claimed]:
        """Complete a task, and claim the next one unless that needs a call of its own."""
        # A handler with a limit needs its free slots counted, while no other claim is on its way.
        alone = self.closed or self._claims_alone or bool(self.slots.limited) or self.slots.free < 0
        sent_at = lease_time()
        asked_at = sent_at if self._uncertain_since is None else self._uncertain_since
        if not alone:
            self._uncertain_since = asked_at
        assignments: Sequence[Assignment[ClaimedTask]] = ()
        try:
            if alone:
                (moved,) = await self._backend.complete([completion])
            else:
                types = self.slots.unlimited_types
                moved, assignments = await self._backend.complete_and_claim(completion, types=types)
        except UnavailableError:
            # The writer repeats the call.
            raise
        except Exception:
            self._uncertain_since = None
            raise
        self._uncertain_since = None
        if assignments:
            self._round_trip_sec = lease_time() - sent_at
        return moved, self._claimed(assignments, asked_at)

    async def wait(self, waiter: WorkWaiter, seconds: float) -> Claimed | None:
        """Wait for work, which may be claimed by then; None: the time is up, or there is other news."""
        types, room = self.slots.room()
        task = asyncio.current_task()
        self._waiting = waiter, task
        sent_at = lease_time()
        try:
            waited = await waiter.wait(seconds, types=types, limit=room)
        except asyncio.CancelledError:
            if task is None or not self._wait_aborted:
                raise
            task.uncancel()
            return None
        finally:
            self._waiting = None
        if waited is None:
            return None
        if waited.before_claim_sec is None:
            # An older server: the claim was probably made one round trip ago.
            return self._claimed(waited.assignments, lease_time() - self._round_trip_sec)
        return self._claimed(waited.assignments, sent_at + waited.before_claim_sec)

    def abort_wait(self) -> None:
        """End a wait at once: a server that refuses this agent would not end its long poll when asked."""
        if self._waiting is not None and (task := self._waiting[1]) is not None:
            self._wait_aborted = True
            task.cancel()

    async def release_unknown(self) -> bool:
        """Release tasks whose claim was carried out, but whose response was lost: they would use an attempt.

        False: not now, because a claim is under way together with a completion.
        """
        if self._uncertain_since is not None:
            return False
        self._claims_alone = True
        try:
            held = [execution.task.id for execution in self.slots.all()]
            agent = self._presence
            number = await self._backend.release_unknown(agent.agent_id, agent.incarnation, held)
        finally:
            self._claims_alone = False
        if number:
            _log.info("%s: released %d tasks whose claim it never received", agent.agent_id, number)
        return True

    def _claimed(self, assignments: Sequence[Assignment[ClaimedTask]], asked_at: float) -> Claimed:
        if assignments:
            self._process.record_activity()
        return Claimed(assignments, asked_at)
