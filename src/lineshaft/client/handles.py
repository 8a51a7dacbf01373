"""Handles: what a submission returns, to wait for the result, to read and to cancel."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import msgspec

from lineshaft.client import large_data
from lineshaft.client.must_await import must_await
from lineshaft.errors import OutputTypeError, TaskCancelled, TaskFailed
from lineshaft.model.durations import Duration, seconds
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import Dag, Submitted, SubmittedDag, Task, Why
from lineshaft.types.page import MAX_LIMIT
from lineshaft.types.typed_task import Decode, decoder_of

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.client.lineshaft import Lineshaft

R_co = TypeVar("R_co", covariant=True)

_ENDED = frozenset({Status.COMPLETED, Status.CANCELLED, Status.DEAD_LETTERED})


class _Reference:
    __slots__ = ("duplicate", "id")

    def __init__(self, submitted: "Submitted | SubmittedDag | _Reference") -> None:
        self.id: Final[str] = submitted.id
        #: It existed already: the idempotency key was in use.
        self.duplicate: Final[bool] = submitted.duplicate

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}{' duplicate' if self.duplicate else ''}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


class TaskReference(_Reference):
    """A submitted task."""

    __slots__ = ("mismatch", "replaced")

    def __init__(self, submitted: "Submitted | TaskReference") -> None:
        super().__init__(submitted)
        #: The idempotency key was in use for a different request.
        self.mismatch: Final[bool] = submitted.mismatch
        #: It existed, waited, and was replaced with what was submitted.
        self.replaced: Final[bool] = submitted.replaced


class DagReference(_Reference):
    """A submitted DAG."""

    __slots__ = ()


#: A task: its id, a handle, or the task as it was read.
TaskRef = str | TaskReference | Task
#: A DAG: its id, a handle, or the DAG as it was read.
DagRef = str | DagReference | Dag


def id_of(what: TaskRef | DagRef) -> str:
    if isinstance(what, str):
        return what
    if not isinstance(what, _Reference | Task | Dag):
        raise TypeError(f"Expected an id, a handle, a task or a DAG, got {what!r}.")
    return what.id


class TaskHandle(TaskReference, Generic[R_co]):
    """A submitted task whose handler returns `R`; `Any` for a task that was submitted by name."""

    __slots__ = ("_decode", "_shaft")

    def __init__(self, shaft: "Lineshaft", submitted: Submitted, decode: Decode | None) -> None:
        super().__init__(submitted)
        self._shaft = shaft
        self._decode = decode

    @must_await
    async def result(self, timeout: Duration | None = None) -> R_co:  # noqa: ASYNC109 - as `Lineshaft.wait`
        """Wait until the task has ended, and return its output.

        Raises TaskFailed if it became a dead letter, TaskCancelled if it was cancelled, and TimeoutError if
        it takes longer than `timeout`; the task goes on then.
        """
        limit = seconds(timeout)
        until = None if limit is None else asyncio.get_running_loop().time() + limit
        while True:
            left = None if until is None else until - asyncio.get_running_loop().time()
            task = await self._shaft.wait(self, left)
            # It may have been revived since.
            if task.status in _ENDED:
                result: R_co = _result_of(task, self._decode)
                return result

    def as_input(self) -> R_co:
        """The output of this task as an argument for another one: `TaskType.new` takes it."""
        return cast("R_co", self)

    @must_await
    async def task(self) -> Task:
        return await self._shaft.get(self)

    @must_await
    async def status(self) -> Status:
        return (await self.task()).status

    async def cancel(self, reason: str = "cancelled", *, cascade: bool = True) -> Task:
        """Cancel the task, its children and, with `cascade`, all that depends on it."""
        return await self._shaft.cancel(self, reason, cascade=cascade)

    async def why(self) -> Why:
        """What the task is waiting for, what it is doing, or how it ended."""
        return await self._shaft.why(self)


class DagHandle(DagReference):
    """A submitted DAG; `dag["key"]` is the handle of one of its tasks."""

    __slots__ = ("_decoders", "_shaft", "tasks")

    def __init__(self, shaft: "Lineshaft", submitted: SubmittedDag, tasks: Sequence[NewTask]) -> None:
        super().__init__(submitted)
        self._shaft = shaft
        self._decoders = {task.key: decoder_of(task) for task in tasks}
        #: By the keys of the submission.
        self.tasks: Mapping[str, TaskHandle[Any]] = {
            key: TaskHandle(shaft, task, self._decoders.get(key)) for key, task in submitted.tasks.items()
        }

    def __getitem__(self, key: str) -> TaskHandle[Any]:
        return _by_key(self.tasks, key)

    async def dag(self) -> Dag:
        return await self._shaft.get_dag(self)

    async def status(self) -> str:
        """pending, running, completed, failed or cancelled."""
        return (await self.dag()).status

    async def result(self, timeout: Duration | None = None) -> dict[str, Any]:  # noqa: ASYNC109 - as `Lineshaft.wait`
        """Wait until all tasks have ended, and return their outputs by key.

        Raises TaskFailed for the first task that became a dead letter, else TaskCancelled for the first that
        was cancelled, and TimeoutError if it takes longer than `timeout`; the DAG goes on then.
        """
        await self.wait(timeout)
        found = {task.id: task for task in await self._tasks()}
        ended = sorted(found.values(), key=lambda task: task.status is not Status.DEAD_LETTERED)
        for task in ended:
            if task.status is not Status.COMPLETED:
                _result_of(task, None)
        return {
            key: _result_of(found[handle.id], self._decoders.get(key)) for key, handle in self.tasks.items()
        }

    async def _tasks(self) -> list[Task]:
        """Those of the submission, in its order."""
        found: dict[str, Task] = {}
        cursor: str | None = None
        while True:
            page = await self._shaft.list(dag_id=self.id, limit=MAX_LIMIT, cursor=cursor)
            found |= {task.id: task for task in page.items}
            cursor = page.next_cursor
            if cursor is None:
                break
        # One that existed before may be of another DAG.
        tasks = [found.get(handle.id) or await handle.task() for handle in self.tasks.values()]
        return [await large_data.with_data(self._shaft.backend, task) for task in tasks]

    async def wait(self, timeout: Duration | None = None) -> Dag:  # noqa: ASYNC109 - as `Lineshaft.wait`
        """Wait until all tasks have ended; raises TimeoutError if it takes longer."""
        return await self._shaft.wait(self, timeout)

    async def cancel(self, reason: str = "cancelled") -> Dag:
        """Cancel all tasks that have not ended, and what depends on them elsewhere."""
        return await self._shaft.cancel_dag(self, reason)


class SyncTaskHandle(TaskReference, Generic[R_co]):
    """`TaskHandle` without `await`."""

    __slots__ = ("_handle", "_shaft")

    def __init__(self, shaft: "SyncLineshaft", handle: TaskHandle[R_co]) -> None:
        super().__init__(handle)
        self._shaft = shaft
        self._handle = handle

    def result(self, timeout: Duration | None = None) -> R_co:
        """Block until the task has ended, and return its output.

        Raises TaskFailed if it became a dead letter, TaskCancelled if it was cancelled, and TimeoutError if
        it takes longer than `timeout`; the task goes on then.
        """
        return self._shaft.loop.run(self._handle.result(timeout))

    def as_input(self) -> R_co:
        """The output of this task as an argument for another one: `TaskType.new` takes it."""
        return cast("R_co", self)

    def task(self) -> Task:
        return self._shaft.loop.run(self._handle.task())

    def status(self) -> Status:
        return self._shaft.loop.run(self._handle.status())

    def cancel(self, reason: str = "cancelled", *, cascade: bool = True) -> Task:
        """Cancel the task, its children and, with `cascade`, all that depends on it."""
        return self._shaft.loop.run(self._handle.cancel(reason, cascade=cascade))

    def why(self) -> Why:
        """What the task is waiting for, what it is doing, or how it ended."""
        return self._shaft.loop.run(self._handle.why())


class SyncDagHandle(DagReference):
    """`DagHandle` without `await`."""

    __slots__ = ("_handle", "_shaft", "tasks")

    def __init__(self, shaft: "SyncLineshaft", handle: DagHandle) -> None:
        super().__init__(handle)
        self._shaft = shaft
        self._handle = handle
        #: By the keys of the submission.
        self.tasks: Mapping[str, SyncTaskHandle[Any]] = {
            key: SyncTaskHandle(shaft, task) for key, task in handle.tasks.items()
        }

    def __getitem__(self, key: str) -> SyncTaskHandle[Any]:
        return _by_key(self.tasks, key)

    def dag(self) -> Dag:
        return self._shaft.loop.run(self._handle.dag())

    def status(self) -> str:
        """pending, running, completed, failed or cancelled."""
        return self._shaft.loop.run(self._handle.status())

    def result(self, timeout: Duration | None = None) -> dict[str, Any]:
        """As `DagHandle.result`."""
        return self._shaft.loop.run(self._handle.result(timeout))

    def wait(self, timeout: Duration | None = None) -> Dag:
        """Block until all tasks have ended; raises TimeoutError if it takes longer."""
        return self._shaft.loop.run(self._handle.wait(timeout))

    def cancel(self, reason: str = "cancelled") -> Dag:
        """Cancel all tasks that have not ended, and what depends on them elsewhere."""
        return self._shaft.loop.run(self._handle.cancel(reason))


H = TypeVar("H")


def _by_key(tasks: Mapping[str, H], key: str) -> H:
    try:
        return tasks[key]
    except KeyError:
        raise KeyError(f"The DAG has no task with key {key!r}, only {', '.join(tasks)}.") from None


def _result_of(task: Task, decode: Decode | None) -> Any:
    name = f"Task {task.id} ({task.type})"
    if task.status is Status.DEAD_LETTERED:
        error, category = task.failure_reason, task.failure_category
        tries = f"{task.attempts} attempt{'' if task.attempts == 1 else 's'}"
        last = task.failure_history[-1] if task.failure_history else None
        raise TaskFailed(
            f"{name} failed permanently after {tries} with {category}: {(error or '').rstrip('.')}. See "
            f"'lineshaft task show {task.id}'; 'lineshaft dlq retry {task.id}' runs it again.",
            task_id=task.id,
            error=error,
            category=category,
            attempts=task.attempts,
            traceback=None if last is None else last.traceback,
        )
    if task.status is Status.CANCELLED:
        reason = task.cancel_reason
        raise TaskCancelled(f"{name} was cancelled: {reason}", task_id=task.id, reason=reason)
    if decode is None:
        return task.result
    try:
        return decode(task.output.data_json)
    except msgspec.ValidationError as error:
        raise OutputTypeError(
            f"{name} has an output that doesn't fit the return type of its handler: {error}. Correct the "
            "annotation, or read the output as it is with task()."
        ) from None
