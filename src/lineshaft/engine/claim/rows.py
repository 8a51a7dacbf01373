"""Claimed tasks built from rows of the claim statements."""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from operator import itemgetter
from typing import Any

import msgspec

from lineshaft.types.json import raw
from lineshaft.types.work import ClaimedTask

#: These fields are the same for all tasks of a claim; those with defaults come after them.
_COMMON = ("started", "claimed_at", "claim_ttl_sec")
_LAST = ("outdated", "account")
_COLUMNS = tuple(name for name in ClaimedTask.__struct_fields__ if name not in (*_COMMON, *_LAST, "locks"))
#: The columns that hold JSON follow each other.
_JSON = _COLUMNS.index("spec")

_Get = Callable[[tuple[Any, ...]], Any]


def claimed_tasks(
    columns: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
    *,
    started: bool,
    claimed_at: datetime,
    claim_ttl_sec: float,
) -> list[ClaimedTask]:
    """The rows have these columns, among them those of a task."""
    before, json, after, last = _getters(columns)
    common = (started, claimed_at, claim_ttl_sec)
    tasks = [
        ClaimedTask(*(*before(row), *map(raw, json(row)), *after(row), *common, *last(row))) for row in rows
    ]
    if "locks" not in columns:
        return tasks
    locks = columns.index("locks")
    return [
        task
        if row[locks] is None
        else msgspec.structs.replace(task, locks=msgspec.json.decode(row[locks], type=dict[str, bool]))
        for task, row in zip(tasks, rows, strict=True)
    ]


@cache
def _getters(columns: tuple[str, ...]) -> tuple[_Get, _Get, _Get, _Get]:
    """For the columns before the spec, the spec with the inputs, the columns after them, and the last ones.

    Fast paths have no account: they leave instances with accounts to `claim_tasks`.
    """
    return (
        _getter(columns, _COLUMNS[:_JSON]),
        itemgetter(columns.index("spec"), columns.index("inputs")),
        _getter(columns, _COLUMNS[_JSON + 2 :]),
        _getter(columns, _LAST if "account" in columns else _LAST[:1]),
    )


def _getter(columns: tuple[str, ...], names: tuple[str, ...]) -> _Get:
    """A slice, if the statement has the columns in this order: several times faster."""
    start = columns.index(names[0])
    end = start + len(names)
    if columns[start:end] == names:
        return itemgetter(slice(start, end))
    return itemgetter(*map(columns.index, names))
