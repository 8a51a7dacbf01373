"""One claimed task in the hands of an agent, from its start until its outcome is written."""

import asyncio
from concurrent.futures import Future
from decimal import Decimal
from typing import Any

from lineshaft.agent.context import Surroundings, SyncTaskContext, TaskContext
from lineshaft.agent.handlers import Handler
from lineshaft.agent.outcome import NOTHING, AttemptCancelled, Outcome, Verdict, of_exception, of_value
from lineshaft.types.work import Assignment, ClaimRef, Spent


class Run:
    __slots__ = (
        "_verdict",
        "claim",
        "context",
        "deadline",
        "handler",
        "id",
        "interval_sec",
        "reported",
        "task",
        "thread",
        "written",
    )

    def __init__(
        self, assignment: Assignment, handler: Handler, agent: Surroundings, deadline: float
    ) -> None:
        claimed = assignment.task
        self.id = claimed.id
        self.claim = ClaimRef(claimed.id, claimed.epoch)
        self.handler = handler
        self.context = (TaskContext if handler.is_async else SyncTaskContext)(assignment, agent)
        self.interval_sec = claimed.heartbeat_interval_sec
        #: By the event loop's clock.
        self.deadline = deadline
        self.task: asyncio.Task[None] | None = None
        self.thread: Future[Any] | None = None
        #: The outcome is on its way, or there is none to write.
        self.reported = False
        #: ... and has arrived, so that the claim needs no heartbeats any more.
        self.written = False
        self._verdict: Outcome | None = None

    # For heartbeats, which come from another thread.

    @property
    def epoch(self) -> int:
        return self.claim.epoch

    @property
    def cost_usd(self) -> Decimal:
        return self.context.spent_usd

    def take_progress(self) -> bytes | None:
        return self.context.take_progress()

    def put_back_progress(self, progress: bytes) -> None:
        self.context.put_back_progress(progress)

    # For the agent.

    @property
    def spent(self) -> Spent:
        return self.context.spent

    def unsaved_state(self) -> bytes | None:
        return self.context.unsaved_state()

    def stop(self, verdict: Outcome, why: str) -> None:
        """Ask the handler to end; unless it still comes to an end of its own, this is the outcome."""
        if self._verdict is None or self._verdict.verdict is not Verdict.NOTHING:
            self._verdict = verdict
        self.context.end(why, gone=verdict.verdict is Verdict.NOTHING)
        if self.task is not None:
            self.task.cancel()

    @property
    def verdict(self) -> Outcome | None:
        """What was decided about it from outside."""
        return self._verdict

    def outcome(self, value: Any = None, error: BaseException | None = None) -> Outcome:
        """What came of it."""
        if self._verdict is not None and (error is not None or self._verdict.verdict is Verdict.NOTHING):
            return self._verdict
        if isinstance(error, AttemptCancelled) and self.context.cancelled:
            # It was told a moment ago; this agent's loop hears of it next.
            return NOTHING
        if error is not None:
            return of_exception(error)
        if self.context.paused:
            # It caught what should have unwound it, and went on.
            return of_exception(self.context.paused)
        return of_value(value, self.context.artifacts)
