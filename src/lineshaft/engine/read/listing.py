"""Which tasks and DAGs a list shows, page by page, without counting and without skipping.

The history has millions of tasks, and not every filter has an index. If one filter leaves few tasks (a DAG, a
parent, a tag, a live status, a bad end), they are all collected and sorted; each filter is tried, up to `FEW`
tasks. Otherwise the list walks through all tasks from the newest on, a bounded part at a time, and returns a
cursor where it stopped: frequent matches fill a page at once, rare ones come in short pages.
"""

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta, Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.pages import decode_cursor, encode_cursor, refuse_unstorable
from lineshaft.engine.read.snapshot import Reader, Row
from lineshaft.errors import InvalidInputError
from lineshaft.model.states import ENDED, LIVE, Status
from lineshaft.types.filters import DagFilter, Names, TaskFilter, TaskOrder, names

#: Up to this many tasks are collected and sorted; more are walked.
FEW = 5_000
#: Rows that a walk reads in one statement, and the number of statements for one page.
SCAN, PARTS = 20_000, 6

_SQL = catalog.load(__name__)


def task_parameters(wanted: TaskFilter) -> dict[str, Any]:
    refuse_unstorable(**{name: names(getattr(wanted, name)) for name in _TEXTS})
    statuses = [Status.parse(name) for name in names(wanted.status)]
    return {
        "any_status": not statuses,
        "live": [name for name in statuses if name in LIVE] or None,
        "ended": [name for name in statuses if name in ENDED] or None,
        "types": _any_of(wanted.type),
        "dag_ids": _any_of(wanted.dag_id),
        "parent_ids": _any_of(wanted.parent_id),
        "agent_ids": _any_of(wanted.agent_id),
        "tags": _any_of(wanted.tag),
        "created_by": _any_of(wanted.created_by),
        "patterns": patterns(names(wanted.q)),
        "lock_keys": _any_of(wanted.lock_key),
        "priority_from": wanted.priority_from,
        "priority_to": wanted.priority_to,
        "batches": wanted.batches or None,
    }


_TEXTS = ("type", "dag_id", "parent_id", "agent_id", "tag", "created_by", "q", "lock_key")


def dag_parameters(wanted: DagFilter) -> dict[str, Any]:
    refuse_unstorable(created_by=names(wanted.created_by), q=names(wanted.q))
    statuses = [name.lower() for name in names(wanted.status)]
    for name in statuses:
        if name not in _DAG_STATES:
            fault = f"must be one of {', '.join(_DAG_STATES)}, got {name!r}"
            raise InvalidInputError(errors=[("status", fault)])
    return {
        "statuses": statuses or None,
        "created_by": _any_of(wanted.created_by),
        "patterns": patterns(names(wanted.q)),
        "virtual": wanted.virtual,
    }


_DAG_STATES = ("pending", "running", "completed", "failed", "cancelled")


def _any_of(values: Names) -> list[str] | None:
    return names(values) or None


