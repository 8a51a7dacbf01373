"""`TaskContext`: what a handler knows about its task, and what it can do besides returning."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import msgspec

from lineshaft.agent import steps
from lineshaft.agent.execution import Execution
from lineshaft.agent.quotas import QuotaUse
from lineshaft.agent.steps import OnChange
from lineshaft.client.artifacts import ArtifactReader, Content
from lineshaft.client.blocking import SyncArtifactReader
from lineshaft.model.durations import Duration
from lineshaft.model.tasks import NewTask
from lineshaft.types import Artifact
from lineshaft.types.reservations import Units
from lineshaft.types.work import (
    MAX_INPUT_BYTES,
    SPAWN_STEP,
    Child,
    ClaimedTask,
    PastAttempt,
    TaskAtWork,
    decoded_inputs,
)

P = ParamSpec("P")
T = TypeVar("T")


class Inputs(dict[str, Any]):
    """Inputs by name; a missing one is explained."""

    def __init__(self, values: Mapping[str, Any], task: ClaimedTask) -> None:
        super().__init__(values)
        self._task = task

    def __missing__(self, name: str) -> Any:
        upstream = decoded_inputs(self._task.inputs)
        if name in upstream:
            raise KeyError(
                f"Input {name!r} of task {self._task.id} did not come along: its inputs are larger than "
                f"{MAX_INPUT_BYTES} bytes together. Read it with Lineshaft.get({upstream[name]!r})."
            )
        names = f"only {', '.join(map(repr, self))}" if self else "it has none"
        raise KeyError(
            f"Task {self._task.id} has no input {name!r}, {names}. Name the upstream task in inputs or "
            "depends_on."
        )


class _Context:
    """What sync and async handlers have in common."""

    __slots__ = ("__weakref__", "_execution", "_inputs", "_spec")

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._spec: dict[str, Any] | None = None
        self._inputs: Inputs | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.type} {self.id} attempt {self.attempt}>"

    # The task.

    @property
    def id(self) -> str:
        return self._execution.task.id

    @property
    def type(self) -> str:
        return self._execution.task.type

    @property
    def title(self) -> str:
        return self._execution.task.title

    @property
    def dag_id(self) -> str:
        return self._execution.task.dag_id

    @property
    def parent_id(self) -> str | None:
        return self._execution.task.parent_id

    @property
    def task(self) -> TaskAtWork:
        """The task, with its `lock_key`, the `document_id` of that, and all its `lock_keys`."""
        task = self._execution.task
        return TaskAtWork(task.id, task.type, task.title, task.lock_key, task.lock_keys)

    @property
    def spec(self) -> dict[str, Any]:
        if self._spec is None:
            self._spec = msgspec.json.decode(self._execution.task.spec)
        return self._spec

    @property
    def inputs(self) -> dict[str, Any]:
        """Outputs of other tasks, by the name in `inputs`, the key or id in `depends_on`, or the reference.

        The references are those of `spec.context_refs`, which may also name artifacts.
        """
        if self._inputs is None:
            self._inputs = Inputs(self._execution.assignment.inputs, self._execution.task)
        return self._inputs

    @property
    def agent_id(self) -> str:
        return self._execution.host.agent_id

    @property
    def model(self) -> str | None:
        """The model to use: the first preference that this agent has; on later attempts maybe a fallback."""
        return self._execution.task.model

    @property
    def account(self) -> str | None:
        """The account with a provider to use, one of the agent's; None: the agent has none."""
        return self._execution.assignment.account

    @property
    def deadline(self) -> datetime | None:
        return self._execution.task.deadline

    @property
    def time_limit_sec(self) -> float:
        """How long this attempt may take from its claim; then another agent may get the task."""
        return self._execution.task.limit_sec

    @property
    def epoch(self) -> int:
        """A fencing number: it grows with every claim. Give it to systems that can refuse an older one."""
        return self._execution.task.epoch

    # Earlier attempts.

    @property
    def attempt(self) -> int:
        """1 for the first; snoozes, rate limits, sleeps, and waits for children or signals don't count."""
        return self._execution.task.attempts + 1

    @property
    def max_attempts(self) -> int:
        return self._execution.task.max_attempts

    @property
    def resume(self) -> bool:
        """The task was started before: there may be steps and a checkpoint."""
        return self._execution.task.resume

    @property
    def previous_attempts(self) -> Sequence[PastAttempt]:
        """How every earlier claim ended, with the errors of those that failed."""
        return self._execution.assignment.attempts

    @property
    def last_error(self) -> PastAttempt | None:
        """The last failed attempt: its `category` and `error` may help the next one."""
        over = [past for past in self.previous_attempts if past.outcome in {"failed", "completed"}]
        # A task that has completed since, and is rerun, has none.
        return over[-1] if over and over[-1].outcome == "failed" else None

    @property
    def last_checkpoint(self) -> Any:
        return self._execution.assignment.checkpoint

    @property
    def state(self) -> dict[str, Any]:
        """A dict that is saved as the checkpoint whenever the task is postponed.

        That is: by a rate limit, a snooze, a sleep, a wait for children or a signal, or because the agent
        stops. It begins as the last checkpoint, if that is a dict. A crash loses it; use a step or a
        checkpoint against that.
        """
        return self._execution.state

    @property
    def steps(self) -> dict[str, Any]:
        """Results of the recorded steps by name."""
        return {
            name: msgspec.json.decode(data)
            for name, data in self._execution.steps.recorded.items()
            if not name.startswith(SPAWN_STEP)
        }

    # Reporting.

    @property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        """A logger whose records carry the task's id, type, agent and attempt."""
        return self._execution.log

    def progress(self, value: Any) -> None:
        """Report progress in any form that JSON has. It is shown with the task; the latest counts."""
        self._execution.report_progress(value)

    def spend(self, usd: Decimal | float | None, *, tokens_input: int = 0, tokens_output: int = 0) -> None:
        """Report money that was spent. Inside a step it is stored with the step, and charged once.

        None is an unknown amount: the tokens are recorded, and no cost is.

        It never raises for lack of money, which is spent already; the next step raises BudgetExceeded.
        """
        self._execution.spend(usd, tokens_input, tokens_output)

    @property
    def spent_usd(self) -> Decimal:
        """What this attempt has cost so far."""
        return self._execution.account.cost

    def artifact(self, reference: Any) -> None:
        """Add a reference to something that this task stored elsewhere: a path, a URL, an object.

        `put_artifact` stores a file and adds it.
        """
        self._execution.name_artifact(reference)

    @property
    def slowdown_until(self) -> datetime | None:
        """Others met a rate limit with its models or all its accounts: go slowly until then."""
        return self._execution.host.slowdown_until

    # Cancellation.

    @property
    def cancelled(self) -> bool:
        """The handler must stop: the task was cancelled, its time is up, or the agent stops."""
        return self._execution.lease.over is not None

    def check_cancelled(self) -> None:
        """Raise AttemptCancelled if the handler must stop."""
        self._execution.lease.check()


