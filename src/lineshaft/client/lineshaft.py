"""`Lineshaft`: the queue, for programs. The same methods over a database or over HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar, Unpack, overload

import msgspec
from msgspec import UNSET, Raw, UnsetType

from lineshaft import types as t
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
from lineshaft.model.storable import replace_unstorable
from lineshaft.model.tasks import NewTask, TaskOptions
from lineshaft.operations import dags, events, review, tasks, work
from lineshaft.settings import Settings
from lineshaft.types.filters import Names, names
from lineshaft.types.json import NULL
from lineshaft.types.page import DEFAULT_LIMIT, MAX_LIMIT
from lineshaft.types.protocol import CancelItem
from lineshaft.types.request import ById, OnePage
from lineshaft.types.typed_task import TypedTask, check_new_tasks, decoder_of
from lineshaft.types.waits import SentSignal

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
        dag = t.NewDag(
            title=title,
            tasks=list(tasks),
            budget_ceiling_usd=budget_ceiling_usd,
            created_by=created_by,
            idempotency_key=idempotency_key,
        )
        return DagHandle(self, await self.backend.submit_dag(dag, connection=connection), tasks)

    def _now(self) -> datetime:
        now = None if self._clock is None else self._clock.now()
        return now or datetime.now(UTC)

    # Tasks.

    @must_await
    async def get(self, task: TaskRef, *, full: bool = False) -> t.Task:
        """A task; with `full` its output has the data also if that is large."""
        found = await self.backend.call(tasks.get_task, tasks.GetTask(id=id_of(task)))
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
        order: str = t.TaskOrder.CREATED_AT,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> t.Page[t.Task]:
        """One page of tasks. A filter with several values matches any of them; `q` is part of the title."""
        request = tasks.ListTasks(
            status=names(status),
            type=names(type),
            dag_id=names(dag_id),
            parent_id=names(parent_id),
            agent_id=names(agent_id),
            tag=names(tag),
            created_by=names(created_by),
            q=names(q),
            order=str(order),
            limit=limit,
            cursor=cursor,
        )
        return await self.backend.call(tasks.list_tasks, request)

    async def attempts(self, task: TaskRef) -> Sequence[t.Attempt]:
        """Every claim of a task, oldest first."""
        return (await self.backend.call(tasks.list_attempts, ById(id=id_of(task)))).items

    async def steps(self, task: TaskRef) -> dict[str, Any]:
        """Results of durable steps by name, in the order in which they were recorded."""
        steps = await self.backend.call(tasks.list_steps, ById(id=id_of(task)))
        return {name: await large_data.value(self.backend, step) for name, step in steps.items()}

    async def why(self, task: TaskRef) -> t.Why:
        """What a task is waiting for, what it is doing, or how it ended."""
        return await self.backend.call(tasks.explain_task, ById(id=id_of(task)))

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
    ) -> t.Task:
        """Change a task that has not ended; or the limits of a dead letter, before it is retried.

        None removes the deadline or a cost limit; `tags` replaces all tags.
        """
        change = t.TaskChange(
            priority=priority,
            deadline=deadline,
            tags=tags,
            max_cost_usd=max_cost_usd,
            max_total_cost_usd=max_total_cost_usd,
            max_attempts=max_attempts,
            max_duration_sec=UNSET if max_duration_sec is UNSET else seconds(max_duration_sec),
        )
        return await self.backend.call(tasks.change_task, tasks.ChangeTask(id=id_of(task), change=change))

    async def add_dependencies(self, task: TaskRef, depends_on: Sequence[TaskRef]) -> t.Task:
        """Make a task that is not claimed yet wait for other tasks too."""
        request = tasks.Dependencies(id=id_of(task), depends_on=[id_of(other) for other in depends_on])
        return await self.backend.call(tasks.add_dependencies, request)

    async def cancel(self, task: TaskRef, reason: str = "cancelled", *, cascade: bool = True) -> t.Task:
        """Cancel a task, its children and, with `cascade`, every task that depends on it."""
        request = CancelItem(id=id_of(task), reason=replace_unstorable(reason), cascade=cascade)
        return await self.backend.call(work.cancel_task, request)

    async def retry(self, task: TaskRef, *, delay: Duration = 0.0) -> t.Task:
        """Revive a DEAD_LETTERED or CANCELLED task, or end the wait of a RETRYING one."""
        return await self.backend.call(
            tasks.retry_task, tasks.Retry(id=id_of(task), delay_sec=seconds(delay))
        )

    async def correct_cost(
        self,
        task: TaskRef,
        cost_usd: Decimal | float | None = None,
        *,
        disputed: Literal["accept", "refuse"] | None = None,
        reason: str,
    ) -> t.Task:
        """Correct what a task has cost, or accept or refuse what is disputed of it (`Task.disputed_usd`).

        The difference is booked today on the task, its agents, its DAG and the day. An amount also decides on
        what is disputed.
        """
        request = tasks.CorrectCost(id=id_of(task), cost_usd=cost_usd, disputed=disputed, reason=reason)
        return await self.backend.call(tasks.correct_cost, request)

    async def rerun(
        self,
        task: TaskRef,
        *,
        downstream: bool = False,
        cancel_running: bool = False,
        forget_steps: bool = True,
        reason: str | None = None,
    ) -> t.Task:
        """Run a COMPLETED task again; its completed attempt is kept with its output.

        Tasks that depend on it and haven't begun wait for it again; with `downstream` completed,
        dead-lettered and cancelled ones run again after it, in order. DependentsRunningError, if some are
        running, unless `cancel_running`. Recorded steps run again, unless `forget_steps` is false.
        """
        request = tasks.RerunTask(
            id=id_of(task),
            downstream=downstream,
            cancel_running=cancel_running,
            forget_steps=forget_steps,
            reason=reason,
        )
        return await self.backend.call(tasks.rerun_task, request)

    async def signal(
        self, task: TaskRef, name: str, data: Any = None, *, idempotency_key: str | None = None
    ) -> SentSignal:
        """Send a signal to a task that has not ended: what it waits for with `ctx.wait_for`, now or later.

        It is kept until the task receives it, which it does once. `data` is at most 64 KiB of JSON. A signal
        with an `idempotency_key` that was sent before is not sent again.
        """
        request = tasks.SendSignal(
            id=id_of(task), name=name, data=_raw("data", data), idempotency_key=idempotency_key
        )
        return await self.backend.call(tasks.signal_task, request)

    async def cancel_matching(
        self, reason: str = "cancelled", *, dry_run: bool = False, **filters: Unpack[t.TaskFilters]
    ) -> t.MatchedTasks:
        """Cancel all tasks that match and have not ended, with their dependents; `list` has the filters.

        In chunks, each in its own transaction. With `dry_run` it only returns which tasks match.
        """
        request = tasks.CancelMatching(filter=_filter(filters), reason=reason, dry_run=dry_run)
        return await self.backend.call(tasks.cancel_matching, request)

    async def retry_matching(
        self, *, dry_run: bool = False, **filters: Unpack[t.TaskFilters]
    ) -> t.MatchedTasks:
        """Retry all tasks that match and are DEAD_LETTERED, CANCELLED or RETRYING; as `cancel_matching`."""
        request = tasks.RetryMatching(filter=_filter(filters), dry_run=dry_run)
        return await self.backend.call(tasks.retry_matching, request)

    async def find_ids(self, text: str, *, kind: Literal["task", "dag"] | None = None) -> Sequence[str]:
        """The tasks and DAGs that a short form (`J8K2M3N4-W1X2`) or a prefix of an id means, up to 20."""
        return (await self.backend.call(tasks.find_ids, tasks.FindIds(name=text, kind=kind))).ids

    # DAGs.

    async def get_dag(self, dag: DagRef) -> t.Dag:
        return await self.backend.call(dags.get_dag, ById(id=id_of(dag)))

    async def dags(
        self,
        *,
        status: Names = (),
        created_by: Names = (),
        q: Names = (),
        virtual: bool = True,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> t.Page[t.Dag]:
        """One page of DAGs, newest first; with `virtual` including the DAGs of standalone tasks."""
        request = dags.ListDags(
            status=names(status),
            created_by=names(created_by),
            q=names(q),
            virtual=virtual,
            limit=limit,
            cursor=cursor,
        )
        return await self.backend.call(dags.list_dags, request)

    async def cancel_dag(self, dag: DagRef, reason: str = "cancelled") -> t.Dag:
        """Cancel every task of a DAG that has not ended, and tasks elsewhere that depend on them."""
        request = dags.CancelDag(id=id_of(dag), reason=replace_unstorable(reason))
        return await self.backend.call(dags.cancel_dag, request)

    async def set_dag_budget(self, dag: DagRef, usd: Decimal | float | None) -> t.Dag:
        """Set what all tasks of a DAG may cost; None removes the limit."""
        return await self.backend.call(dags.change_dag, dags.ChangeDag(id=id_of(dag), budget_ceiling_usd=usd))

    async def add_dag_budget(self, dag: DagRef, usd: Decimal | float) -> t.Dag:
        """Add to the budget of a DAG. A DAG without a budget stays unlimited."""
        return await self.backend.call(dags.change_dag, dags.ChangeDag(id=id_of(dag), add_budget_usd=usd))

    async def rename_dag(self, dag: DagRef, title: str) -> t.Dag:
        """Change the title of a DAG."""
        return await self.backend.call(dags.change_dag, dags.ChangeDag(id=id_of(dag), title=title))

    # Events.

    async def read_events(
        self,
        after: str | None = None,
        *,
        task_id: str | None = None,
        dag_id: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = MAX_LIMIT,
    ) -> t.EventPage:
        """One page of events after a cursor; None is the beginning, "now" the end.

        `last:50` is the page of the last 50 events, `since:2030-01-31T09:00:00Z` starts at a time.
        """
        request = events.ListEvents(
            after=after, limit=limit, task_id=task_id, dag_id=dag_id, kind=tuple(sorted(kinds or ()))
        )
        return await self.backend.call(events.list_events, request)

    async def events(
        self,
        after: str | None = NOW,
        *,
        task_id: str | None = None,
        dag_id: str | None = None,
        kinds: Collection[str] | None = None,
        follow: bool = True,
    ) -> AsyncGenerator[t.Event, None]:
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
    async def wait(self, what: TaskReference | t.Task, timeout: Duration | None = None) -> t.Task: ...  # noqa: ASYNC109

    @overload
    async def wait(self, what: DagReference | t.Dag, timeout: Duration | None = None) -> t.Dag: ...  # noqa: ASYNC109

    @overload
    async def wait(self, what: str, timeout: Duration | None = None) -> t.Task | t.Dag: ...  # noqa: ASYNC109

    async def wait(
        self,
        what: TaskRef | DagRef,
        timeout: Duration | None = None,  # noqa: ASYNC109 - the TimeoutError says what was waited for
    ) -> t.Task | t.Dag:
        """Wait until a task or a DAG has ended, in whatever way; raises TimeoutError if it takes longer.

        The output of the task has its data also if that is large.
        """
        name = id_of(what)
        started = time.monotonic()
        try:
            async with asyncio.timeout(seconds(timeout)):
                is_dag = await self._watch.ended(name)
        except TimeoutError:
            is_dag = isinstance(what, DagReference | t.Dag) or name.startswith("dag_")
            state = await self._state(name, is_dag=is_dag)
            raise TimeoutError(
                f"{name} has not ended after {time.monotonic() - started:.1f} s; it goes on{state}. Wait "
                f"longer, or see what it waits for with 'lineshaft {'dag show' if is_dag else 'why'} {name}'."
            ) from None
        if is_dag:
            return await self.get_dag(name)
        return await self.get(name, full=True)

    async def _state(self, name: str, *, is_dag: bool) -> str:
        """Why it has not ended, for an error; empty if that can't be read now."""
        try:
            async with asyncio.timeout(_EXPLAIN_SEC):
                if not is_dag:
                    return f". It is {(await self.why(name)).summary}"
                dag = await self.get_dag(name)
        except (LineshaftError, TimeoutError):
            return ""
        counts = ", ".join(f"{number} {status}" for status, number in sorted(dag.counts.items()))
        return f". It is {dag.status}, its tasks: {counts}"

    # Approvals and reports.

    async def approvals(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> t.Page[t.Approval]:
        """Outputs and tasks that wait for a person, oldest first."""
        return await self.backend.call(review.list_approvals, OnePage(limit=limit, cursor=cursor))

    async def approve(
        self,
        task: TaskRef,
        *,
        reviewer: str,
        note: str | None = None,
        data: Any = None,
        decision_report: Any = None,
    ) -> t.Task:
        """Approve an output; or do a task that needs a person, with `data` as its output."""
        request = review.Decide(
            id=id_of(task),
            approve=True,
            reviewer=reviewer,
            note=note,
            data=_raw("data", data),
            decision_report=_raw("decision_report", decision_report),
        )
        return await self.backend.call(review.decide, request)

    async def reject(self, task: TaskRef, *, reviewer: str, note: str | None = None) -> t.Task:
        """Reject an output, which fails its attempt; or decline to do a task, which becomes a dead letter."""
        request = review.Decide(id=id_of(task), approve=False, reviewer=reviewer, note=note)
        return await self.backend.call(review.decide, request)

    async def reports(
        self,
        query: str = "",
        *,
        type: str | None = None,  # noqa: A002 - the name of the field
        dag_id: str | None = None,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> t.Page[t.Report]:
        """Decision reports that contain these words, newest first; without words, all."""
        request = review.SearchReports(q=query, type=type, dag_id=dag_id, limit=limit, cursor=cursor)
        return await self.backend.call(review.search_reports, request)

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
    ) -> t.Page[t.DeadLetter]:
        """One page of tasks that failed permanently, newest first.

        `pattern`: that of a group; `resolution`: the last decision; `hidden`: include deleted ones.
        """
        request = review.ListLetters(
            reviewed=reviewed,
            type=names(type),
            category=names(category),
            error_contains=error_contains,
            poison_pill=poison_pill,
            dag_id=names(dag_id),
            resolution=names(resolution),
            pattern=names(pattern),
            hidden=hidden,
            limit=limit,
            cursor=cursor,
        )
        return await self.backend.call(review.list_dead_letters, request)

    async def get_dead_letter(self, task: TaskRef) -> t.DeadLetter:
        """The newest dead letter of a task, with its whole history and every decision since."""
        return await self.backend.call(review.get_dead_letter, ById(id=id_of(task)))

    async def dead_letter_groups(
        self,
        *,
        type: Names = (),  # noqa: A002 - the name of the field
        category: Names = (),
        limit: int = DEFAULT_LIMIT,
    ) -> Sequence[t.DeadLetterGroup]:
        """Unreviewed dead letters grouped by similar errors, the largest group first."""
        request = review.ListGroups(type=tuple(names(type)), category=tuple(names(category)), limit=limit)
        return (await self.backend.call(review.list_dead_letter_groups, request)).items

    async def resolve(
        self,
        task: TaskRef,
        resolution: t.Resolution,
        *,
        reviewer: str,
        note: str | None = None,
        not_before: datetime | None = None,
        spec: Mapping[str, Any] | None = None,
        forget_steps: Sequence[str] | Literal["all"] | None = None,
    ) -> t.Task:
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
        request = review.Resolve(id=id_of(task), decision=decision)
        return await self.backend.call(review.resolve_dead_letter, request)

    async def resolve_all(
        self,
        resolution: t.Resolution,
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
    ) -> t.BulkResolution:
        """Resolve every open dead letter that matches these filters, up to 1,000 at once.

        Each is resolved or refused independently of the others; `more` is true if others match.
        """
        letters = t.DeadLetterFilter(
            type=names(type),
            category=names(category),
            pattern=names(pattern),
            error_contains=error_contains,
            poison_pill=poison_pill,
            task_ids=[id_of(task) for task in tasks],
        )
        request = review.ResolveMany(
            filter=letters,
            resolution=resolution,
            reviewer=reviewer,
            note=note,
            not_before=not_before,
            spec=spec,
            forget_steps=_names(forget_steps),
        )
        return await self.backend.call(review.resolve_dead_letters, request)


def _filter(filters: t.TaskFilters) -> t.TaskFilter:
    return msgspec.convert({name: names(value) for name, value in filters.items()}, t.TaskFilter)  # type: ignore[arg-type]  # all values are Names


def _raw(name: str, value: Any) -> Raw:
    return NULL if value is None else Raw(encoded_json(name, value))


def _names(steps: Sequence[str] | None) -> list[str] | str | None:
    return steps if steps is None or isinstance(steps, str) else list(steps)
