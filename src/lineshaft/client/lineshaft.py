"""`Lineshaft`: the queue, for programs. The same methods over a database or over HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from types import TracebackType
from typing import Any, Self, overload

from lineshaft.checks.registry import Checks
from lineshaft.client.backend import Backend
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.client.http_backend import HttpBackend
from lineshaft.client.waiting import EndWatch
from lineshaft.clock import seconds
from lineshaft.errors import InvalidInputError
from lineshaft.model.fields import encoded_json
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from lineshaft.types import (
    Approval,
    ApprovalDecision,
    BulkResolution,
    Dag,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    Event,
    Page,
    Report,
    Submitted,
    SubmittedDag,
    Task,
    TaskFilter,
    TaskOrder,
    Why,
)
from lineshaft.types.page import DEFAULT_LIMIT

#: Read events after this: only what happens from now on.
NOW = "now"
_EVENTS_AT_ONCE = 500
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.02, 0.5


class Lineshaft:
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
        checks: Checks | None = None,
        backend: Backend | None = None,
    ) -> None:
        """`token`: for a server; without it that of LINESHAFT_TOKEN.

        `checks`: gates of your own; without it those that the settings tell. A server has its own.
        """
        self.backend = backend or _choose(url, token, settings, max_connections, checks)
        self._watch = EndWatch(self.backend)

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

    # Submitting.

    async def submit(self, task: NewTask, *, connection: Any = None) -> Submitted:
        """Submit one task.

        With a `connection` (psycopg's, or a connection or session of SQLAlchemy) it becomes part of that
        connection's transaction: it exists once you commit, and never did if you roll back.
        """
        (submitted,) = await self.backend.submit([task], connection=connection)
        return submitted

    async def submit_many(self, tasks: Sequence[NewTask], *, connection: Any = None) -> list[Submitted]:
        """Submit up to 10,000 standalone tasks, all or none."""
        return await self.backend.submit(tasks, connection=connection)

    async def submit_dag(
        self,
        title: str,
        tasks: Sequence[NewTask],
        *,
        budget_ceiling_usd: Decimal | float | None = None,
        created_by: str | None = None,
        idempotency_key: str | None = None,
        connection: Any = None,
    ) -> SubmittedDag:
        """Submit tasks that depend on each other by `key`, all or none.

        With an `idempotency_key` that is in force it is the DAG that exists, and nothing is created.
        """
        return await self.backend.submit_dag(
            title,
            tasks,
            budget_ceiling_usd=budget_ceiling_usd,
            created_by=created_by,
            idempotency_key=idempotency_key,
            connection=connection,
        )

    # Reading.

    async def get(self, task: str | Submitted) -> Task:
        return await self.backend.task(_id(task))

    async def get_dag(self, dag: str | SubmittedDag) -> Dag:
        return await self.backend.dag(_id(dag))

    async def list(
        self,
        *,
        status: str | Sequence[str] = (),
        type: str | Sequence[str] = (),  # noqa: A002 - the field's name
        dag_id: str | Sequence[str] = (),
        parent_id: str | Sequence[str] = (),
        agent_id: str | Sequence[str] = (),
        tag: str | Sequence[str] = (),
        created_by: str | Sequence[str] = (),
        q: str | Sequence[str] = (),
        order: str = TaskOrder.CREATED_AT,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Task]:
        """One page of tasks. Of each filter any value matches; `q` is part of the title."""
        wanted = TaskFilter(
            status=_listed(status),
            type=_listed(type),
            dag_id=_listed(dag_id),
            parent_id=_listed(parent_id),
            agent_id=_listed(agent_id),
            tag=_listed(tag),
            created_by=_listed(created_by),
            q=_listed(q),
        )
        return await self.backend.tasks(wanted, order=order, limit=limit, cursor=cursor)

    async def why(self, task: str | Submitted) -> Why:
        """Why a task is not running."""
        return await self.backend.why(_id(task))

    async def events(
        self,
        after: str | None = NOW,
        *,
        task_id: str | None = None,
        dag_id: str | None = None,
        kinds: Collection[str] | None = None,
        follow: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """Everything that happens, in order, none twice and none missed.

        `after` is the cursor of the last event you have seen, None for the beginning, or "now". Without
        `follow` it ends where everything that has happened so far was told.
        """
        cursor, pause = after, _FIRST_PAUSE_SEC
        while True:
            page = await self.backend.events(
                cursor, limit=_EVENTS_AT_ONCE, task_id=task_id, dag_id=dag_id, kinds=kinds
            )
            for event in page.items:
                yield event
            cursor = page.next_cursor
            if not page.caught_up:
                continue
            if not follow:
                return
            # Quick after something happened, slower the longer nothing does.
            pause = _FIRST_PAUSE_SEC if page.items else min(2 * pause, _LONGEST_PAUSE_SEC)
            await asyncio.sleep(pause)

    # Waiting.

    @overload
    async def wait(self, what: Submitted, timeout: float | None = None) -> Task: ...  # noqa: ASYNC109

    @overload
    async def wait(self, what: SubmittedDag, timeout: float | None = None) -> Dag: ...  # noqa: ASYNC109

    @overload
    async def wait(self, what: str, timeout: float | None = None) -> Task | Dag: ...  # noqa: ASYNC109

    async def wait(  # the timeout is the caller's to choose, and a TimeoutError says what was waited for
        self,
        what: str | Submitted | SubmittedDag,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Task | Dag:
        """Wait until a task or a DAG has ended, in whatever way; raises TimeoutError if it takes longer."""
        name = _id(what)
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                is_dag = await self._watch.ended(name)
        except TimeoutError:
            raise TimeoutError(
                f"{name} has not ended after {time.monotonic() - started:.1f} s. It goes on; ask "
                "'lineshaft why' what it waits for, or wait longer."
            ) from None
        return await (self.backend.dag(name) if is_dag else self.backend.task(name))

    # People.

    async def approvals(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Approval]:
        """What waits for a person, the longest first: outputs at a gate, and tasks that only one can do."""
        return await self.backend.approvals(limit=limit, cursor=cursor)

    async def approve(
        self,
        task: str | Submitted,
        *,
        reviewer: str,
        note: str | None = None,
        data: Any = None,
        decision_report: Any = None,
    ) -> Task:
        """Let an output pass its gate; or do the task, with `data` as its output."""
        answer = None if data is None else encoded_json("data", data)
        report = None if decision_report is None else encoded_json("decision_report", decision_report)
        await self.backend.decide(_id(task), ApprovalDecision(True, reviewer, note, answer, report))  # noqa: FBT003
        return await self.backend.task(_id(task))

    async def reject(self, task: str | Submitted, *, reviewer: str, note: str | None = None) -> Task:
        """Reject an output, which fails its attempt; or decline to do a task, which becomes a dead letter."""
        await self.backend.decide(_id(task), ApprovalDecision(False, reviewer, note))  # noqa: FBT003
        return await self.backend.task(_id(task))

    async def reports(
        self,
        query: str = "",
        *,
        type: str | None = None,  # noqa: A002 - as the filter of `list`
        dag_id: str | None = None,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[Report]:
        """Decision reports with these words, newest first; without words, all."""
        return await self.backend.reports(query, type_=type, dag_id=dag_id, limit=limit, cursor=cursor)

    async def dead_letters(
        self,
        *,
        reviewed: bool | None = None,
        type: str | Sequence[str] = (),  # noqa: A002 - as the filter of `list`
        category: str | Sequence[str] = (),
        error_contains: str | None = None,
        poison_pill: bool | None = None,
        dag_id: str | Sequence[str] = (),
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[DeadLetter]:
        """What failed for good, newest first."""
        wanted = DeadLetterFilter(
            reviewed=reviewed,
            type=_listed(type),
            category=_listed(category),
            error_contains=error_contains,
            poison_pill=poison_pill,
            dag_id=_listed(dag_id),
        )
        return await self.backend.dead_letters(wanted, limit=limit, cursor=cursor)

    async def get_dead_letter(self, task: str | Submitted) -> DeadLetter:
        """The last time that a task failed for good, with its whole history and what was decided since."""
        return await self.backend.dead_letter(_id(task))

    async def dead_letter_groups(
        self,
        *,
        type: str | Sequence[str] = (),  # noqa: A002 - as the filter of `list`
        category: str | Sequence[str] = (),
        limit: int = DEFAULT_LIMIT,
    ) -> Sequence[DeadLetterGroup]:
        """What nobody has looked at, by like error; the largest group first."""
        return await self.backend.dead_letter_groups(
            types=_listed(type), categories=_listed(category), limit=limit
        )

    async def resolve(
        self,
        task: str | Submitted,
        resolution: str,
        *,
        reviewer: str,
        note: str | None = None,
        not_before: datetime | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> Task:
        """Decide about a dead letter: retry, modify_and_retry (with `spec`), cancel, delete or escalate.

        A retry may wait until `not_before`. Of two who decide at once one wins, and the other is told.
        """
        decision = _decision(resolution, reviewer, note, not_before, spec)
        await self.backend.resolve(_id(task), decision)
        return await self.backend.task(_id(task))

    async def resolve_all(
        self,
        resolution: str,
        *,
        reviewer: str,
        note: str | None = None,
        not_before: datetime | None = None,
        spec: Mapping[str, Any] | None = None,
        type: str | Sequence[str] = (),  # noqa: A002 - as the filter of `list`
        category: str | Sequence[str] = (),
        error_contains: str | None = None,
        poison_pill: bool | None = None,
        tasks: Sequence[str | Submitted] = (),
    ) -> BulkResolution:
        """Decide about every open dead letter that these filters find, up to 1,000 at once.

        One that can't be resolved keeps none of the others from it; `more` says that there are more.
        """
        wanted = DeadLetterFilter(
            type=_listed(type),
            category=_listed(category),
            error_contains=error_contains,
            poison_pill=poison_pill,
            task_ids=tuple(_id(task) for task in tasks),
        )
        decision = _decision(resolution, reviewer, note, not_before, spec)
        return await self.backend.resolve_all(wanted, decision)

    # Operating.

    async def cancel(self, task: str | Submitted, reason: str = "cancelled", *, cascade: bool = True) -> Task:
        """Cancel a task, its children and, with `cascade`, all that depends on it."""
        await self.backend.cancel(_id(task), reason, cascade=cascade)
        return await self.backend.task(_id(task))

    async def cancel_dag(self, dag: str | SubmittedDag, reason: str = "cancelled") -> Dag:
        """Cancel whatever of a DAG has not ended, and what depends on it elsewhere."""
        await self.backend.cancel_dag(_id(dag), reason)
        return await self.backend.dag(_id(dag))

    async def set_dag_budget(self, dag: str | SubmittedDag, usd: Decimal | float | None) -> Dag:
        """What all tasks of a DAG may cost; None: no limit. What it can afford now is to be had at once."""
        await self.backend.set_dag_budget(_id(dag), usd)
        return await self.backend.dag(_id(dag))

    async def add_dag_budget(self, dag: str | SubmittedDag, usd: Decimal | float) -> Dag:
        """More money for a DAG that has a ceiling; one without stays without."""
        await self.backend.add_dag_budget(_id(dag), usd)
        return await self.backend.dag(_id(dag))

    async def retry(self, task: str | Submitted, *, delay: float | timedelta = 0.0) -> Task:
        """Revive a DEAD_LETTERED or CANCELLED task, or end the wait of a RETRYING one."""
        await self.backend.retry(_id(task), delay_sec=seconds(delay))
        return await self.backend.task(_id(task))

    async def pause(self, type: str | None = None) -> None:  # noqa: A002 - as the filter of `list`
        """Claim nothing of a type, or nothing at all, until it is resumed; what runs goes on."""
        await self.backend.pause(type)

    async def resume(self, type: str | None = None) -> None:  # noqa: A002 - as above
        """End a pause. One that was not there changes nothing."""
        await self.backend.resume(type)


def _choose(
    url: str | None,
    token: str | None,
    settings: Settings | None,
    max_connections: int,
    checks: Checks | None,
) -> Backend:
    known = settings or Settings.load()
    if url is None and settings is None:
        url = known.url
    if url is not None and url.startswith(("http://", "https://")):
        if checks is not None:
            fault = "can't be given with the URL of a server: gates run there, as its settings say"
            raise InvalidInputError(errors=[("checks", fault)])
        return HttpBackend(url, token or known.token, max_connections=max_connections)
    if token is not None:
        fault = "is for a server: give its URL (http://… or https://…) with it"
        raise InvalidInputError(errors=[("token", fault)])
    if url is not None:
        known = replace(known, database_url=url)
    return DatabaseBackend(known, max_connections=max_connections, checks=checks)


def _decision(
    resolution: str,
    reviewer: str,
    note: str | None,
    not_before: datetime | None,
    spec: Mapping[str, Any] | None,
) -> ResolutionRequest:
    return ResolutionRequest(
        resolution=resolution, reviewer=reviewer, note=note, not_before=not_before, spec=spec
    )


def _listed(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _id(what: str | Submitted | SubmittedDag) -> str:
    return what if isinstance(what, str) else what.id
