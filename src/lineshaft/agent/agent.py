"""`Agent`: handlers of task types, and their run."""

import contextlib
import gc
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Unpack

import msgspec
from msgspec.structs import replace

from lineshaft.agent import program, siblings
from lineshaft.agent.handlers import Function, Handler, make_handler
from lineshaft.agent.run import work
from lineshaft.agent.signals import signals
from lineshaft.agent.stopping import StopRequest
from lineshaft.agent.task_type import TaskDecorator, TaskFunction, plain_function
from lineshaft.client.lineshaft import Lineshaft
from lineshaft.errors import LineshaftError
from lineshaft.logs import shown
from lineshaft.model.durations import Duration, seconds
from lineshaft.model.tasks import NewTask, TaskDefaults, check_options
from lineshaft.operations.new_tasks import check_batch
from lineshaft.types import NewAgent, NewSource, SourceKind
from lineshaft.types.sources import CatchUp, Overlap, escaped


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
        accounts: Sequence[str] = (),
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
        `accounts` are accounts with providers: each task gets one that is open as `ctx.account`.
        Durations are seconds or a timedelta.
        """
        self.id = id
        self._instance = instance
        self._declaration = NewAgent(
            type=type,
            capabilities=tuple(capabilities),
            models_available=tuple(models),
            accounts=tuple(accounts),
            version=version,
            max_concurrent_tasks=max_concurrent_tasks,
            budget_usd=budget_usd,
            poll_interval_sec=seconds(poll_interval_sec),
            claim_ttl_sec=seconds(claim_ttl_sec),
            heartbeat_interval_sec=seconds(heartbeat_interval_sec),
        )
        self._grace_sec = seconds(grace_sec)
        self._handlers: dict[str, Handler] = {}
        #: Their types, with the defaults of tasks.
        self._types: dict[str, TaskFunction[..., Any, Any]] = {}
        self._schedules: list[NewSource] = []
        #: Set while the agent runs.
        self._stop_request: StopRequest | None = None

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
        agent runs at the same time. `defaults` are fields of the tasks that `TaskType.new` builds;
        `max_cost_usd`, `max_attempts`, `max_duration_sec` and `retry` apply to all tasks of the type that
        leave them out, however they are submitted.
        """
        decorated: object = type
        if not isinstance(decorated, str):
            name = getattr(decorated, "__name__", "TYPE")
            raise TypeError(f"@agent.task needs the name of a task type: write @agent.task({name!r}).")
        check_options(defaults, (*NewTask.__struct_fields__, "concurrency", "time_limit_sec"))

        def register(function: Function, /) -> Any:
            if type in self._handlers:
                raise ValueError(f"Task type {type!r} already has a handler.")
            plain = plain_function(function)
            handler = make_handler(type, plain, concurrency=concurrency, time_limit_sec=time_limit_sec)
            decorated: TaskFunction[..., Any, Any] = TaskFunction(type, plain, handler, **defaults)
            self._handlers[type] = handler
            self._types[type] = decorated
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
            schedule = str(name or getattr(function, "__name__", ""))
            if isinstance(function, TaskFunction) and function.name in self._handlers:
                decorated: TaskFunction[..., Any, Any] = function
            else:
                decorated = self.task(schedule, **defaults)(function)
            task = decorated.new(**(spec or {})).with_options(**defaults)
            check_batch([task])
            timing: dict[str, Any] = {"cron": when} if isinstance(when, str) else {"every_sec": seconds(when)}
            self._schedules.append(
                NewSource(
                    name=f"agent:{agent_id}/{schedule}",
                    kind=SourceKind.SCHEDULE,
                    template={"task": escaped(msgspec.to_builtins(task))},
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
        if self._stop_request is not None:
            raise LineshaftError(f"Agent {self.id!r} is already running.")
        if not self._handlers:
            raise LineshaftError("This agent has no handlers. Give it one with @agent.task('TYPE').")
        stop = self._stop_request = StopRequest(self._grace_sec)
        try:
            if optimize:
                _freeze()
            with shown(), signals(stop) if handle_signals else contextlib.nullcontext():
                await work(
                    shaft.backend,
                    self._registration(),
                    dict(self._handlers),
                    list(self._schedules),
                    stop,
                    drain_retries_within_sec=seconds(retries_within_sec) if until_idle else None,
                )
        finally:
            self._stop_request = None

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
        if self._stop_request is not None:
            self._stop_request.stop_from_anywhere(now=now)

    def _registration(self) -> NewAgent:
        instance = siblings.new_name() if self._instance is None else self._instance
        return replace(
            self._declaration,
            id=self.id,
            instance=instance,
            host=siblings.host_name(),
            types=tuple(self._handlers),
            task_defaults={name: type_.declaration() for name, type_ in self._types.items()},
        )


def _freeze() -> None:
    """Exempt existing objects from collection, which otherwise takes a fifth of a busy agent's time."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
