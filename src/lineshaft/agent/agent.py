"""`Agent`: handlers of task types, and their run."""

import asyncio
import contextlib
import gc
import logging
import math
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from types import TracebackType
from typing import Any, Unpack

from lineshaft.agent import program, siblings
from lineshaft.agent.handlers import Function, Handler, make_handler
from lineshaft.agent.loop import Worker
from lineshaft.agent.process_group import agent_process
from lineshaft.agent.stopping import signals
from lineshaft.agent.task_log import count
from lineshaft.agent.task_type import TaskDecorator, TaskFunction, plain_function
from lineshaft.client import requests
from lineshaft.client.backend import Backend
from lineshaft.client.lineshaft import Lineshaft
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.logs import shown
from lineshaft.model.durations import Duration, seconds
from lineshaft.model.tasks import NewTask, TaskDefaults, check_options
from lineshaft.types import NewAgent, NewSource, SourceKind
from lineshaft.types.sources import CatchUp, Overlap, escaped

_log = logging.getLogger("lineshaft.agent")

#: A connection may be silent for this long, however short heartbeats are: the server may be busy.
_LEAST_PATIENCE_SEC = 10.0
#: Time for the last outcomes when the agent stops, and then to report that it left.
_LAST_WRITES_SEC = 10.0
_LAST_WORD_SEC = 1.0
_LISTED_TYPES = 8


