"""`SyncLineshaft`: the same methods for scripts and web apps that have no event loop.

Each method runs the asynchronous one in the event loop of a background thread. A call with the caller's own
`connection` runs in the caller's thread instead, because a transaction must not be used by two threads.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from decimal import Decimal
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from lineshaft.client.artifacts import ArtifactReader, Artifacts, Content, Progress
from lineshaft.client.handles import SyncDagHandle, SyncTaskHandle, TaskRef
from lineshaft.client.lineshaft import Lineshaft
from lineshaft.client.sources import SyncSources
from lineshaft.errors import LineshaftError
from lineshaft.model.durations import Duration
from lineshaft.model.tasks import NewTask, TaskOptions
from lineshaft.settings import Settings
from lineshaft.types import Artifact, Page
from lineshaft.types.page import DEFAULT_LIMIT
from lineshaft.types.typed_task import TypedTask

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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


def _blocking(
    method: Callable[Concatenate[Lineshaft, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncLineshaft", P], T]:
    def call(self: "SyncLineshaft", /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop, connection = self.loop, kwargs.get("connection")
        if connection is None:
            return loop.run(method(self.shaft, *args, **kwargs))
        from lineshaft.engine.postgres.caller_transaction import (  # noqa: PLC0415 - imports psycopg
            at_once,
            refuse_async,
        )

        refuse_async(connection)
        return at_once(method(self.shaft, *args, **kwargs))

    return _named_like(method, call)


def _iterating(
    method: Callable[Concatenate[Lineshaft, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["SyncLineshaft", P], Iterator[T]]:
    def call(self: "SyncLineshaft", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        loop = self.loop
        items = method(self.shaft, *args, **kwargs)

        async def following() -> list[T]:
            try:
                return [await anext(items)]
            except StopAsyncIteration:
                return []

        try:
            while found := loop.run(following()):
                yield found[0]
        finally:
            loop.run(items.aclose())

    return _named_like(method, call)


def _named_like(method: Callable[..., Any], call: Callable[P, T]) -> Callable[P, T]:
    call.__name__, call.__qualname__ = method.__name__, f"SyncLineshaft.{method.__name__}"
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


class SyncArtifacts:
    """`Artifacts` for code without an event loop."""

    def __init__(self, shaft: Lineshaft, loop: LoopThread) -> None:
        self._artifacts = shaft.artifacts
        self._loop = loop

    def put(
        self,
        name: str,
        content: Content,
        *,
        content_type: str | None = None,
        task: TaskRef | None = None,
        progress: Progress | None = None,
    ) -> Artifact:
        work = self._artifacts.put(name, content, content_type=content_type, task=task, progress=progress)
        return self._loop.run(work)

    def open(self, ref: str, *, start: int = 0, stop: int | None = None) -> SyncArtifactReader:
        return SyncArtifactReader(self._loop, self._artifacts.open(ref, start=start, stop=stop))

    def read(self, ref: str) -> bytes:
        return self._loop.run(self._artifacts.read(ref))

    def save(self, ref: str, path: os.PathLike[str], *, progress: Progress | None = None) -> Artifact:
        return self._loop.run(self._artifacts.save(ref, path, progress=progress))

    def get(self, ref: str) -> Artifact:
        return self._loop.run(self._artifacts.get(ref))

    def delete(self, ref: str) -> None:
        self._loop.run(self._artifacts.delete(ref))

    def list(
        self, *, task: TaskRef | None = None, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[Artifact]:
        return self._loop.run(self._artifacts.list(task=task, limit=limit, cursor=cursor))

    for _name in ("put", "open", "read", "save", "get", "delete", "list"):
        locals()[_name].__doc__ = getattr(Artifacts, _name).__doc__
    del _name


class SyncLineshaft:
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
        self.shaft = Lineshaft(
            url, token=token, settings=settings, max_connections=max_connections, actor=actor
        )
        self._loop: LoopThread | None = None

    @classmethod
    def around(cls, shaft: Lineshaft, loop: LoopThread) -> Self:
        """Wrap a client that is open in this loop. Its owner closes it."""
        made = cls.__new__(cls)
        made.shaft, made._loop = shaft, loop  # noqa: SLF001 - its own
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
        return SyncArtifacts(self.shaft, self.loop)

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

    def submit_dag(
        self,
        title: str,
        tasks: Sequence[NewTask],
        *,
        budget_ceiling_usd: Decimal | float | None = None,
        created_by: str | None = None,
        idempotency_key: str | None = None,
        connection: Any = None,
    ) -> SyncDagHandle:
        dag = self._submit_dag(
            title,
            tasks,
            budget_ceiling_usd=budget_ceiling_usd,
            created_by=created_by,
            idempotency_key=idempotency_key,
            connection=connection,
        )
        return SyncDagHandle(self, dag)

    @property
    def sources(self) -> SyncSources:
        """Schedules, webhooks and other rules that create work."""
        return SyncSources(self.shaft.sources, self.loop)

    submit.__doc__ = Lineshaft.submit.__doc__
    submit_many.__doc__ = Lineshaft.submit_many.__doc__
    submit_dag.__doc__ = Lineshaft.submit_dag.__doc__
    _submit = _blocking(Lineshaft.submit)
    _submit_many = _blocking(Lineshaft.submit_many)
    _submit_dag = _blocking(Lineshaft.submit_dag)
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
    breakers = _blocking(Lineshaft.breakers)
    open_breaker = _blocking(Lineshaft.open_breaker)
    reset_breaker = _blocking(Lineshaft.reset_breaker)
    locks = _blocking(Lineshaft.locks)
    release_lock = _blocking(Lineshaft.release_lock)
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
