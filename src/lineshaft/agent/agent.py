"""`Agent`: handlers for types of tasks, and the run of them."""

import asyncio
import contextlib
import gc
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Unpack

from lineshaft.agent.handlers import Function, Handler, make_handler
from lineshaft.agent.loop import Worker
from lineshaft.agent.process_group import crew_of
from lineshaft.agent.stopping import signals
from lineshaft.agent.task_type import Decorator, TaskFunction, plain_function
from lineshaft.client.lineshaft import Lineshaft
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.ids import new_id
from lineshaft.model.durations import Duration
from lineshaft.model.tasks import TaskDefaults
from lineshaft.types import NewAgent

#: A connection may be silent for this long, however short heartbeats are: a busy server is no dead one.
_LEAST_PATIENCE_SEC = 10.0
#: To write what is still to be written, before it ends; and then to say that it is gone.
_LAST_WRITES_SEC = 10.0
_LAST_WORD_SEC = 1.0


class Agent:
    """Claims tasks of the types it has handlers for, and works on them.

        agent = Agent("coder-1", capabilities=["python"])

        @agent.task("review")
        async def review(ctx, diff: str) -> dict: ...

        await agent.run(shaft)

    The id names it for good: its budget is that of the id, and registering the same id again, elsewhere or
    after a crash, supersedes the earlier one. Without an id it gets a new one for each run.
    """

    def __init__(
        self,
        id: str | None = None,  # noqa: A002 - what it is called everywhere else
        *,
        type: str | None = None,  # noqa: A002 - as above
        capabilities: Sequence[str] = (),
        models: Sequence[str] = (),
        max_concurrent_tasks: int = 3,
        budget_usd: Decimal | float | None = None,
        poll_interval_sec: float = 5.0,
        claim_ttl_sec: float = 60.0,
        heartbeat_interval_sec: float = 30.0,
        grace_sec: float = 30.0,
    ) -> None:
        """`grace_sec`: how long tasks may go on after it was asked to stop, before they are handed back."""
        self.id = id
        self._type = type
        self._capabilities = tuple(capabilities)
        self._models = tuple(models)
        self._max_concurrent_tasks = max_concurrent_tasks
        self._budget_usd = budget_usd
        self._poll_interval_sec = poll_interval_sec
        self._claim_ttl_sec = claim_ttl_sec
        self._heartbeat_interval_sec = heartbeat_interval_sec
        self._grace_sec = grace_sec
        self._handlers: dict[str, Handler] = {}
        self._run: _Run | None = None

    def task(
        self,
        type: str,  # noqa: A002 - the field's name
        *,
        concurrency: int | None = None,
        time_limit_sec: Duration | None = None,
        **defaults: Unpack[TaskDefaults],
    ) -> Decorator:
        """Make a function the handler of a task type.

        It may be `async def`, or `def`, which runs in a thread. If its first parameter is called `ctx`, it
        gets the TaskContext; all others come from the task's spec, by name, checked against their
        annotations. What it returns is the task's output. `concurrency` limits how many of these tasks this
        agent runs at the same time. `defaults` are fields of the tasks that `TaskType.new` builds.
        """

        def register(function: Function, /) -> Any:
            if type in self._handlers:
                raise ValueError(f"Task type {type!r} already has a handler.")
            plain = plain_function(function)
            handler = make_handler(type, plain, concurrency=concurrency, time_limit_sec=time_limit_sec)
            decorated: TaskFunction[..., Any, Any] = TaskFunction(type, plain, handler, **defaults)
            self._handlers[type] = handler
            return decorated

        return register

    @property
    def handlers(self) -> dict[str, Handler]:
        return dict(self._handlers)

    async def run(
        self,
        shaft: Lineshaft,
        *,
        until_idle: bool = False,
        retries_within_sec: float = 5.0,
        handle_signals: bool = True,
    ) -> None:
        """Work until stopped: by `stop`, by SIGTERM or SIGINT, or because the agent was registered elsewhere.

        Without `handle_signals` the process is left as it is: signals are its own affair, and its garbage.
        With `until_idle` it ends when there is nothing left that it could do now. It waits for a retry that
        is due within `retries_within_sec`; what was snoozed, rate limited or scheduled for later is left.
        Several agents of one process that run so end together, when all of them are idle.
        """
        if self._run is not None:
            raise LineshaftError(f"Agent {self.id!r} is running already.")
        if not self._handlers:
            raise LineshaftError("This agent has no handlers. Give it one with @agent.task('TYPE').")
        run = self._run = _Run(self, shaft, retries_within_sec if until_idle else None)
        try:
            if handle_signals and not until_idle:
                # The process is there for this agent.
                _spare_the_collector()
            if handle_signals:
                with signals(run.stop):
                    await run.work()
            else:
                await run.work()
        finally:
            self._run = None

    def stop(self, *, now: bool = False) -> None:
        """Ask it to stop, from any thread: take nothing new and finish; with `now`, hand back what runs."""
        if self._run is not None:
            self._run.stop_from_anywhere(now)

    @property
    def registration(self) -> NewAgent:
        return NewAgent(
            id=self.id or new_id("agent"),
            type=self._type,
            capabilities=self._capabilities,
            types=tuple(self._handlers),
            models_available=self._models,
            max_concurrent_tasks=self._max_concurrent_tasks,
            budget_usd=self._budget_usd,
            poll_interval_sec=self._poll_interval_sec,
            claim_ttl_sec=self._claim_ttl_sec,
            heartbeat_interval_sec=self._heartbeat_interval_sec,
        )

    @property
    def grace_sec(self) -> float:
        return self._grace_sec

    @property
    def heartbeat_interval_sec(self) -> float:
        return self._heartbeat_interval_sec


