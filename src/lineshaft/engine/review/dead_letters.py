"""Dead letters: tasks that failed permanently wait here, with their whole history, until a person decides.

A decision is one transaction; a bulk decision is several, each of a bounded size. It begins with a lock on
the dead letters: of two concurrent decisions one wins, and the other gets an error that names the first.
A dead letter is never deleted automatically.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace
from psycopg.rows import class_row

from lineshaft.engine.artifacts.references import refer, unknown_artifacts
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.read.listing import patterns as like_patterns
from lineshaft.engine.read.pages import decode_cursor, encode_cursor, refuse_unstorable
from lineshaft.engine.read.snapshot import Reader, Row, in_snapshot
from lineshaft.engine.read.tasks import read_failed_attempts
from lineshaft.engine.transition.cancel import Cancellations
from lineshaft.engine.transition.dependencies import TaskDependencies
from lineshaft.engine.transition.effects import log_events
from lineshaft.engine.transition.reviews import LockedDeadLetter, NewReview, Reviews
from lineshaft.engine.transition.revive import Revive
from lineshaft.engine.transition.rows import NewEvent
from lineshaft.engine.transition.steps import forget_steps
from lineshaft.errors import (
    AlreadyReviewedError,
    InvalidInputError,
    InvalidTransitionError,
    LineshaftError,
    NotFoundError,
    UnavailableError,
)
from lineshaft.model.reviews import Resolution, ResolutionRequest
from lineshaft.model.spec_change import spec_changes
from lineshaft.model.states import Status
from lineshaft.model.storable import is_storable
from lineshaft.model.tasks import LIMITS_IN_SPEC, NewTask, TaskRow, bits_of, resolve
from lineshaft.types import (
    BulkResolution,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    Page,
    Refusal,
    Review,
)
from lineshaft.types.filters import names
from lineshaft.types.json import raw
from lineshaft.types.page import DEFAULT_LIMIT, check_limit

#: Dead letters that one call decides about.
MAX_BULK = 1_000
#: Counting stops here.
MAX_COUNTED = 100_000
#: Hours that `recent` counts.
RECENT_HOURS = 24
#: Dead letters that one transaction decides about: enough to be fast, few enough not to block others.
_PER_TRANSACTION = 100
#: Tasks of a group that are named.
_SAMPLES = 20
#: The alert of an escalation.
HUMAN_REVIEW_NEEDED = "HUMAN_REVIEW_NEEDED"
ALL = DeadLetterFilter()
#: Statuses and resolutions are decoded; the spec stays raw.
_DECODED = {"spec", "status", "resolution"}

_SQL = catalog.load(__name__)


class _DeadLetterKey(Struct, frozen=True, array_like=True, tag="dead_letter"):
    at: datetime
    id: str
    revival: Annotated[int, Meta(ge=0, le=2**15 - 1)]


class _LastReview(Struct, frozen=True):
    resolution: str | None
    reviewer: str | None
    reviewed_at: datetime | None
    status: str


#: Tasks that were moved; and errors by task for those that were not.
_Resolved = tuple[set[str], dict[str, LineshaftError]]


class DeadLetters:
    def __init__(
        self,
        database: Database,
        reviews: Reviews,
        cancel: Cancellations,
        revive: Revive,
        dependencies: TaskDependencies,
    ) -> None:
        self._database = database
        self._reviews = reviews
        self._cancel = cancel
        self._revive = revive
        self._dependencies = dependencies

    # Reads.

    async def get(self, task_id: str) -> DeadLetter:
        """The latest dead letter of a task, whatever was decided since."""
        if is_storable(task_id):
            page = await self.find(DeadLetterFilter(task_ids=task_id, hidden=True), limit=1)
            if page.items:
                return page.items[0]
        raise _unknown(task_id)

    async def find(
        self, filters: DeadLetterFilter = ALL, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[DeadLetter]:
        """Newest first."""
        check_limit(limit)
        after = decode_cursor(cursor, _DeadLetterKey)

        async def read(reader: Reader) -> Page[DeadLetter]:
            rows = await _list(reader, filters, after=after, limit=limit + 1)
            page, more = rows[:limit], None
            if len(rows) > limit:
                last = page[-1]
                more = encode_cursor(
                    _DeadLetterKey(last["dead_lettered_at"], last["task_id"], last["revival"])
                )
            return Page(await _with_history(reader, page), more)

        return await in_snapshot(self._database, read, for_filters=True)

    async def groups(
        self, *, types: Sequence[str] = (), categories: Sequence[str] = (), limit: int = DEFAULT_LIMIT
    ) -> list[DeadLetterGroup]:
        """Dead letters without a decision, by error pattern; the largest group first."""
        check_limit(limit)
        refuse_unstorable(type=types, category=categories)

        async def read(reader: Reader) -> list[DeadLetterGroup]:
            rows = await reader.rows(
                _SQL["group_dead_letters"],
                types=list(types) or None,
                categories=list(categories) or None,
                samples=_SAMPLES,
                limit=limit,
            )
            return [DeadLetterGroup(**row) for row in rows]

        return await in_snapshot(self._database, read, for_filters=True)

    async def count_open(self, filters: DeadLetterFilter) -> int:
        """How many wait for a decision, including escalated ones; `MAX_COUNTED` means that many or more."""

        async def read(reader: Reader) -> int:
            (row,) = await reader.rows(
                _SQL["count_dead_letters"], **filter_parameters(filters), open=True, limit=MAX_COUNTED
            )
            return int(row["count"])

        return await in_snapshot(self._database, read, for_filters=True)

    async def recent(
        self, patterns: Sequence[str], *, types: Sequence[str] = (), categories: Sequence[str] = ()
    ) -> dict[str, list[int]]:
        """Dead letters without a decision by pattern, for each of the last `RECENT_HOURS`, oldest first."""
        refuse_unstorable(pattern=patterns, type=types, category=categories)

        async def read(reader: Reader) -> dict[str, list[int]]:
            found = {pattern: [0] * RECENT_HOURS for pattern in patterns}
            for row in await reader.rows(
                _SQL["recent_dead_letters"],
                patterns=list(patterns),
                types=list(types) or None,
                categories=list(categories) or None,
                hours=RECENT_HOURS,
            ):
                found[row["pattern"]][RECENT_HOURS - 1 - row["hours_ago"]] = row["count"]
            return found

        return await in_snapshot(self._database, read, for_filters=True)

    async def _open(self, filters: DeadLetterFilter, limit: int) -> list[str]:
        """Tasks that wait for a decision, including escalated ones; newest first."""

        async def read(reader: Reader) -> list[str]:
            rows = await _list(reader, filters, only_open=True, limit=limit)
            return [row["task_id"] for row in rows]

        return await in_snapshot(self._database, read, for_filters=True)

    # Decisions.

    async def resolve(self, task_id: str, decision: ResolutionRequest) -> DeadLetter:
        decision.check()
        _, refused = await self._resolve([task_id], decision)
        if refused:
            raise refused[task_id]
        return await self.get(task_id)

    async def resolve_all(
        self, filters: DeadLetterFilter, decision: ResolutionRequest, *, limit: int = MAX_BULK
    ) -> BulkResolution:
        """Decide about all open dead letters that match a filter, in several transactions.

        One that can't be resolved doesn't stop the others. If the database becomes unavailable, the same call
        again finds the rest.
        """
        decision.check()
        if not 1 <= limit <= MAX_BULK:
            raise InvalidInputError(errors=[("limit", f"must be from 1 to {MAX_BULK}, got {limit}")])
        found = await self._open(filters, limit + 1)
        resolved: set[str] = set()
        refused: dict[str, LineshaftError] = {}
        for start in range(0, min(limit, len(found)), _PER_TRANSACTION):
            chunk = found[start : min(start + _PER_TRANSACTION, limit)]
            # A decision about a batch moves its children too.
            left = [task_id for task_id in chunk if task_id not in resolved]
            moved, not_these = await self._resolve_each(left, decision)
            resolved |= moved
            refused |= not_these
        decided = [task_id for task_id in found[:limit] if task_id in resolved]
        refusals = [Refusal(task_id, error.code, str(error)) for task_id, error in refused.items()]
        return BulkResolution(decided, refusals, more=len(found) > limit)

    async def _resolve_each(self, ids: Sequence[str], decision: ResolutionRequest) -> _Resolved:
        """All in one transaction; if one of them makes that fail, each in its own."""
        if not ids:
            return set(), {}
        try:
            return await self._resolve(ids, decision)
        except UnavailableError:
            raise
        except LineshaftError as error:
            if len(ids) == 1:
                return set(), {ids[0]: error}
        resolved: set[str] = set()
        refused: dict[str, LineshaftError] = {}
        for task_id in ids:
            if task_id not in resolved:
                moved, not_this = await self._resolve_each([task_id], decision)
                resolved |= moved
                refused |= not_this
        return resolved, refused

    async def _resolve(self, ids: Sequence[str], decision: ResolutionRequest) -> _Resolved:
        """In one transaction."""
        resolution = decision.check()
        review = NewReview(
            resolution=resolution,
            reviewer=decision.reviewer,
            note=decision.note or None,
            not_before=decision.not_before,
            forgotten=decision.forget_steps,
        )

        async def work(connection: Connection) -> _Resolved:
            locked = await self._reviews.lock(connection, ids)
            if resolution is Resolution.ESCALATE:
                locked = {name: found for name, found in locked.items() if not found.reviewed}
            refused = {
                name: await _refusal(connection, name, resolution) for name in ids if name not in locked
            }
            # In the order of the request.
            dead = [locked[name] for name in ids if name in locked]
            return set(await self._decide(connection, dead, decision, review)) if dead else set(), refused

        return await self._database.run(work)

    async def _decide(
        self,
        connection: Connection,
        dead: Sequence[LockedDeadLetter],
        decision: ResolutionRequest,
        review: NewReview,
    ) -> Iterable[str]:
        """Returns all tasks that were moved."""
        if decision.forget_steps is not None:
            await _forget_steps(connection, [each.id for each in dead], decision.forget_steps)
        match review.resolution:
            case Resolution.ESCALATE:
                return await self._escalate(connection, dead, review)
            case Resolution.CANCEL | Resolution.DELETE:
                return await self._cancel.cancel_dead_letters(connection, [each.id for each in dead], review)
            case Resolution.RETRY:
                delays = {each.id: _delay(each, decision) for each in dead}
                return await self._revive.revive(connection, delays, review)
            case Resolution.MODIFY_AND_RETRY:
                moved: list[str] = []
                for each in dead:
                    changed = await self._change_spec(connection, each, decision.spec, review)
                    moved += await self._revive.revive(connection, {each.id: _delay(each, decision)}, changed)
                return moved

    async def _escalate(
        self, connection: Connection, dead: Sequence[LockedDeadLetter], review: NewReview
    ) -> list[str]:
        ids = [each.id for each in dead]
        causes = await self._reviews.record(connection, ids, review)
        events = [
            NewEvent.of(
                ["task.resolved", "alert"],
                each.id,
                each.dag_id,
                epoch=each.epoch,
                data=_alert(each, review) | causes[each.id],
            )
            for each in dead
        ]
        await log_events(connection, self._database.now, events)
        return ids

    async def _change_spec(
        self, connection: Connection, dead: LockedDeadLetter, spec: Any, review: NewReview
    ) -> NewReview:
        """Replace the spec, checked like a submission; the task then depends on tasks that it refers to."""
        row = resolve(NewTask(dead.type, spec=spec, preset=dead.preset))
        before = msgspec.json.decode(dead.spec)
        after = msgspec.json.decode(row.spec)
        inputs = {} if dead.inputs is None else msgspec.json.decode(dead.inputs)
        # A reference by the key of the submission still means the same task.
        refs = {f"task:{name}:output": name for name in row.context_tasks}
        refs = {ref: inputs.get(ref, name) for ref, name in refs.items()}
        await self._dependencies.add_inputs(connection, dead.id, list(dict.fromkeys(refs.values())))
        for ref in before.get("context_refs", ()):
            inputs.pop(ref, None)
        inputs |= refs
        if unknown := await refer(connection, {dead.id: row.context_artifacts}):
            raise InvalidInputError(errors=[("spec.context_refs", unknown_artifacts(sorted(unknown)))])
        await connection.execute(
            _SQL["change_spec"],
            {
                "id": dead.id,
                "spec": row.spec.decode(),
                "inputs": msgspec.json.encode(inputs).decode() if inputs else None,
                **_limits(dead, row, before, after),
            },
        )
        found = tuple(spec_changes(before, after))
        return replace(review, spec_before=dead.spec, spec_change=msgspec.json.encode(found), changed=found)


async def _list(
    reader: Reader,
    filters: DeadLetterFilter,
    *,
    limit: int,
    after: _DeadLetterKey | None = None,
    only_open: bool | None = None,
) -> list[Row]:
    return await reader.rows(
        _SQL["list_dead_letters"],
        **filter_parameters(filters),
        open=only_open,
        after_at=after and after.at,
        after_id=after and after.id,
        after_revival=after and after.revival,
        limit=limit,
    )


def filter_parameters(wanted: DeadLetterFilter) -> dict[str, Any]:
    texts = ("type", "category", "task_ids", "dag_id", "pattern")
    refuse_unstorable(
        error_contains=[wanted.error_contains or ""],
        **{name: names(getattr(wanted, name)) for name in texts},
    )
    for name in names(wanted.resolution):
        if name not in tuple(Resolution):
            fault = f"must be one of {', '.join(Resolution)}, got {name!r}"
            raise InvalidInputError(errors=[("resolution", fault)])
    like = like_patterns([wanted.error_contains] if wanted.error_contains else [])
    return {
        "reviewed": wanted.reviewed,
        "types": names(wanted.type) or None,
        "categories": names(wanted.category) or None,
        "error_like": like and like[0],
        "poison_pill": wanted.poison_pill,
        "task_ids": names(wanted.task_ids) or None,
        "dag_ids": names(wanted.dag_id) or None,
        "resolutions": names(wanted.resolution) or None,
        "patterns": names(wanted.pattern) or None,
        "hidden": wanted.hidden,
    }


async def _with_history(reader: Reader, rows: Sequence[Row]) -> list[DeadLetter]:
    ids = [row["task_id"] for row in rows]
    decisions = await reader.send(_SQL["read_reviews"], ids=ids)
    failures = await read_failed_attempts(reader, ids)
    reviews: defaultdict[tuple[str, int], list[Review]] = defaultdict(list)
    for row in await decisions.fetchall():
        reviews[row.pop("task_id"), row.pop("revival")].append(
            Review(
                resolution=Resolution(row.pop("resolution")),
                spec_before_json=raw(row.pop("spec_before")),
                spec_change_json=raw(row.pop("spec_change")),
                **row,
            )
        )
    return [
        DeadLetter(
            **{name: value for name, value in row.items() if name not in _DECODED},
            spec_json=Raw(row["spec"]),
            status=Status(row["status"]),
            resolution=None if row["resolution"] is None else Resolution(row["resolution"]),
            failure_history=[
                attempt for attempt in failures[row["task_id"]] if attempt.revival <= row["revival"]
            ],
            reviews=reviews[row["task_id"], row["revival"]],
        )
        for row in rows
    ]


async def _forget_steps(connection: Connection, ids: Sequence[str], wanted: list[str] | str) -> None:
    """Delete recorded steps of dead letters, which are locked; raises if one has no step of a name."""
    steps = None if isinstance(wanted, str) else wanted
    found = await forget_steps(connection, ids, steps)
    for task_id in ids:
        for name in steps or ():
            if (task_id, name) not in found:
                fault = (
                    f"task {task_id} has no recorded step {name!r}. GET /v1/tasks/{task_id}/steps lists them"
                )
                raise InvalidInputError(errors=[("forget_steps", fault)])


async def _refusal(connection: Connection, task_id: str, resolution: Resolution) -> LineshaftError:
    async with connection.cursor(row_factory=class_row(_LastReview)) as cursor:
        await cursor.execute(_SQL["last_review"], {"id": task_id})
        last = await cursor.fetchone()
    if last is None:
        return _unknown(task_id)
    asked = f"Can't resolve the dead letter of task {task_id} as {resolution}"
    if last.resolution is None or last.reviewed_at is None:
        return InvalidTransitionError(f"{asked}: the task is {last.status}.")
    who = "it was retried manually" if last.reviewer is None else f"{last.reviewer} decided {last.resolution}"
    return AlreadyReviewedError(
        f"{asked}: {who} at {last.reviewed_at.isoformat()}, and the task is {last.status} now. "
        "Nothing was changed.",
        resolution=last.resolution,
        reviewer=last.reviewer,
    )


def _unknown(task_id: str) -> NotFoundError:
    return NotFoundError(
        f"There is no dead letter of a task {task_id!r}; it may never have failed permanently."
    )


def _alert(dead: LockedDeadLetter, review: NewReview) -> dict[str, Any]:
    message = f"{review.reviewer} asks another person to decide about task {dead.id}"
    return review.event_data(dead.id) | {"alert": HUMAN_REVIEW_NEEDED, "message": message}


def _delay(dead: LockedDeadLetter, decision: ResolutionRequest) -> float:
    if decision.not_before is None:
        return 0.0
    return max((decision.not_before - dead.now).total_seconds(), 0.0)


def _limits(dead: LockedDeadLetter, row: TaskRow, before: Any, after: Any) -> dict[str, Any]:
    """Limits come from the new spec, as at submission; a limit that only the old spec has is dropped."""
    old, new = (
        found if isinstance(found := spec.get("constraints"), dict) else {} for spec in (before, after)
    )
    limits: dict[str, Any] = {
        "fixed_limits": bits_of(name for name, value in new.items() if value is not None)
    }
    for name in LIMITS_IN_SPEC:
        value = getattr(row if name in new or name in old else dead, name)
        limits[name] = list(value) if isinstance(value, tuple) else value
    return limits
