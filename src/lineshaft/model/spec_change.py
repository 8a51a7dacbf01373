"""What a person changed in a spec: each place with what stood there and what stands there now.

Places are JSON pointers (`/constraints/max_cost_usd`). Objects are compared key by key; whatever else
differs, a list for one, is told whole. An absent `from` or `to` means that there was, or is, nothing there.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType


class Change(Struct, frozen=True, kw_only=True, rename={"before": "from", "after": "to"}):
    path: str
    before: Any | UnsetType = UNSET
    after: Any | UnsetType = UNSET


class _Pair(NamedTuple):
    path: str
    before: Any
    after: Any


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """In the order of their places."""
    found: list[Change] = []
    open_pairs = [_Pair("", before, after)]
    while open_pairs:
        path, old, new = open_pairs.pop()
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for key in {**old, **new}:
                place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
                open_pairs.append(_Pair(place, old.get(key, UNSET), new.get(key, UNSET)))
        elif old is UNSET or new is UNSET or not _same(old, new):
            found.append(Change(path=path, before=old, after=new))
    return sorted(found, key=lambda change: change.path)


def _same(old: Any, new: Any) -> bool:
    """As JSON: 1 is not true, and the order of keys says nothing."""
    return msgspec.json.encode(old, order="sorted") == msgspec.json.encode(new, order="sorted")
