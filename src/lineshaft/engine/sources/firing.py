"""Firing: an event becomes work, in one transaction with everything that is remembered about it.

Rendering, the key, the limit on open work, the submission and the history are one transaction: a process that
is killed at any moment leaves all of it or nothing. A refused submission is rolled back to a savepoint, with
its key, so that the same delivery may succeed later; the failure is recorded.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

from msgspec import Struct, field

from lineshaft.engine.feed.actor import act_json
from lineshaft.engine.postgres import caller_transaction, catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows
from lineshaft.engine.read.pages import refuse_unstorable
from lineshaft.engine.submit.submission import Submission
from lineshaft.engine.transition.cancel import Cancellations
from lineshaft.errors import (
    DatabaseError,
    ForbiddenError,
    InvalidTransitionError,
    LineshaftError,
    NotFoundError,
    UnavailableError,
)
from lineshaft.model.fields import STEERING
from lineshaft.sources.definition import AGENT_PREFIX, Definition, Rendered, checked, compiled
from lineshaft.types.sources import Fired, FiringOutcome, NewSource, SourceKind

_SQL = catalog.load(__name__)
_log = logging.getLogger("lineshaft.sources")

#: Work that is cancelled for one firing: normally one, more after `max_open` was lowered.
_CANCELLED_AT_ONCE = 100
_TRIES = 5
#: Event sources whose work led to an event, one after another.
MAX_CHAIN_DEPTH = 10
_MAX_ERROR = 2_000
#: Times of a schedule that a dry run shows.
_UPCOMING = 5
#: Tasks that an event names; the table `firing` has all of them.
_NAMED_TASKS = 20


class Key(NamedTuple):
    """What must not fire twice."""

    text: str
    #: How long; None: forever.
    ttl_sec: float | None = None


class Occasion(Struct, frozen=True):
    """What happened."""

    event: Mapping[str, Any]
    keys: Sequence[Key] = ()
    #: What an event source fires for: the kind of the event, and how many event sources led to it.
    event_kind: str | None = None
    depth: int = 0


class SourceRow(Struct, frozen=True):
    id: int
    created_at: datetime
    next_tick: datetime | None
    paused: bool
    name: str
    kind: str
    definition: bytes
    now: datetime

    @property
    def compiled(self) -> Definition:
        return compiled(self.definition)

    @property
    def is_enabled(self) -> bool:
        return self.compiled.source.enabled is True and not self.paused


class OpenWork(NamedTuple):
    id: str
    is_task: bool


class TooMuchOpenError(Exception):
    """This work must be cancelled before the source can fire."""

    def __init__(self, name: str, work: Sequence[OpenWork]) -> None:
        self.name = name
        self.work = work
        super().__init__(name)


class DryRun(Struct, frozen=True):
    """What an event would do."""

    #: There is a `when`.
    is_conditional: bool
    #: Without work if `when` is not true.
    rendered: Rendered
    #: Something has fired under its key, so it would be a duplicate.
    has_fired: bool
    #: The next times of a schedule.
    upcoming: list[datetime]


class _FiringResult(Struct, frozen=True):
    outcome: FiringOutcome
    task_ids: list[str] = field(default_factory=list)
    dag_id: str | None = None
    error: str | None = None
    alert: bool = False


class Firings:
    def __init__(self, database: Database, submission: Submission, cancel: Cancellations) -> None:
        self._database = database
        self._submission = submission
        self._cancel = cancel

    async def fire(
        self,
        name: str,
        occasion: Occasion | None = None,
        *,
        unless_disabled: bool = False,
        by_hand: bool = False,
    ) -> Fired:
        """Fire a source now. `unless_disabled`: one that is disabled counts as unknown.

        `by_hand`: a person does, which is an event.
        """
        refuse_unstorable(name=[name])

        async def work(connection: Connection) -> Fired:
            row = await self.share(connection, name)
            if row is None or (unless_disabled and not row.is_enabled):
                raise unknown_source(name)
            fired = await self.fire_in(
                connection, row, occasion or Occasion(_default_event(row.kind, row.now))
            )
            if by_hand:
                await self._log_fired(connection, name, fired)
            return fired

        return await self.run(work)

    async def _log_fired(self, connection: Connection, name: str, fired: Fired) -> None:
        about = {
            "source": name,
            "outcome": fired.outcome,
            "task_ids": (fired.task_ids or [])[:_NAMED_TASKS],
            "dag_id": fired.dag_id,
        }
        data = act_json({key: value for key, value in about.items() if value})
        await connection.execute(_SQL["log_fired"], {**self._database.now, "data": data})

    async def look_up(self, name: str) -> SourceRow | None:
        """A source as it is now, without a lock."""
        refuse_unstorable(name=[name])
        async with self._database.connection() as connection:
            return await self.share(connection, name)

    async def note(self, name: str, outcome: FiringOutcome, error: str) -> Fired:
        """Record an event that creates nothing."""

        async def work(connection: Connection) -> Fired:
            row = await self.share(connection, name)
            if row is None:
                raise unknown_source(name)
            await self.record(connection, row, outcome, error=error)
            return Fired(outcome=outcome, task_ids=[], error=error)

        return await self.run(work)

    async def preview(self, name: str, event: Mapping[str, Any] | None = None) -> Fired:
        """What firing would create; raises InvalidInputError if it can't be rendered."""
        row = await self.look_up(name)
        if row is None:
            raise unknown_source(name)
        given = _default_event(row.kind, row.now) if event is None else event
        rendered = await asyncio.to_thread(row.compiled.render, given, row.now)
        return Fired(tasks=[] if rendered.work is None else rendered.work.documents)

    async def dry_run(self, source: NewSource, event: Mapping[str, Any] | None = None) -> DryRun:
        """What an event would do to a source with this definition, stored or not.

        Raises InvalidInputError if the definition isn't valid or can't be rendered.
        """
        definition = Definition(await asyncio.to_thread(checked, source))
        row = await self.look_up(source.name)
        now = (self._database.now["now"] or datetime.now(UTC)) if row is None else row.now
        given = _default_event(source.kind, now) if event is None else event
        rendered = await asyncio.to_thread(definition.render, given, now)
        has_fired = False
        if row is not None and rendered.key is not None:
            wanted = {**self._database.now, "source_id": row.id, "key": _own_key(rendered.key).text}
            async with self._database.connection() as connection:
                has_fired = bool(await fetch_column(connection, _SQL["is_known_key"], wanted))
        times = definition.upcoming(now if row is None else row.created_at, now)
        return DryRun(bool(source.when), rendered, has_fired, list(islice(times, _UPCOMING)))

    async def run(self, work: Callable[[Connection], Awaitable[Fired]]) -> Fired:
        """Run work in a transaction; again after open work was cancelled that is in its way."""
        for _ in range(_TRIES):
            try:
                return await self._database.run(work, pipeline=False)
            except TooMuchOpenError as full:
                await self.make_room(full)
        return await self._database.run(work, pipeline=False)

    async def make_room(self, full: TooMuchOpenError) -> None:
        """Cancel open work, in transactions of its own: each task is locked before its source."""
        reason = f"superseded by a newer firing of source {full.name}"
        for open_work in full.work[:_CANCELLED_AT_ONCE]:
            cancel = self._cancel.cancel if open_work.is_task else self._cancel.cancel_dag
            try:
                await cancel(open_work.id, reason)
            except (InvalidTransitionError, NotFoundError):
                continue  # it has ended in the meantime

    async def share(self, connection: Connection, name: str) -> SourceRow | None:
        """A source, which can't be deleted until the transaction ends."""
        own = {**self._database.now, "name": name}
        return await fetch_row(connection, SourceRow, _SQL["share_source"], own)

    async def fire_in(
        self, connection: Connection, row: SourceRow, occasion: Occasion, *, keep_filtered: bool = True
    ) -> Fired:
        """Fire in the transaction of the connection, which holds a lock on the source.

        Without `keep_filtered`, events that `when` filters are not recorded: there may be very many.
        """
        result = await self._fire(connection, row, occasion)
        if keep_filtered or result.outcome is not FiringOutcome.FILTERED:
            await self.record(connection, row, result.outcome, result=result)
        return Fired(
            outcome=result.outcome, task_ids=result.task_ids, dag_id=result.dag_id, error=result.error
        )

    async def record(
        self,
        connection: Connection,
        row: SourceRow,
        outcome: FiringOutcome,
        *,
        error: str | None = None,
        result: _FiringResult | None = None,
    ) -> None:
        """Write the history and the totals; a failure is an alert too."""
        result = result or _FiringResult(outcome, error=error)
        alert = None
        if result.alert or result.outcome is FiringOutcome.FAILED:
            alert = f"Source {row.name} {result.outcome}: {result.error}"
            _log.warning("%s", alert)
        await connection.execute(
            _SQL["record"],
            {
                **self._database.now,
                "source_id": row.id,
                "name": row.name,
                "outcome": result.outcome.value,
                "task_ids": result.task_ids,
                "dag_id": result.dag_id,
                "error": result.error,
                "alert": alert,
            },
        )

    async def _fire(self, connection: Connection, row: SourceRow, occasion: Occasion) -> _FiringResult:
        try:
            # In a thread: a template may take a second.
            rendered = await asyncio.to_thread(_rendered, row, occasion)
            async with caller_transaction.nested(connection):
                return await self._create(connection, row, occasion, rendered)
        except _NotCreatedError as refused:
            return refused.result
        except (UnavailableError, DatabaseError):
            raise
        except LineshaftError as error:
            return _failed(error)

    async def _create(
        self, connection: Connection, row: SourceRow, occasion: Occasion, rendered: Rendered
    ) -> _FiringResult:
        """Take the keys and submit the work. What raises leaves nothing behind, not even a key."""
        keys = occasion.keys if rendered.key is None else [_own_key(rendered.key)]
        if keys and not await self._take_keys(connection, row.id, keys):
            return _FiringResult(FiringOutcome.DUPLICATE)
        await self._check_open(connection, row)
        result = await self._submit(connection, row, rendered)
        if result.outcome is FiringOutcome.CREATED:
            own = {**self._database.now, "source_id": row.id, "depth": occasion.depth}
            if result.dag_id is not None:
                await connection.execute(_SQL["add_dag"], {**own, "id": result.dag_id})
            else:
                await connection.execute(_SQL["add_task"], {**own, "id": result.task_ids[0]})
        return result

    async def _take_keys(self, connection: Connection, source_id: int, keys: Sequence[Key]) -> bool:
        taken = await fetch_column(
            connection,
            _SQL["take_keys"],
            {
                **self._database.now,
                "source_id": source_id,
                "keys": [key.text for key in keys],
                "ttls": [key.ttl_sec for key in keys],
            },
        )
        return len(taken) == len(keys)

    async def _check_open(self, connection: Connection, row: SourceRow) -> None:
        most = row.compiled.max_open
        if not most:
            return
        own = {"source_id": row.id}
        await connection.execute(_SQL["lock_source"], own)
        await connection.execute(_SQL["close_ended"], own)
        found = await fetch_rows(connection, OpenWork, _SQL["open_work"], own)
        if len(found) < most:
            return
        if row.compiled.source.overlap == "cancel_oldest":
            raise TooMuchOpenError(row.name, found[: len(found) - most + 1])
        fault = f"{len(found)} tasks or DAGs of this source are open, and max_open is {most}"
        raise _NotCreatedError(_FiringResult(FiringOutcome.SKIPPED, error=fault))

    async def _submit(self, connection: Connection, row: SourceRow, rendered: Rendered) -> _FiringResult:
        work = rendered.work
        if work is None:
            raise AssertionError("there is something to submit")
        if work.task is not None:
            if work.task.on_conflict in STEERING and row.name.startswith(AGENT_PREFIX):
                raise ForbiddenError(
                    f"on_conflict can't be {work.task.on_conflict} in a schedule that an agent declares: "
                    "what changes other tasks needs the scope operate. Declare a schedule under another name."
                )
            (task,) = await self._submission.submit([work.task], connection=connection, is_short=True)
            outcome = FiringOutcome.DUPLICATE if task.duplicate else FiringOutcome.CREATED
            return _FiringResult(outcome, [task.id])
        if work.dag is None:
            raise AssertionError("work is a task or a DAG")
        dag = await self._submission.submit_dag(
            work.dag.title,
            work.dag.tasks,
            budget_ceiling_usd=work.dag.budget_ceiling_usd,
            created_by=work.dag.created_by,
            idempotency_key=work.dag.idempotency_key,
            connection=connection,
            is_short=True,
        )
        ids = [task.id for task in dag.tasks.values()]
        if dag.duplicate or all(task.duplicate for task in dag.tasks.values()):
            return _FiringResult(FiringOutcome.DUPLICATE, ids, dag.id if dag.duplicate else None)
        return _FiringResult(FiringOutcome.CREATED, ids, dag.id)


