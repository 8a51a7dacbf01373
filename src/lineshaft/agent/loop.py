"""The work of one agent: claim what there is room for, run it, hand in what comes of it, wait for more."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar

from lineshaft.agent.handlers import Handler
from lineshaft.agent.outcome import NOTHING, RELEASED, Outcome, Verdict, describe, failed
from lineshaft.agent.process_group import AgentProcess
from lineshaft.agent.run import Run
from lineshaft.agent.threads import Threads
from lineshaft.agent.writer import Writer
from lineshaft.client.backend import Backend, Idler
from lineshaft.errors import InvalidInputError, LineshaftError, SupersededError
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.types import AgentInfo
from lineshaft.types.work import Assignment, Moved, Presence

T = TypeVar("T")

_log = logging.getLogger("lineshaft.agent")

#: With so many slots, a third of them is filled at a time: one is claimed, one works and one is written.
_MANY_SLOTS = 30
#: A call costs as much as some fifty tasks in it; more at once would only start later what is there already.
_MOST_AT_ONCE = 500
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.1, 5.0
#: A handler that was told to end has this long before it is given up on, unless it says that it needs longer.
_PATIENCE_SEC = 2.0
#: A look of another, made within this share of the time between two looks, is as good as one's own.
_SOME = 0.8
#: Something is due for these by itself, or a gate is to be run: the upkeep shall not wait for its turn.
_PUT_OFF = frozenset({Status.RETRYING, Status.PENDING, Status.VALIDATING})


class Worker:
    """One registered incarnation at work, in one event loop; what heartbeats tell comes from a thread."""

    def __init__(
        self,
        backend: Backend,
        view: AgentInfo,
        handlers: Mapping[str, Handler],
        crew: AgentProcess,
        *,
        drain_retries_within_sec: float | None,
    ) -> None:
        self.backend = backend
        self.agent_id = view.id
        self.loop = asyncio.get_running_loop()
        self.presence = Presence(view.id, view.incarnation)
        self.interval_sec = view.heartbeat_interval_sec
        self.slowdown_until: datetime | None = None
        self._view = view
        self._handlers = handlers
        self._crew = crew
        self._drain_within = drain_retries_within_sec
        self._set_slots(view.max_concurrent_tasks)
        self._limited = [handler for handler in handlers.values() if handler.concurrency is not None]
        self._unlimited = [handler.type for handler in handlers.values() if handler.concurrency is None]
        # One with a budget may be unable to afford what others can.
        alone = view.id if view.budget_usd is not None else None
        self._interest = (
            alone,
            frozenset(handlers),
            frozenset(view.capabilities),
            tuple(view.models_available),
        )
        self._running: dict[str, Run] = {}
        self._running_of: Counter[str] = Counter()
        self._writer = Writer(backend, self._written)
        self._threads = Threads(f"lineshaft {view.id}")
        self._freed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        #: It waits, and may be interrupted.
        self._waits = False
        self._nudged = False
        self._stopping = False
        self._error: Exception | None = None
        self._claims: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    # The life of a worker.

    async def work(self) -> None:
        """Until it is stopped, superseded, or (when draining) nothing is left to do."""
        self._writer.start()
        self._crew.heart.enter(self)
        self._claims = asyncio.create_task(self._claim_on(), name=f"lineshaft claims {self.agent_id}")
        try:
            await asyncio.wait({self._claims})
        finally:
            self._stopping = True
            self.nudge()
            await asyncio.wait({self._claims})
        if not self._claims.cancelled():
            self._claims.result()
        if self._error is not None:
            raise self._error

    def stop_claiming(self) -> None:
        self._stopping = True
        self.nudge()

    def nudge(self) -> None:
        """End a wait for work: there is a reason to look again."""
        self._nudged = True
        self._freed.set()
        if self._claims is not None and self._waits:
            self._waits = False
            self._claims.cancel()

    def _set_slots(self, slots: int) -> None:
        self._slots = slots
        self._batch = min(slots if slots < _MANY_SLOTS else slots // 3, _MOST_AT_ONCE)

    def _change_slots(self, slots: int) -> None:
        _log.info("Agent %s may hold %d tasks from now on", self.agent_id, slots)
        self._set_slots(slots)
        self.nudge()

    async def finish(self, within_sec: float) -> None:
        """Let what runs come to its end, but no longer than this; then hand it back."""
        try:
            async with asyncio.timeout(within_sec):
                await self._empty.wait()
        except TimeoutError:
            self.hand_back()

    def hand_back(self) -> None:
        for run in list(self._running.values()):
            self._stop_run(run, RELEASED, "the agent stops")

    async def close(self, within_sec: float) -> None:
        """Write what is still to be written; give up after a while."""
        try:
            async with asyncio.timeout(within_sec):
                await self._empty.wait()
                await self._writer.flush()
        except TimeoutError:
            _log.warning(
                "Agent %s ends with %d tasks in its hands; their leases run out",
                self.agent_id,
                len(self._running),
            )
        await self._crew.heart.leave(self)
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._writer.close()
        self._threads.close()

    # Claiming.

    async def _claim_on(self) -> None:
        idling = await self.backend.idler(self._view)
        with idling as idler:
            pauses = 0
            while not self._stopping:
                try:
                    if await self._claim_and_wait(idler):
                        return
                    pauses = 0
                except SupersededError as error:
                    self._supersede(error)
                    return
                except Exception as error:
                    if isinstance(error, LineshaftError) and not (error.retryable or _is_a_defect(error)):
                        raise
                    _log.warning("Agent %s can't claim: %s", self.agent_id, error)
                    pause = min(_FIRST_PAUSE_SEC * 2**pauses, _LONGEST_PAUSE_SEC)
                    pauses = min(pauses + 1, 10)
                    await self._wait(asyncio.sleep(pause * random.uniform(0.5, 1.0)))  # noqa: S311 - no secret
                self._nudged = False
            # What woke it is for another.
            idler.pass_on()

    def _is_nudged(self) -> bool:
        return self._nudged

    async def _wait(self, what: Coroutine[Any, Any, T]) -> T | None:
        """Wait for something, unless there is a reason to look again: then None."""
        if self._is_nudged():
            what.close()
            return None
        self._waits = True
        try:
            return await what
        except asyncio.CancelledError:
            if not self._is_nudged():
                raise
            if (current := asyncio.current_task()) is not None:
                current.uncancel()
            return None
        finally:
            self._waits = False

    async def _claim_and_wait(self, idler: Idler) -> bool:
        """One round; True: everything is drained."""
        while self._slots - len(self._running) < self._worth_asking():
            self._freed.clear()
            await self._freed.wait()
            if self._stopping:
                return False
        before = self._crew.activity
        if await self._claim(idler):
            return False
        if self._stopping:
            return False
        if self._drain_within is not None and not self._running and not self._writer.busy:
            soon = await self.backend.retry_within(list(self._handlers), self._drain_within)
            if soon is not None:
                await self._wait(asyncio.sleep(max(soon, 0.0)))
                await self.backend.upkeep()
                return False
            # Once more: what was put off when it looked first may have become READY before it looked second.
            await self._claim(idler)
            if self._crew.all_idle(self, before):
                return True
        self._crew.found_nothing(self._interest)
        # Of agents that may take the same, one looks for all.
        while await self._wait(idler.wait(self._poll_pause())) is False:
            if not self._crew.looked_since(self._interest, _SOME * self._poll_pause()):
                break
        return False

    def _poll_pause(self) -> float:
        told = self.backend.poll_interval_sec
        # Spread: agents that were started together need not ask together.
        return (self._view.poll_interval_sec if told is None else told) * random.uniform(0.8, 1.0)  # noqa: S311

    async def _claim(self, idler: Idler) -> bool:
        """Claim and start; whether there may be more to be had."""
        limited = [handler for handler in self._limited if self._room_of(handler) > 0]
        if limited:
            # The best of all first, as many as each of these may take: the others alone could fill all slots.
            room = min(self._room_of(handler) for handler in limited)
            types = [*self._unlimited, *(handler.type for handler in limited)]
            if not await self._claim_types(types, room, idler):
                self._decline_unless(limited, idler)
                return False
        room = min(self._slots - len(self._running), self._batch)
        full = bool(self._unlimited) and await self._claim_types(self._unlimited, room, idler)
        for handler in limited:
            full = await self._claim_types([handler.type], self._room_of(handler), idler) or full
        if not full:
            self._decline_unless(limited, idler)
        return full

    def _decline_unless(self, has_room: Sequence[Handler], idler: Idler) -> None:
        """What woke it may be for a handler that is at its limit: another agent may take it."""
        if len(has_room) < len(self._limited):
            idler.decline()

    def _room_of(self, handler: Handler) -> int:
        """Of one with a limit of its own."""
        free = (handler.concurrency or 0) - self._running_of[handler.type]
        return min(free, self._slots - len(self._running), self._batch)

    async def _claim_types(self, types: list[str], room: int, idler: Idler) -> bool:
        if room <= 0:
            return False
        asked_at = self.loop.time()
        asking: Awaitable[list[Assignment]] = self._ask(types, room)
        while True:
            assignments = await asking
            full = len(assignments) == room
            if full:
                idler.pass_on()
            started_at, asked_at = asked_at, self.loop.time()
            # Not before handlers with a limit of their own have had their turn.
            goes_on = full and not self._limited and not self._stopping
            if goes_on and self._slots - len(self._running) - len(assignments) >= self._batch < self._slots:
                # The database looks for the next while these are started.
                room = self._batch
                asking = self.loop.create_task(self._ask(types, room))
                await asyncio.sleep(0)
            else:
                goes_on = False
            for assignment in assignments:
                self._start(assignment, started_at)
            if not goes_on:
                return full

    def _worth_asking(self) -> int:
        """How many slots must be free. One, unless more will be in a moment: a call for one costs as much."""
        return self._batch if self._writer.writing >= self._batch else 1

    async def _ask(self, types: list[str], room: int) -> list[Assignment]:
        assignments = await self.backend.claim(
            self.agent_id, self.presence.incarnation, limit=room, types=types
        )
        if assignments:
            self._crew.activity += 1
        return assignments

    # Running.

    def _start(self, assignment: Assignment, asked_at: float) -> None:
        task = assignment.task
        handler = self._handlers[task.type]
        limit = handler.time_limit_sec
        # The task's own counts from its claim, which came after the question: it never ends too late here.
        deadline = asked_at + (task.limit_sec if limit is None else min(task.limit_sec, limit))
        if (lost := self._running.get(task.id)) is not None:
            # It was taken back, and nobody could tell.
            self._stop_run(lost, NOTHING, "the claim was lost")
        run = Run(assignment, handler, self, deadline)
        self._running[task.id] = run
        self._empty.clear()
        if handler.concurrency is not None:
            self._running_of[task.type] += 1
        if run.interval_sec < self.interval_sec:
            self._crew.heart.hurry(self, run.interval_sec)
        if self._watchdog is None or deadline < self._watchdog.when():
            self._watch(deadline)
        try:
            args, kwargs = handler.arguments(task.spec)
        except Exception as error:  # noqa: BLE001 - types of others may raise anything
            text = str(error) if isinstance(error, InvalidInputError) else describe(error)
            self._report(run, failed(text, FailureCategory.INVALID_INPUT))
            return
        if handler.takes_context:
            args = (run.context, *args)
        if handler.is_async:
            run.task = self.loop.create_task(self._run(run, args, kwargs))
        else:
            try:
                run.thread = self._threads.submit(partial(handler.function, *args, **kwargs))
            except RuntimeError as error:
                # The system has no thread left for it.
                self._report(run, failed(str(error), FailureCategory.CRASH))
                return
            run.thread.add_done_callback(partial(self._thread_ended, run))

    async def _run(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            value = await run.handler.function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a handler raises is its outcome
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
            # It was given up on before: only its slot was still taken, unless the outcome is on its way.
            if run.written:
                self._free(run)
            return
        try:
            outcome = run.outcome(value, error)
        except Exception as unclear:  # noqa: BLE001 - logged, and told as the outcome
            # What a handler gives may answer any question with an error.
            _log.exception("It can't be told what came of %s", run.id)
            outcome = failed(describe(error or unclear), FailureCategory.CRASH)
        if outcome.verdict is Verdict.FAIL and error is not None and run.verdict is None:
            _log.info("Task %s failed: %s", run.id, outcome.error, exc_info=error)
        self._report(run, outcome)

    def _report(self, run: Run, outcome: Outcome) -> None:
        run.reported = True
        self._writer.put(run, outcome)

    def _written(self, run: Run, moved: Moved | None) -> None:
        run.written = True
        self._crew.activity += 1
        if moved is not None and moved.status in _PUT_OFF:
            self._crew.expect_due()
        if run.task is None and run.thread is None:
            self._free(run)
        else:
            # Who waits because more was being written must look again: this slot is still taken.
            self._freed.set()

    def _free(self, run: Run) -> None:
        if self._running.get(run.id) is run:
            del self._running[run.id]
        self._freed.set()
        if run.handler.concurrency is not None:
            self._running_of[run.handler.type] -= 1
            self.nudge()
        elif self._view.budget_usd is not None:
            # What it had reserved may pay for another.
            self.nudge()
        if not self._running:
            self._empty.set()
            if self._drain_within is not None:
                self.nudge()

    # Stopping single tasks.

    def _stop_run(self, run: Run, verdict: Outcome, why: str) -> None:
        # Once: a handler that is saving its state must not be cancelled again.
        if run.reported or (run.verdict is not None and verdict is not NOTHING):
            return
        run.stop(verdict, why)
        if run.thread is not None:
            # A thread can't be stopped. It finds out when it next asks; the outcome doesn't wait for it.
            self._report(run, verdict)
        else:
            patience = max(_PATIENCE_SEC, run.handler.patience_sec)
            self.loop.call_later(patience, self._give_up, run, verdict)

    def _give_up(self, run: Run, verdict: Outcome) -> None:
        if not run.reported and run.task is not None:
            _log.warning("The handler of %s doesn't heed its cancellation; it is left to itself", run.id)
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
                    limit = run.handler.time_limit_sec
                    text = "It took longer than it may" + (
                        f" (the handler's limit is {limit:g} s)" if limit else ""
                    )
                    self._stop_run(run, failed(text, FailureCategory.TIMEOUT), text)
            else:
                first = min(first, run.deadline)
        self._watch(first)

    # What heartbeats tell, from their thread.

    def held(self) -> Collection[Run]:
        return [run for run in self._running.copy().values() if not run.written]

    def told(self, task_id: str, epoch: int, answer: str) -> None:
        run = self._running.get(task_id)
        if run is None or run.epoch != epoch or run.reported:
            return
        why = "the task was cancelled" if answer == "cancel" else "the claim was lost"
        # At once: the event loop may be blocked by the very handler that should hear of it.
        run.execution.end(why, gone=True)
        self._soon(self._stop_run, run, NOTHING, why)

    def told_status(self, status: str | None) -> None:
        if status is None:
            error = SupersededError(
                f"Agent {self.agent_id!r} was registered again elsewhere: incarnation "
                f"{self.presence.incarnation} must stop."
            )
            self._soon(self._supersede, error)
        elif status == "offline":
            # It was, until this heartbeat: its claims found nothing.
            self._soon(self.nudge)

    def told_slots(self, slots: int) -> None:
        if slots != self._slots:
            self._soon(self._change_slots, slots)

    def told_slowdown(self, until: datetime | None) -> None:
        self.slowdown_until = until

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            _log.debug("Agent %s has ended already", self.agent_id)

    def _supersede(self, error: SupersededError) -> None:
        if self._error is None:
            self._error = error
        for run in list(self._running.values()):
            self._stop_run(run, NOTHING, "the agent was superseded")
        self.stop_claiming()

    # What executions need.

    def hurry(self) -> None:
        self._crew.heart.hurry(self)

    def unbooked(self, dag_id: str | None) -> tuple[Decimal, Decimal]:
        runs = self._running.copy().values()
        agent = sum((run.execution.unreserved_usd for run in runs), Decimal(0))
        if dag_id is None:
            return agent, Decimal(0)
        return agent, sum(
            (run.execution.unreserved_usd for run in runs if run.execution.live_dag_id == dag_id), Decimal(0)
        )

    async def in_thread(self, function: Callable[[], T]) -> T:
        result: T = await asyncio.wrap_future(self._threads.submit(function))
        return result


def _is_a_defect(error: LineshaftError) -> bool:
    """Of the server, or of what is in between: no refusal; it may be repaired any minute."""
    return error.code == LineshaftError.code
