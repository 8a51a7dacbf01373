"""What lies on the review desk, as the outside sees it: entries with their whole history, and groups."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.read.listing import patterns
from lineshaft.engine.read.rows import failed_attempt
from lineshaft.engine.read.snapshot import (
    Reader,
    Row,
    decode_cursor,
    encode_cursor,
    in_snapshot,
    refuse_unstorable,
)
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.model.reviews import Resolution
from lineshaft.model.states import Status
from lineshaft.model.storable import is_storable
from lineshaft.types import DeadLetter, DeadLetterFilter, DeadLetterGroup, Page, Review
from lineshaft.types.filters import names
from lineshaft.types.json import raw
from lineshaft.types.page import DEFAULT_LIMIT, check_limit

#: Tasks of a group that are named.
_SAMPLES = 20


ALL_LETTERS = DeadLetterFilter()


def parameters(wanted: DeadLetterFilter) -> dict[str, Any]:
    texts = ("type", "category", "task_ids", "dag_id", "pattern")
    refuse_unstorable(
        error_contains=[wanted.error_contains or ""],
        **{name: names(getattr(wanted, name)) for name in texts},
    )
    for name in names(wanted.resolution):
        if name not in tuple(Resolution):
            fault = f"must be one of {', '.join(Resolution)}, got {name!r}"
            raise InvalidInputError(errors=[("resolution", fault)])
    like = patterns([wanted.error_contains] if wanted.error_contains else [])
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


class _Key(Struct, frozen=True, array_like=True, tag="dead_letter"):
    at: datetime
    id: str
    revival: Annotated[int, Meta(ge=0, le=2**15 - 1)]


async def read_letters(
    database: Database, filters: DeadLetterFilter, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None
) -> Page[DeadLetter]:
    check_limit(limit)
    after = decode_cursor(cursor, _Key)

    async def read(reader: Reader) -> Page[DeadLetter]:
        desk = replace(reader, sql=catalog.load("review/dead_letters"))
        rows = await desk.rows(
            "list_letters",
            **parameters(filters),
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


async def read_letter(database: Database, task_id: str) -> DeadLetter:
    """The last time that a task came here."""
    if is_storable(task_id):
        page = await read_letters(database, DeadLetterFilter(task_ids=task_id, hidden=True), limit=1)
        if page.items:
            return page.items[0]
    raise NotFoundError(f"There is no dead letter of a task {task_id!r}; it may never have failed for good.")


async def open_letters(database: Database, filters: DeadLetterFilter, limit: int) -> list[str]:
    """Tasks that wait for a decision, the escalated ones too; newest first."""

    async def read(reader: Reader) -> list[str]:
        desk = replace(reader, sql=catalog.load("review/dead_letters"))
        start = {"after_at": None, "after_id": None, "after_revival": None}
        rows = await desk.rows("list_letters", **parameters(filters), **start, open=True, limit=limit)
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


async def _complete(reader: Reader, desk: Reader, rows: Sequence[Row]) -> list[DeadLetter]:
    ids = [row["task_id"] for row in rows]
    attempts = await reader.send("read_failures", ids=ids)
    decisions = await desk.send("read_reviews", ids=ids)
    failures: defaultdict[str, list[Row]] = defaultdict(list)
    for row in await attempts.fetchall():
        if row["outcome"] == "failed":
            failures[row["task_id"]].append(row)
    reviews: defaultdict[tuple[str, int], list[Review]] = defaultdict(list)
    for row in await decisions.fetchall():
        place = row.pop("task_id"), row.pop("revival")
        reviews[place].append(
            Review(
                resolution=Resolution(row.pop("resolution")),
                spec_before_json=raw(row.pop("spec_before")),
                spec_change_json=raw(row.pop("spec_change")),
                **row,
            )
        )
    return [
        DeadLetter(
            **{name: value for name, value in row.items() if name not in {"spec", "status", "resolution"}},
            spec_json=Raw(row["spec"]),
            status=Status(row["status"]),
            resolution=_resolution(row["resolution"]),
            failure_history=[
                failed_attempt(attempt)
                for attempt in failures[row["task_id"]]
                if attempt["revival"] <= row["revival"]
            ],
            reviews=reviews[row["task_id"], row["revival"]],
        )
        for row in rows
    ]


def _resolution(name: str | None) -> Resolution | None:
    return None if name is None else Resolution(name)
