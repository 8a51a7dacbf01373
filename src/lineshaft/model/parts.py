"""Parts of outputs, named by paths such as `files.0.name`, and tasks that run for each item of a list."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.model.fields import text_fault

#: Items of one list.
MAX_ITEMS = 10_000
DEFAULT_MAX_ITEMS = 100
#: The inputs that each child of a list gets.
ITEM, INDEX = "item", "index"
#: Fields that an error names.
_NAMED = 10


class Part(Struct, frozen=True, omit_defaults=True):
    """A part of the output of a task; or a value that came from one."""

    #: A key of the call, later the id.
    task: str = ""
    #: Names of fields and positions in lists, with dots between them.
    path: str = ""
    value: msgspec.Raw | UnsetType = UNSET

    @property
    def is_value(self) -> bool:
        return self.value is not UNSET

    def __str__(self) -> str:
        return f"{self.task}.{self.path}" if self.path else self.task


#: Where an input comes from: the output of a task, or a part of one.
Source = str | Part


class ForEach(Struct, frozen=True, forbid_unknown_fields=True):
    """A task that becomes one child for each item of a list, which a task before it returns."""

    #: The list: the key of the other task, with the path to the list in its output (`scan.files`).
    over: str
    #: The task fails if the list has more items.
    max: int = DEFAULT_MAX_ITEMS
    #: How many children run at once; None: as many as there are agents for.
    concurrency: int | None = None


def for_each_faults(for_each: ForEach) -> list[tuple[str, str]]:
    """The faults of its fields."""
    faults = [] if (fault := text_fault(for_each.over)) is None else [("for_each.over", fault)]
    if not 1 <= for_each.max <= MAX_ITEMS:
        faults.append(("for_each.max", f"must be a whole number from 1 to {MAX_ITEMS}, got {for_each.max}"))
    if for_each.concurrency is not None and for_each.concurrency < 1:
        faults.append(
            ("for_each.concurrency", f"must be a whole number of at least 1, got {for_each.concurrency}")
        )
    return faults


class StoredForEach(Struct, frozen=True, omit_defaults=True):
    """A `for_each` as it is stored."""

    over: str
    #: What `over` means, with the id of the task.
    source: Part
    max: int = DEFAULT_MAX_ITEMS
    concurrency: int | None = None


class NoSuchPartError(Exception):
    """An output has no part of this name."""


def part_named(text: str, keys: Container[str]) -> Source:
    """The task of a reference, or the part of its output.

    A reference that is the key of a task of the call means that task. Otherwise the longest key before a dot
    is the task, and the rest is the path. An id is one that Lineshaft made, if a path follows it.
    """
    if text in keys:
        return text
    end = text.rfind(".")
    while end > 0:
        if text[:end] in keys:
            return Part(text[:end], text[end + 1 :])
        end = text.rfind(".", 0, end)
    name, dot, path = text.partition(".")
    return Part(name, path) if dot and name.startswith("task_") else text


def part_of(value: Any, path: str) -> Any:
    """The part of a value; raises NoSuchPartError with the place where the path leaves the value."""
    place = "the output"
    for name in path.split(".") if path else ():
        if name not in _fields(value):
            raise NoSuchPartError(f"there is no {name!r} in {place}: it {_described(value)}")
        value = value[int(name)] if isinstance(value, list) else value[name]
        place = repr(name)
    return value


class _Positions(Container[str]):
    """The positions of a list, as they are written in paths."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.isdecimal() and name.isascii() and int(name) < self._count


def _fields(value: Any) -> Container[str]:
    if isinstance(value, list):
        return _Positions(len(value))
    return value if isinstance(value, dict) else ()


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        more = f" and {len(value) - _NAMED} more" if len(value) > _NAMED else ""
        names = ", ".join(map(repr, list(value)[:_NAMED]))
        return f"is an object with {names}{more}" if value else "is an empty object"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"is a list of {len(value)} items"
    return f"is {shown(value)}"


def items_of(output: Any, each: StoredForEach) -> list[Any]:
    """The items of the list in an output; raises InvalidInputError if it isn't a list, or is too long."""
    try:
        items = part_of(output, each.source.path)
    except NoSuchPartError as error:
        raise InvalidInputError(str(error)) from None
    if not isinstance(items, list):
        raise InvalidInputError(f"expected a list, but it {_described(items)}")
    if len(items) > each.max:
        raise InvalidInputError(f"the list has {len(items)} items, but max is {each.max}")
    return items
