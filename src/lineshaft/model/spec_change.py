"""The differences between two specs: each path with its old and its new value.

Paths are JSON pointers (`/constraints/max_cost_usd`). Objects are compared key by key; any other value, such
as a list, is reported whole. A missing `from` or `to` means that the path did not, or does not, exist.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType


class SpecChange(Struct, frozen=True, kw_only=True, rename={"before": "from", "after": "to"}):
    path: str
    before: Any | UnsetType = UNSET
    after: Any | UnsetType = UNSET


class _Pair(NamedTuple):
    path: str
    before: Any
    after: Any


def spec_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[SpecChange]:
    """The differences, ordered by path."""
    found: list[SpecChange] = []
    open_pairs = [_Pair("", before, after)]
    while open_pairs:
        path, old, new = open_pairs.pop()
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for key in {**old, **new}:
                place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
                open_pairs.append(_Pair(place, old.get(key, UNSET), new.get(key, UNSET)))
        elif old is UNSET or new is UNSET or not _same(old, new):
            found.append(SpecChange(path=path, before=old, after=new))
    return sorted(found, key=lambda change: change.path)


def _same(old: Any, new: Any) -> bool:
    """Compare as JSON: 1 is not true, and the order of keys has no meaning."""
    return msgspec.json.encode(old, order="sorted") == msgspec.json.encode(new, order="sorted")
