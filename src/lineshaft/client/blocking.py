"""`SyncLineshaft`: the same methods for scripts and web apps that have no event loop.

Each method runs the asynchronous one in the event loop of a background thread. A call with the caller's own
`connection` runs in the caller's thread instead, because a transaction must not be used by two threads.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from lineshaft.client.artifacts import ArtifactReader, Artifacts
from lineshaft.client.handles import SyncDagHandle, SyncTaskHandle
from lineshaft.client.lineshaft import Lineshaft
from lineshaft.client.sources import Sources
from lineshaft.errors import LineshaftError
from lineshaft.model.durations import Duration
from lineshaft.model.tasks import NewTask, TaskOptions
from lineshaft.settings import Settings
from lineshaft.types import Artifact
from lineshaft.types.typed_task import TypedTask

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H")


class LoopThread:
    """An event loop in a background thread."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._loop.run_forever()
        # Threads that wait for these tasks get a CancelledError.
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._pid:
            work.close()
            raise LineshaftError(
                "This Lineshaft was opened before the process was forked. Open one in each process."
            )
        with self._lock:
            if self._closed:
                work.close()
                raise LineshaftError("This Lineshaft was closed. Open it again.")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise LineshaftError(
                "Another thread closed this Lineshaft during the call. The call may have taken effect; check "
                "before retrying."
            ) from None
        except BaseException:
            # Interrupted while waiting: the result is no longer needed.
            future.cancel()
            raise

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # the thread belongs to the parent process
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Blocking:
    """An object for code without an event loop, around the asynchronous one of the same methods."""

    def __init__(self, inner: Any, loop: LoopThread) -> None:
        self._inner = inner
        self._loop_of = loop

    @property
    def loop(self) -> LoopThread:
        return self._loop_of


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    def call(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop, connection = self.loop, kwargs.get("connection")
        if connection is None:
            return loop.run(method(self._inner, *args, **kwargs))
        from lineshaft.engine.postgres.caller_transaction import (  # noqa: PLC0415 - imports psycopg
            at_once,
            refuse_async,
        )

        refuse_async(connection)
        return at_once(method(self._inner, *args, **kwargs))

    return _named_like(method, call)


def _handled(
    method: Callable[Concatenate[Lineshaft, P], Coroutine[Any, Any, T]],
    handle: "Callable[[SyncLineshaft, T], H]",
) -> "Callable[Concatenate[SyncLineshaft, P], H]":
    run = _blocking(method)

    def call(self: "SyncLineshaft", /, *args: P.args, **kwargs: P.kwargs) -> H:
        return handle(self, run(self, *args, **kwargs))

    return _named_like(method, call)


def _iterating(
    method: Callable[Concatenate[Any, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    def call(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        loop = self.loop
        items = method(self._inner, *args, **kwargs)

        async def following() -> list[T]:
            try:
                return [await anext(items)]
            except StopAsyncIteration:
                return []

        try:
            while item := loop.run(following()):
                yield item[0]
        finally:
            loop.run(items.aclose())

    return _named_like(method, call)


def _named_like(method: Callable[..., Any], call: Callable[P, T]) -> Callable[P, T]:
    call.__name__, call.__qualname__ = method.__name__, f"Sync{method.__qualname__}"
    call.__doc__ = method.__doc__
    return call


class _Runner(Protocol):
    """Runs a coroutine in an event loop, and waits for its result."""

    def run(self, work: Coroutine[Any, Any, T]) -> T: ...


class SyncArtifactReader:
    """`ArtifactReader` for code without an event loop."""

    def __init__(self, loop: _Runner, reader: ArtifactReader) -> None:
        self._loop = loop
        self._reader = reader

    @property
    def artifact(self) -> Artifact:
        return self._reader.artifact

    def __enter__(self) -> Self:
        self._loop.run(self._reader.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._reader.__aexit__(kind, error, trace))

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes, fewer only at the end; without a size everything, in memory."""
        return self._loop.run(self._reader.read(size))

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read(1 << 20):
            yield chunk


class SyncArtifacts(Blocking):
    """`Artifacts` for code without an event loop."""

    def open(self, ref: str, *, start: int = 0, stop: int | None = None) -> SyncArtifactReader:
        return SyncArtifactReader(self.loop, self._inner.open(ref, start=start, stop=stop))

    open.__doc__ = Artifacts.open.__doc__  # noqa: A003 - the method
    put = _blocking(Artifacts.put)
    read = _blocking(Artifacts.read)
    save = _blocking(Artifacts.save)
    get = _blocking(Artifacts.get)
    delete = _blocking(Artifacts.delete)
    list = _blocking(Artifacts.list)


class SyncSources(Blocking):
    """`shaft.sources` for code without an event loop."""

    put = _blocking(Sources.put)
    get = _blocking(Sources.get)
    list = _blocking(Sources.list)
    create = _blocking(Sources.create)
    patch = _blocking(Sources.patch)
    delete = _blocking(Sources.delete)
    fire = _blocking(Sources.fire)
    firings = _blocking(Sources.firings)
    apply = _blocking(Sources.apply)


class SyncLineshaft(Blocking):
    """`Lineshaft` for code without an event loop. Safe to share between threads.

    with SyncLineshaft() as shaft:
        shaft.submit(NewTask("mail", spec={"to": "ann@example.org"}), connection=session)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        settings: Settings | None = None,
        max_connections: int = 10,
        actor: str | None = None,
    ) -> None:
        """As `Lineshaft`: the DSN of a database, or the URL of a server and its token."""
        self.shaft = self._inner = Lineshaft(
            url, token=token, settings=settings, max_connections=max_connections, actor=actor
        )
        self._loop: LoopThread | None = None

    @classmethod
    def around(cls, shaft: Lineshaft, loop: LoopThread) -> Self:
        """Wrap a client that is open in this loop. Its owner closes it."""
        made = cls.__new__(cls)
        made.shaft = made._inner = shaft  # noqa: SLF001 - its own
        made._loop = loop  # noqa: SLF001 - its own
        return made

    @property
    def loop(self) -> LoopThread:
        if self._loop is None:
            raise LineshaftError(
                "This Lineshaft is not open. Use 'with SyncLineshaft() as shaft', or open()."
            )
        return self._loop

    @property
    def artifacts(self) -> SyncArtifacts:
        """Files that tasks read and write."""
        return SyncArtifacts(self.shaft.artifacts, self.loop)

    def open(self) -> Self:
        self._loop = LoopThread("lineshaft client")
        try:
            self._loop.run(self.shaft.open())
        except BaseException:
            self._close_loop()
            raise
        return self

    def close(self) -> None:
        if self._loop is not None:
            try:
                self._loop.run(self.shaft.close())
            finally:
                self._close_loop()

    def _close_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @overload
    def submit(
        self,
        task: TypedTask[R],
        *,
        delay: Duration | None = None,
        connection: Any = None,
        **options: Unpack[TaskOptions],
    ) -> SyncTaskHandle[R]: ...

    @overload
    def submit(
        self,
        task: NewTask,
        *,
        delay: Duration | None = None,
        connection: Any = None,
        **options: Unpack[TaskOptions],
    ) -> SyncTaskHandle[Any]: ...

    def submit(self, task: NewTask, **options: Any) -> SyncTaskHandle[Any]:
        return SyncTaskHandle(self, self._submit(task, **options))

    @overload
    def submit_many(
        self, tasks: Sequence[TypedTask[R]], *, connection: Any = None
    ) -> list[SyncTaskHandle[R]]: ...

    @overload
    def submit_many(
        self, tasks: Sequence[NewTask], *, connection: Any = None
    ) -> list[SyncTaskHandle[Any]]: ...

    def submit_many(self, tasks: Sequence[NewTask], *, connection: Any = None) -> list[SyncTaskHandle[Any]]:
        return [SyncTaskHandle(self, one) for one in self._submit_many(tasks, connection=connection)]

    @property
    def sources(self) -> SyncSources:
        """Schedules, webhooks and other rules that create work."""
        return SyncSources(self.shaft.sources, self.loop)

    submit.__doc__ = Lineshaft.submit.__doc__
    submit_many.__doc__ = Lineshaft.submit_many.__doc__
    _submit = _blocking(Lineshaft.submit)
    _submit_many = _blocking(Lineshaft.submit_many)
    submit_dag = _handled(Lineshaft.submit_dag, SyncDagHandle)
    wait = _blocking(Lineshaft.wait)
    get = _blocking(Lineshaft.get)
    list = _blocking(Lineshaft.list)
    attempts = _blocking(Lineshaft.attempts)
    steps = _blocking(Lineshaft.steps)
    why = _blocking(Lineshaft.why)
    change = _blocking(Lineshaft.change)
    add_dependencies = _blocking(Lineshaft.add_dependencies)
    cancel = _blocking(Lineshaft.cancel)
    retry = _blocking(Lineshaft.retry)
    correct_cost = _blocking(Lineshaft.correct_cost)
    rerun = _blocking(Lineshaft.rerun)
    signal = _blocking(Lineshaft.signal)
    cancel_matching = _blocking(Lineshaft.cancel_matching)
    retry_matching = _blocking(Lineshaft.retry_matching)
    find_ids = _blocking(Lineshaft.find_ids)
    get_dag = _blocking(Lineshaft.get_dag)
    dags = _blocking(Lineshaft.dags)
    cancel_dag = _blocking(Lineshaft.cancel_dag)
    set_dag_budget = _blocking(Lineshaft.set_dag_budget)
    add_dag_budget = _blocking(Lineshaft.add_dag_budget)
    rename_dag = _blocking(Lineshaft.rename_dag)
    read_events = _blocking(Lineshaft.read_events)
    approvals = _blocking(Lineshaft.approvals)
    approve = _blocking(Lineshaft.approve)
    reject = _blocking(Lineshaft.reject)
    reports = _blocking(Lineshaft.reports)
    dead_letters = _blocking(Lineshaft.dead_letters)
    get_dead_letter = _blocking(Lineshaft.get_dead_letter)
    dead_letter_groups = _blocking(Lineshaft.dead_letter_groups)
    resolve = _blocking(Lineshaft.resolve)
    resolve_all = _blocking(Lineshaft.resolve_all)
    agents = _blocking(Lineshaft.agents)
    get_agent = _blocking(Lineshaft.get_agent)
    change_agent = _blocking(Lineshaft.change_agent)
    delete_agent = _blocking(Lineshaft.delete_agent)
    limits = _blocking(Lineshaft.limits)
    change_limits = _blocking(Lineshaft.change_limits)
    types = _blocking(Lineshaft.types)
    get_type = _blocking(Lineshaft.get_type)
    set_type = _blocking(Lineshaft.set_type)
    breakers = _blocking(Lineshaft.breakers)
    open_breaker = _blocking(Lineshaft.open_breaker)
    reset_breaker = _blocking(Lineshaft.reset_breaker)
    locks = _blocking(Lineshaft.locks)
    release_lock = _blocking(Lineshaft.release_lock)
    quotas = _blocking(Lineshaft.quotas)
    get_quota = _blocking(Lineshaft.get_quota)
    set_quota = _blocking(Lineshaft.set_quota)
    delete_quota = _blocking(Lineshaft.delete_quota)
    slowdowns = _blocking(Lineshaft.slowdowns)
    end_slowdown = _blocking(Lineshaft.end_slowdown)
    pause = _blocking(Lineshaft.pause)
    resume = _blocking(Lineshaft.resume)
    stats = _blocking(Lineshaft.stats)
    waiting = _blocking(Lineshaft.waiting)
    throughput = _blocking(Lineshaft.throughput)
    costs = _blocking(Lineshaft.costs)
    attention = _blocking(Lineshaft.attention)
    health = _blocking(Lineshaft.health)
    tokens = _blocking(Lineshaft.tokens)
    create_token = _blocking(Lineshaft.create_token)
    revoke_token = _blocking(Lineshaft.revoke_token)
    events = _iterating(Lineshaft.events)
