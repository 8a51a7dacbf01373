"""Carries out what heartbeats answer: claims that are over, a new number of slots, a slowdown, a refusal."""

import logging
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

from lineshaft.agent.claim_calls import ClaimCalls
from lineshaft.agent.execution import Execution, Host
from lineshaft.agent.executor import Executor
from lineshaft.agent.lease import CLAIM_LOST
from lineshaft.agent.money import OWN_LIMITS, over_limit_text
from lineshaft.agent.outcome import NOTHING, RELEASED, failed
from lineshaft.agent.stopping import AGENT_STOPS, REFUSED_TO_WORK, Stopper
from lineshaft.errors import LineshaftError, SupersededError
from lineshaft.model.retry import FailureCategory
from lineshaft.types import RegisteredAgent
from lineshaft.types.work import Presence

_log = logging.getLogger("lineshaft.agent")


class Answers:
    """One agent, as the lease keeper sees it. Its methods are called from the thread of heartbeats."""

    def __init__(
        self, view: RegisteredAgent, host: Host, claims: ClaimCalls, executor: Executor, stopper: Stopper
    ) -> None:
        self.presence = Presence(view.id, view.incarnation)
        self._interval_sec = view.own.heartbeat_interval_sec
        #: Where handlers run.
        self.loop = host.loop
        self.thread_id = threading.get_ident()
        self._instance_name = view.own.instance
        self._host = host
        self.slots = claims.slots
        self._claims = claims
        self._executor = executor
        self._stopper = stopper

    @property
    def interval_sec(self) -> float:
        """How often to send heartbeats: a task may have a shorter interval than its agent."""
        return min([self._interval_sec, *(one.task.heartbeat_interval_sec for one in self.slots.held())])

    def on_spending_known(self) -> None:
        """The server knows what was spent when the last heartbeat was sent."""
        self._soon(self.slots.forget_reported)

    def on_claim_over(self, task_id: str, epoch: int, answer: str, reason: str | None) -> None:
        """The claim is over: `cancel` or `lost`. With a reason it is held, but over that limit."""
        execution = self.slots.get(task_id)
        if execution is None or execution.claim.epoch != epoch or execution.reported:
            return
        if reason is not None:
            self._soon(self._stop_over_limit, execution, reason)
            return
        why = "the task was cancelled" if answer == "cancel" else CLAIM_LOST
        # At once: the event loop may be blocked by the handler that has to stop.
        if answer == "cancel":
            execution.lease.end(why, gone=True)
        else:
            execution.lease.lose()
        self._soon(self._executor.stop, execution, NOTHING, why)

    def _stop_over_limit(self, execution: Execution, reason: str) -> None:
        """Give up a claim that is still held: the attempt fails, or waits for money."""
        text = over_limit_text(reason, execution.spent.cost_usd)
        outcome = failed(text, FailureCategory.BUDGET_EXCEEDED) if reason in OWN_LIMITS else RELEASED
        self._executor.stop(execution, outcome, text)

    def on_released(self, task_id: str, epoch: int) -> None:
        """The task was released, because the agent has to stop and its event loop is blocked."""
        execution = self.slots.get(task_id)
        if execution is not None and execution.claim.epoch == epoch:
            execution.claim_ended(AGENT_STOPS)
            self._soon(self._executor.stop, execution, NOTHING, AGENT_STOPS)

    def on_refused(self, error: LineshaftError) -> None:
        """The server accepts no calls from this process."""
        # At once: the event loop may be blocked by a handler.
        for execution in self.slots.held():
            execution.lease.end(REFUSED_TO_WORK, gone=True)
        self._soon(self._stopper.end_with, error)

    def on_status(self, status: str | None) -> None:
        """None: superseded."""
        if status is None:
            agent = self.presence
            self.on_refused(
                SupersededError(
                    f"Instance {self._instance_name!r} of agent {agent.agent_id!r} was registered again or "
                    f"was reported as dead: this process, incarnation {agent.incarnation}, must stop."
                )
            )

    def on_slots(self, limit: int) -> None:
        """How many tasks the agent may hold."""
        if limit != self.slots.limit:
            self._soon(self._resize, limit)

    def _resize(self, limit: int) -> None:
        _log.info("%s: may now hold %d tasks", self.presence.agent_id, limit)
        self.slots.resize(limit)
        self._claims.nudge()

    def on_slowdown(self, until: datetime | None) -> None:
        """Some of the agent's models are slowed down until then; None: no model is."""
        self._host.slow_down(until)

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            _log.debug("Agent %s has ended already", self.presence.agent_id)
