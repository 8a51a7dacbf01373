"""One attempt in progress, for the agent that runs it. A handler sees it through its context."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from lineshaft.agent import steps
from lineshaft.agent.money import Account
from lineshaft.agent.outcome import AttemptCancelled, ClaimOver, encoded
from lineshaft.client import large_data
from lineshaft.client.artifacts import ArtifactReader, Artifacts, Content
from lineshaft.client.backend import Backend
from lineshaft.errors import StaleClaimError, UnavailableError
from lineshaft.model.tasks import NewTask
from lineshaft.types import Artifact
from lineshaft.types.assignments import Assignment
from lineshaft.types.data_refs import data_ref_in
from lineshaft.types.work import (
    SPAWN_STEP,
    Child,
    ClaimedTask,
    ClaimRef,
    NewStep,
    Spent,
    check_progress_size,
)

T = TypeVar("T")

_log = logging.getLogger("lineshaft.agent.task")


class Host(Protocol):
    """What an execution needs of the agent that runs it."""

    backend: Backend
    agent_id: str
    loop: asyncio.AbstractEventLoop
    slowdown_until: datetime | None

    def hurry(self) -> None:
        """Send the next heartbeat now: there is something to report."""
        ...

    async def in_thread(self, function: Callable[[], T]) -> T: ...


class Execution:
    __slots__ = (
        "_digests",
        "_gone",
        "_progress",
        "_running",
        "_seen",
        "_state",
        "_state_saved",
        "_state_stored",
        "account",
        "artifacts",
        "assignment",
        "host",
        "over",
        "paused",
        "steps",
        "task",
    )

    def __init__(self, assignment: Assignment[ClaimedTask], host: Host) -> None:
        task = assignment.task
        self.host = host
        self.assignment = assignment
        self.task = task
        self.account = Account(task.max_cost_usd)
        #: Results by name, as JSON.
        self.steps: dict[str, bytes] = dict(assignment.steps)
        #: Of the arguments of steps that earlier attempts recorded.
        self._digests = {name: digest for name, digest in assignment.step_digests.items() if digest}
        #: Why the handler must stop. Set from any thread.
        self.over: str | None = None
        #: Set when the handler's own call ended the claim.
        self.paused: ClaimOver | None = None
        self.artifacts: list[Any] | None = None
        self._running: dict[str, asyncio.Event] = {}
        self._seen: dict[str, steps.Call] = {}
        #: The claim is over as well: until then a checkpoint can be saved.
        self._gone = False
        self._progress: bytes | None = None
        self._state: dict[str, Any] | None = None
        self._state_saved = b"{}"
        #: A large state, and the reference to it.
        self._state_stored = (b"", b"")

    def receive(self, assignment: Assignment[ClaimedTask]) -> None:
        """Replace references to large data by the data, before the handler runs."""
        self.assignment = assignment
        self.steps = dict(assignment.steps)

    @property
    def claim(self) -> ClaimRef:
        return self.assignment.claim

    @property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        task = self.task
        extra = {"task_id": task.id, "task_type": task.type, "agent_id": self.host.agent_id}
        return logging.LoggerAdapter(_log, {**extra, "attempt": task.attempts + 1})

    @property
    def spent(self) -> Spent:
        return self.account.spent

    # The end.

    def end(self, why: str, *, gone: bool) -> None:
        """Ask the handler to stop; `gone`: the claim is over. From any thread."""
        self._gone = self._gone or gone
        if self.over is None:
            self.over = why

    def is_gone(self) -> bool:
        """Whether the claim is over."""
        return self._gone

    def check_cancelled(self) -> None:
        if self.over is not None:
            raise AttemptCancelled(self.over)

    # Progress and state.

    def report_progress(self, value: Any) -> None:
        json = encoded(value, "progress")
        check_progress_size(json)
        self._progress = json
        self.host.hurry()

    def take_progress(self) -> bytes | None:
        progress, self._progress = self._progress, None
        return progress

    def put_back_progress(self, progress: bytes) -> None:
        if self._progress is None:
            self._progress = progress

    def charge(self, usd: Decimal | float, tokens_input: int, tokens_output: int) -> Decimal:
        """Report a cost, without a check of limits."""
        amount = self.account.add(usd, tokens_input, tokens_output)
        # Within a second, whatever becomes of this process.
        self.host.hurry()
        return amount

    def spend(self, usd: Decimal | float, tokens_input: int, tokens_output: int) -> None:
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
        self.check_cancelled()
        made = await self.stored_files.put(name, content, content_type=content_type, task=self.task.id)
        if made.ref not in (self.artifacts or ()):
            self.name_artifact(made.ref)
        return made

    def open_artifact(self, ref: str) -> ArtifactReader:
        return self.stored_files.open(ref)

    @property
    def stored_files(self) -> Artifacts:
        return Artifacts(self.host.backend)

    @property
    def last_checkpoint(self) -> Any:
        return self.assignment.checkpoint

    @property
    def state(self) -> dict[str, Any]:
        if self._state is None:
            last = self.last_checkpoint
            self._state = last if isinstance(last, dict) else {}
            self._state_saved = encoded(self._state, "state")
        return self._state

    def unsaved_state(self) -> bytes | None:
        """The checkpoint to save when the task is postponed; None: nothing has changed."""
        if self._state is None:
            return None
        try:
            state = encoded(self._state, "state")
        except (ValueError, RuntimeError) as error:  # a thread may still be changing it
            self.log.warning("Postponing the task without saving a checkpoint: %s", error)
            return None
        if state == self._state_saved:
            return None
        stored, reference = self._state_stored
        return reference if state == stored else state

    async def store_state(self) -> None:
        """Store a large state as an artifact; `unsaved_state` is the reference from then on."""
        state = self.unsaved_state()
        if state is None:
            return
        try:
            self._state_stored = state, await self.stored("state.json", state)
        except UnavailableError as error:
            self.log.warning("Saving the state in the database: %s", error)

    # Writes, which only the holder of the claim may make.

    async def save_checkpoint(self, data: Any) -> None:
        # Allowed after the handler was asked to stop: that is when there is something to save.
        if self._gone:
            self.check_cancelled()
        await self._save(encoded(data, "checkpoint"))

    async def _save(self, json: bytes) -> None:
        json = await self.stored("checkpoint.json", json)
        await self._held(lambda: self._write(lambda: self.host.backend.save_checkpoint(self.claim, json)))

    async def stored(self, name: str, json: bytes) -> bytes:
        """The JSON, or a reference to it if it is large."""
        return await large_data.stored(self.host.backend, self.task.id, name, json, self.is_gone)

    async def spawn(self, key: str, tasks: Sequence[NewTask], *, wait: bool) -> list[Child]:
        self.check_cancelled()
        steps.check_name(key, "spawn")
        known = self.steps.get(SPAWN_STEP + key)
        if known is not None:
            ended = self.assignment.children
            children = [ended.get(name) or Child(name) for name in msgspec.json.decode(known)]
            if not wait or all(child.ended for child in children):
                return children
        if wait and (state := self.unsaved_state()) is not None:
            await self._save(state)
        spawned = await self._held(
            lambda: self._write(
                lambda: self.host.backend.spawn(self.claim, key, tasks, wait=wait, spent=self.account.spent)
            )
        )
        if spawned.paused:
            self.end("the task waits for its children", gone=True)
            self.paused = ClaimOver(self.over)
            raise self.paused
        self.steps[SPAWN_STEP + key] = msgspec.json.encode([child.id for child in spawned.children])
        return spawned.children

    async def _held(self, work: Callable[[], Awaitable[T]], then: Callable[[], object] | None = None) -> T:
        # To its end, also if the handler is cancelled in the meantime.
        writing = asyncio.ensure_future(work())
        # Retrieve the exception: the handler may no longer wait for it.
        writing.add_done_callback(lambda written: written.cancelled() or written.exception())
        if then is not None:
            writing.add_done_callback(lambda _: then())
        return await asyncio.shield(writing)

    async def _write(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await steps.insist(call, self.is_gone)
        except StaleClaimError as error:
            self.end(str(error), gone=True)
            self.paused = ClaimOver(str(error))
            raise self.paused from error

    # Steps.

    def check_same_call(self, name: str, call: steps.Call) -> None:
        """Refuse a second step of the same name: it would get the result of the first one."""
        if not self._seen.setdefault(name, call).is_same(call):
            raise ValueError(
                f"Step {name!r} was called with other arguments before, in this run. A step is identified by "
                "its name: give each its own, for instance with a number in it."
            )

    def begin_step(self, name: str, call: steps.Call | None = None) -> bytes | None:
        """The recorded result; None: the step may run now."""
        self.check_cancelled()
        known = self.steps.get(name)
        if known is not None and not self._must_rerun(name, call):
            return known
        steps.check_name(name, "step")
        steps.check_not_within(self.task.id, name)
        self.account.check_next_step()
        return None

    def _must_rerun(self, name: str, call: steps.Call | None) -> bool:
        """Whether a recorded step runs again, because its arguments changed; raises if that is refused."""
        recorded = None if call is None else self._digests.get(name)
        if call is None or recorded is None or call.on_change == "reuse" or call.digest() == recorded:
            return False
        if call.on_change == "rerun":
            return True
        raise steps.other_arguments(name, self.task.id)

    async def end_step(
        self,
        name: str,
        value: Any,
        cost: Decimal,
        *,
        function: Callable[..., Any] | None = None,
        digest: str | None = None,
    ) -> bytes:
        """Record a result, and return the one that counts."""
        steps.check_name(name, "step")
        result = await self._record(name, steps.result_json(name, value, function), cost, digest)
        self.account.check_limits()
        return result

    async def _record(
        self,
        name: str,
        data: bytes,
        cost: Decimal,
        digest: str | None,
        then: Callable[[], object] | None = None,
    ) -> bytes:
        """`then` is called when the write has ended."""
        spent = self.account.spent

        async def work() -> bytes:
            backend = self.host.backend
            json = await self.stored(f"step {name}.json", data)
            step = NewStep(self.claim, name, json, cost, spent, digest)
            stored, left = await self._write(lambda: backend.record_step(step))
            stored = data if data_ref_in(stored) == data_ref_in(json) is not None else stored
            stored = await large_data.patiently(lambda: large_data.loaded(backend, stored), self.is_gone)
            self.account.learn(left, spent.cost_usd or Decimal(0))
            self.steps[name] = stored
            # From now on it is a step of this run, where `check_same_call` compares.
            self._digests.pop(name, None)
            return stored

        return await self._held(work, then)

    async def step(self, name: str, call: steps.Call) -> bytes:
        """Run a step of an `async def` handler, unless it was recorded; returns its result."""
        self.check_same_call(name, call)
        while (known := self.begin_step(name, call)) is None:
            busy = self._running.get(name)
            if busy is not None:
                # The same step twice at the same time: the second runs only if the first fails.
                await busy.wait()
                continue
            self._running[name] = asyncio.Event()
            try:
                digest = call.digest()
                data, cost = await self._run_step(name, call)
            except BaseException:
                self._free_step(name)
                raise
            # Free only when it is written: the handler may stop waiting and ask for the step again.
            result = await self._record(name, data, cost, digest, then=partial(self._free_step, name))
            self.account.check_limits()
            return result
        return known

    def _free_step(self, name: str) -> None:
        self._running.pop(name).set()

    async def _run_step(self, name: str, call: steps.Call) -> tuple[bytes, Decimal]:
        """The result and the cost."""
        with steps.metered(self.task.id, name) as meter:
            if steps.is_async(call.function):
                value = await call.run()
            else:
                value = await self._in_thread(call.run)
                if inspect.isawaitable(value):
                    value = await value
        return steps.result_json(name, value, call.function), meter.cost

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        working = asyncio.ensure_future(self.host.in_thread(function))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            if self.over is None:
                # Cancelled by the handler, which no longer wants the result.
                working.cancel()
            else:
                # A thread can't be stopped. Within the agent's patience, keep the claim until it has ended:
                # no other agent gets the task, and what the thread spends is booked.
                await asyncio.wait({working})
            raise
