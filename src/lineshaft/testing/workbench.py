"""`Workbench`: a queue for one test, which decides when agents work and when time passes."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from lineshaft.agent.agent import Agent
from lineshaft.agent.execution import raised
from lineshaft.client.blocking import LoopThread, SyncLineshaft
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.client.lineshaft import Lineshaft
from lineshaft.clock import MovableClock
from lineshaft.logs import shown
from lineshaft.model.durations import Duration, seconds
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.operations import work
from lineshaft.settings import Settings
from lineshaft.testing.databases import scratch_database, server_for_tests
from lineshaft.types import Task, TypedTask

P = ParamSpec("P")
T = TypeVar("T")

#: Longer than any retry delay.
_ALL_RETRIES_SEC = 2 * 365 * 86_400.0


class Workbench:
    """A `Lineshaft` on its own database, with a clock that moves only on `advance`.

    Pass `shaft` to the code under test.
    """

    def __init__(self, dsn: str | None = None, *, max_connections: int = 6) -> None:
        """`dsn`: a migrated database that nothing else uses; without it, one is created and dropped."""
        self._dsn = dsn
        self._max_connections = max_connections
        self._resources = AsyncExitStack()
        self._backend: DatabaseBackend | None = None
        self._shaft: Lineshaft | None = None
        #: Exceptions of handlers, by task id.
        self._raised: dict[str, BaseException] = {}
        self.clock = MovableClock(datetime.now(UTC))

    async def open(self) -> Self:
        async with AsyncExitStack() as opening:
            dsn = self._dsn
            if dsn is None:
                databases = ExitStack()
                opening.push_async_callback(asyncio.to_thread, databases.close)
                server = await asyncio.to_thread(databases.enter_context, server_for_tests())
                dsn = await asyncio.to_thread(databases.enter_context, scratch_database(server))
            settings = replace(Settings(), database_url=dsn)
            self._backend = DatabaseBackend(settings, clock=self.clock, max_connections=self._max_connections)
            self._shaft = await opening.enter_async_context(
                Lineshaft(backend=self._backend, clock=self.clock)
            )
            self._resources = opening.pop_all()
        return self

    async def close(self) -> None:
        await self._resources.aclose()
        self._shaft = self._backend = None

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def shaft(self) -> Lineshaft:
        if self._shaft is None:
            raise RuntimeError("This workbench is not open. Use 'async with Workbench() as bench'.")
        return self._shaft

    # Working.

    async def drain(self, *agents: Agent, retry: bool = True) -> None:
        """Let the agents work until nothing is left for them.

        Failed tasks are retried at once: the clock is advanced to when they are due. Tasks that were snoozed,
        rate limited or scheduled for later, that sleep or wait for a signal, wait until `advance`. With
        `retry=False`, so do retries.
        """
        backend = self._opened()
        types = sorted({name for agent in agents for name in agent.task_types})
        while True:
            collecting = raised.set(self._raised)
            try:
                # Without pytest, which captures all lines, only failures are of interest.
                with shown(level="error"):
                    await asyncio.gather(
                        *(
                            agent.run(self.shaft, until_idle=True, retries_within_sec=0, handle_signals=False)
                            for agent in agents
                        )
                    )
            finally:
                raised.reset(collecting)
            request = work.NextRetry(type=tuple(types), within_sec=_ALL_RETRIES_SEC)
            soon = (await backend.call(work.next_retry, request)).due_sec if retry else None
            if soon is None:
                return
            await self.advance(max(soon, 0.0))

    async def run(self, agent: Agent, task: NewTask) -> Task:
        """Submit a task, drain the agent, and return the task as it is then."""
        handle = await self.shaft.submit(task)
        await self.drain(agent)
        return await handle.task()

    @overload
    async def result(self, agent: Agent, task: TypedTask[T]) -> T: ...

    @overload
    async def result(self, agent: Agent, task: NewTask) -> Any: ...

    async def result(self, agent: Agent, task: NewTask) -> Any:
        """Submit a task, drain the agent, and return the output; raises AssertionError unless it succeeds.

        The exception of the handler, if there was one, is the cause of that error, with its traceback.
        """
        handle = await self.shaft.submit(task)
        await self.drain(agent)
        done = await handle.task()
        if done.status is not Status.COMPLETED:
            raise AssertionError(
                f"Task {done.type!r} is {done.status}, not COMPLETED.{_failures(done)}"
            ) from self._raised.get(done.id)
        return await handle.result()

    async def advance(self, duration: Duration) -> None:
        """Move the clock forward. Tasks that are due become ready; leases and deadlines expire."""
        self.clock.advance(seconds(duration))
        await self._opened().maintain()

    # Looking.

    async def submitted(self, /, type: str | None = None, **fields: Any) -> list[Task]:  # noqa: A002
        """All matching tasks in the order of their submission.

        `spec` matches a spec that has at least these values; every other field must be equal.
        """
        tasks: list[Task] = []
        cursor: str | None = None
        while True:
            filters = {} if type is None else {"type": type}
            page = await self.shaft.list(limit=200, cursor=cursor, **filters)
            tasks += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        tasks.sort(key=lambda task: (task.created_at, task.id))
        return [task for task in tasks if _matches(task, fields)]

    async def assert_submitted(
        self,
        /,
        type: str,  # noqa: A002 - what a task calls it
        *,
        count: int | None = None,
        **fields: Any,
    ) -> list[Task]:
        """Assert that at least one such task was submitted, or exactly `count`; returns the tasks."""
        found = await self.submitted(type, **fields)
        if len(found) == count or (count is None and found):
            return found
        wanted = f"{type!r}" + (f" with {fields}" if fields else "")
        number = "at least one task" if count is None else f"{count} tasks"
        others = "".join(f"\n  {task.type!r} {task.status} {task.spec}" for task in await self.submitted())
        raise AssertionError(
            f"Expected {number} {wanted} to be submitted, found {len(found)} among: {others or 'none'}"
        )

    def _opened(self) -> DatabaseBackend:
        if self._backend is None:
            raise RuntimeError("This workbench is not open. Use 'async with Workbench() as bench'.")
        return self._backend


def _failures(task: Task) -> str:
    """The failed attempts, with the last traceback."""
    lines = [f"\n  {one.category}: {one.error}" for one in task.failure_history]
    tracebacks = [one.traceback for one in task.failure_history if one.traceback]
    return "".join([*lines, f"\n\n{tracebacks[-1].rstrip()}" if tracebacks else ""])


def _matches(task: Task, fields: Mapping[str, Any]) -> bool:
    for name, wanted in fields.items():
        found = getattr(task, name)
        if name == "spec":
            found = {key: value for key, value in found.items() if key in wanted}
        if found != wanted:
            return False
    return True


def _blocking(
    method: Callable[Concatenate[Workbench, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncWorkbench", P], T]:
    def call(self: "SyncWorkbench", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.loop.run(method(self.bench, *args, **kwargs))

    call.__name__, call.__qualname__ = method.__name__, f"SyncWorkbench.{method.__name__}"
    call.__doc__ = method.__doc__
    return call


class SyncWorkbench:
    """`Workbench` for tests without an event loop; `shaft` is a `SyncLineshaft`."""

    def __init__(self, dsn: str | None = None, *, max_connections: int = 6) -> None:
        self.bench = Workbench(dsn, max_connections=max_connections)
        self._shaft: SyncLineshaft | None = None

    def open(self) -> Self:
        loop = LoopThread("lineshaft workbench")
        try:
            loop.run(self.bench.open())
        except BaseException:
            loop.close()
            raise
        self._shaft = SyncLineshaft.around(self.bench.shaft, loop)
        return self

    def close(self) -> None:
        if self._shaft is not None:
            loop = self.loop
            self._shaft = None
            loop.run(self.bench.close())
            loop.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def shaft(self) -> SyncLineshaft:
        if self._shaft is None:
            raise RuntimeError("This workbench is not open. Use 'with SyncWorkbench() as bench'.")
        return self._shaft

    @property
    def loop(self) -> LoopThread:
        return self.shaft.loop

    @property
    def clock(self) -> MovableClock:
        return self.bench.clock

    drain = _blocking(Workbench.drain)
    run = _blocking(Workbench.run)
    result = _blocking(Workbench.result)
    advance = _blocking(Workbench.advance)
    submitted = _blocking(Workbench.submitted)
    assert_submitted = _blocking(Workbench.assert_submitted)
