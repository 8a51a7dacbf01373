"""`InlineBench`: one handler, run alone. Steps, costs and progress are kept in memory."""

import asyncio
import math
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import msgspec
from msgspec import Raw

from lineshaft.agent.context import context_of
from lineshaft.agent.execution import Execution, Host
from lineshaft.agent.outcome import Cancel, Fail, OutcomeKind, Result, Snooze, encoded, of_exception, of_value
from lineshaft.agent.task_type import TaskType
from lineshaft.agent.threads import Threads
from lineshaft.client.backend import Backend
from lineshaft.errors import LineshaftError
from lineshaft.ids import new_id
from lineshaft.model.budget import money
from lineshaft.model.tasks import TaskRow, resolve
from lineshaft.types.assignments import Assignment
from lineshaft.types.json import NULL, raw
from lineshaft.types.waits import NewSuspension, Signal, WaitEnd
from lineshaft.types.work import ClaimedTask, ClaimRef, NewStep, PastAttempt, RemainingBudgets

P = ParamSpec("P")
R = TypeVar("R")

_INTERVAL_SEC = 30.0


class InlineBench:
    """Runs a handler with a real context, but without a queue and without a database: in milliseconds.

        bench = InlineBench(model="large")
        assert await bench.run(research, prompt="gears") == Notes("gears")
        assert (bench.spent_usd, list(bench.steps)) == (Decimal("0.02"), ["search"])

    Arguments and the result pass through JSON and are checked as an agent does it. An exception of the
    handler is raised as it is; `Cancel`, `Fail` and `Snooze` are raised too. Another `run` is the next
    attempt: it finds the steps, the checkpoint and the state of those before. `ctx.spawn` needs a queue.
    Time passes at once: `ctx.sleep` returns, and a `ctx.wait_for` with a timeout gets the signal that was
    sent before with `signal`, or times out.
    """

    def __init__(
        self,
        *,
        inputs: Mapping[str, Any] | None = None,
        model: str | None = None,
        account: str | None = None,
        max_cost_usd: Decimal | float | None = None,
    ) -> None:
        """`inputs` is what `ctx.inputs` has; an input that is a parameter is passed to `run`."""
        self._inputs = {name: Raw(encoded(value, "input")) for name, value in (inputs or {}).items()}
        self._model = model
        self._account = account
        self._max_cost_usd = max_cost_usd
        self._memory = _Memory()
        self._id = new_id("task")
        self._runs = 0
        self._attempts: list[PastAttempt] = []
        self._lock = threading.Lock()
        #: What all attempts have cost so far.
        self.spent_usd = Decimal(0)
        #: Everything that was reported with `ctx.progress`, in order.
        self.progress: list[Any] = []
        #: Everything that the last attempt named with `ctx.artifact` or returned as artifacts.
        self.artifacts: list[Any] = []

    @property
    def steps(self) -> dict[str, Any]:
        """Results of the recorded steps by name."""
        return {name: msgspec.json.decode(data) for name, data in self._memory.steps.items()}

    @property
    def checkpoint(self) -> Any:
        """What was saved last; None: nothing."""
        return None if self._memory.checkpoint is None else msgspec.json.decode(self._memory.checkpoint)

    def signal(self, name: str, data: Any = None) -> None:
        """Send a signal, which the next `ctx.wait_for` of this name receives."""
        self._memory.signals.append(
            Signal(new_id("signal"), name, Raw(encoded(data, "signal")), datetime.now(UTC))
        )

    async def run(self, task_type: TaskType[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the handler with these arguments, and return its output."""
        handler = task_type._handler  # noqa: SLF001 - of this package
        assignment = self._assignment(resolve(task_type.new(*args, **kwargs)))
        threads = Threads("lineshaft inline")
        host = Host(cast("Backend", self._memory), "inline", threads, self._collect_progress)
        execution = Execution(assignment, handler, host, asked_at=math.inf, deadline=math.inf)
        arguments, named = handler.arguments(assignment.task.spec)
        if handler.takes_context:
            arguments = (context_of(execution), *arguments)
        try:
            if handler.is_async:
                value = await handler.function(*arguments, **named)
            else:
                value = await asyncio.to_thread(handler.function, *arguments, **named)
            return self._output(task_type, value, execution)
        except BaseException as error:
            self._attempts.append(_past(assignment.task, error, execution.account.cost))
            if (state := execution.unsaved_state()) is not None:
                self._memory.checkpoint = state
            raise
        finally:
            threads.close()
            self._runs += 1
            self.spent_usd += execution.account.cost

    def run_sync(self, task_type: TaskType[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`run`, for a test without an event loop."""
        return asyncio.run(self.run(task_type, *args, **kwargs))

    def _collect_progress(self, execution: Execution) -> None:
        with self._lock:
            if (json := execution.take_progress()) is not None:
                self.progress.append(msgspec.json.decode(json))

    def _assignment(self, row: TaskRow) -> Assignment[ClaimedTask]:
        memory = self._memory
        task = ClaimedTask(
            id=self._id,
            epoch=self._runs + 1,
            live_dag_id=None,
            lock_key=None,
            model=self._model,
            attempts=sum(past.outcome == "failed" for past in self._attempts),
            rate_limits=0,
            cost_usd=self.spent_usd,
            limit_sec=row.max_duration_sec,
            heartbeat_interval_sec=row.heartbeat_interval_sec or _INTERVAL_SEC,
            resume=self._runs > 0,
            type=row.type,
            title=row.title,
            spec=Raw(row.spec),
            inputs=NULL,
            dag_id=f"dag_{self._id.removeprefix('task_')}",
            parent_id=None,
            deadline=row.deadline,
            max_attempts=row.max_attempts,
            max_cost_usd=row.max_cost_usd if self._max_cost_usd is None else money(self._max_cost_usd),
            require_decision_report=row.require_decision_report,
            outdated=False,
            started=True,
            claimed_at=datetime.now(UTC),
            claim_ttl_sec=_INTERVAL_SEC,
        )
        return Assignment(
            task=task,
            claim_token="",
            model=task.model,
            account=self._account,
            inputs_json=self._inputs,
            resume=task.resume,
            checkpoint_json=raw(memory.checkpoint),
            steps_json=Raw(msgspec.json.encode({name: Raw(data) for name, data in memory.steps.items()})),
            step_digests_json=Raw(msgspec.json.encode(memory.digests)),
            attempts=self._attempts,
        )

    def _output(self, task_type: TaskType[P, R], value: Any, execution: Execution) -> R:
        if isinstance(value, Cancel | Fail | Snooze):
            raise value
        outcome = of_value(value, execution.artifacts)
        if outcome.kind is OutcomeKind.FAIL:
            raise Fail(outcome.error, outcome.category)
        self.artifacts = [] if outcome.artifacts is None else msgspec.json.decode(outcome.artifacts)
        data = outcome.output or b"null"
        decode = task_type._decode or msgspec.json.decode  # noqa: SLF001 - of this package
        return cast("R", value.data if isinstance(value, Result) else decode(data))


class _Memory:
    """What an attempt leaves behind, as the backend that an execution writes to."""

    def __init__(self) -> None:
        self.steps: dict[str, bytes] = {}
        self.digests: dict[str, str | None] = {}
        self.checkpoint: bytes | None = None
        self.signals: list[Signal] = []

    async def record_step(self, step: NewStep) -> tuple[bytes, RemainingBudgets]:
        self.steps[step.name] = step.data
        self.digests[step.name] = step.digest
        return step.data, RemainingBudgets()

    async def save_checkpoint(self, _claim: ClaimRef, data: bytes) -> None:
        self.checkpoint = data

    async def suspend(self, new: NewSuspension) -> WaitEnd:
        passed = timedelta(seconds=new.timeout_sec or 0.0)
        until = None if new.timeout_sec is None else datetime.now(UTC) + passed
        found = next((one for one in self.signals if one.name == new.signal), None)
        if found is not None:
            self.signals.remove(found)
        elif until is None:
            raise LineshaftError(
                f"The handler waits for the signal {new.signal!r} without a timeout, and it wasn't sent. "
                f"Call bench.signal({new.signal!r}, DATA) before bench.run."
            )
        # As the first run of a queue's handler gets it.
        end = msgspec.json.decode(WaitEnd(until, found).json, type=WaitEnd)
        self.steps[new.name] = end.json
        return end

    async def acquire(self, *_: object, **__: object) -> None:
        """There are no quotas."""

    async def spawn(self, *_: object, **__: object) -> NoReturn:
        raise LineshaftError(
            "ctx.spawn needs a queue. Test this handler with a Workbench, not an InlineBench."
        )


def _past(task: ClaimedTask, error: BaseException, cost_usd: Decimal) -> PastAttempt:
    outcome = of_exception(error)
    return PastAttempt(
        number=task.attempts + 1,
        agent_id="inline",
        instance=None,
        model=task.model,
        outcome="released" if outcome.is_postponed else "failed",
        category=outcome.category if outcome.kind is OutcomeKind.FAIL else None,
        error=outcome.error or None,
        started_at=task.claimed_at,
        ended_at=datetime.now(UTC),
        cost_usd=cost_usd,
    )