class _Run:
    """One call of `Agent.run`: register, work, stop in good order, leave."""

    def __init__(self, agent: Agent, shaft: Lineshaft, drain_retries_within_sec: float | None) -> None:
        self._agent = agent
        self._backend = shaft.backend
        self._drain = drain_retries_within_sec
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    def stop(self, now: bool) -> None:  # noqa: FBT001 - how signals call it
        self._stop.set()
        if now:
            self._stop_now.set()

    def stop_from_anywhere(self, now: bool) -> None:  # noqa: FBT001 - as stop
        self._loop.call_soon_threadsafe(self.stop, now)

    async def work(self) -> None:
        agent = self._agent
        self._backend.expect_answers_within(max(agent.heartbeat_interval_sec, _LEAST_PATIENCE_SEC))
        crew = crew_of(self._backend)
        async with crew.membership():
            view = await self._backend.register(agent.registration)
            worker = Worker(self._backend, view, agent.handlers, crew, drain_retries_within_sec=self._drain)
            if self._drain is not None:
                crew.enter_drain(worker)
            working = asyncio.create_task(worker.work(), name=f"lineshaft agent {view.id}")
            stopping = asyncio.create_task(self._stop.wait())
            superseded = False
            try:
                await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if self._stop.is_set():
                    await self._finish(worker, view.id, view.incarnation)
            except asyncio.CancelledError:
                worker.hand_back()
                raise
            finally:
                stopping.cancel()
                worker.stop_claiming()
                await asyncio.wait({working})
                superseded = working.exception() is not None
                worker.hand_back()
                patience = max(handler.patience_sec for handler in agent.handlers.values())
                last = self._loop.time() + patience + _LAST_WRITES_SEC
                await worker.close(patience + _LAST_WRITES_SEC)
                crew.leave_drain(worker)
                if not superseded:
                    await self._leave(view.id, view.incarnation, until=last + _LAST_WORD_SEC)
            working.result()

    async def _finish(self, worker: Worker, agent_id: str, incarnation: int) -> None:
        """Nothing new; what runs may end, within the grace, unless a second signal comes."""
        worker.stop_claiming()
        finishing = asyncio.create_task(self._drain_and_finish(worker, agent_id, incarnation))
        at_once = asyncio.create_task(self._stop_now.wait())
        try:
            await asyncio.wait({finishing, at_once}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (finishing, at_once):
                task.cancel()
            await asyncio.wait({finishing, at_once})

    async def _drain_and_finish(self, worker: Worker, agent_id: str, incarnation: int) -> None:
        # Beside each other: a database that is away must not make the grace longer.
        telling = asyncio.create_task(self._tell_that_it_drains(agent_id, incarnation))
        try:
            await worker.finish(self._agent.grace_sec)
            await asyncio.wait({telling}, timeout=_LAST_WORD_SEC)
        finally:
            telling.cancel()
            await asyncio.wait({telling})

    async def _tell_that_it_drains(self, agent_id: str, incarnation: int) -> None:
        with contextlib.suppress(UnavailableError):  # it takes nothing more anyway
            await self._backend.drain(agent_id, incarnation)

    async def _leave(self, agent_id: str, incarnation: int, *, until: float) -> None:
        # If it can't, the offline detector finds out.
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout_at(until):
                await self._backend.leave(agent_id, incarnation)


def _spare_the_collector() -> None:
    """What is there by now stays: looking through it again and again is a fifth of a busy agent's time."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