def patterns(parts: Iterable[str]) -> list[str] | None:
    """Patterns for ILIKE, with special characters escaped."""
    escaped = [part.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") for part in parts]
    return [f"%{part}%" for part in escaped] or None


class _AgeKey(Struct, frozen=True, array_like=True, tag="task"):
    at: datetime
    id: str


class _DagKey(Struct, frozen=True, array_like=True, tag="dag"):
    at: datetime
    id: str


class _PriorityKey(Struct, frozen=True, array_like=True, tag="priority"):
    #: Priorities change with time: all pages are sorted as of the first.
    as_of: datetime
    effective: float
    no: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Keys(Struct, frozen=True):
    """The ids of one page, in order, and the cursor of the next."""

    ids: list[str]
    next_cursor: str | None


async def task_keys(
    reader: Reader, wanted: TaskFilter, order: str, limit: int, cursor: str | None, *, few: int = FEW
) -> Keys:
    if order not in tuple(TaskOrder):
        raise InvalidInputError(errors=[("order", f"must be one of {', '.join(TaskOrder)}, got {order!r}")])
    if order == TaskOrder.PRIORITY:
        return await _by_priority(reader, wanted, limit, cursor, few)
    filters = task_parameters(wanted)
    start = decode_cursor(cursor, _AgeKey)
    ids = await _collect(reader, filters, few)
    if ids is None:
        await reader.send(_SQL["plan_to_walk"])

    async def fetch(after: _Place | None, need: int) -> list[Row]:
        place = {**_after(after), "limit": need}
        if ids is not None:
            return await reader.rows(_SQL["keys_among"], **filters, **place, ids=ids)
        return await reader.rows(_SQL["keys_by_age"], **filters, **place, scan=SCAN)

    rows, last = await _walk(fetch, _place_of(start), limit)
    return Keys([row["id"] for row in rows], None if last is None else encode_cursor(_AgeKey(*last)))


async def dag_keys(reader: Reader, wanted: DagFilter, limit: int, cursor: str | None) -> Keys:
    filters = dag_parameters(wanted)
    start = decode_cursor(cursor, _DagKey)
    await reader.send(_SQL["plan_to_walk"])

    async def fetch(after: _Place | None, need: int) -> list[Row]:
        place = {**_after(after), "limit": need, "scan": SCAN}
        return await reader.rows(_SQL["dag_keys_by_age"], **filters, **place)

    rows, last = await _walk(fetch, _place_of(start), limit)
    return Keys([row["dag_id"] for row in rows], None if last is None else encode_cursor(_DagKey(*last)))


_Place = tuple[datetime, str]
_Fetch = Callable[[_Place | None, int], Awaitable[list[Row]]]


def _place_of(key: _AgeKey | _DagKey | None) -> _Place | None:
    return None if key is None else (key.at, key.id)


async def _walk(fetch: _Fetch, after: _Place | None, limit: int) -> tuple[list[Row], _Place | None]:
    """The matching rows of a page, and the place to continue after; None: there are no more."""
    found: list[Row] = []
    for _ in range(PARTS):
        # One more than wanted shows whether there is a next page.
        rows = await fetch(after, limit + 1 - len(found))
        found += [row for row in rows if row["matches"]]
        if len(found) > limit:
            return found[:limit], _place(found[limit - 1])
        if not rows or not rows[-1]["is_last"]:
            return found, None
        after = _place(rows[-1])
    return found, after


def _place(row: Row) -> _Place:
    return row["created_at"], row["id"]


def _after(place: _Place | None) -> dict[str, Any]:
    at, name = place or (None, None)
    return {"after_at": at, "after_id": name}


async def _by_priority(reader: Reader, wanted: TaskFilter, limit: int, cursor: str | None, few: int) -> Keys:
    filters = task_parameters(wanted)
    if filters["any_status"]:
        filters |= {"any_status": False, "live": sorted(LIVE)}
    if filters["ended"]:
        ended = ", ".join(filters["ended"])
        fault = f"priority is only for tasks that have not ended, but status has {ended}; use created_at"
        raise InvalidInputError(errors=[("order", fault)])
    after = decode_cursor(cursor, _PriorityKey)
    as_of = after.as_of if after else (await reader.rows(_SQL["read_now"]))[0]["now"]
    place = {
        "as_of": as_of,
        "after_effective": after and after.effective,
        "after_no": after and after.no,
        "limit": limit + 1,
    }
    ids = await _collect(reader, filters, few)
    given = {name for name, value in filters.items() if value}
    if ids is None and filters["live"] == [Status.READY] and given <= {"live", "types"}:
        rows = await reader.rows(_SQL["keys_of_ready"], types=filters["types"], **place)
    else:
        if ids is None:
            await reader.send(_SQL["plan_to_scan"])
        rows = await reader.rows(_SQL["keys_by_priority"], **filters, **place, ids=ids)
    page = rows[:limit]
    more = None
    if len(rows) > limit:
        more = encode_cursor(_PriorityKey(as_of, page[-1]["effective"], page[-1]["submission_no"]))
    return Keys([row["id"] for row in page], more)


#: The statement that collects the tasks of a status.
_SOURCES = {
    Status.CLAIMED: "ids_held",
    Status.RUNNING: "ids_held",
    Status.RETRYING: "ids_retrying",
    Status.PENDING: "ids_live",
    Status.READY: "ids_live",
    Status.VALIDATING: "ids_live",
    Status.COMPLETED: "ids_completed",
    Status.CANCELLED: "ids_ended_badly",
    Status.DEAD_LETTERED: "ids_ended_badly",
}


async def _collect(reader: Reader, filters: dict[str, Any], few: int) -> list[str] | None:
    """All candidates, by the first filter that leaves few; None: every filter leaves many."""
    attempts: list[list[str]] = []
    if filters["parent_ids"]:
        attempts.append(["ids_of_parents"])
    if filters["dag_ids"]:
        attempts.append(["ids_of_dags"])
    if filters["lock_keys"]:
        attempts.append(["ids_of_documents"])
    if not filters["any_status"]:
        statuses = [*(filters["live"] or ()), *(filters["ended"] or ())]
        attempts.append(sorted({_SOURCES[name] for name in statuses}))
    if filters["tags"]:
        attempts.append(["ids_tagged"])
    for statements in attempts:
        ids: set[str] = set()
        for name in statements:
            (row,) = await reader.rows(_SQL[name], **filters, most=few + 1)
            ids.update(row["ids"])
            if len(ids) > few:
                break
        if len(ids) <= few:
            return list(ids)
    return None
