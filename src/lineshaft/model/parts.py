"""Parts of outputs, named by paths such as `files.0.name`, and tasks that run for each item of a list."""

from collections.abc import Container

import msgspec
from msgspec import UNSET, Struct, UnsetType

from lineshaft.model.fields import text_fault

#: Items of one list.
MAX_ITEMS = 10_000
DEFAULT_MAX_ITEMS = 100
#: The inputs that each child of a list gets.
ITEM, INDEX = "item", "index"
#: Fields that an error names, and bytes of a value that it shows.
_NAMED, _SHOWN = 10, 60


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


def part_of(json: bytes, path: str) -> bytes:
    """The part of a value, both as JSON; raises NoSuchPartError with the place where the path leaves it.

    What is on the way is not decoded: numbers stay as they are, however large or exact.
    """
    place = "the output"
    for name in path.split(".") if path else ():
        fields = _fields(json)
        if isinstance(fields, dict) and name in fields:
            json = bytes(fields[name])
        elif isinstance(fields, list) and _is_position(name) and int(name) < len(fields):
            json = bytes(fields[int(name)])
        else:
            raise NoSuchPartError(f"there is no {name!r} in {place}: it {described(json)}")
        place = repr(name)
    return json


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def _fields(json: bytes) -> dict[str, msgspec.Raw] | list[msgspec.Raw] | None:
    """Of an object or a list."""
    match json.lstrip()[:1]:
        case b"{":
            return _decode_object(json)
        case b"[":
            return _decode_list(json)
    return None


def _is_position(name: str) -> bool:
    return name.isdecimal() and name.isascii()


def described(json: bytes) -> str:
    """What a value is, for a message."""
    fields = _fields(json)
    if isinstance(fields, list):
        return f"is a list of {len(fields)} items"
    if not isinstance(fields, dict):
        return f"is {json[:_SHOWN].decode(errors='ignore')}{'…' if len(json) > _SHOWN else ''}"
    more = f" and {len(fields) - _NAMED} more" if len(fields) > _NAMED else ""
    names = ", ".join(map(repr, list(fields)[:_NAMED]))
    return f"is an object with {names}{more}" if fields else "is an empty object"
