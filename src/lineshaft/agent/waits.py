"""Sleeps and waits for signals of one execution: the handler ends here, and runs again when the wait is over.

A wait is a step: how it ended is recorded under its name, and the handler's next run finds that.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from lineshaft.agent import steps
from lineshaft.agent.durable_steps import DurableSteps
from lineshaft.agent.lease import ClaimWrites, Lease
from lineshaft.agent.money import Account
from lineshaft.agent.outcome import Fail, SignalTimeout
from lineshaft.model.durations import Duration, seconds
from lineshaft.model.fields import LONGEST_SECONDS
from lineshaft.model.retry import FailureCategory
from lineshaft.types.waits import NewSuspension, WaitEnd


class DurableWaits:
    def __init__(
        self,
        durable: DurableSteps,
        lease: Lease,
        account: Account,
        writes: ClaimWrites,
        unsaved_state: Callable[[], bytes | None],
    ) -> None:
        self._steps = durable
        self._lease = lease
        self._account = account
        self._writes = writes
        self._unsaved_state = unsaved_state
        #: Whether the claim is over until a wait has ended.
        self.is_suspended = False

    async def sleep(self, name: str, duration: Duration) -> WaitEnd:
        return await self._wait("sleep", name, None, _checked(duration, "sleep"))

    async def wait_for(self, name: str, *, signal: str | None, timeout: Duration | None) -> WaitEnd:  # noqa: ASYNC109
        limit = None if timeout is None else _checked(timeout, "wait for a signal")
        return await self._wait("wait_for", name, signal or name, limit)

    async def _wait(self, method: str, name: str, signal: str | None, timeout_sec: float | None) -> WaitEnd:
        self._lease.check()
        steps.check_name(name, "wait")
        self._steps.check_wait(method, name)
        recorded = self._steps.recorded.get(name)
        if recorded is not None:
            return self._read(name, recorded)
        if (state := self._unsaved_state()) is not None:
            await self._writes.save_checkpoint(state)
        new = NewSuspension(self._writes.claim, name, signal, timeout_sec, spent=self._account.spent)
        end = await self._writes.suspend(new)
        if end is None:
            self.is_suspended = True
            what = "sleeps" if signal is None else f"waits for the signal {signal!r}"
            raise self._lease.unwind(f"the task {what}")
        self._steps.recorded[name] = end.json
        return end

    def _read(self, name: str, recorded: bytes) -> WaitEnd:
        try:
            return msgspec.json.decode(recorded, type=WaitEnd)
        except msgspec.ValidationError as error:
            raise Fail(
                f"Step {name!r} was recorded by an earlier attempt, and not by a wait. "
                f"{steps.advice(name, self._writes.claim.id)}",
                FailureCategory.STEP_MISMATCH,
            ) from error

    def received(self, end: WaitEnd, name: str) -> Any:
        """The data of the signal; raises SignalTimeout if none came in time."""
        if end.signal is None:
            at = "" if end.until is None else f" by {end.until:%Y-%m-%dT%H:%M:%SZ}"
            raise SignalTimeout(
                f"No signal came{at}, and step {name!r} has recorded that. "
                f"To wait again, {steps.retry_without(name, self._writes.claim.id)}"
            )
        return end.signal.data


def _checked(duration: Duration, what: str) -> float:
    length = float(seconds(duration))
    if not 0 <= length <= LONGEST_SECONDS:
        raise ValueError(f"A {what} lasts from 0 to {LONGEST_SECONDS:.0f} seconds, a year, got {duration!r}.")
    return length
