"""Runs handlers: from the claimed task to the written outcome, which frees the slot."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from lineshaft.agent.claim_calls import ClaimCalls, Claimed
from lineshaft.agent.context import context_of
from lineshaft.agent.execution import Execution, Host, current
from lineshaft.agent.handlers import Handler
from lineshaft.agent.lease import CLAIM_LOST
from lineshaft.agent.outcome import NOTHING, RELEASED, Outcome, describe, failed, with_traceback
from lineshaft.agent.process_group import AgentProcess
from lineshaft.agent.slots import Slots
from lineshaft.agent.task_log import TaskLog
from lineshaft.agent.writer import Writer
from lineshaft.client import large_data
from lineshaft.clock import lease_time
from lineshaft.errors import InvalidInputError
from lineshaft.model.retry import FailureCategory, timed_out
from lineshaft.model.states import Status
from lineshaft.types import RegisteredAgent
from lineshaft.types.assignments import Assignment
from lineshaft.types.work import ClaimedTask, Moved, Presence

T = TypeVar("T")

_log = logging.getLogger("lineshaft.agent")

#: How long a cancelled handler may take to end, unless it asks for longer.
_PATIENCE_SEC = 2.0
#: After these, maintenance has something to do soon: a task becomes due, or a gate has to run.
_POSTPONED = frozenset({Status.RETRYING, Status.PENDING, Status.VALIDATING})


class Executor:
    def __init__(
        self,
        view: RegisteredAgent,
        handlers: Mapping[str, Handler],
        host: Host,
        claims: ClaimCalls,
        process: AgentProcess,
        *,
        until_idle: bool,
    ) -> None:
        self._host = host
        self._loop = host.loop
        self._handlers = handlers
        self._slots = claims.slots
        self._claims = claims
        self._process = process
        self._presence = Presence(view.id, view.incarnation)
        self._heartbeat_interval_sec = view.own.heartbeat_interval_sec
        self._has_budget = view.budget_usd is not None
        self._until_idle = until_idle
        self.task_log = TaskLog()
        self.writer = Writer(host.backend, claims, self._written, self.start)
        self.deadlines = Deadlines(claims.slots, self.stop)

    # From the claim to the handler.

    def start(self, claimed: Claimed) -> None:
        for assignment in claimed.assignments:
            self._start(assignment, claimed.asked_at)

    def _start(self, assignment: Assignment[ClaimedTask], asked_at: float) -> None:
        task = assignment.task
        handler = self._handlers[task.type]
        limit = handler.time_limit_sec
        # The task's limit counts from its claim, which comes after the request: it never ends too late.
        passed = lease_time() - asked_at
        deadline = self._loop.time() - passed + min(task.limit_sec, math.inf if limit is None else limit)
        if (lost := self._slots.get(task.id)) is not None:
            # It was taken back, and this agent got it again.
            lost.lease.lose()
            self.stop(lost, NOTHING, CLAIM_LOST)
        execution = Execution(assignment, handler, self._host, asked_at=asked_at, deadline=deadline)
        self._slots.add(execution)
        if task.heartbeat_interval_sec < self._heartbeat_interval_sec:
            self._process.lease_keeper.hurry(self._presence, task.heartbeat_interval_sec)
        self.deadlines.watch(deadline)
        if large_data.has_large_data(assignment):
            self._await(execution, execution.load, lambda loaded, _: self._call(loaded))
        else:
            self._call(execution)

    def _call(self, execution: Execution) -> None:
        handler, assignment = execution.handler, execution.assignment
        task = assignment.task
        try:
            args, kwargs = handler.arguments(task.spec, assignment.inputs_json, task.inputs)
        except Exception as error:  # noqa: BLE001 - user types may raise anything
            text = str(error) if isinstance(error, InvalidInputError) else describe(error)
            execution.keep_error(error)
            self.report(execution, with_traceback(failed(text, FailureCategory.INVALID_INPUT), error))
            return
        if handler.takes_context:
            args = (context_of(execution), *args)
        call = partial(self._begin, execution, partial(handler.function, *args, **kwargs))
        if handler.is_async:
            self._await(execution, call, self._returned)
            return
        try:
            thread = self._host.threads.submit(call)
        except RuntimeError as error:
            # The system can't start another thread.
            self.report(execution, failed(str(error), FailureCategory.CRASH))
            return
        execution.begin(thread)
        thread.add_done_callback(partial(self._thread_ended, execution))

    def _begin(self, execution: Execution, call: Callable[[], T]) -> T:
        """Call a handler, unless its task may be somebody else's by now.

        This runs where the handler does, since it may have waited for the event loop or a thread.
        """
        execution.lease.check_start()
        self.task_log.started(execution)
        # A coroutine and a thread's job have context variables of their own: nothing has to be set back.
        current.set(execution)
        return call()

    def _await(
        self, execution: Execution, work: Callable[[], Awaitable[T]], then: Callable[[Execution, T], None]
    ) -> None:
        """Go on with the result of a coroutine. Whatever it raises is the outcome."""

        async def run() -> None:
            try:
                result = await work()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if self._loop.is_closed():
                    raise
                self._ended(execution, None, error)
            else:
                execution.rest()
                then(execution, result)

        execution.begin(self._loop.create_task(run()))

    def _returned(self, execution: Execution, value: Any) -> None:
        self._ended(execution, value, None)

    def _thread_ended(self, execution: Execution, thread: "Future[Any]") -> None:
        # The handler's thread calls this.
        error = thread.exception()
        value = None if error is not None else thread.result()
        try:
            self._loop.call_soon_threadsafe(self._ended, execution, value, error)
        except RuntimeError:
            _log.debug("The handler of %s ended after its agent", execution.task.id)

    # From the handler's end to the free slot.

    def _ended(self, execution: Execution, value: Any, error: BaseException | None) -> None:
        execution.rest()
        if self._was_abandoned(execution):
            return
        try:
            outcome = execution.outcome(value, error)
        except Exception as unclear:  # noqa: BLE001 - logged, and reported as the outcome
            # Objects that a handler returns may raise in any method.
            _log.exception("Reading the outcome of %s failed", execution.task.id)
            outcome = failed(describe(error or unclear), FailureCategory.ERROR)
        execution.keep_error(error)
        if execution.needs_store(outcome):
            self._await(execution, partial(execution.store, outcome), self._stored)
        else:
            self.report(execution, outcome)

    def _stored(self, execution: Execution, outcome: Outcome) -> None:
        if not self._was_abandoned(execution):
            self.report(execution, outcome)

    def _was_abandoned(self, execution: Execution) -> bool:
        """Whether its outcome was reported before: only its slot was still taken."""
        if execution.reported is None:
            return False
        if execution.written:
            self._free(execution)
        return True

    def report(self, execution: Execution, outcome: Outcome) -> None:
        execution.report(outcome)
        self.writer.put(execution, outcome)

    def _written(self, execution: Execution, moved: Moved | None) -> None:
        execution.end(moved)
        self.task_log.ended(execution, moved)
        self._process.record_activity()
        if execution.waits.is_suspended or (moved is not None and moved.status in _POSTPONED):
            self._process.expect_due()
        if execution.is_working:
            # A claim that waits for outcomes to be written must look again: this slot is still taken.
            self._slots.announce()
        else:
            self._free(execution)

    def _free(self, execution: Execution) -> None:
        self._slots.remove(execution)
        if execution.has_unreported_spending:
            self._host.on_news(execution)
        is_limited = execution.handler.concurrency is not None
        # With a budget, the task's reservation may pay for another one.
        if is_limited or self._has_budget or (self._until_idle and self._slots.are_empty):
            self._claims.nudge()

    # Stopping one execution.

    def stop(self, execution: Execution, outcome: Outcome, why: str) -> None:
        """Ask a handler to stop; `outcome` counts unless the handler still ends by itself."""
        # Only once: a handler that is saving its state must not be cancelled again.
        if execution.reported or (execution.decided is not None and outcome is not NOTHING):
            return
        execution.stop(outcome, why)
        if execution.is_in_thread and outcome is not RELEASED:
            # A thread can't be stopped. Its context raises on the next call; the outcome doesn't wait for it.
            self.report(execution, outcome)
        else:
            # A thread whose task would go on elsewhere has the same time to end as a coroutine.
            patience = max(_PATIENCE_SEC, execution.handler.patience_sec)
            self._loop.call_later(patience, self._give_up, execution, outcome)

    def _give_up(self, execution: Execution, outcome: Outcome) -> None:
        if not execution.reported:
            _log.warning("The handler of %s ignores its cancellation and is abandoned", execution.task.id)
            self.report(execution, outcome)

    def abandon(self, execution: Execution) -> None:
        """Wait for its handler no longer, and write nothing: the agent may not work any more."""
        if not execution.reported:
            self.report(execution, NOTHING)

    async def close(self) -> None:
        self.deadlines.cancel()
        await self.writer.close()
        self._host.threads.close()


class Deadlines:
    """Stops executions whose time is up, with one timer for all of them."""

    def __init__(self, slots: Slots, stop: Callable[[Execution, Outcome, str], None]) -> None:
        self._slots = slots
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, deadline: float) -> None:
        if self._timer is None or deadline < self._timer.when():
            self.cancel()
            if deadline < math.inf:
                self._timer = self._loop.call_at(deadline, self.look)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Stop what is overdue."""
        self.cancel()
        now = self._loop.time()
        first = math.inf
        for execution in self._slots.all():
            if execution.reported is not None:
                continue
            if execution.deadline > now:
                first = min(first, execution.deadline)
            elif execution.decided is None:
                limit, task_limit = execution.handler.time_limit_sec, execution.task.limit_sec
                if limit is not None and limit < task_limit:
                    text = f"Timed out after {limit:.10g} s (handler time limit)"
                else:
                    text = timed_out(task_limit)
                self._stop(execution, failed(text, FailureCategory.TIMEOUT), text)
        self.watch(first)
