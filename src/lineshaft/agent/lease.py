"""The lease of one claim, as far as this process knows, and the writes that only its holder may make.

An answer may be late, and a process may be frozen: the task is somebody else's by then, and what this process
does for it is paid twice. So an agent judges by its own clock whether a lease can still hold, before it runs
a handler or a step. A lease counts from when the claim or the heartbeat was sent: the database renewed it
later.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lineshaft import background
from lineshaft.agent.outcome import AttemptCancelled, ClaimOver, LateClaim
from lineshaft.client import large_data
from lineshaft.client.backend import Backend
from lineshaft.clock import lease_time
from lineshaft.errors import RateLimitedError, StaleClaimError, UnavailableError
from lineshaft.model.tasks import NewTask
from lineshaft.types.reservations import NewReservation, Settlement
from lineshaft.types.waits import NewSuspension, WaitEnd
from lineshaft.types.work import ClaimRef, NewStep, RemainingBudgets, Spawned, Spent

T = TypeVar("T")

_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.1, 2.0
CLAIM_LOST = "the claim was lost"
#: How often a step that waits for the next heartbeat looks whether there was one.
_LOOK_AGAIN_SEC = 0.05
#: How long one call waits for room in a quota.
_QUOTA_WAIT_SEC = 30.0


class Lease:
    """Whether a handler may go on. May be renewed and ended from any thread."""

    __slots__ = (
        *("_ask", "_gone", "_limit_at", "_term_sec", "_until"),
        *("is_lost", "over", "renewed_at", "unwinding"),
    )

    def __init__(self, asked_at: float, term_sec: float, limit_sec: float, ask: Callable[[], None]) -> None:
        """`asked_at`: when the claim was sent; `ask` has the lease renewed soon.

        `term_sec`: how long the lease lasts, but never longer than the attempt, `limit_sec`.
        """
        self._term_sec = term_sec
        self._limit_at = asked_at + limit_sec
        self._until = asked_at
        self._ask = ask
        #: When the claim, or the last heartbeat that renewed it, was sent.
        self.renewed_at = asked_at
        self.renew(asked_at)
        #: Why the handler must stop; None: it may go on.
        self.over: str | None = None
        #: What unwinds a handler whose own call has ended the claim.
        self.unwinding: ClaimOver | None = None
        #: Whether the claim is over as well: until then a checkpoint can be saved.
        self._gone = False
        #: Whether the queue has taken the task back.
        self.is_lost = False

    def end(self, why: str, *, gone: bool) -> None:
        """Ask the handler to stop; `gone`: the claim is over."""
        self._gone = self._gone or gone
        if self.over is None:
            self.over = why

    def lose(self, why: str = CLAIM_LOST) -> None:
        """The queue has taken the task back."""
        self.is_lost = self.over is None
        self.end(why, gone=True)

    def unwind(self, why: str) -> ClaimOver:
        """End the claim by a call of the handler, and return what the call raises."""
        self.end(why, gone=True)
        self.unwinding = ClaimOver(why)
        return self.unwinding

    def is_gone(self) -> bool:
        """Whether the claim is over."""
        return self._gone

    def check(self) -> None:
        """Raise AttemptCancelled if the handler must stop."""
        if self.over is not None:
            raise AttemptCancelled(self.over)

    # By the clock.

    def renew(self, sent_at: float) -> None:
        """A call that was sent then has renewed it."""
        self.renewed_at = max(self.renewed_at, sent_at)
        self._until = min(self.renewed_at + self._term_sec, self._limit_at)

    @property
    def may_hold(self) -> bool:
        """Whether it can't have run out yet."""
        return lease_time() < self._until

    def check_start(self) -> None:
        """Raise LateClaim if the handler must not start: the task may be somebody else's by now."""
        self.check()
        if not self.may_hold:
            age = lease_time() - self.renewed_at
            raise LateClaim(
                f"its claim reached the handler {age:.1f} s after it was asked for, and its lease lasts "
                f"{self._term_sec:g} s; if this happens often, raise heartbeat_interval_sec"
            )

    async def hold(self) -> None:
        """Return at once if it can't have run out, else when a heartbeat has renewed it; raises as `check`.

        What another agent has by now must not go on; what none has taken is still this agent's.
        """
        if not self.may_hold:
            self._ask()
        while not self.may_hold:
            self.check()
            await asyncio.sleep(_LOOK_AGAIN_SEC)


class ClaimWrites:
    """Writes for one claim. The agent repeats them while the database is away and the claim isn't over."""

    __slots__ = ("_backend", "_lease", "claim")

    def __init__(self, backend: Backend, claim: ClaimRef, lease: Lease) -> None:
        self._backend = backend
        self._lease = lease
        self.claim = claim

    async def stored(self, name: str, json: bytes) -> bytes:
        """The JSON, or a reference to it if it is large."""
        return await large_data.stored(self._backend, self.claim.id, name, json, self._lease.is_gone)

    async def loaded(self, json: bytes) -> bytes:
        """What a reference stands for; any other JSON as it is."""
        return await large_data.patiently(lambda: large_data.loaded(self._backend, json), self._lease.is_gone)

    async def record_step(self, step: NewStep) -> tuple[bytes, RemainingBudgets]:
        return await self._insist(lambda: self._backend.record_step(step))

    async def save_checkpoint(self, json: bytes) -> None:
        json = await self.stored("checkpoint.json", json)
        await to_its_end(self._insist(lambda: self._backend.save_checkpoint(self.claim, json)))

    async def spawn(self, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: Spent) -> Spawned:
        return await to_its_end(
            self._insist(lambda: self._backend.spawn(self.claim, key, tasks, wait=wait, spent=spent))
        )

    async def suspend(self, new: NewSuspension) -> WaitEnd | None:
        """How the wait has ended; None: the claim is over."""
        return await to_its_end(self._insist(lambda: self._backend.suspend(new)))

    async def acquire(self, new: NewReservation) -> str | None:
        """Reserve as soon as there is room; raises as `Lease.check` when the handler must stop."""
        acquiring = asyncio.ensure_future(self._acquire(new))
        try:
            while not acquiring.done():
                # A handler in a thread isn't cancelled.
                self._lease.check()
                await asyncio.wait({acquiring}, timeout=_LOOK_AGAIN_SEC)
        finally:
            await background.stop(acquiring)
        return acquiring.result()

    async def _acquire(self, new: NewReservation) -> str | None:
        try:
            return await self._insist(lambda: self._backend.acquire(new, wait_sec=0.0))
        except RateLimitedError:
            while True:
                with contextlib.suppress(RateLimitedError):
                    return await self._insist(lambda: self._backend.acquire(new, wait_sec=_QUOTA_WAIT_SEC))

    async def settle(self, settlement: Settlement) -> None:
        await to_its_end(self._insist(lambda: self._backend.settle(settlement)))

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        pause = _FIRST_PAUSE_SEC
        while True:
            try:
                return await call()
            except UnavailableError:
                if self._lease.is_gone():
                    raise
            except StaleClaimError as error:
                self._lease.lose(str(error))
                raise self._lease.unwind(str(error)) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SEC)


async def to_its_end(work: Coroutine[Any, Any, T], then: Callable[[], object] | None = None) -> T:
    """Await a write that goes on if the handler is cancelled; `then` is called when the write has ended."""
    writing = asyncio.ensure_future(work)
    # Retrieve the exception: the handler may no longer wait for it.
    writing.add_done_callback(lambda written: written.cancelled() or written.exception())
    if then is not None:
        writing.add_done_callback(lambda _: then())
    return await asyncio.shield(writing)
