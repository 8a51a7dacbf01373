"""`Lineshaft`: the queue, for programs. The same methods over a database or over HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar, Unpack, overload

import msgspec
from msgspec import UNSET, UnsetType

from lineshaft.client import large_data
from lineshaft.client.administration import Administration
from lineshaft.client.backend import Backend
from lineshaft.client.choice import choose_backend
from lineshaft.client.handles import (
    DagHandle,
    DagRef,
    DagReference,
    TaskHandle,
    TaskRef,
    TaskReference,
    id_of,
)
from lineshaft.client.must_await import must_await
from lineshaft.client.waiting import EndWatch
from lineshaft.clock import Clock
from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.model.durations import Duration, seconds
from lineshaft.model.fields import encoded_json
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.tasks import NewTask, TaskOptions
from lineshaft.settings import Settings
from lineshaft.types import (
    Approval,
    ApprovalDecision,
    Attempt,
    BulkResolution,
    Dag,
    DagFilter,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    Event,
    EventPage,
    MatchedTasks,
    Page,
    Report,
    Resolution,
    Task,
    TaskChange,
    TaskFilter,
    TaskFilters,
    TaskOrder,
    Why,
)
from lineshaft.types.filters import Names, names
from lineshaft.types.page import DEFAULT_LIMIT, MAX_LIMIT
from lineshaft.types.typed_task import TypedTask, check_new_tasks, decoder_of

if TYPE_CHECKING:
    from lineshaft.checks.registry import Checks

R = TypeVar("R")

#: Read events after this: only what happens from now on.
NOW = "now"
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.02, 0.5
#: After a timeout: how long it may take to find out the reason.
_EXPLAIN_SEC = 2.0


class Lineshaft(Administration):
    """The queue.

        async with Lineshaft() as shaft:
            task = await shaft.submit(NewTask("research", spec={"prompt": "competitors"}))
            print((await shaft.wait(task)).result)

    `url` is the DSN of a database or the http(s) URL of a server. The default is the server of LINESHAFT_URL,
    else the database of LINESHAFT_DATABASE_URL, else an embedded database, which starts automatically.
    `max_connections` limits the connections that are open at the same time.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        settings: Settings | None = None,
        max_connections: int = 10,
        checks: "Checks | None" = None,
        actor: str | None = None,
        backend: Backend | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`token` is for a server; the default is LINESHAFT_TOKEN.

        `checks` are your own gates; the default is those of the settings. A server has its own. `actor`, on
        a database, is the name that events have of what is done by hand, such as a cancellation; a server
        records the name of the token.
        """
        super().__init__(
            backend
            or choose_backend(
                url, token, settings, max_connections=max_connections, checks=checks, actor=actor
            )
        )
        self._watch = EndWatch(self.backend)
        self._clock = clock

    async def open(self) -> Self:
        await self.backend.open()
        return self

    async def close(self) -> None:
        await self._watch.close()
        await self.backend.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    if not TYPE_CHECKING:  # type checkers report it on their own

        def __enter__(self) -> Never:
            raise TypeError(
                "Lineshaft is used with 'async with Lineshaft() as shaft'. Without an event loop: "
                "'with SyncLineshaft() as shaft'."
            )

        def __exit__(self, *_: object) -> None:
            """Python asks for it before it enters."""

    # Submitting.

    @overload
    async def submit(
        self,
        task: TypedTask[R],
        *,
        delay: Duration | None = None,
        connection: Any = None,
        **options: Unpack[TaskOptions],
    ) -> TaskHandle[R]: ...

    @overload
    async def submit(
        self,
        task: NewTask,
        *,
        delay: Duration | None = None,
        connection: Any = None,
        **options: Unpack[TaskOptions],
    ) -> TaskHandle[Any]: ...

    @must_await
    async def submit(
        self,
        task: NewTask,
        *,
        delay: Duration | None = None,
        connection: Any = None,
        **options: Unpack[TaskOptions],
    ) -> TaskHandle[Any]:
        """Submit one task. `options` replace fields of the task; `delay` sets `run_at` to so much from now.

        With a `connection` (of psycopg or asyncpg, or a connection or session of SQLAlchemy) it becomes part
        of that connection's transaction: it exists once you commit, and never did if you roll back.
        """
        check_new_tasks([task])
        if delay is not None:
            if options.get("run_at") is not None:
                raise InvalidInputError(errors=[("delay", "can't be given together with run_at")])
            options["run_at"] = self._now() + timedelta(seconds=seconds(delay))
        if options:
            task = task.with_options(**options)
        (submitted,) = await self.backend.submit([task], connection=connection)
        return TaskHandle(self, submitted, decoder_of(task))

    @overload
    async def submit_many(
        self, tasks: Sequence[TypedTask[R]], *, connection: Any = None
    ) -> list[TaskHandle[R]]: ...

    @overload
    async def submit_many(
        self, tasks: Sequence[NewTask], *, connection: Any = None
    ) -> list[TaskHandle[Any]]: ...

    @must_await
    async def submit_many(self, tasks: Sequence[NewTask], *, connection: Any = None) -> list[TaskHandle[Any]]:
        """Submit up to 10,000 standalone tasks, all or none."""
        check_new_tasks(tasks)
        submitted = await self.backend.submit(tasks, connection=connection)
        return [TaskHandle(self, one, decoder_of(task)) for one, task in zip(submitted, tasks, strict=True)]

    @must_await
    async def submit_dag(
        self,
        title: str,
        tasks: Sequence[NewTask],
        *,
        budget_ceiling_usd: Decimal | float | None = None,
        created_by: str | None = None,
        idempotency_key: str | None = None,
        connection: Any = None,
    ) -> DagHandle:
        """Submit tasks that depend on each other by `key`, all or none.

        With an `idempotency_key` that is in use it returns the existing DAG, and nothing is created.
        """
        check_new_tasks(tasks)
        submitted = await self.backend.submit_dag(
            title,
            tasks,
            budget_ceiling_usd=budget_ceiling_usd,
            created_by=created_by,
            idempotency_key=idempotency_key,
            connection=connection,
        )
        return DagHandle(self, submitted, tasks)

    def _now(self) -> datetime:
        now = None if self._clock is None else self._clock.now()
        return now or datetime.now(UTC)

    # Tasks.

    @must_await
    async def get(self, task: TaskRef, *, full: bool = False) -> Task:
        """A task; with `full` its output has the data also if that is large."""
        found = await self.backend.task(id_of(task))
        return await large_data.with_data(self.backend, found) if full else found

    async def list(
        self,
        *,
        status: Names = (),
        type: Names = (),  # noqa: A002 - the name of the field
        dag_id: Names = (),
        parent_id: Names = (),
        agent_id: Names = (),
        tag: Names = (),
        created_by: Names = (),
        q: Names = (),
        order: str = TaskOrder.CREATED_AT,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Task]:
        """One page of tasks. A filter with several values matches any of them; `q` is part of the title."""
        wanted = TaskFilter(
            status=names(status),
            type=names(type),
            dag_id=names(dag_id),
            parent_id=names(parent_id),
            agent_id=names(agent_id),
            tag=names(tag),
            created_by=names(created_by),
            q=names(q),
        )
        return await self.backend.tasks(wanted, order=order, limit=limit, cursor=cursor)

    async def attempts(self, task: TaskRef) -> Sequence[Attempt]:
        """Every claim of a task, oldest first."""
        return await self.backend.attempts(id_of(task))

    async def steps(self, task: TaskRef) -> dict[str, Any]:
        """Results of durable steps by name, in the order in which they were recorded."""
        found = await self.backend.steps(id_of(task))
        return {name: await large_data.value(self.backend, step) for name, step in found.items()}

    async def why(self, task: TaskRef) -> Why:
        """What a task is waiting for, what it is doing, or how it ended."""
        return await self.backend.why(id_of(task))

    async def change(
        self,
        task: TaskRef,
        *,
        priority: int | UnsetType = UNSET,
        deadline: datetime | UnsetType | None = UNSET,
        tags: Sequence[str] | UnsetType = UNSET,
        max_cost_usd: Decimal | float | UnsetType | None = UNSET,
        max_total_cost_usd: Decimal | float | UnsetType | None = UNSET,
        max_attempts: int | UnsetType = UNSET,
        max_duration_sec: Duration | UnsetType = UNSET,
    ) -> Task:
        """Change a task that has not ended; or the limits of a dead letter, before it is retried.

        None removes the deadline or a cost limit; `tags` replaces all tags.
        """
        change = TaskChange(
            priority=priority,
            deadline=deadline,
            tags=tags,
            max_cost_usd=max_cost_usd,
            max_total_cost_usd=max_total_cost_usd,
            max_attempts=max_attempts,
            max_duration_sec=UNSET if max_duration_sec is UNSET else seconds(max_duration_sec),
        )
        return await self.backend.change(id_of(task), change)

    async def add_dependencies(self, task: TaskRef, depends_on: Sequence[TaskRef]) -> Task:
        """Make a task that is not claimed yet wait for other tasks too."""
        return await self.backend.add_dependencies(id_of(task), [id_of(other) for other in depends_on])

    async def cancel(self, task: TaskRef, reason: str = "cancelled", *, cascade: bool = True) -> Task:
        """Cancel a task, its children and, with `cascade`, every task that depends on it."""
        return await self.backend.cancel(id_of(task), reason, cascade=cascade)

    async def retry(self, task: TaskRef, *, delay: Duration = 0.0) -> Task:
        """Revive a DEAD_LETTERED or CANCELLED task, or end the wait of a RETRYING one."""
        return await self.backend.retry(id_of(task), delay_sec=seconds(delay))

    async def cancel_matching(
        self, reason: str = "cancelled", *, dry_run: bool = False, **filters: Unpack[TaskFilters]
    ) -> MatchedTasks:
        """Cancel all tasks that match and have not ended, with their dependents; `list` has the filters.

        In chunks, each in its own transaction. With `dry_run` it only returns which tasks match.
        """
        return await self.backend.cancel_matching(_filter(filters), reason, dry_run=dry_run)

    async def retry_matching(self, *, dry_run: bool = False, **filters: Unpack[TaskFilters]) -> MatchedTasks:
        """Retry all tasks that match and are DEAD_LETTERED, CANCELLED or RETRYING; as `cancel_matching`."""
        return await self.backend.retry_matching(_filter(filters), dry_run=dry_run)

    async def find_ids(self, text: str, *, kind: Literal["task", "dag"] | None = None) -> Sequence[str]:
        """The tasks and DAGs that a short form (`J8K2M3N4-W1X2`) or a prefix of an id means, up to 20."""
        return await self.backend.find_ids(text, kind)

    # DAGs.

    async def get_dag(self, dag: DagRef) -> Dag:
        return await self.backend.dag(id_of(dag))

    async def dags(
        self,
        *,
        status: Names = (),
        created_by: Names = (),
        q: Names = (),
        virtual: bool = True,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Dag]:
        """One page of DAGs, newest first; with `virtual` including the DAGs of standalone tasks."""
        wanted = DagFilter(status=names(status), created_by=names(created_by), q=names(q), virtual=virtual)
        return await self.backend.dags(wanted, limit=limit, cursor=cursor)

    async def cancel_dag(self, dag: DagRef, reason: str = "cancelled") -> Dag:
        """Cancel every task of a DAG that has not ended, and tasks elsewhere that depend on them."""
        return await self.backend.cancel_dag(id_of(dag), reason)

    async def set_dag_budget(self, dag: DagRef, usd: Decimal | float | None) -> Dag:
        """Set what all tasks of a DAG may cost; None removes the limit."""
        return await self.backend.set_dag_budget(id_of(dag), usd)

    async def add_dag_budget(self, dag: DagRef, usd: Decimal | float) -> Dag:
        """Add to the budget of a DAG. A DAG without a budget stays unlimited."""
        return await self.backend.add_dag_budget(id_of(dag), usd)

    async def rename_dag(self, dag: DagRef, title: str) -> Dag:
        """Change the title of a DAG."""
        return await self.backend.rename_dag(id_of(dag), title)

    # Events.

    async def read_events(
        self,
        after: str | None = None,
        *,
        task_id: str | None = None,
        dag_id: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = MAX_LIMIT,
    ) -> EventPage:
        """One page of events after a cursor; None is the beginning, "now" the end.

        `last:50` is the page of the last 50 events, `since:2030-01-31T09:00:00Z` starts at a time.
        """
        return await self.backend.events(after, limit=limit, task_id=task_id, dag_id=dag_id, kinds=kinds)

    async def events(
        self,
        after: str | None = NOW,
        *,
        task_id: str | None = None,
        dag_id: str | None = None,
        kinds: Collection[str] | None = None,
        follow: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """Every event in order, none twice and none missed.

        `after` is the cursor of the last event you have seen, None for the beginning, or "now". Without
        `follow` it ends after the last event so far.
        """
        cursor, pause = after, _FIRST_PAUSE_SEC
        while True:
            page = await self.read_events(cursor, task_id=task_id, dag_id=dag_id, kinds=kinds)
            for event in page.items:
                yield event
            cursor = page.next_cursor
            if not page.caught_up:
                continue
            if not follow:
                return
            # Quick after an event, slower the longer there is none.
            pause = _FIRST_PAUSE_SEC if page.items else min(2 * pause, _LONGEST_PAUSE_SEC)
            await asyncio.sleep(pause)

    # Waiting.

    @overload
    async def wait(self, what: TaskReference | Task, timeout: Duration | None = None) -> Task: ...  # noqa: ASYNC109

    @overload
    async def wait(self, what: DagReference | Dag, timeout: Duration | None = None) -> Dag: ...  # noqa: ASYNC109

    @overload
    async def wait(self, what: str, timeout: Duration | None = None) -> Task | Dag: ...  # noqa: ASYNC109

    async def wait(
        self,
        what: TaskRef | DagRef,
        timeout: Duration | None = None,  # noqa: ASYNC109 - the TimeoutError says what was waited for
    ) -> Task | Dag:
        """Wait until a task or a DAG has ended, in whatever way; raises TimeoutError if it takes longer.

        The output of the task has its data also if that is large.
        """
        name = id_of(what)
        started = time.monotonic()
        try:
            async with asyncio.timeout(seconds(timeout)):
                is_dag = await self._watch.ended(name)
        except TimeoutError:
            is_dag = isinstance(what, DagReference | Dag) or name.startswith("dag_")
            state = await self._state(name, is_dag=is_dag)
            raise TimeoutError(
                f"{name} has not ended after {time.monotonic() - started:.1f} s; it goes on{state}. Wait "
                f"longer, or see what it waits for with 'lineshaft {'dag show' if is_dag else 'why'} {name}'."
            ) from None
        if is_dag:
            return await self.backend.dag(name)
        return await large_data.with_data(self.backend, await self.backend.task(name))

    async def _state(self, name: str, *, is_dag: bool) -> str:
        """Why it has not ended, for an error; empty if that can't be read now."""
        try:
            async with asyncio.timeout(_EXPLAIN_SEC):
                if not is_dag:
                    return f". It is {(await self.backend.why(name)).summary}"
                dag = await self.backend.dag(name)
        except (LineshaftError, TimeoutError):
            return ""
        counts = ", ".join(f"{number} {status}" for status, number in sorted(dag.counts.items()))
        return f". It is {dag.status}, its tasks: {counts}"

    # Approvals and reports.

    async def approvals(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Approval]:
        """Outputs and tasks that wait for a person, oldest first."""
        return await self.backend.approvals(limit=limit, cursor=cursor)

    async def approve(
        self,
        task: TaskRef,
        *,
        reviewer: str,
        note: str | None = None,
        data: Any = None,
        decision_report: Any = None,
    ) -> Task:
        """Approve an output; or do a task that needs a person, with `data` as its output."""
        answer = None if data is None else encoded_json("data", data)
        report = None if decision_report is None else encoded_json("decision_report", decision_report)
        decision = ApprovalDecision(True, reviewer, note, answer, report)  # noqa: FBT003 - the decision
        return await self.backend.decide(id_of(task), decision)

    async def reject(self, task: TaskRef, *, reviewer: str, note: str | None = None) -> Task:
        """Reject an output, which fails its attempt; or decline to do a task, which becomes a dead letter."""
        return await self.backend.decide(id_of(task), ApprovalDecision(False, reviewer, note))  # noqa: FBT003

    async def reports(
        self,
        query: str = "",
        *,
        type: str | None = None,  # noqa: A002 - the name of the field
        dag_id: str | None = None,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Report]:
        """Decision reports that contain these words, newest first; without words, all."""
        return await self.backend.reports(query, type_=type, dag_id=dag_id, limit=limit, cursor=cursor)

    # Dead letters.

    async def dead_letters(
        self,
        *,
        reviewed: bool | None = None,
        type: Names = (),  # noqa: A002 - the name of the field
        category: Names = (),
        error_contains: str | None = None,
        poison_pill: bool | None = None,
        dag_id: Names = (),
        resolution: Names = (),
        pattern: Names = (),
        hidden: bool = False,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[DeadLetter]:
        """One page of tasks that failed permanently, newest first.

        `pattern`: that of a group; `resolution`: the last decision; `hidden`: include deleted ones.
        """
        wanted = DeadLetterFilter(
            reviewed=reviewed,
            type=names(type),
            category=names(category),
            error_contains=error_contains,
            poison_pill=poison_pill,
            dag_id=names(dag_id),
            resolution=names(resolution),
            pattern=names(pattern),
            hidden=hidden,
        )
        return await self.backend.dead_letters(wanted, limit=limit, cursor=cursor)

    async def get_dead_letter(self, task: TaskRef) -> DeadLetter:
        """The newest dead letter of a task, with its whole history and every decision since."""
        return await self.backend.dead_letter(id_of(task))

    async def dead_letter_groups(
        self,
        *,
        type: Names = (),  # noqa: A002 - the name of the field
        category: Names = (),
        limit: int = DEFAULT_LIMIT,
    ) -> Sequence[DeadLetterGroup]:
        """Unreviewed dead letters grouped by similar errors, the largest group first."""
        return await self.backend.dead_letter_groups(
            types=names(type), categories=names(category), limit=limit
        )

    async def resolve(
        self,
        task: TaskRef,
        resolution: Resolution,
        *,
        reviewer: str,
        note: str | None = None,
        not_before: datetime | None = None,
        spec: Mapping[str, Any] | None = None,
        forget_steps: Sequence[str] | Literal["all"] | None = None,
    ) -> Task:
        """Resolve a dead letter: retry, modify_and_retry (with `spec`), cancel, delete or escalate.

        A retry may wait until `not_before`; recorded steps in `forget_steps`, or "all", run again. If two
        callers decide at the same time, the second gets AlreadyReviewedError.
        """
        decision = ResolutionRequest(
            resolution=resolution,
            reviewer=reviewer,
            note=note,
            not_before=not_before,
            spec=spec,
            forget_steps=_names(forget_steps),
        )
        return await self.backend.resolve(id_of(task), decision)

    async def resolve_all(
        self,
        resolution: Resolution,
        *,
        reviewer: str,
        note: str | None = None,
        not_before: datetime | None = None,
        spec: Mapping[str, Any] | None = None,
        forget_steps: Sequence[str] | Literal["all"] | None = None,
        type: Names = (),  # noqa: A002 - the name of the field
        category: Names = (),
        pattern: Names = (),
        error_contains: str | None = None,
        poison_pill: bool | None = None,
        tasks: Sequence[TaskRef] = (),
    ) -> BulkResolution:
        """Resolve every open dead letter that matches these filters, up to 1,000 at once.

        Each is resolved or refused independently of the others; `more` is true if others match.
        """
        wanted = DeadLetterFilter(
            type=names(type),
            category=names(category),
            pattern=names(pattern),
            error_contains=error_contains,
            poison_pill=poison_pill,
            task_ids=[id_of(task) for task in tasks],
        )
        decision = ResolutionRequest(
            resolution=resolution,
            reviewer=reviewer,
            note=note,
            not_before=not_before,
            spec=spec,
            forget_steps=_names(forget_steps),
        )
        return await self.backend.resolve_all(wanted, decision)


def _filter(filters: TaskFilters) -> TaskFilter:
    return msgspec.convert({name: names(given) for name, given in filters.items()}, TaskFilter)  # type: ignore[arg-type]  # all values are Names


def _names(steps: Sequence[str] | None) -> list[str] | str | None:
    return steps if steps is None or isinstance(steps, str) else list(steps)
