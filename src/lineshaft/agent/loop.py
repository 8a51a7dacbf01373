"""The loop of one agent: claim tasks, run them, write their outcomes, wait for more."""

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from lineshaft.agent.handlers import Handler
from lineshaft.agent.idle import left_text, waiting_text
from lineshaft.agent.lease_keeper import REFUSED
from lineshaft.agent.money import OWN_LIMITS, over_limit_text
from lineshaft.agent.outcome import NOTHING, RELEASED, Outcome, describe, failed, with_traceback
from lineshaft.agent.process_group import AgentProcess
from lineshaft.agent.run import Run
from lineshaft.agent.task_log import TaskLog, count, duration
from lineshaft.agent.threads import Threads
from lineshaft.agent.writer import Writer
from lineshaft.client import large_data
from lineshaft.client.backend import Backend, WorkWaiter
from lineshaft.errors import InvalidInputError, LineshaftError, SupersededError, UnavailableError
from lineshaft.model.retry import FailureCategory, timed_out
from lineshaft.model.states import Status
from lineshaft.types import RegisteredAgent
from lineshaft.types.assignments import Assignment
from lineshaft.types.data_refs import MAX_INLINE_BYTES
from lineshaft.types.work import ClaimedTask, DueRetries, Moved, Presence

T = TypeVar("T")

_AGENT_STOPS = "the agent stops"
_REFUSED_TO_WORK = "the agent was superseded or refused"

_log = logging.getLogger("lineshaft.agent")

#: From this many slots on, a third is claimed at a time: one third is claimed, one runs, one is written.
_MANY_SLOTS = 30
#: A call costs as much as some fifty of its tasks; larger ones would only delay the start of the first.
_MOST_AT_ONCE = 500
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.1, 5.0
#: How long a cancelled handler may take to end, unless it asks for longer.
_PATIENCE_SEC = 2.0
#: When the agent may no longer work: handlers are cancelled again after this time, and then abandoned.
_HURRIED_PATIENCE_SEC = 0.3
#: An agent relies on another's fruitless claim within this share of its poll interval.
_RECENT_SHARE = 0.8
#: Due times that differ by less are those of the same retry.
_SAME_RETRY_SEC = 0.5
#: After these, maintenance has something to do soon: a task becomes due, or a gate has to run.
_POSTPONED = frozenset({Status.RETRYING, Status.PENDING, Status.VALIDATING})


