"""Specs side by side: what differs among many, and one change that is applied to each of many."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from lineshaft.model.spec_change import spec_changes

#: Places of one spec that are compared, and places that are shown.
_MOST_PLACES = 500
MOST_SHOWN = 40
#: Values that are shown for a place, and characters of each.
_MOST_VALUES = 4
_MOST_TEXT = 120
_MISSING = "(missing)"


class Changed(NamedTuple):
    """A place with its value before and after as JSON; None: it isn't there."""

    path: str
    before: str | None
    after: str | None


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Changed]:
    return [
        Changed(change.path, _json_text(change.before), _json_text(change.after))
        for change in spec_changes(before, after)
    ]


def _json_text(value: Any) -> str | None:
    return None if value is UNSET else msgspec.json.encode(value).decode()


class Difference(NamedTuple):
    path: str
    #: The most frequent values, each with the number of specs that have it.
    values: list[tuple[str, int]]
    #: Values that are not among these.
    others: int


def differences(specs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """The places at which specs differ, those with few different values first."""
    flat = [dict(_places(spec)) for spec in specs]
    found: list[tuple[int, Difference]] = []
    for path in dict.fromkeys(place for one in flat for place in one):
        values = Counter(one.get(path, _MISSING) for one in flat)
        if len(values) > 1:
            shown = [(text[:_MOST_TEXT], count) for text, count in values.most_common(_MOST_VALUES)]
            found.append((len(values), Difference(path, shown, len(values) - len(shown))))
    return [difference for _, difference in sorted(found, key=lambda one: (one[0], one[1].path))]


def _places(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each place with its value as JSON. Objects are followed; a list is one value."""
    found: list[tuple[str, str]] = []
    waiting: list[tuple[str, Any]] = [("", spec)]
    while waiting and len(found) < _MOST_PLACES:
        path, value = waiting.pop()
        if isinstance(value, Mapping) and (value or not path):
            waiting += [(f"{path}/{_escaped(key)}", value[key]) for key in sorted(value, reverse=True)]
        else:
            found.append((path, msgspec.json.encode(value, order="sorted").decode()))
    return found


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396): objects are merged, null removes a key, anything else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged
