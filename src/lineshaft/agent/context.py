"""`TaskContext`: what a handler knows about its task, and what it can do besides returning."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import msgspec

from lineshaft.agent import steps
from lineshaft.agent.money import Account
from lineshaft.agent.outcome import AttemptCancelled, ClaimOver, encoded
from lineshaft.client.backend import Backend
from lineshaft.engine.transition.operations import SPAWN_STEP
from lineshaft.errors import StaleClaimError
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Assignment, Child, ClaimRef, PastAttempt, Spent, check_progress_size

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("lineshaft.agent.task")


class Surroundings(Protocol):
    """What a context needs of the agent that runs it."""

    backend: Backend
    agent_id: str
    loop: asyncio.AbstractEventLoop
    slowdown_until: datetime | None

    def hurry(self) -> None:
        """There is something to tell with the next heartbeat: don't wait for its turn."""
        ...

    def unbooked(self, dag_id: str | None) -> tuple[Decimal, Decimal]:
        """What this agent's and this DAG's tasks have spent here beyond their reservations."""
        ...

    async def in_thread(self, function: Callable[[], T]) -> T: ...


class _Context:
    """What sync and async handlers have in common."""

    __slots__ = (
        "__weakref__",
        "_account",
        "_agent",
        "_artifacts",
        "_assignment",
        "_gone",
        "_over",
        "_paused",
        "_progress",
        "_running",
        "_seen",
        "_spec",
        "_state",
        "_state_saved",
        "_steps",
        "_task",
    )

    def __init__(self, assignment: Assignment, agent: Surroundings) -> None:
        task = assignment.task
        self._agent = agent
        self._assignment = assignment
        self._task = task
        self._account = Account(task.max_cost_usd, task.reserved_usd)
        self._steps: dict[str, bytes] = dict(assignment.history.steps or ())
        self._running: dict[str, asyncio.Event] = {}
        self._seen: dict[str, tuple[Any, Any]] = {}
        #: Why nobody wants the result, once it is so. Set from any thread.
        self._over: str | None = None
        #: ... and whether the claim is gone too: until then, what was reached can be saved.
        self._gone = False
        self._paused: ClaimOver | None = None
        self._progress: bytes | None = None
        self._artifacts: list[Any] | None = None
        self._spec: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None
        self._state_saved = b"{}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.type} {self.id} attempt {self.attempt}>"

    # The task.

    @property
    def id(self) -> str:
        return self._task.id

    @property
    def type(self) -> str:
        return self._task.type

    @property
    def title(self) -> str:
        return self._task.title

    @property
    def dag_id(self) -> str:
        return self._task.dag_id

    @property
    def parent_id(self) -> str | None:
        return self._task.parent_id

    @property
    def spec(self) -> dict[str, Any]:
        if self._spec is None:
            self._spec = msgspec.json.decode(self._task.spec)
        return self._spec

    @property
    def inputs(self) -> dict[str, Any]:
        """What `spec.context_refs` refer to, by reference: outputs of tasks, names of artifacts."""
        return self._assignment.inputs

    @property
    def agent_id(self) -> str:
        return self._agent.agent_id

    @property
    def model(self) -> str | None:
        """The model to use: the task's first preference that this agent has; a fallback on later attempts."""
        return self._task.model

    @property
    def deadline(self) -> datetime | None:
        return self._task.deadline

    @property
    def time_limit_sec(self) -> float:
        """How long this attempt may take, from its claim on; then somebody else may have the task."""
        return self._task.limit_sec

    @property
    def epoch(self) -> int:
        """A fencing number: it grows with every claim. Give it to whatever must not be done twice."""
        return self._task.epoch

    # What was before.

    @property
    def attempt(self) -> int:
        """1 for the first; snoozes, rate limits and waits for children don't count."""
        return self._task.attempts + 1

    @property
    def max_attempts(self) -> int:
        return self._task.max_attempts

    @property
    def resume(self) -> bool:
        """The task was started before: steps and checkpoint may be there."""
        return self._task.resume

    @property
    def previous_attempts(self) -> Sequence[PastAttempt]:
        """How every earlier claim ended, and of what the failed ones died."""
        return self._assignment.history.attempts

    @property
    def last_error(self) -> PastAttempt | None:
        """The attempt that failed last: its `category` and `error` may help the next one."""
        failures = [past for past in self.previous_attempts if past.outcome == "failed"]
        return failures[-1] if failures else None

    @property
    def last_checkpoint(self) -> Any:
        data = self._assignment.history.checkpoint
        return None if data is None else msgspec.json.decode(data)

    @property
    def state(self) -> dict[str, Any]:
        """Where it stands, in words of its own: saved by itself as the checkpoint when it is put off.

        That is: by a rate limit, a snooze, a wait for children, or because the agent stops. It begins as the
        last checkpoint, if that is a dict. What a crash must not lose belongs in a step or a checkpoint.
        """
        if self._state is None:
            last = self.last_checkpoint
            self._state = last if isinstance(last, dict) else {}
            self._state_saved = encoded(self._state, "state")
        return self._state

    @property
    def steps(self) -> dict[str, Any]:
        """Results of the steps that are done, by name."""
        return {
            name: msgspec.json.decode(data)
            for name, data in self._steps.items()
            if not name.startswith(SPAWN_STEP)
        }

    # Telling.

    @property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        return logging.LoggerAdapter(
            _log,
            {"task_id": self.id, "task_type": self.type, "agent_id": self.agent_id, "attempt": self.attempt},
        )

    def progress(self, value: Any) -> None:
        """Tell how far it is, in any form that JSON has. Shown with the task; the latest counts."""
        json = encoded(value, "progress")
        check_progress_size(json)
        self._progress = json
        self._agent.hurry()

    def spend(self, usd: Decimal | float, *, tokens_input: int = 0, tokens_output: int = 0) -> None:
        """Tell that money was spent. In a step it is stored with the step, and charged once.

        It never fails for want of money, since the money is gone; the next step is not begun then.
        """
        amount = self._account.add(usd, tokens_input, tokens_output)
        meter = steps.current_meter.get()
        if meter is not None:
            meter.cost += amount

    @property
    def spent_usd(self) -> Decimal:
        """What this attempt has cost so far."""
        return self._account.cost

    def artifact(self, reference: Any) -> None:
        """Name something that this task made and that is kept elsewhere: a path, a URL, or an object."""
        encoded(reference, "artifact")
        if self._artifacts is None:
            self._artifacts = []
        self._artifacts.append(reference)

    @property
    def slowdown_until(self) -> datetime | None:
        """Others met a rate limit with this agent's models: go slowly until then. As heartbeats tell it."""
        return self._agent.slowdown_until

    # Being cancelled.

    @property
    def cancelled(self) -> bool:
        """Somebody cancelled the task, its time is up, or the agent stops: come to an end."""
        return self._over is not None

    def check_cancelled(self) -> None:
        """Raise AttemptCancelled if it is time to come to an end."""
        if self._over is not None:
            raise AttemptCancelled(self._over)

    # For the agent that runs it; handlers have no use for these.

    @property
    def _claim(self) -> ClaimRef:
        return ClaimRef(self._task.id, self._task.epoch)

    @property
    def spent(self) -> Spent:
        return self._account.spent

    @property
    def unreserved_usd(self) -> Decimal:
        return self._account.unreserved

    @property
    def live_dag_id(self) -> str | None:
        return self._task.live_dag_id

    @property
    def artifacts(self) -> list[Any] | None:
        return self._artifacts

    @property
    def paused(self) -> ClaimOver | None:
        """Set once the claim is over by the handler's own doing."""
        return self._paused

    def unsaved_state(self) -> bytes | None:
        """What is to be saved as its checkpoint, now that it is put off; None: nothing, or nothing new."""
        if self._state is None:
            return None
        try:
            state = encoded(self._state, "state")
        except (ValueError, RuntimeError) as error:  # or a thread, which can't be stopped, is changing it
            self.log.warning("It is put off without a checkpoint: %s", error)
            return None
        return None if state == self._state_saved else state

    def end(self, why: str, *, gone: bool) -> None:
        """The claim is gone, or soon will be given up. From any thread."""
        self._gone = self._gone or gone
        if self._over is None:
            self._over = why

    def take_progress(self) -> bytes | None:
        progress, self._progress = self._progress, None
        return progress

    def put_back_progress(self, progress: bytes) -> None:
        if self._progress is None:
            self._progress = progress

    def _check_same_call(self, name: str, args: Any, kwargs: Any) -> None:
        """A loop that forgets to give each step its own name would get the first result every time."""
        seen = self._seen.setdefault(name, (args, kwargs))
        if not steps.same(seen, (args, kwargs)):
            raise ValueError(
                f"Step {name!r} was called with other arguments before, in this run. A step is remembered by "
                "its name: give each its own, for instance with a number in it."
            )

    def _begin_step(self, name: str) -> bytes | None:
        """The recorded result, or None: it has to be run, and may be."""
        self.check_cancelled()
        known = self._steps.get(name)
        if known is not None:
            return known
        steps.check_name(name, "step")
        steps.check_not_within(self.id, name)
        self._account.check(*self._agent.unbooked(self._task.live_dag_id))
        return None

    async def _record(
        self, name: str, data: bytes, cost: Decimal, then: Callable[[], object] | None = None
    ) -> bytes:
        """Gives what counts. `then` is done when it is written or refused, whoever still waits for it."""
        so_far = self._account.cost

        async def call() -> bytes:
            stored, purses = await self._agent.backend.record_step(
                self._claim, name, data, cost_usd=cost, cost_so_far_usd=so_far
            )
            self._account.learn(purses, so_far)
            self._steps[name] = stored
            return stored

        return await self._held(call, then)

    async def _save_checkpoint(self, data: Any) -> None:
        # Also after it was asked to stop: that is when there is something to save.
        if self._gone:
            self.check_cancelled()
        json = encoded(data, "checkpoint")
        await self._held(lambda: self._agent.backend.save_checkpoint(self._claim, json))

    async def _spawn(self, key: str, tasks: Sequence[NewTask], *, wait: bool) -> list[Child]:
        self.check_cancelled()
        steps.check_name(key, "spawn")
        known = self._steps.get(SPAWN_STEP + key)
        if known is not None:
            ended = self._assignment.history.children or {}
            children = [ended.get(name) or Child(name) for name in msgspec.json.decode(known)]
            if not wait or all(child.ended for child in children):
                return children
        if wait and (state := self.unsaved_state()) is not None:
            await self._held(lambda: self._agent.backend.save_checkpoint(self._claim, state))
        spawned = await self._held(
            lambda: self._agent.backend.spawn(self._claim, key, tasks, wait=wait, spent=self._account.spent)
        )
        if spawned.paused:
            self.end("it waits for its children", gone=True)
            self._paused = ClaimOver(self._over)
            raise self._paused
        self._steps[SPAWN_STEP + key] = msgspec.json.encode([child.id for child in spawned.children])
        return spawned.children

    async def _held(self, call: Callable[[], Awaitable[T]], then: Callable[[], object] | None = None) -> T:
        """A write that only the holder of the claim may make."""
        # To its end, also when the handler is cancelled meanwhile: what is written half is neither.
        writing = asyncio.ensure_future(self._write(call))
        # Nobody may be there any more to hear that it failed.
        writing.add_done_callback(lambda written: written.cancelled() or written.exception())
        if then is not None:
            writing.add_done_callback(lambda _: then())
        return await asyncio.shield(writing)

    async def _write(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await steps.insist(call, lambda: self._gone)
        except StaleClaimError as error:
            self.end(str(error), gone=True)
            self._paused = ClaimOver(str(error))
            raise self._paused from error


class TaskContext(_Context):
    """What an `async def` handler is given as `ctx`."""

    __slots__ = ()

    @overload
    async def step(
        self, name: str, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    @overload
    async def step(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    async def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run it once and remember the result by its name, also across a crash.

        `function` may be async or not; one that is not runs in a thread. Before it begins, there must be
        money left, else BudgetExceeded is raised. The same name is the same step: give each its own.
        """
        self._check_same_call(name, args, kwargs)
        while (known := self._begin_step(name)) is None:
            busy = self._running.get(name)
            if busy is not None:
                # The same step twice at once: the second waits, and runs it only if the first failed.
                await busy.wait()
                continue
            self._running[name] = asyncio.Event()
            try:
                data, cost = await self._run_step(name, function, args, kwargs)
            except BaseException:
                self._free_step(name)
                raise
            # Whoever gives up waiting for this and asks for the step again has to wait until it is written.
            known = await self._record(name, data, cost, then=partial(self._free_step, name))
            break
        return steps.restored(known, function)

    def _free_step(self, name: str) -> None:
        self._running.pop(name).set()

    async def _run_step(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bytes, Decimal]:
        """Its result, and what it cost."""
        with steps.metered(self.id, name) as meter:
            if steps.is_async(function):
                value = await function(*args, **kwargs)
            else:
                value = await self._in_thread(partial(function, *args, **kwargs))
                if inspect.isawaitable(value):
                    value = await value
        return steps.result_json(name, value), meter.cost

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        working = asyncio.ensure_future(self._agent.in_thread(function))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            if self._over is None:
                # The handler's own doing; it need not wait for what it doesn't want any more.
                working.cancel()
            else:
                # A thread can't be stopped. As long as the agent has patience, nobody else gets the task
                # while it is at work, and what it spends is booked.
                await asyncio.wait({working})
            raise

    def begin_step(self, name: str) -> bytes | None:
        """For a step that runs outside of Python: its recorded result, or None if it is to be run."""
        return self._begin_step(name)

    async def end_step(self, name: str, value: Any, cost: Decimal) -> None:
        """Record the result of such a step; `cost` is that part of what was spent that belongs to it."""
        steps.check_name(name, "step")
        await self._record(name, steps.result_json(name, value), cost)

    async def checkpoint(self, data: Any) -> None:
        """Save where it stands; whoever carries on finds it as `last_checkpoint`. The latest counts."""
        await self._save_checkpoint(data)

    async def spawn(self, key: str, tasks: Sequence[NewTask], *, wait: bool = False) -> list[Child]:
        """Create tasks in this task's DAG, once, however often the handler is run again with this key.

        With `wait` the handler ends here and its slot is free; when all of them have ended, in whatever way,
        it is run again from the beginning, finds its steps done, and gets the children with their outputs.
        """
        return await self._spawn(key, tasks, wait=wait)


class SyncTaskContext(_Context):
    """What a plain `def` handler, which runs in a thread, is given as `ctx`: the same, without `await`."""

    __slots__ = ()

    def step(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `TaskContext.step`; the function runs in the handler's own thread."""
        self._check_thread("step")
        self._check_same_call(name, args, kwargs)
        known = self._begin_step(name)
        if known is None:
            with steps.metered(self.id, name) as meter:
                value: Any = function(*args, **kwargs)
                if inspect.isawaitable(value):
                    value = self._wait_for(_awaited(value))
            known = self._wait_for(self._record(name, steps.result_json(name, value), meter.cost))
        result: T = steps.restored(known, function)
        return result

    def checkpoint(self, data: Any) -> None:
        self._check_thread("checkpoint")
        self._wait_for(self._save_checkpoint(data))

    def spawn(self, key: str, tasks: Sequence[NewTask], *, wait: bool = False) -> list[Child]:
        self._check_thread("spawn")
        return self._wait_for(self._spawn(key, tasks, wait=wait))

    def _check_thread(self, method: str) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            return
        if here is self._agent.loop:
            raise RuntimeError(
                f"ctx.{method} was called in the agent's event loop, where asynchronous steps run, and would "
                "wait for that loop for ever. Make the handler 'async def', or the step a plain function."
            )

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The agent's event loop does it."""
        return asyncio.run_coroutine_threadsafe(work, self._agent.loop).result()


async def _awaited(value: Awaitable[T]) -> T:
    return await value
