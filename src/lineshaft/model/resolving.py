"""Fast resolution of similar tasks: what a task shares with the one before isn't checked or encoded again."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from operator import is_, itemgetter
from typing import Any

import msgspec

from lineshaft.model.fields import CHECKS, encoded_json
from lineshaft.model.tasks import DEFAULT_RULES, NewTask, TaskRow, TaskRules, resolve


class Resolver:
    """Resolves the tasks of one call; returns a row, which similar tasks share, and the task's own spec."""

    def __init__(self, rules: TaskRules = DEFAULT_RULES) -> None:
        self._rules = rules
        self._shape: tuple[Any, ...] | None = None
        self._row: TaskRow | None = None

    def __call__(self, task: NewTask, *, place: str = "") -> tuple[TaskRow, bytes]:
        fields = msgspec.structs.astuple(task)
        shape, row = _shape(fields), self._row
        is_similar = row is not None and self._shape is not None and _is_same(shape, self._shape)
        if row is None or not is_similar or not _is_plain(task.spec) or _is_misplaced(fields):
            row = resolve(task, place=place, rules=self._rules)
            # A title or a dependency from the spec belongs to this task only.
            self._shape, self._row = (shape, row) if _is_plain(task.spec) else (None, None)
            return row, row.spec
        return row, encoded_json("spec", task.spec, place=place)


def all_alike(tasks: Sequence[NewTask]) -> bool:
    """Whether tasks differ only in their specs, and have no ids and no dependencies."""
    first = _shape(msgspec.structs.astuple(tasks[0]))
    for task in tasks:
        fields = msgspec.structs.astuple(task)
        if not (_place(fields) in _NO_PLACE and _is_same(_shape(fields), first) and _is_plain(task.spec)):
            return False
        # A subclass has more to store with each task.
        if len(fields) != len(_fields):
            return False
    return True


#: Fields that similar tasks don't share, besides the spec: ids and dependencies.
_PLACE = ("key", "id", "depends_on", "inputs", "parent_id", "dag_id")
_NO_PLACE: tuple[tuple[Any, ...], ...] = (
    (None, None, (), None, None, None),
    (None, None, [], None, None, None),
)
_fields = NewTask.__struct_fields__
_place = itemgetter(*map(_fields.index, _PLACE))
_PLACE_CHECKS = tuple(CHECKS[name] for name in _PLACE)
_shape = itemgetter(*(n for n, name in enumerate(_fields) if name not in {*_PLACE, "spec"}))
#: Keys of a spec that affect other columns.
_SPECIAL = frozenset({"constraints", "context_refs", "goal", "action"})


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Stricter than equality: 1, 1.0 and true are equal, and so are times in different time zones."""
    return all(map(is_, one, other)) or all(map(_is_same_value, one, other))


def _is_same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, datetime):
        return bool(one.utcoffset() == other.utcoffset())
    return type(one) in _COMPARABLE


#: Types whose equal values are interchangeable. Lists contain strings, or are invalid.
_COMPARABLE = frozenset({str, int, float, bool, Decimal, list, tuple})


def _is_plain(spec: Any) -> bool:
    return isinstance(spec, dict) and _SPECIAL.isdisjoint(spec)


def _is_misplaced(fields: tuple[Any, ...]) -> bool:
    """Whether an id or a dependency is invalid."""
    for check, value in zip(_PLACE_CHECKS, _place(fields), strict=True):
        if value is not None and check(value):
            return True
    return False