class Worker:
    """One registered incarnation at work, in one event loop. Answers to heartbeats come from a thread."""

    def __init__(
        self,
        backend: Backend,
        view: RegisteredAgent,
        handlers: Mapping[str, Handler],
        process: AgentProcess,
        *,
        drain_retries_within_sec: float | None,
    ) -> None:
        self.backend = backend
        self.agent_id = view.id
        self.loop = asyncio.get_running_loop()
        self.presence = Presence(view.id, view.incarnation)
        self._own = view.own
        self.interval_sec = self._own.heartbeat_interval_sec
        self.slowdown_until: datetime | None = None
        self._has_budget = view.budget_usd is not None
        self._handlers = handlers
        self._process = process
        self._drain_within = drain_retries_within_sec
        self._set_slots(self._own.max_concurrent_tasks)
        self._limited = [handler for handler in handlers.values() if handler.concurrency is not None]
        self._unlimited = [handler.type for handler in handlers.values() if handler.concurrency is None]
        # An agent with a budget may be unable to afford what others can.
        alone = view.id if self._has_budget else None
        self._interest = (
            alone,
            frozenset(handlers),
            frozenset(self._own.capabilities),
            tuple(self._own.models_available),
        )
        self._running: dict[str, Run] = {}
        self._running_of: Counter[str] = Counter()
        #: Ended, with spending that is still to be reported: no outcome did, as the claim was over.
        self._owing: set[Run] = set()
        self._writer = Writer(backend, self._written, self)
        self.task_log = TaskLog(view.id)
        self._threads = Threads(f"lineshaft {view.id}")
        self._freed = asyncio.Event()
        #: Set by a nudge: look for work again, without waiting.
        self._nudged = asyncio.Event()
        #: Set while it waits.
        self._waiter: WorkWaiter | None = None
        #: How long the last claim took.
        self._round_trip_sec = 0.0
        self._stopping = False
        #: No task may be claimed together with a completion now.
        self._claims_alone = False
        #: Until then a claim whose response was lost may still be carried out, by the event loop's clock.
        self._doubts_until = -math.inf
        #: Since when claims have failed, in the time of the event loop.
        self._failing_since: float | None = None
        #: When the retry is due that it last reported to wait for, by the event loop's clock.
        self._reported_due_at = -math.inf
        #: Why it can't go on: it was superseded, or the server refuses it.
        self.error: LineshaftError | None = None
        self._claims: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    async def work(self) -> None:
        """Work until stopped, superseded, or (when draining) nothing is left to do."""
        self._writer.start()
        self._process.lease_keeper.enter(self)
        self._claims = asyncio.create_task(self._claim_on(), name=f"lineshaft claims {self.agent_id}")
        try:
            await asyncio.wait({self._claims})
        finally:
            self._stopping = True
            self.nudge()
            await asyncio.wait({self._claims})
        if not self._claims.cancelled():
            self._claims.result()
        if self.error is not None:
            raise self.error

    def stop_claiming(self) -> None:
        self._stopping = True
        self.nudge()

    def nudge(self) -> None:
        """End a wait for work, because there is a reason to look again."""
        self._nudged.set()
        self._freed.set()
        if self._waiter is not None:
            self._waiter.interrupt()

    def _set_slots(self, slots: int) -> None:
        self._slots = slots
        self._batch = min(slots if slots < _MANY_SLOTS else slots // 3, _MOST_AT_ONCE)

    def _change_slots(self, slots: int) -> None:
        _log.info("%s: may now hold %d tasks", self.agent_id, slots)
        self._set_slots(slots)
        self.nudge()

    async def finish(self, within_sec: float) -> None:
        """Let running tasks finish, but no longer than this; then release them."""
        try:
            async with asyncio.timeout(within_sec):
                await self._all_written()
        except TimeoutError:
            self.hand_back()

    async def _all_written(self) -> None:
        """Not until all handlers have ended: a thread whose task was released may go on."""
        while self.held():
            self._freed.clear()
            await self._freed.wait()

    def expect_stop(self, release_by: float) -> None:
        """Have the heartbeat thread release all tasks then, if the event loop is blocked. From any thread."""
        # An event loop that runs again must not claim what was just released.
        self._stopping = True
        self._process.lease_keeper.release_by(self, release_by)

    def hand_back(self) -> None:
        for run in list(self._running.values()):
            self._stop_run(run, RELEASED, _AGENT_STOPS)

    async def close(self, within_sec: float) -> None:
        """Write the remaining outcomes; give up after this time."""
        try:
            async with asyncio.timeout(within_sec):
                await self._all_written()
                await self._writer.flush()
                await self._spending_reported()
        except TimeoutError:
            if held := self.held():
                text = f"ends while it holds {count(len(held), 'task')}; their leases will expire"
            else:
                text = "ends before it could report what its last tasks have spent"
            _log.warning("%s: %s", self.agent_id, text)
            for run in held:
                # What couldn't be written must at least be seen.
                self.task_log.ended(run, None)
        await self._process.lease_keeper.leave(self, at_once=self.error is not None)
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._writer.close()
        self._threads.close()

    async def _spending_reported(self) -> None:
        """Also of abandoned handlers, as far as they have spent by now."""
        if self.error is not None and self.error.code in REFUSED:
            return
        while any(run.has_unreported_spending for run in self.to_report()):
            self._freed.clear()
            self._process.lease_keeper.hurry(self, 0.0)
            await self._freed.wait()

    # Claiming.

    async def _claim_on(self) -> None:
        async with self.backend.waiter(self.agent_id, self._own) as waiter:
            await self._claim_until_stopped(waiter)

    async def _claim_until_stopped(self, waiter: WorkWaiter) -> None:
        pauses = 0
        doubts = False
        while not self._stopping:
            try:
                if doubts:
                    # No claim is under way here.
                    released = await self._release_unknown()
                    doubts = not released or self.loop.time() < self._doubts_until
                if await self._claim_and_wait(waiter):
                    return
                pauses = 0
            except Exception as error:  # noqa: BLE001 - logged, or the end of the agent
                if isinstance(error, LineshaftError) and not (error.retryable or _is_server_fault(error)):
                    self._end_with(error)
                    return
                # Once per outage: it is tried again every few seconds.
                level = logging.WARNING if self._failing_since is None else logging.DEBUG
                _log.log(level, "%s: can't claim: %s", self.agent_id, error)
                self._failing_since = self._failing_since or self.loop.time()
                doubts = True
                self._doubts_until = self.loop.time() + self.interval_sec
                pause = min(_FIRST_PAUSE_SEC * 2**pauses, _LONGEST_PAUSE_SEC)
                pauses = min(pauses + 1, 10)
                await self._pause(pause * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            self._nudged.clear()
        # The task that woke it is for another agent.
        waiter.pass_on()

    async def _release_unknown(self) -> bool:
        """A claim whose response was lost may have been carried out. It would use an attempt.

        False: not now, because a claim is under way together with a completion.
        """
        if self._writer.claiming:
            return False
        self._claims_alone = True
        try:
            number = await self.backend.release_unknown(
                self.agent_id, self.presence.incarnation, list(self._running)
            )
        finally:
            self._claims_alone = False
        if number:
            _log.info("%s: released %d tasks whose claim it never received", self.agent_id, number)
        return True

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless there is a reason to look again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._nudged.wait()

    async def _claim_and_wait(self, waiter: WorkWaiter) -> bool:
        """One round; True: everything is drained."""
        while self._slots - len(self._running) < self._worth_claiming():
            self._freed.clear()
            await self._freed.wait()
            if self._stopping:
                return False
        before = self._process.activity
        found = await self._claim(waiter)
        if self._failing_since is not None:
            waited = duration(self.loop.time() - self._failing_since)
            self._failing_since = None
            _log.info("%s: can claim again, after %s", self.agent_id, waited)
        if found:
            return False
        if self._stopping:
            return False
        if self._drain_within is not None and not self._running and not self._writer.busy:
            retries = await self.backend.retry_within(list(self._handlers), self._drain_within)
            if retries.due_sec is not None:
                await self._wait_for_retry(waiter, retries, retries.due_sec)
                return False
            # Once more: a task that was postponed at the first look may have become READY before the second.
            await self._claim(waiter)
            if self._process.all_idle(self, before):
                await self._report_left(self._drain_within)
                return True
        self._process.found_nothing(self._interest)
        await self._wait(waiter)
        return False

    async def _wait_for_retry(self, waiter: WorkWaiter, retries: DueRetries, due_sec: float) -> None:
        """Wait until a retry is due, or for other work."""
        due_at = self.loop.time() + due_sec
        if abs(due_at - self._reported_due_at) > _SAME_RETRY_SEC:
            self._reported_due_at = due_at
            _log.info("%s: waiting: %s", self.agent_id, waiting_text(retries))
        if due_sec > 0:
            await self._wait(waiter, due_sec)
        if self.loop.time() >= due_at:
            await self.backend.maintain()

    async def _report_left(self, waited_sec: float) -> None:
        try:
            text = left_text(await self.backend.left_behind(list(self._handlers)))
        except UnavailableError as error:
            _log.debug("What agent %s leaves behind is unknown: %s", self.agent_id, error)
            return
        if text:
            # A caller that waits for no retries expects some to be left.
            level = logging.WARNING if waited_sec else logging.INFO
            _log.log(level, "%s: nothing to do now. Left behind: %s", self.agent_id, text)

    async def _wait(self, waiter: WorkWaiter, at_most_sec: float = math.inf) -> None:
        """Wait until there is a reason to look for work, and start the tasks that the wait has claimed."""
        until = self.loop.time() + at_most_sec
        while not self._nudged.is_set() and (left := until - self.loop.time()) > 0:
            types, room = self._wanted()
            pause = min(self._poll_pause(), left)
            self._waiter = waiter
            try:
                found = await waiter.wait(pause, types=types, limit=room)
            finally:
                self._waiter = None
            if found is not None:
                if found:
                    self._process.activity += 1
                # The claim was made at most one round trip ago.
                claimed_at = self.loop.time() - self._round_trip_sec
                for assignment in found:
                    self._start(assignment, claimed_at)
                return
            # Of agents with the same interest, one looks for all.
            if not self._process.looked_since(self._interest, _RECENT_SHARE * pause):
                return

    def _poll_pause(self) -> float:
        interval = self.backend.poll_interval_sec
        # Spread, so that agents that were started together don't ask together.
        return (self._own.poll_interval_sec if interval is None else interval) * random.uniform(0.8, 1.0)  # noqa: S311

    def _wanted(self) -> tuple[list[str], int]:
        """The types to claim, and how many tasks, so that no handler exceeds its limit."""
        limited = [handler for handler in self._limited if self._room_of(handler) > 0]
        types = [*self._unlimited, *(handler.type for handler in limited)]
        room = min(self._slots - len(self._running), self._batch)
        return types, max(min([room, *(self._room_of(handler) for handler in limited)]), 1)

    async def _claim(self, waiter: WorkWaiter) -> bool:
        """Claim and start; whether there may be more."""
        limited = [handler for handler in self._limited if self._room_of(handler) > 0]
        if limited:
            # The best of all types first: unlimited types alone could fill all slots.
            types, room = self._wanted()
            if not await self._claim_types(types, room, waiter):
                self._decline_unless(limited, waiter)
                return False
        room = min(self._slots - len(self._running), self._batch)
        full = bool(self._unlimited) and await self._claim_types(self._unlimited, room, waiter)
        for handler in limited:
            full = await self._claim_types([handler.type], self._room_of(handler), waiter) or full
        if not full:
            self._decline_unless(limited, waiter)
        return full

    def _decline_unless(self, has_room: Sequence[Handler], waiter: WorkWaiter) -> None:
        """The task that woke it may be for a handler at its limit: another agent may take it."""
        if len(has_room) < len(self._limited):
            waiter.decline()

    def _room_of(self, handler: Handler) -> int:
        """How many more tasks a handler with a limit may take."""
        free = (handler.concurrency or 0) - self._running_of[handler.type]
        return min(free, self._slots - len(self._running), self._batch)

    async def _claim_types(self, types: list[str], room: int, waiter: WorkWaiter) -> bool:
        if room <= 0:
            return False
        asked_at = self.loop.time()
        asking: Awaitable[list[Assignment[ClaimedTask]]] = self._ask(types, room)
        while True:
            assignments = await asking
            full = len(assignments) == room
            if full:
                waiter.pass_on()
            started_at, asked_at = asked_at, self.loop.time()
            # Handlers with a limit have their turn first.
            goes_on = full and not self._limited and not self._stopping
            if goes_on and self._slots - len(self._running) - len(assignments) >= self._batch < self._slots:
                # The database finds the next ones while these are started.
                room = self._batch
                asking = self.loop.create_task(self._ask(types, room))
                await asyncio.sleep(0)
            else:
                goes_on = False
            for assignment in assignments:
                self._start(assignment, started_at)
            if not goes_on:
                return full

    def _worth_claiming(self) -> int:
        """How many slots must be free: one, unless more will be soon, as a call for one costs as much."""
        return self._batch if self._writer.writing >= self._batch else 1

    async def _ask(self, types: list[str], room: int) -> list[Assignment[ClaimedTask]]:
        asked_at = self.loop.time()
        assignments = await self.backend.claim(
            self.agent_id, self.presence.incarnation, limit=room, types=types
        )
        self._round_trip_sec = self.loop.time() - asked_at
        if assignments:
            self._process.activity += 1
        return assignments

    def next_types(self) -> list[str] | None:
        """The types of the task to take together with a completion; None: none."""
        # A handler with a limit needs its free slots counted, while no other claim is on its way.
        if self._stopping or self._limited or self._claims_alone or len(self._running) > self._slots:
            return None
        return self._unlimited

    def take(self, assignments: Sequence[Assignment[ClaimedTask]], asked_at: float) -> None:
        """Start what was claimed together with a completion."""
        self._process.activity += 1
        self._round_trip_sec = self.loop.time() - asked_at
        for assignment in assignments:
            self._start(assignment, asked_at)

    # Running.

    def _start(self, assignment: Assignment[ClaimedTask], asked_at: float) -> None:
        task = assignment.task
        handler = self._handlers[task.type]
        limit = handler.time_limit_sec
        # The task's limit counts from its claim, which comes after the request: it never ends too late.
        deadline = asked_at + (task.limit_sec if limit is None else min(task.limit_sec, limit))
        if (lost := self._running.get(task.id)) is not None:
            # It was taken back, and this agent got it again.
            self._stop_run(lost, NOTHING, "the claim was lost")
        run = Run(assignment, handler, self, deadline)
        self._running[task.id] = run
        if handler.concurrency is not None:
            self._running_of[task.type] += 1
        if run.interval_sec < self.interval_sec:
            self._process.lease_keeper.hurry(self, run.interval_sec)
        if self._watchdog is None or deadline < self._watchdog.when():
            self._watch(deadline)
        if large_data.has_large_data(assignment):
            run.task = self.loop.create_task(self._load(run))
        else:
            self._call(run)

    async def _load(self, run: Run) -> None:
        """Read large data of earlier attempts and other tasks before the handler runs."""
        try:
            execution = run.execution
            execution.receive(
                await large_data.with_large_data(self.backend, execution.assignment, execution.is_gone)
            )
        except BaseException as error:
            if self.loop.is_closed():
                raise
            self._ended(run, None, error)
            return
        run.task = None
        self._call(run)

    def _call(self, run: Run) -> None:
        handler, assignment = run.handler, run.execution.assignment
        task = assignment.task
        try:
            args, kwargs = handler.arguments(task.spec, assignment.inputs_json, task.inputs)
        except Exception as error:  # noqa: BLE001 - user types may raise anything
            text = str(error) if isinstance(error, InvalidInputError) else describe(error)
            run.error = error
            self._report(run, with_traceback(failed(text, FailureCategory.INVALID_INPUT), error))
            return
        self.task_log.started(run)
        if handler.takes_context:
            args = (run.context, *args)
        if handler.is_async:
            run.task = self.loop.create_task(self._run(run, args, kwargs))
        else:
            try:
                run.thread = self._threads.submit(partial(handler.function, *args, **kwargs))
            except RuntimeError as error:
                # The system can't start another thread.
                self._report(run, failed(str(error), FailureCategory.CRASH))
                return
            run.thread.add_done_callback(partial(self._thread_ended, run))

    async def _run(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            value = await run.handler.function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # anything that a handler raises is its outcome
            if self.loop.is_closed():
                raise
            self._ended(run, None, error)
        else:
            self._ended(run, value, None)

    def _thread_ended(self, run: Run, thread: "Future[Any]") -> None:
        # From the handler's thread.
        error = thread.exception()
        value = None if error is not None else thread.result()
        try:
            self.loop.call_soon_threadsafe(self._ended, run, value, error)
        except RuntimeError:
            _log.debug("The handler of %s ended after its agent", run.id)

    def _ended(self, run: Run, value: Any, error: BaseException | None) -> None:
        run.task = run.thread = None
        if run.reported:
            # It was abandoned before: only its slot was still taken, unless the outcome is being written.
            if run.written:
                self._free(run)
            return
        try:
            outcome = run.outcome(value, error)
        except Exception as unclear:  # noqa: BLE001 - logged, and reported as the outcome
            # Objects that a handler returns may raise in any method.
            _log.exception("Reading the outcome of %s failed", run.id)
            outcome = failed(describe(error or unclear), FailureCategory.CRASH)
        run.error = error
        data = run.unsaved_state() if outcome.is_postponed else outcome.output
        if data is not None and len(data) > MAX_INLINE_BYTES:
            run.task = self.loop.create_task(self._store(run, outcome))
            return
        self._report(run, outcome)

    async def _store(self, run: Run, outcome: Outcome) -> None:
        """Store a large output or state as an artifact, and report the reference."""
        try:
            if outcome.output is not None:
                outcome = replace(outcome, output=await run.execution.stored("output.json", outcome.output))
            else:
                await run.execution.store_state()
        except BaseException as error:
            if self.loop.is_closed():
                raise
            self._ended(run, None, error)
            return
        run.task = None
        if run.reported:
            if run.written:
                self._free(run)
            return
        self._report(run, outcome)

    def _report(self, run: Run, outcome: Outcome) -> None:
        run.reported = outcome
        self._writer.put(run, outcome)

    def _written(self, run: Run, moved: Moved | None) -> None:
        run.written = True
        self.task_log.ended(run, moved)
        self._process.activity += 1
        if moved is not None and moved.status in _POSTPONED:
            self._process.expect_due()
        if run.task is None and run.thread is None:
            if moved is not None:
                # The outcome has reported it.
                run.known_spent = run.spent
            self._free(run)
        else:
            # A claim that waits for outcomes to be written must look again: this slot is still taken.
            self._freed.set()

    def _free(self, run: Run) -> None:
        if self._running.get(run.id) is run:
            del self._running[run.id]
        if run.has_unreported_spending:
            self._owing.add(run)
            self.hurry()
        self._freed.set()
        if run.handler.concurrency is not None:
            self._running_of[run.handler.type] -= 1
            self.nudge()
        elif self._has_budget:
            # Its reservation may pay for another task.
            self.nudge()
        if not self._running and self._drain_within is not None:
            self.nudge()

    # Stopping single tasks.

    def _stop_run(self, run: Run, verdict: Outcome, why: str) -> None:
        # Only once: a handler that is saving its state must not be cancelled again.
        if run.reported or (run.verdict is not None and verdict is not NOTHING):
            return
        run.stop(verdict, why)
        if run.thread is not None and verdict is not RELEASED:
            # A thread can't be stopped. Its context raises on the next call; the outcome doesn't wait for it.
            self._report(run, verdict)
        else:
            # A thread whose task would go on elsewhere has the same time to end as a coroutine.
            patience = max(_PATIENCE_SEC, run.handler.patience_sec)
            self.loop.call_later(patience, self._give_up, run, verdict)

    def _give_up(self, run: Run, verdict: Outcome) -> None:
        if not run.reported:
            _log.warning("The handler of %s ignores its cancellation and is abandoned", run.id)
            self._report(run, verdict)

    def _watch(self, when: float) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = self.loop.call_at(when, self._look_for_overdue) if when != float("inf") else None

    def _look_for_overdue(self) -> None:
        now = self.loop.time()
        self._watchdog = None
        first = float("inf")
        for run in list(self._running.values()):
            if run.reported:
                continue
            if run.deadline <= now:
                if run.verdict is None:
                    own, limit = run.handler.time_limit_sec, run.execution.task.limit_sec
                    if own is not None and own < limit:
                        text = f"Timed out after {own:.10g} s (handler time limit)"
                    else:
                        text = timed_out(limit)
                    self._stop_run(run, failed(text, FailureCategory.TIMEOUT), text)
            else:
                first = min(first, run.deadline)
        self._watch(first)

    # Answers to heartbeats, from their thread.

    def held(self) -> Collection[Run]:
        return [run for run in self._running.copy().values() if not run.written]

    def to_report(self) -> Collection[Run]:
        # Held claims last: a server answers by task, and a task whose claim was lost may be held again.
        abandoned = (run for run in self._running.copy().values() if run.written)
        owing = [run for run in (*self._owing.copy(), *abandoned) if run.has_unreported_spending]
        return [*owing, *self.held()]

    def on_spending_known(self) -> None:
        self._soon(self._forget_reported)

    def _forget_reported(self) -> None:
        self._owing = {run for run in self._owing if run.has_unreported_spending}
        self._freed.set()

    def on_claim_over(self, task_id: str, epoch: int, answer: str, reason: str | None) -> None:
        run = self._running.get(task_id)
        if run is None or run.epoch != epoch or run.reported:
            return
        if reason is not None:
            self._soon(self._over_limit, run, reason)
            return
        why = "the task was cancelled" if answer == "cancel" else "the claim was lost"
        # At once: the event loop may be blocked by the handler that has to stop.
        run.execution.end(why, gone=True)
        self._soon(self._stop_run, run, NOTHING, why)

    def _over_limit(self, run: Run, reason: str) -> None:
        """The claim is held, but must be given up: the attempt fails, or waits for money."""
        text = over_limit_text(reason, run.spent.cost_usd)
        verdict = failed(text, FailureCategory.BUDGET_EXCEEDED) if reason in OWN_LIMITS else RELEASED
        self._stop_run(run, verdict, text)

    def on_released(self, task_id: str, epoch: int) -> None:
        run = self._running.get(task_id)
        if run is not None and run.epoch == epoch:
            run.claim_ended(_AGENT_STOPS)
            run.written = True
            self._soon(self._stop_run, run, NOTHING, _AGENT_STOPS)

    def on_refused(self, error: LineshaftError) -> None:
        # At once: the event loop may be blocked by a handler.
        for run in self.held():
            run.execution.end(_REFUSED_TO_WORK, gone=True)
        self._soon(self._end_with, error)

    def on_status(self, status: str | None) -> None:
        if status is None:
            self.on_refused(
                SupersededError(
                    f"Instance {self._own.instance!r} of agent {self.agent_id!r} was registered again or was "
                    f"reported as dead: this process, incarnation {self.presence.incarnation}, must stop."
                )
            )

    def on_slots(self, slots: int) -> None:
        if slots != self._slots:
            self._soon(self._change_slots, slots)

    def on_slowdown(self, until: datetime | None) -> None:
        self.slowdown_until = until

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            _log.debug("Agent %s has ended already", self.agent_id)

    def _end_with(self, error: LineshaftError) -> None:
        """End the agent; at once if it was superseded or is refused, as it can't write outcomes then."""
        if self.error is not None:
            return
        self.error = error
        self.stop_claiming()
        if not (isinstance(error, SupersededError) or error.code in REFUSED):
            return
        for run in list(self._running.values()):
            self._stop_run(run, NOTHING, _REFUSED_TO_WORK)
        self.loop.call_later(_HURRIED_PATIENCE_SEC, self._cancel_again)
        if self._waiter is not None and self._claims is not None:
            # A server that refuses this agent would not end its long poll when asked.
            self._claims.cancel()

    def _cancel_again(self) -> None:
        """Handlers may have time to stop, such as that between SIGTERM and SIGKILL; this ends it."""
        for run in list(self._running.values()):
            if run.task is not None:
                run.task.cancel()
        self.loop.call_later(_HURRIED_PATIENCE_SEC, self._abandon_all)

    def _abandon_all(self) -> None:
        for run in list(self._running.values()):
            if not run.reported:
                self._report(run, NOTHING)

    # For executions.

    def hurry(self) -> None:
        self._process.lease_keeper.hurry(self)

    async def in_thread(self, function: Callable[[], T]) -> T:
        result: T = await asyncio.wrap_future(self._threads.submit(function))
        return result


def _is_server_fault(error: LineshaftError) -> bool:
    """Whether it is a defect of the server or a proxy, which may be fixed soon."""
    return error.code == LineshaftError.code
