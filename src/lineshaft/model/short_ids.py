"""Short forms of ids, for people.

The id `task_01J8K2M3N4P5Q6R7S8T9V0W1X2` begins with the time of its creation, and ids of one call differ only
in their last characters. So its short form is the time and the end, `J8K2M3N4-W1X2`; the end is longer where
that is needed to tell two ids apart. The database finds it in its primary key, among the ids of one
millisecond: short forms need no index of their own. All ids begin with 01 until 2039.

A unique prefix of an id is accepted too. Ids that callers chose have no other short form.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_CHARACTER = "[0-9A-HJKMNP-TV-Z]"
_WHOLE = re.compile(rf"((?:task|dag|token)_)01({_CHARACTER}{{24}})")
_SHORT = re.compile(rf"(?:(?:task|dag|token)_)?({_CHARACTER}{{8}})-({_CHARACTER}{{1,16}})", re.IGNORECASE)
_PREFIX = re.compile(rf"(?:01)?({_CHARACTER}{{4,24}})", re.IGNORECASE)
_TIME, _LEAST_END, _LONGEST_END = 8, 4, 16


def is_whole(text: str) -> bool:
    """Whether it is a generated id, complete."""
    return _WHOLE.fullmatch(text) is not None


def short_ids(ids: Iterable[str]) -> Mapping[str, str]:
    """The short form of each id, unique among those of its kind; ids that callers chose are their own."""
    parts = {name: found for name in ids if (found := _WHOLE.fullmatch(name)) is not None}
    short: dict[str, str] = {}
    for length in range(_LEAST_END, _LONGEST_END + 1):
        forms = {name: f"{found[2][:_TIME]}-{found[2][-length:]}" for name, found in parts.items()}
        counts = Counter((parts[name][1], form) for name, form in forms.items())
        for name, form in forms.items():
            if counts[parts[name][1], form] == 1 or length == _LONGEST_END:
                short.setdefault(name, form)
    return short


def short_id(name: str) -> str:
    return short_ids([name]).get(name, name)


class IdRange(NamedTuple):
    """Ids from `low` to below `high` that end with `end`."""

    low: str
    high: str
    end: str = ""


def ranges(kind: str, text: str) -> list[IdRange]:
    """Where to look for the ids of a kind (task, dag or token) that a short form or a prefix may mean."""
    if found := _SHORT.fullmatch(text):
        return [_range(f"{kind}_01{found[1].upper()}", found[2].upper())]
    if len(text) < _LEAST_END or not (text.isascii() and text.isprintable()):
        return []
    prefixes = [text]
    if found := _PREFIX.fullmatch(text):
        prefixes.append(f"{kind}_01{found[1].upper()}")
    return [_range(prefix) for prefix in prefixes]


def matches(kind: str, text: str, name: str) -> bool:
    """Whether the text is this id, or its short form or prefix."""
    return text == name or any(
        each.low <= name < each.high and name.endswith(each.end) for each in ranges(kind, text)
    )


def _range(prefix: str, end: str = "") -> IdRange:
    return IdRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1), end)
