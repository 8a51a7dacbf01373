"""What lies on the review desk, as the outside sees it: entries with their whole history, and groups."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

from msgspec import Meta, Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.read.listing import patterns
from lineshaft.engine.read.reading import (
    DEFAULT_LIMIT,
    Page,
    Reader,
    Row,
    check_limit,
    decode_cursor,
    encode_cursor,
    in_snapshot,
    refuse_unstorable,
)
from lineshaft.engine.read.views import FailureView, failure_view
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.model.reviews import Resolution
from lineshaft.model.states import Status
from lineshaft.model.storable import is_storable

#: Tasks of a group that are named.
_SAMPLES = 20


class ReviewView(Struct, frozen=True, kw_only=True):
    """One decision."""

    at: datetime
    resolution: Resolution
    #: None: a retry by hand, past the desk.
    reviewer: str | None
    note: str | None
    not_before: datetime | None
    #: The spec as it was, and the places that were changed; only with `modify_and_retry`.
    spec_before: bytes | None
    spec_change: bytes | None


class DeadLetterView(Struct, frozen=True, kw_only=True):
    """An entry as in 004 §7.3, and what a person needs besides to decide."""

    task_id: str
    dag_id: str
    type: str
    title: str
    spec: bytes
    #: How often it had been revived when it came here.
    revival: int
    #: Every failed attempt so far, those before earlier revivals too.
    failure_history: list[FailureView]
    total_cost_usd: Decimal
    dead_lettered_at: datetime
    category: str
    error: str
    #: What alike errors have in common.
    pattern: str
    poison_pill: bool
    reviewed: bool
    #: The last decision; all of them are in `reviews`.
    resolution: Resolution | None
    reviewer: str | None
    note: str | None
    reviewed_at: datetime | None
    hidden: bool
    reviews: list[ReviewView]
    #: Where the task stands now.
    status: Status


class DeadLetterGroup(Struct, frozen=True, kw_only=True):
    """Entries with like errors (R-137)."""

    pattern: str
    count: int
    poison_pills: int
    total_cost_usd: Decimal
    first_at: datetime
    last_at: datetime
    categories: list[str]
    types: list[str]
    #: Some of them, the newest first.
    task_ids: list[str]
    #: The newest error, in full.
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Each: any of these; none: all. An entry must pass every one."""

    reviewed: bool | None = None
    type: Sequence[str] = ()
    category: Sequence[str] = ()
    #: Part of the error, in any case.
    error_contains: str | None = None
    poison_pill: bool | None = None
    task_ids: Sequence[str] = ()
    dag_id: Sequence[str] = ()
    #: What was decided last.
    resolution: Sequence[str] = ()
    #: As a group has it.
    pattern: Sequence[str] = ()
    #: Also those that were deleted.
    hidden: bool = False

    def parameters(self) -> dict[str, Any]:
        refuse_unstorable(
            type=self.type,
            category=self.category,
            error_contains=[self.error_contains or ""],
            task_ids=self.task_ids,
            dag_id=self.dag_id,
            pattern=self.pattern,
        )
        for name in self.resolution:
            if name not in tuple(Resolution):
                fault = f"must be one of {', '.join(Resolution)}, got {name!r}"
                raise InvalidInputError(errors=[("resolution", fault)])
        like = patterns([self.error_contains] if self.error_contains else [])
        return {
            "reviewed": self.reviewed,
            "types": list(self.type) or None,
            "categories": list(self.category) or None,
            "error_like": like and like[0],
            "poison_pill": self.poison_pill,
            "task_ids": list(self.task_ids) or None,
            "dag_ids": list(self.dag_id) or None,
            "resolutions": list(self.resolution) or None,
            "patterns": list(self.pattern) or None,
            "hidden": self.hidden,
        }


ALL_LETTERS = DeadLetterFilter()


class _Key(Struct, frozen=True, array_like=True, tag="dead_letter"):
    at: datetime
    id: str
    revival: Annotated[int, Meta(ge=0, le=2**15 - 1)]


async def read_letters(
    database: Database, filters: DeadLetterFilter, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None
) -> Page[DeadLetterView]:
    check_limit(limit)
    after = decode_cursor(cursor, _Key)

    async def read(reader: Reader) -> Page[DeadLetterView]:
        desk = replace(reader, sql=catalog.load("review/dead_letters"))
        rows = await desk.rows(
            "list_letters",
            **filters.parameters(),
            open=None,
            after_at=after and after.at,
            after_id=after and after.id,
            after_revival=after and after.revival,
            limit=limit + 1,
        )
        page, more = rows[:limit], None
        if len(rows) > limit:
            last = page[-1]
            more = encode_cursor(_Key(last["dead_lettered_at"], last["task_id"], last["revival"]))
        return Page(await _complete(reader, desk, page), more)

    return await in_snapshot(database, read, for_filters=True)


async def read_letter(database: Database, task_id: str) -> DeadLetterView:
    """The last time that a task came here."""
    if is_storable(task_id):
        page = await read_letters(database, DeadLetterFilter(task_ids=[task_id], hidden=True), limit=1)
        if page.items:
            return page.items[0]
    raise NotFoundError(f"There is no dead letter of a task {task_id!r}; it may never have failed for good.")


async def open_letters(database: Database, filters: DeadLetterFilter, limit: int) -> list[str]:
    """Tasks that wait for a decision, the escalated ones too; newest first."""

    async def read(reader: Reader) -> list[str]:
        desk = replace(reader, sql=catalog.load("review/dead_letters"))
        start = {"after_at": None, "after_id": None, "after_revival": None}
        rows = await desk.rows("list_letters", **filters.parameters(), **start, open=True, limit=limit)
        return [row["task_id"] for row in rows]

    return await in_snapshot(database, read, for_filters=True)


async def read_groups(
    database: Database, *, types: Sequence[str], categories: Sequence[str], limit: int
) -> list[DeadLetterGroup]:
    check_limit(limit)
    refuse_unstorable(type=types, category=categories)

    async def read(reader: Reader) -> list[DeadLetterGroup]:
        desk = replace(reader, sql=catalog.load("review/dead_letters"))
        rows = await desk.rows(
            "group_letters",
            types=list(types) or None,
            categories=list(categories) or None,
            samples=_SAMPLES,
            limit=limit,
        )
        return [DeadLetterGroup(**row) for row in rows]

    return await in_snapshot(database, read, for_filters=True)


async def _complete(reader: Reader, desk: Reader, rows: Sequence[Row]) -> list[DeadLetterView]:
    ids = [row["task_id"] for row in rows]
    attempts = await reader.send("read_failures", ids=ids)
    decisions = await desk.send("read_reviews", ids=ids)
    failures: defaultdict[str, list[Row]] = defaultdict(list)
    for row in await attempts.fetchall():
        if row["outcome"] == "failed":
            failures[row["task_id"]].append(row)
    reviews: defaultdict[tuple[str, int], list[ReviewView]] = defaultdict(list)
    for row in await decisions.fetchall():
        place = row.pop("task_id"), row.pop("revival")
        reviews[place].append(ReviewView(**row | {"resolution": Resolution(row["resolution"])}))
    return [
        DeadLetterView(
            **row | {"status": Status(row["status"]), "resolution": _resolution(row["resolution"])},
            failure_history=[
                failure_view(attempt)
                for attempt in failures[row["task_id"]]
                if attempt["revival"] <= row["revival"]
            ],
            reviews=reviews[row["task_id"], row["revival"]],
        )
        for row in rows
    ]


def _resolution(name: str | None) -> Resolution | None:
    return None if name is None else Resolution(name)
