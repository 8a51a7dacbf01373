"""Claimed tasks built from rows of the claim statements."""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from operator import itemgetter
from typing import Any

from lineshaft.types.work import ClaimedTask

#: The last fields are the same for all tasks of a claim.
_COMMON = ("started", "claimed_at", "claim_ttl_sec")
_COLUMNS = tuple(name for name in ClaimedTask.__struct_fields__ if name not in _COMMON)


def claimed_tasks(
    rows: Sequence[Any], *, started: bool, claimed_at: datetime, claim_ttl_sec: float
) -> list[ClaimedTask]:
    """The rows are named tuples of one statement, with more columns than a task has."""
    task_columns = _getter(rows[0]._fields)
    common = (started, claimed_at, claim_ttl_sec)
    return [ClaimedTask(*task_columns(row) + common) for row in rows]


@cache
def _getter(columns: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return itemgetter(*map(columns.index, _COLUMNS))