class TaskContext(_Context):
    """The `ctx` of an `async def` handler."""

    __slots__ = ()

    @overload
    async def step(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        key: Any,
        on_change: OnChange = "refuse",
        **kwargs: Any,
    ) -> T: ...

    @overload
    async def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        key: Any,
        on_change: OnChange = "refuse",
        **kwargs: Any,
    ) -> T: ...

    @overload
    async def step(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        on_change: OnChange,
        **kwargs: Any,
    ) -> T: ...

    @overload
    async def step(
        self, name: str, function: Callable[..., T], /, *args: Any, on_change: OnChange, **kwargs: Any
    ) -> T: ...

    @overload
    async def step(
        self, name: str, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    @overload
    async def step(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    async def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once and record the result under this name; later attempts get the recorded result.

        `function` may be async or not; one that is not runs in a thread. If no money is left to start with,
        BudgetExceeded is raised. A step is identified by its name: give each its own.

        If a later attempt calls the step with other arguments, it fails as `step_mismatch`. With `on_change`
        "rerun" the step runs again instead, with "reuse" the recorded result is used. `key` is compared in
        place of the arguments; it may be anything that JSON has.
        """
        call = steps.StepCall.of(function, args, kwargs)
        return steps.restored(name, self.id, await self._execution.steps.run(name, call), function)

    async def checkpoint(self, data: Any) -> None:
        """Save where the work is; the next attempt finds it as `last_checkpoint`. The latest counts."""
        await self._execution.save_checkpoint(data)

    async def put_artifact(self, name: str, content: Content, *, content_type: str | None = None) -> Artifact:
        """Store a file, and add it to this task's output.

        `content` is bytes, the path of a file, an open file or pieces of bytes. Without `content_type` the
        media type is guessed from the name. A later attempt that makes the same file gets the same artifact.
        """
        return await self._execution.put_artifact(name, content, content_type)

    def open_artifact(self, ref: str) -> ArtifactReader:
        """Read a file: `async with ctx.open_artifact("artifact:ID") as reader`."""
        return self._execution.stored_files.open(ref)

    async def spawn(self, key: str, tasks: Sequence[NewTask], *, wait: bool = False) -> list[Child]:
        """Create tasks in this task's DAG, once per key, however often the handler runs.

        With `wait` the handler ends here and its slot is free. When all of them have ended, in whatever way,
        it runs again from the beginning, skips its recorded steps, and gets the children with their outputs.
        """
        return await self._execution.spawn(key, tasks, wait=wait)

    async def sleep(self, name: str, duration: Duration) -> None:
        """Wait for so long, seconds or a timedelta, without a slot; this is recorded as the step `name`.

        The handler ends here and its slot is free. When the time has passed, it runs again from the
        beginning, on any agent, skips its recorded steps, and goes on. No attempt is used.
        """
        await self._execution.waits.sleep(name, duration)

    async def wait_for(
        self,
        name: str,
        *,
        signal: str | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - the wait is longer than this call
    ) -> Any:
        """Wait for a signal without a slot, and return its data; this is recorded as the step `name`.

        `signal` is the signal's name, by default that of the step. One that was sent before is received at
        once, and each is received once. Otherwise the handler ends here, as in `sleep`. If `timeout` passes,
        SignalTimeout is raised, a TimeoutError.
        """
        waits = self._execution.waits
        return waits.received(await waits.wait_for(name, signal=signal, timeout=timeout), name)

    @asynccontextmanager
    async def quota(
        self,
        key: str,
        *,
        requests: Decimal | float = 1,
        tokens: Decimal | float | None = None,
        usd: Decimal | float | None = None,
    ) -> AsyncIterator[QuotaUse]:
        """Reserve what the block uses of a key's rates: `async with ctx.quota("model:m", tokens=2000) as q`.

        It waits until there is room, as long as the attempt may last. `q.settle(tokens=1480)` reports what
        was really used, which is booked when the block ends; without it, what was reserved counts. A key is
        any that a quota matches: `model:NAME`, `type:NAME`, or one of your own.
        """
        use = await self._execution.quotas.acquire(key, Units(requests, tokens, usd))
        try:
            yield use
        finally:
            await self._execution.quotas.end(use)


class SyncTaskContext(_Context):
    """The `ctx` of a `def` handler, which runs in a thread: the same without `await`."""

    __slots__ = ()

    @overload
    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        key: Any,
        on_change: OnChange = "refuse",
        **kwargs: Any,
    ) -> T: ...

    @overload
    def step(
        self, name: str, function: Callable[..., T], /, *args: Any, on_change: OnChange, **kwargs: Any
    ) -> T: ...

    @overload
    def step(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As `TaskContext.step`; the function runs in the handler's own thread."""
        loop, recorder = self._loop("step"), self._execution.steps
        call = steps.StepCall.of(function, args, kwargs)
        recorder.check_same_call(name, call)
        recorded = recorder.begin(name, call)
        if recorded is None:
            if not self._execution.lease.may_hold:
                loop.run(self._execution.lease.hold())
            digest = call.digest()
            with steps.metered(self.id, name) as meter:
                value = call.run()
                if inspect.isawaitable(value):
                    value = loop.run(_awaited(value))
            recorded = loop.run(recorder.end(name, value, meter.cost, function=function, digest=digest))
        return steps.restored(name, self.id, recorded, function)

    def checkpoint(self, data: Any) -> None:
        """As `TaskContext.checkpoint`."""
        self._loop("checkpoint").run(self._execution.save_checkpoint(data))

    def put_artifact(self, name: str, content: Content, *, content_type: str | None = None) -> Artifact:
        """As `TaskContext.put_artifact`."""
        return self._loop("put_artifact").run(self._execution.put_artifact(name, content, content_type))

    def open_artifact(self, ref: str) -> SyncArtifactReader:
        """Read a file: `with ctx.open_artifact("artifact:ID") as reader`."""
        return SyncArtifactReader(self._loop("open_artifact"), self._execution.stored_files.open(ref))

    def spawn(self, key: str, tasks: Sequence[NewTask], *, wait: bool = False) -> list[Child]:
        """As `TaskContext.spawn`."""
        return self._loop("spawn").run(self._execution.spawn(key, tasks, wait=wait))

    def sleep(self, name: str, duration: Duration) -> None:
        """As `TaskContext.sleep`."""
        self._loop("sleep").run(self._execution.waits.sleep(name, duration))

    def wait_for(self, name: str, *, signal: str | None = None, timeout: Duration | None = None) -> Any:
        """As `TaskContext.wait_for`."""
        waits = self._execution.waits
        end = self._loop("wait_for").run(waits.wait_for(name, signal=signal, timeout=timeout))
        return waits.received(end, name)

    @contextmanager
    def quota(
        self,
        key: str,
        *,
        requests: Decimal | float = 1,
        tokens: Decimal | float | None = None,
        usd: Decimal | float | None = None,
    ) -> Iterator[QuotaUse]:
        """As `TaskContext.quota`: `with ctx.quota("model:m", tokens=2000) as q`."""
        loop, quotas = self._loop("quota"), self._execution.quotas
        use = loop.run(quotas.acquire(key, Units(requests, tokens, usd)))
        try:
            yield use
        finally:
            loop.run(quotas.end(use))

    def _loop(self, method: str) -> "_AgentLoop":
        """The agent's event loop, for a call from another thread."""
        loop = self._execution.host.loop
        try:
            is_inside = asyncio.get_running_loop() is loop
        except RuntimeError:
            is_inside = False
        if is_inside:
            raise RuntimeError(
                f"ctx.{method} was called in the agent's event loop, where asynchronous steps run, and would "
                "wait for that loop forever. Make the handler 'async def', or the step a plain function."
            )
        return _AgentLoop(loop)


class _AgentLoop(NamedTuple):
    """Runs coroutines in the agent's event loop, and waits for them in the handler's thread."""

    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


def context_of(execution: Execution) -> TaskContext | SyncTaskContext:
    """The `ctx` of the execution's handler."""
    return (TaskContext if execution.handler.is_async else SyncTaskContext)(execution)


def execution_of(ctx: TaskContext) -> Execution:
    """For Lineshaft's handlers that run steps outside of Python."""
    return ctx._execution  # noqa: SLF001 - of this module


async def _awaited(value: Awaitable[T]) -> T:
    return await value
