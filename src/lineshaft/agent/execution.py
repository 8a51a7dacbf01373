"""One claimed task in an agent, from its start until its outcome is written."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec.structs import replace

from lineshaft.agent import steps
from lineshaft.agent.durable_steps import DurableSteps
from lineshaft.agent.handlers import Handler
from lineshaft.agent.lease import ClaimWrites, Lease
from lineshaft.agent.money import Account
from lineshaft.agent.outcome import (
    NOTHING,
    AttemptCancelled,
    Outcome,
    encoded,
    failed,
    of_exception,
    of_value,
    with_traceback,
)
from lineshaft.agent.quotas import Quotas
from lineshaft.agent.threads import Threads
from lineshaft.agent.waits import DurableWaits
from lineshaft.client import large_data
from lineshaft.client.artifacts import Artifacts, Content
from lineshaft.client.backend import Backend
from lineshaft.errors import UnavailableError
from lineshaft.model.retry import FailureCategory
from lineshaft.model.tasks import NewTask
from lineshaft.types import Artifact
from lineshaft.types.assignments import Assignment
from lineshaft.types.data_refs import MAX_INLINE_BYTES
from lineshaft.types.work import SPAWN_STEP, UNREPORTED, Child, ClaimedTask, Moved, Spent, check_progress_size

_log = logging.getLogger("lineshaft.agent.task")

#: The execution whose handler runs here, for libraries that a handler calls without its context.
current: "ContextVar[Execution | None]" = ContextVar("lineshaft_execution", default=None)
#: Collects exceptions of handlers by task id, for tests; None: nothing does.
raised: ContextVar[dict[str, BaseException] | None] = ContextVar("lineshaft_raised", default=None)


class Host:
    """What executions need of the agent that runs them."""

    def __init__(
        self,
        backend: Backend,
        agent_id: str,
        threads: Threads,
        on_news: Callable[["Execution"], None],
        *,
        instance: str = "",
    ) -> None:
        """`on_news` is called from any thread when an execution needs a heartbeat, as to report something.

        `instance`: the name of the agent's process.
        """
        self.backend = backend
        self.agent_id = agent_id
        self.instance = instance
        self.threads = threads
        self.on_news = on_news
        self.loop = asyncio.get_running_loop()
        #: Until when some of the agent's models are slowed down.
        self.slowdown_until: datetime | None = None

    def slow_down(self, until: datetime | None) -> None:
        self.slowdown_until = until


class HandlerState:
    """`ctx.state`: a dict that becomes the checkpoint whenever the task is postponed."""

    __slots__ = ("_saved", "_stored", "_value")

    def __init__(self) -> None:
        #: None: the handler hasn't asked for it.
        self._value: dict[str, Any] | None = None
        #: The JSON with which the state began.
        self._saved = b"{}"
        #: A large state, and the reference to it.
        self._stored = (b"", b"")

    def value(self, last_checkpoint: Any) -> dict[str, Any]:
        """The state, which begins as the last checkpoint if that is a dict."""
        if self._value is None:
            self._value = last_checkpoint if isinstance(last_checkpoint, dict) else {}
            self._saved = encoded(self._value, "state")
        return self._value

    def unsaved(self, log: "logging.LoggerAdapter[logging.Logger]") -> bytes | None:
        """The checkpoint to save when the task is postponed; None: nothing has changed."""
        if self._value is None:
            return None
        try:
            state = encoded(self._value, "state")
        except (ValueError, RuntimeError) as error:  # a thread may still be changing it
            log.warning("Postponing the task without saving a checkpoint: %s", error)
            return None
        if state == self._saved:
            return None
        stored, reference = self._stored
        return reference if state == stored else state

    async def store(self, writes: ClaimWrites, log: "logging.LoggerAdapter[logging.Logger]") -> None:
        """Store a large state as an artifact; `unsaved` returns the reference from then on."""
        state = self.unsaved(log)
        if state is None:
            return
        try:
            self._stored = state, await writes.stored("state.json", state)
        except UnavailableError as error:
            log.warning("Saving the state in the database: %s", error)


class Execution:
    def __init__(
        self,
        assignment: Assignment[ClaimedTask],
        handler: Handler,
        host: Host,
        *,
        asked_at: float,
        deadline: float,
    ) -> None:
        """`asked_at`: when its claim was sent, by the clock of leases.

        `deadline`: when the attempt's time is up, by the event loop's clock.
        """
        self.assignment = assignment
        self.task = assignment.task
        self.claim = assignment.claim
        self.handler = handler
        self.host = host
        self.deadline = deadline
        self.started_at = host.loop.time()
        self.lease = Lease(asked_at, self.task.lease_sec, self.task.limit_sec, ask=lambda: host.on_news(self))
        self.account = Account(self.task.max_cost_usd)
        self._writes = ClaimWrites(host.backend, self.claim, self.lease)
        self.steps = DurableSteps(assignment, self.lease, self.account, self._writes, host.threads)
        self._state = HandlerState()
        self.waits = DurableWaits(self.steps, self.lease, self.account, self._writes, self.unsaved_state)
        self.quotas = Quotas(self.lease, self._writes)
        self.artifacts: list[Any] | None = None
        self._progress: bytes | None = None
        #: What the server knows to be spent.
        self.known_spent = UNREPORTED
        #: The coroutine or thread that works for it now.
        self._work: asyncio.Task[None] | Future[Any] | None = None
        #: The outcome that the agent decided on, unless the handler still ends by itself.
        self.decided: Outcome | None = None
        #: The outcome that is being written, if only that there is none to write.
        self.reported: Outcome | None = None
        #: The outcome is written: the claim needs no more heartbeats.
        self.written = False
        self._error: BaseException | None = None
        self._raised = raised.get()

    @property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        return logging.LoggerAdapter(_log, self.labels)

    @property
    def labels(self) -> dict[str, object]:
        """Fields of every log record about it."""
        task = self.task
        labels = {"task_id": task.id, "task_type": task.type, "agent_id": self.host.agent_id}
        return {**labels, "attempt": task.attempts + 1}

    # The agent runs it.

    async def load(self) -> None:
        """Read large data of earlier attempts and other tasks, before the handler runs."""
        self.assignment = await large_data.with_large_data(
            self.host.backend, self.assignment, self.lease.is_gone
        )
        self.steps.replace(self.assignment.steps)

    def begin(self, work: "asyncio.Task[None] | Future[Any]") -> None:
        self._work = work

    def rest(self) -> None:
        """Its coroutine or thread has ended."""
        self._work = None

    @property
    def is_working(self) -> bool:
        return self._work is not None

    @property
    def is_in_thread(self) -> bool:
        return isinstance(self._work, Future)

    def is_run_by(self, task: "asyncio.Task[Any] | None") -> bool:
        return task is not None and self._work is task

    def stop(self, outcome: Outcome, why: str) -> None:
        """Ask the handler to stop; `outcome` counts unless the handler still ends by itself."""
        if self.decided is not NOTHING:
            self.decided = outcome
        self.lease.end(why, gone=outcome is NOTHING)
        self.cancel()

    def cancel(self) -> None:
        """Cancel the coroutine; a thread can't be stopped."""
        if isinstance(self._work, asyncio.Task):
            self._work.cancel()

    def claim_ended(self, why: str) -> None:
        """There is no outcome to write. From any thread; the event loop stops the handler later."""
        self.decided = NOTHING
        self.lease.end(why, gone=True)
        self.written = True

    def outcome(self, value: Any, error: BaseException | None) -> Outcome:
        """What a handler that has ended with this value or error means."""
        if self.decided is not None and (error is not None or self.decided is NOTHING):
            return self.decided if error is None else with_traceback(self.decided, error)
        if isinstance(error, AttemptCancelled) and self.lease.over is not None:
            # A heartbeat ended it a moment ago; the event loop handles that next.
            return NOTHING
        if error is not None:
            if self._raised is not None:
                self._raised[self.task.id] = error
            return of_exception(error)
        if self.lease.unwinding is not None:
            # The handler caught the ClaimOver and went on.
            return of_exception(self.lease.unwinding)
        outcome = of_value(value, self.artifacts)
        fault = None if outcome.output is None else self.handler.output_fault(outcome.output)
        return outcome if fault is None else failed(fault, FailureCategory.INVALID_OUTPUT)

    def needs_store(self, outcome: Outcome) -> bool:
        """Whether the output, or the state of a postponed task, is too large for the outcome."""
        data = self.unsaved_state() if outcome.is_postponed else outcome.output
        return data is not None and len(data) > MAX_INLINE_BYTES

    async def store(self, outcome: Outcome) -> Outcome:
        """Store a large output or state as an artifact; returns the outcome with the reference."""
        if outcome.output is not None:
            return replace(outcome, output=await self._writes.stored("output.json", outcome.output))
        await self._state.store(self._writes, self.log)
        return outcome

    def keep_error(self, error: BaseException | None) -> None:
        """Keep what the handler raised until it is logged."""
        self._error = error

    def take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error

    def report(self, outcome: Outcome) -> None:
        self.reported = outcome

    def end(self, moved: Moved | None) -> None:
        """Its outcome is written; None: there was nothing to write."""
        self.written = True
        if moved is not None and not self.is_working:
            # The outcome has reported it.
            self.known_spent = self.spent

    # Heartbeats report it, from another thread.

    @property
    def spent(self) -> Spent:
        return self.account.spent

    @property
    def has_unreported_spending(self) -> bool:
        return self.spent != self.known_spent

    def spending_known(self, spent: Spent) -> None:
        """The server knows this much."""
        self.known_spent = spent

    def take_progress(self) -> bytes | None:
        progress, self._progress = self._progress, None
        return progress

    def put_back_progress(self, progress: bytes) -> None:
        """Keep it for the next heartbeat, unless there is newer."""
        if self._progress is None:
            self._progress = progress

    def unsaved_state(self) -> bytes | None:
        """The checkpoint to save when the task is postponed; None: nothing has changed."""
        return self._state.unsaved(self.log)

    # The handler uses it through its context.

    @property
    def state(self) -> dict[str, Any]:
        return self._state.value(self.assignment.checkpoint)

    def report_progress(self, value: Any) -> None:
        json = encoded(value, "progress")
        check_progress_size(json)
        self._progress = json
        self.host.on_news(self)

    def charge(self, usd: Decimal | float | None, tokens_input: int, tokens_output: int) -> Decimal:
        """Report a cost, without a check of limits."""
        amount = self.account.add(usd, tokens_input, tokens_output)
        # The server knows it within a second, whatever becomes of this process.
        self.host.on_news(self)
        return amount

    def spend(self, usd: Decimal | float | None, tokens_input: int, tokens_output: int) -> None:
        amount = self.charge(usd, tokens_input, tokens_output)
        meter = steps.current_meter.get()
        if meter is not None:
            # The step is recorded with its cost first, so that nothing is paid twice.
            meter.cost += amount
        else:
            # The end of the attempt reports the cost.
            self.account.check_limits()

    def name_artifact(self, reference: Any) -> None:
        encoded(reference, "artifact")
        if self.artifacts is None:
            self.artifacts = []
        self.artifacts.append(reference)

    async def put_artifact(self, name: str, content: Content, content_type: str | None) -> Artifact:
        self.lease.check()
        artifact = await self.stored_files.put(name, content, content_type=content_type, task=self.task.id)
        if artifact.ref not in (self.artifacts or ()):
            self.name_artifact(artifact.ref)
        return artifact

    @property
    def stored_files(self) -> Artifacts:
        return Artifacts(self.host.backend)

    async def save_checkpoint(self, data: Any) -> None:
        # Allowed after the handler was asked to stop: that is when there is something to save.
        if self.lease.is_gone():
            self.lease.check()
        await self._writes.save_checkpoint(encoded(data, "checkpoint"))

    async def spawn(self, key: str, tasks: Sequence[NewTask], *, wait: bool) -> list[Child]:
        self.lease.check()
        steps.check_name(key, "spawn")
        recorded = self.steps.recorded.get(SPAWN_STEP + key)
        if recorded is not None:
            ended = self.assignment.children
            children = [ended.get(name) or Child(name) for name in msgspec.json.decode(recorded)]
            if not wait or all(child.ended for child in children):
                return children
        if wait and (state := self.unsaved_state()) is not None:
            await self._writes.save_checkpoint(state)
        spawned = await self._writes.spawn(key, tasks, wait=wait, spent=self.spent)
        if spawned.paused:
            raise self.lease.unwind("the task waits for its children")
        self.steps.recorded[SPAWN_STEP + key] = msgspec.json.encode([child.id for child in spawned.children])
        return spawned.children
