"""How an agent stops: it is asked to, its tasks finish within a grace or are handed back, and it ends."""

import asyncio
import logging
import math
import signal
import time
from functools import partial

from lineshaft.agent.claim_calls import ClaimCalls
from lineshaft.agent.executor import Executor
from lineshaft.agent.lease_keeper import REFUSED, LeaseKeeper
from lineshaft.agent.outcome import NOTHING, RELEASED
from lineshaft.agent.task_log import count
from lineshaft.errors import LineshaftError, SupersededError
from lineshaft.types.work import Presence

_log = logging.getLogger("lineshaft.agent")

AGENT_STOPS = "the agent stops"
REFUSED_TO_WORK = "the agent was superseded or refused"
#: When the agent may no longer work: handlers are cancelled again after this time, and then abandoned.
_HURRIED_PATIENCE_SEC = 0.3


class Stopper:
    """Ends the work of one agent."""

    def __init__(
        self, presence: Presence, claims: ClaimCalls, executor: Executor, lease_keeper: LeaseKeeper
    ) -> None:
        self.presence = presence
        self._slots = claims.slots
        self._claims = claims
        self._executor = executor
        self._lease_keeper = lease_keeper
        self._loop = asyncio.get_running_loop()
        #: Why the agent can't go on: it was superseded, or the server refuses it.
        self.error: LineshaftError | None = None

    def held_count(self) -> int:
        return len(self._slots.held())

    def expect_stop(self, release_by: float) -> None:
        """Have the heartbeat thread release all tasks then, if the event loop is blocked. From any thread."""
        # An event loop that runs again must not claim what was just released.
        self._claims.forbid()
        self._lease_keeper.release_by(self.presence, release_by)

    async def finish(self, within_sec: float) -> None:
        """Let running tasks finish, but no longer than this; then release them."""
        try:
            async with asyncio.timeout(within_sec):
                await self._all_written()
        except TimeoutError:
            self.hand_back()

    async def _all_written(self) -> None:
        """Wait for outcomes, not for handlers: a thread whose task was released may go on."""
        while self._slots.held():
            await self._slots.change()

    def hand_back(self) -> None:
        for execution in self._slots.all():
            self._executor.stop(execution, RELEASED, AGENT_STOPS)

    async def close(self, within_sec: float) -> None:
        """Write the remaining outcomes; give up after this time."""
        try:
            async with asyncio.timeout(within_sec):
                await self._all_written()
                await self._executor.writer.flush()
                await self._spending_reported()
        except TimeoutError:
            if held := self._slots.held():
                text = f"ends while it holds {count(len(held), 'task')}; their leases will expire"
            else:
                text = "ends before it could report what its last tasks have spent"
            _log.warning("%s: %s", self.presence.agent_id, text)
            for execution in held:
                # What couldn't be written must at least be seen.
                self._executor.task_log.ended(execution, None)
        await self._lease_keeper.leave(self.presence, at_once=self.error is not None)
        await self._executor.close()

    async def _spending_reported(self) -> None:
        """Wait until the server knows all spending, also that of abandoned handlers until now."""
        if self.error is not None and self.error.code in REFUSED:
            return
        while any(execution.has_unreported_spending for execution in self._slots.to_report()):
            self._lease_keeper.hurry(self.presence, 0.0)
            await self._slots.change()

    def end_with(self, error: LineshaftError) -> None:
        """End the agent; at once if it was superseded or is refused, as it can't write outcomes then."""
        if self.error is not None:
            return
        self.error = error
        self._claims.close()
        if not (isinstance(error, SupersededError) or error.code in REFUSED):
            return
        for execution in self._slots.all():
            self._executor.stop(execution, NOTHING, REFUSED_TO_WORK)
        self._loop.call_later(_HURRIED_PATIENCE_SEC, self._cancel_again)
        self._claims.abort_wait()

    def _cancel_again(self) -> None:
        """Handlers may have time to stop, such as that between SIGTERM and SIGKILL; this ends it."""
        for execution in self._slots.all():
            execution.cancel()
        self._loop.call_later(_HURRIED_PATIENCE_SEC, self._abandon_all)

    def _abandon_all(self) -> None:
        for execution in self._slots.all():
            self._executor.abandon(execution)


class StopRequest:
    """Whether an agent was asked to stop, and how. That may happen before the agent works."""

    def __init__(self, grace_sec: float) -> None:
        self.grace_sec = grace_sec
        self.requested = asyncio.Event()
        #: Set when running tasks are released at once.
        self.without_grace = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stopper: Stopper | None = None
        #: When running tasks are released at the latest, in monotonic time.
        self._release_by = math.inf

    def attach(self, stopper: Stopper) -> None:
        """The agent works now: a request reaches it from any thread."""
        self._stopper = stopper
        if self._release_by < math.inf:
            stopper.expect_stop(self._release_by)

    def stop(self, *, now: bool, because: signal.Signals | None = None) -> None:
        """Called in the event loop; `now`: don't wait for running tasks."""
        self._log_stop(now=now, because=because)
        self.requested.set()
        if now:
            self.without_grace.set()

    def expect_stop(self, *, now: bool) -> None:
        """The same, from a thread and at once: the event loop may be blocked."""
        when = time.monotonic() + (0.0 if now else self.grace_sec)
        self._release_by = min(self._release_by, when)
        if self._stopper is not None:
            self._stopper.expect_stop(self._release_by)

    def stop_from_anywhere(self, *, now: bool) -> None:
        self.expect_stop(now=now)
        self._loop.call_soon_threadsafe(partial(self.stop, now=now))

    def _log_stop(self, *, now: bool, because: signal.Signals | None) -> None:
        if self._stopper is None or self.without_grace.is_set() or (self.requested.is_set() and not now):
            return
        held = self._stopper.held_count()
        tasks, them = count(held, "task"), "it" if held == 1 else "them"
        if not held:
            text = "stopping"
        elif now:
            text = f"handing back {tasks}"
        else:
            again = {signal.SIGINT: "Ctrl-C again", signal.SIGTERM: "a second signal"}
            hint = f"; {again[because]} hands {them} back" if because in again else ""
            text = f"finishing {tasks} within {self.grace_sec:g} s{hint}"
        agent_id = self._stopper.presence.agent_id
        extra = {"agent_id": agent_id} | ({"signal": because.name} if because else {})
        _log.info("%s: %s", agent_id, text, extra=extra)
