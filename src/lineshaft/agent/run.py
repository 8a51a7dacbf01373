"""One claimed task in an agent, from its start until its outcome is written."""

import asyncio
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

from lineshaft.agent.context import SyncTaskContext, TaskContext
from lineshaft.agent.execution import Execution, Host
from lineshaft.agent.handlers import Handler
from lineshaft.agent.outcome import (
    NOTHING,
    AttemptCancelled,
    Outcome,
    Verdict,
    of_exception,
    of_value,
    with_traceback,
)
from lineshaft.types.assignments import Assignment
from lineshaft.types.work import UNREPORTED, ClaimedTask, Spent

#: Collects exceptions of handlers by task id, for tests; None: nothing does.
raised: ContextVar[dict[str, BaseException] | None] = ContextVar("lineshaft_raised", default=None)


class Run:
    __slots__ = (
        "_raised",
        "_verdict",
        "claim",
        "context",
        "deadline",
        "error",
        "execution",
        "handler",
        "id",
        "interval_sec",
        "known_spent",
        "reported",
        "started_at",
        "task",
        "thread",
        "written",
    )

    def __init__(
        self, assignment: Assignment[ClaimedTask], handler: Handler, host: Host, deadline: float
    ) -> None:
        claimed = assignment.task
        self.id = claimed.id
        self.claim = assignment.claim
        self.handler = handler
        self.execution = Execution(assignment, host)
        self.context = (TaskContext if handler.is_async else SyncTaskContext)(self.execution)
        self.interval_sec = claimed.heartbeat_interval_sec
        #: Both by the event loop's clock.
        self.started_at = host.loop.time()
        self.deadline = deadline
        self.task: asyncio.Task[None] | None = None
        self.thread: Future[Any] | None = None
        #: What the handler raised.
        self.error: BaseException | None = None
        #: The outcome that is being written, if only that there is none to write.
        self.reported: Outcome | None = None
        #: The outcome is written: the claim needs no more heartbeats.
        self.written = False
        #: What the server knows to be spent.
        self.known_spent = UNREPORTED
        self._verdict: Outcome | None = None
        self._raised = raised.get()

    # For heartbeats, which come from another thread.

    @property
    def epoch(self) -> int:
        return self.claim.epoch

    def take_progress(self) -> bytes | None:
        return self.execution.take_progress()

    def put_back_progress(self, progress: bytes) -> None:
        self.execution.put_back_progress(progress)

    # For the agent.

    @property
    def spent(self) -> Spent:
        return self.execution.spent

    @property
    def has_unreported_spending(self) -> bool:
        return self.spent != self.known_spent

    def unsaved_state(self) -> bytes | None:
        return self.execution.unsaved_state()

    def stop(self, verdict: Outcome, why: str) -> None:
        """Ask the handler to stop; `verdict` is the outcome unless the handler still ends on its own."""
        if self._verdict is None or self._verdict.verdict is not Verdict.NOTHING:
            self._verdict = verdict
        self.execution.end(why, gone=verdict.verdict is Verdict.NOTHING)
        if self.task is not None:
            self.task.cancel()

    def claim_ended(self, why: str) -> None:
        """There is no outcome to write. From any thread; the event loop stops the handler later."""
        self._verdict = NOTHING
        self.execution.end(why, gone=True)

    @property
    def verdict(self) -> Outcome | None:
        """The outcome that was decided from outside."""
        return self._verdict

    def outcome(self, value: Any = None, error: BaseException | None = None) -> Outcome:
        if self._verdict is not None and (error is not None or self._verdict.verdict is Verdict.NOTHING):
            return self._verdict if error is None else with_traceback(self._verdict, error)
        if isinstance(error, AttemptCancelled) and self.execution.over is not None:
            # A heartbeat ended it a moment ago; the event loop handles that next.
            return NOTHING
        if error is not None:
            if self._raised is not None:
                self._raised[self.id] = error
            return of_exception(error)
        if self.execution.paused:
            # The handler caught the ClaimOver and went on.
            return of_exception(self.execution.paused)
        return of_value(value, self.execution.artifacts)