class Agent:
    """Claims tasks of the types that it has handlers for, and runs the handlers.

        agent = Agent("coder-1", capabilities=["python"])

        @agent.task("review")
        async def review(ctx, diff: str) -> dict: ...

        await agent.run(shaft)

    The id names a role: any number of processes with the same id work side by side and share its budget, as
    replicas do. Without an id, each run gets a new one.
    """

    def __init__(
        self,
        id: str | None = None,  # noqa: A002 - the field's name
        *,
        instance: str | None = None,
        type: str | None = None,  # noqa: A002 - as above
        capabilities: Sequence[str] = (),
        models: Sequence[str] = (),
        version: str | None = None,
        max_concurrent_tasks: int = 3,
        budget_usd: Decimal | float | None = None,
        poll_interval_sec: Duration = 5.0,
        claim_ttl_sec: Duration = 60.0,
        heartbeat_interval_sec: Duration = 30.0,
        grace_sec: Duration = 20.0,
    ) -> None:
        """`grace_sec`: how long tasks may go on after the agent was asked to stop, before they are released.

        Its default leaves time to release them within the 30 s that Kubernetes gives a process. `version`, of
        the program, is recorded with each attempt. `instance` names this process among those of the same id:
        starting one of the same name again supersedes it. By default each process has a name of its own.
        Durations are seconds or a timedelta.
        """
        self.id = id
        self._instance = instance
        self._type = type
        self._capabilities = tuple(capabilities)
        self._models = tuple(models)
        self._version = version
        self._max_concurrent_tasks = max_concurrent_tasks
        self._budget_usd = budget_usd
        self._poll_interval_sec = seconds(poll_interval_sec)
        self._claim_ttl_sec = seconds(claim_ttl_sec)
        self._heartbeat_interval_sec = seconds(heartbeat_interval_sec)
        self._grace_sec = seconds(grace_sec)
        self._handlers: dict[str, Handler] = {}
        self._schedules: list[NewSource] = []
        self._run: _Run | None = None

    def task(
        self,
        type: str,  # noqa: A002 - the field's name
        *,
        concurrency: int | None = None,
        time_limit_sec: Duration | None = None,
        **defaults: Unpack[TaskDefaults],
    ) -> TaskDecorator:
        """Make a function the handler of a task type.

        It may be `async def`, or `def`, which runs in a thread. If its first parameter is called `ctx`, it
        gets the TaskContext; all others come from the task's spec, by name, checked against their
        annotations. What it returns is the task's output. `concurrency` limits how many of these tasks this
        agent runs at the same time. `defaults` are fields of the tasks that `TaskType.new` builds.
        """
        given: object = type
        if not isinstance(given, str):
            name = getattr(given, "__name__", "TYPE")
            raise TypeError(f"@agent.task needs the name of a task type: write @agent.task({name!r}).")
        check_options(defaults, (*NewTask.__struct_fields__, "concurrency", "time_limit_sec"))

        def register(function: Function, /) -> Any:
            if type in self._handlers:
                raise ValueError(f"Task type {type!r} already has a handler.")
            plain = plain_function(function)
            handler = make_handler(type, plain, concurrency=concurrency, time_limit_sec=time_limit_sec)
            decorated: TaskFunction[..., Any, Any] = TaskFunction(type, plain, handler, **defaults)
            self._handlers[type] = handler
            return decorated

        return register

    def every(
        self,
        when: str | Duration,
        *,
        name: str | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "one",
        jitter_sec: Duration = 0.0,
        max_open: int | None = None,
        overlap: Overlap = "skip",
        spec: Mapping[str, Any] | None = None,
        **defaults: Unpack[TaskDefaults],
    ) -> TaskDecorator:
        """Run a function at the ticks of a schedule: a cron expression, or an interval.

            @agent.every("0 9 * * MON", timezone="Europe/Berlin")
            async def weekly(ctx): ...

        It becomes the handler of a task type of its name, unless it is the function of `@agent.task`. When
        the agent starts, it declares the source `agent:ID/NAME`, which creates a task with this `spec` at
        each tick, exactly once, however many replicas of the agent run.
        """
        if self.id is None:
            raise ValueError("A schedule belongs to an agent with an id: Agent('ID').")
        agent_id = self.id

        def register(function: Function, /) -> Any:
            own = str(name or getattr(function, "__name__", ""))
            if isinstance(function, TaskFunction) and function.name in self._handlers:
                decorated: TaskFunction[..., Any, Any] = function
            else:
                decorated = self.task(own, **defaults)(function)
            (task,) = requests.tasks([decorated.new(**(spec or {})).with_options(**defaults)])
            timing: dict[str, Any] = {"cron": when} if isinstance(when, str) else {"every_sec": seconds(when)}
            self._schedules.append(
                NewSource(
                    name=f"agent:{agent_id}/{own}",
                    kind=SourceKind.SCHEDULE,
                    template={"task": escaped(task)},
                    timezone=timezone,
                    catch_up=catch_up,
                    jitter_sec=seconds(jitter_sec),
                    max_open=max_open,
                    overlap=overlap,
                    **timing,
                )
            )
            return decorated

        return register

    @property
    def task_types(self) -> tuple[str, ...]:
        """The names of the types that it has handlers for."""
        return tuple(self._handlers)

    async def run(
        self,
        shaft: Lineshaft,
        *,
        until_idle: bool = False,
        retries_within_sec: Duration = 60.0,
        handle_signals: bool = True,
        optimize: bool = False,
    ) -> None:
        """Work until stopped: by `stop`, by SIGTERM or SIGINT, or because the agent was registered elsewhere.

        With `until_idle` it returns when there is nothing left that it could do now. It waits for a retry
        that is due within `retries_within_sec`, and leaves tasks that were snoozed, rate limited or scheduled
        for later, and tasks that other agents hold. It logs what it waits for and what it leaves. Several
        agents in one process that run this way return together, when all are idle.

        Signals are handled in the main thread, unless the program handles or ignores them itself;
        `handle_signals=False` leaves them alone. `optimize` is for a process that does nothing else: it
        exempts the objects that exist now from garbage collection (`gc.freeze`).
        """
        if self._run is not None:
            raise LineshaftError(f"Agent {self.id!r} is already running.")
        if not self._handlers:
            raise LineshaftError("This agent has no handlers. Give it one with @agent.task('TYPE').")
        run = self._run = _Run(
            shaft.backend,
            self._registration(),
            dict(self._handlers),
            list(self._schedules),
            grace_sec=self._grace_sec,
            drain_retries_within_sec=seconds(retries_within_sec) if until_idle else None,
        )
        try:
            if optimize:
                _freeze()
            with shown(), signals(run) if handle_signals else contextlib.nullcontext():
                await run.work()
        except LineshaftError as error:
            if handle_signals:
                _print_in_one_line(error)
            raise
        finally:
            self._run = None

    def main(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        until_idle: bool = False,
        retries_within_sec: Duration = 60.0,
    ) -> None:
        """Run as a program, without an event loop: `run` on `Lineshaft(url, token=token)`.

        Returns when the agent was stopped or, with `until_idle`, has nothing left to do. If it fails, it
        prints one line and ends the program with exit code 1.
        """
        program.main(self, url, token, until_idle=until_idle, retries_within_sec=retries_within_sec)

    def stop(self, *, now: bool = False) -> None:
        """Claim nothing new and finish; with `now`, release running tasks. May be called from any thread."""
        if self._run is not None:
            self._run.stop_from_anywhere(now=now)

    def _registration(self) -> NewAgent:
        return NewAgent(
            id=self.id,
            instance=siblings.new_name() if self._instance is None else self._instance,
            host=siblings.host_name(),
            type=self._type,
            capabilities=self._capabilities,
            types=tuple(self._handlers),
            models_available=self._models,
            version=self._version,
            max_concurrent_tasks=self._max_concurrent_tasks,
            budget_usd=self._budget_usd,
            poll_interval_sec=self._poll_interval_sec,
            claim_ttl_sec=self._claim_ttl_sec,
            heartbeat_interval_sec=self._heartbeat_interval_sec,
        )