class _NotCreatedError(Exception):
    def __init__(self, result: _FiringResult) -> None:
        self.result = result
        super().__init__(result.outcome)


def _rendered(row: SourceRow, occasion: Occasion) -> Rendered:
    """The work to create; raises if there is none."""
    try:
        rendered = row.compiled.render(occasion.event, row.now, event_kind=occasion.event_kind)
    except LineshaftError:
        raise
    except Exception as error:  # noqa: BLE001 - see below
        # One faulty template must not stop a whole scheduler.
        _log.exception("Source %s can't be rendered", row.name)
        raise LineshaftError(f"Unexpected error {type(error).__name__}; see the server's log.") from None
    if rendered.work is None:
        raise _NotCreatedError(_FiringResult(FiringOutcome.FILTERED))
    if occasion.depth > MAX_CHAIN_DEPTH:
        fault = f"{MAX_CHAIN_DEPTH} event sources led to this event, one after another: is it a loop?"
        raise _NotCreatedError(_FiringResult(FiringOutcome.SKIPPED, error=fault, alert=True))
    return rendered


def _failed(error: LineshaftError) -> _FiringResult:
    text = str(error)
    return _FiringResult(
        FiringOutcome.FAILED, error=text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}…"
    )


def _own_key(rendered: str) -> Key:
    """The key that the field `idempotency` gives."""
    return Key(f"key:{rendered}")


def _default_event(kind: str, now: datetime) -> dict[str, Any]:
    """What templates get if a source is fired by hand without an event."""
    return tick_event(now) if kind == SourceKind.SCHEDULE else {}


def tick_event(tick: datetime, missed: int = 0) -> dict[str, Any]:
    return {"tick": tick.strftime("%Y-%m-%dT%H:%M:%SZ"), "missed": missed}


def unknown_source(name: str) -> NotFoundError:
    return NotFoundError(f"There is no source {name!r}. See 'lineshaft sources list'.")
