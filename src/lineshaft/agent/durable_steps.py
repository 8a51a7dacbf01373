"""The steps of one execution: which are recorded, which run now, and what they cost."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from lineshaft.agent import steps
from lineshaft.agent.lease import ClaimWrites, Lease, to_its_end
from lineshaft.agent.money import Account
from lineshaft.agent.threads import Threads
from lineshaft.types.assignments import Assignment
from lineshaft.types.data_refs import data_ref_in
from lineshaft.types.work import ClaimedTask, NewStep


class DurableSteps:
    def __init__(
        self,
        assignment: Assignment[ClaimedTask],
        lease: Lease,
        account: Account,
        writes: ClaimWrites,
        threads: Threads,
    ) -> None:
        self._task_id = assignment.task.id
        self._lease = lease
        self._account = account
        self._writes = writes
        self._threads = threads
        #: Results by name, as JSON.
        self.recorded: dict[str, bytes] = dict(assignment.steps)
        #: Digests of the arguments of steps that earlier attempts recorded.
        self._digests = {name: digest for name, digest in assignment.step_digests.items() if digest}
        #: The first call of each step in this execution.
        self._calls: dict[str, steps.StepCall] = {}
        #: The waits of this execution.
        self._waits: set[str] = set()
        #: Steps that run now; the event is set when the result is written.
        self._running: dict[str, asyncio.Event] = {}

    def replace(self, recorded: Mapping[str, bytes]) -> None:
        """Take results with their large data, before the handler runs."""
        self.recorded = dict(recorded)

    def check_same_call(self, name: str, call: steps.StepCall) -> None:
        """Refuse a second step of the same name: it would get the result of the first one."""
        if name in self._waits or not self._calls.setdefault(name, call).is_same(call):
            raise ValueError(
                f"Step {name!r} was called with other arguments before, in this run. A step is identified by "
                "its name: give each its own, for instance with a number in it."
            )

    def check_wait(self, method: str, name: str) -> None:
        """Refuse a second wait of the same name, which would end at once, and one beside a running step.

        The handler runs again after a wait: a step that wasn't recorded by then is paid for twice.
        """
        if name in self._waits or name in self._calls:
            raise ValueError(
                f"ctx.{method}({name!r}) has the name of an earlier step or wait of this run. A wait is "
                "identified by its name: give each its own, for instance with a number in it."
            )
        if self._running or steps.current_meter.get() is not None:
            raise RuntimeError(
                f"ctx.{method}({name!r}) was called while a step runs. The handler ends here and runs again "
                "after the wait, so the step would run again too. Wait before or after it."
            )
        self._waits.add(name)

    def begin(self, name: str, call: steps.StepCall | None = None) -> bytes | None:
        """The recorded result; None: the step may run now, if its lease holds (`hold`)."""
        self._lease.check()
        result = self.recorded.get(name)
        if result is not None and not self._must_rerun(name, call):
            return result
        steps.check_name(name, "step")
        steps.check_not_within(self._task_id, name)
        self._account.check_next_step()
        return None

    def _must_rerun(self, name: str, call: steps.StepCall | None) -> bool:
        """Whether a recorded step runs again, because its arguments changed; raises if that is refused."""
        recorded = None if call is None else self._digests.get(name)
        if call is None or recorded is None or call.on_change == "reuse" or call.digest() == recorded:
            return False
        if call.on_change == "rerun":
            return True
        raise steps.other_arguments(name, self._task_id)

    async def end(
        self,
        name: str,
        value: Any,
        cost: Decimal,
        *,
        function: Callable[..., Any] | None = None,
        digest: str | None = None,
    ) -> bytes:
        """Record a result, and return the one that counts."""
        steps.check_name(name, "step")
        result = await to_its_end(self._record(name, steps.result_json(name, value, function), cost, digest))
        self._account.check_limits()
        return result

    async def _record(self, name: str, data: bytes, cost: Decimal, digest: str | None) -> bytes:
        spent = self._account.spent
        json = await self._writes.stored(f"step {name}.json", data)
        step = NewStep(self._writes.claim, name, json, cost, spent, digest)
        result, left = await self._writes.record_step(step)
        result = data if data_ref_in(result) == data_ref_in(json) is not None else result
        result = await self._writes.loaded(result)
        self._account.learn(left, spent.cost_usd or Decimal(0))
        self.recorded[name] = result
        # From now on it is a step of this execution, where `check_same_call` compares.
        self._digests.pop(name, None)
        return result

    async def run(self, name: str, call: steps.StepCall) -> bytes:
        """Run a step of an `async def` handler, unless it was recorded; returns its result."""
        self.check_same_call(name, call)
        while (recorded := self.begin(name, call)) is None:
            if not self._lease.may_hold:
                await self._lease.hold()
                continue
            running = self._running.get(name)
            if running is not None:
                # The same step twice at the same time: the second runs only if the first fails.
                await running.wait()
                continue
            self._running[name] = asyncio.Event()
            try:
                digest = call.digest()
                data, cost = await self._call(name, call)
            except BaseException:
                self._free(name)
                raise
            # Free only when it is written: the handler may stop waiting and ask for the step again.
            writing = self._record(name, data, cost, digest)
            result = await to_its_end(writing, then=partial(self._free, name))
            self._account.check_limits()
            return result
        return recorded

    def _free(self, name: str) -> None:
        self._running.pop(name).set()

    async def _call(self, name: str, call: steps.StepCall) -> tuple[bytes, Decimal]:
        """The result and the cost."""
        with steps.metered(self._task_id, name) as meter:
            if steps.is_async(call.function):
                value = await call.run()
            else:
                value = await self._in_thread(call.run)
                if inspect.isawaitable(value):
                    value = await value
        return steps.result_json(name, value, call.function), meter.cost

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        working = asyncio.wrap_future(self._threads.submit(function))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            if self._lease.over is None:
                # Cancelled by the handler, which no longer wants the result.
                working.cancel()
            else:
                # A thread can't be stopped. Within the agent's patience, keep the claim until it has ended:
                # no other agent gets the task, and what the thread spends is booked.
                await asyncio.wait({working})
            raise