class _Run:
    """One call of `Agent.run`: register, work, stop, leave."""

    def __init__(
        self,
        backend: Backend,
        registration: NewAgent,
        handlers: Mapping[str, Handler],
        schedules: Sequence[NewSource],
        *,
        grace_sec: float,
        drain_retries_within_sec: float | None,
    ) -> None:
        self._backend = backend
        self._registration = registration
        self._handlers = handlers
        self._schedules = schedules
        self._grace_sec = grace_sec
        self._drain = drain_retries_within_sec
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._worker: Worker | None = None
        #: When running tasks are released at the latest, in monotonic time.
        self._release_by = math.inf

    def stop(self, *, now: bool, because: signal.Signals | None = None) -> None:
        self._report_stop(now=now, because=because)
        self._stop.set()
        if now:
            self._stop_now.set()

    def _report_stop(self, *, now: bool, because: signal.Signals | None) -> None:
        if self._worker is None or self._stop_now.is_set() or (self._stop.is_set() and not now):
            return
        held = len(self._worker.held())
        tasks, them = count(held, "task"), "it" if held == 1 else "them"
        if not held:
            text = "stopping"
        elif now:
            text = f"handing back {tasks}"
        else:
            again = {signal.SIGINT: "Ctrl-C again", signal.SIGTERM: "a second signal"}
            hint = f"; {again[because]} hands {them} back" if because in again else ""
            text = f"finishing {tasks} within {self._grace_sec:g} s{hint}"
        extra = {"agent_id": self._worker.agent_id} | ({"signal": because.name} if because else {})
        _log.info("%s: %s", self._worker.agent_id, text, extra=extra)

    def expect_stop(self, *, now: bool) -> None:
        when = time.monotonic() + (0.0 if now else self._grace_sec)
        self._release_by = min(self._release_by, when)
        if self._worker is not None:
            self._worker.expect_stop(self._release_by)

    def stop_from_anywhere(self, *, now: bool) -> None:
        self.expect_stop(now=now)
        self._loop.call_soon_threadsafe(partial(self.stop, now=now))

    async def work(self) -> None:
        interval = self._registration.heartbeat_interval_sec
        self._backend.expect_answers_within(max(interval, _LEAST_PATIENCE_SEC))
        process = agent_process(self._backend)
        async with process.membership():
            view = await self._backend.register(self._registration)
            for warning in view.warnings:
                _log.warning("%s", warning, extra={"agent_id": view.id})
            if view.status != "active":
                _log.warning(
                    "%s: was set %s by hand and claims nothing; "
                    "'lineshaft agents change %s --status active' lets it work",
                    *(view.id, view.status, view.id),
                )
            for schedule in self._schedules:
                await self._backend.put_source(schedule)
            worker = Worker(
                self._backend, view, self._handlers, process, drain_retries_within_sec=self._drain
            )
            if self._drain is not None:
                process.enter_drain(worker)
            self._worker = worker
            about = {"agent_id": view.id}
            types = _listed(self._handlers)
            _log.info("%s: waiting for %s on %s", view.id, types, self._backend.place, extra=about)
            if self._release_by < math.inf:
                worker.expect_stop(self._release_by)
            looked = asyncio.Event()
            working = asyncio.create_task(_work_after(looked, worker), name=f"lineshaft agent {view.id}")
            stopping = asyncio.create_task(self._stop.wait())
            try:
                async with siblings.watching(self._backend, worker.presence, looked):
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
                worker.hand_back()
                patience = max(handler.patience_sec for handler in self._handlers.values())
                last = self._loop.time() + patience + _LAST_WRITES_SEC
                await worker.close(patience + _LAST_WRITES_SEC)
                process.leave_drain(worker)
                _log.info("%s: ended: %s", view.id, worker.task_log.summary(), extra=about)
                if worker.error is None and working.exception() is None:
                    await self._leave(view.id, view.incarnation, until=last + _LAST_WORD_SEC)
            working.result()
            if worker.error is not None:
                # It was superseded or refused while it was stopping.
                raise worker.error

    async def _finish(self, worker: Worker, agent_id: str, incarnation: int) -> None:
        """Let running tasks end within the grace, or until a second signal."""
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
        # At the same time: an unavailable database must not extend the grace.
        reporting = asyncio.create_task(self._report_draining(agent_id, incarnation))
        try:
            await worker.finish(self._grace_sec)
            await asyncio.wait({reporting}, timeout=_LAST_WORD_SEC)
        finally:
            reporting.cancel()
            await asyncio.wait({reporting})

    async def _report_draining(self, agent_id: str, incarnation: int) -> None:
        with contextlib.suppress(UnavailableError):  # it claims nothing anyway
            await self._backend.drain(agent_id, incarnation)

    async def _leave(self, agent_id: str, incarnation: int, *, until: float) -> None:
        # Otherwise the offline detector notices.
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout_at(until):
                await self._backend.leave(agent_id, incarnation)


def _listed(types: Iterable[str]) -> str:
    """Some of the types, in words."""
    first, rest = list(types)[:_LISTED_TYPES], list(types)[_LISTED_TYPES:]
    return ", ".join(first) + (f" and {count(len(rest), 'other type')}" if rest else "")


def _freeze() -> None:
    """Exempt existing objects from collection, which otherwise takes a fifth of a busy agent's time."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


async def _work_after(looked: asyncio.Event, worker: Worker) -> None:
    """Work, once the tasks of dead predecessors on this machine are ready or wait for their retries.

    Otherwise an agent that runs until it is idle would not see them.
    """
    await looked.wait()
    await worker.work()


def _print_in_one_line(error: LineshaftError) -> None:
    """If this error ends the program, print its text without a traceback: it is nothing in the code."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is error:
            sys.stderr.write(f"lineshaft: {error}\n")
        else:
            before(kind, value, trace)

    sys.excepthook = hook
