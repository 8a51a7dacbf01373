"""Differences between specs lead from one to the other, both ways."""

import copy
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from lineshaft.model.spec_change import SpecChange, spec_changes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2, allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
SPECS = st.dictionaries(st.text("ab/~", max_size=2), JSON, max_size=3)


def applied(spec: dict[str, Any], change: SpecChange, value: Any) -> None:
    *way, last = [
        part.replace("~1", "/").replace("~0", "~") for part in change.path.removeprefix("/").split("/")
    ]
    place = spec
    for part in way:
        place = place[part]
    if value is UNSET:
        del place[last]
    else:
        place[last] = copy.deepcopy(value)


def canonical(spec: Any) -> bytes:
    return msgspec.json.encode(spec, order="sorted")


@given(SPECS, SPECS)
def test_applying_the_differences_gives_the_other_spec(before: dict[str, Any], after: dict[str, Any]) -> None:
    """R-132: the recorded differences are complete, in both directions."""
    found = spec_changes(before, after)

    forth, back = copy.deepcopy(before), copy.deepcopy(after)
    for change in found:
        applied(forth, change, change.after)
        applied(back, change, change.before)
    assert (canonical(forth), canonical(back)) == (canonical(after), canonical(before))
    assert (found == []) == (canonical(before) == canonical(after))


def test_paths_are_json_pointers() -> None:
    before = {"prompt": "a", "constraints": {"max_cost_usd": 1}, "old": [1, 2]}
    after = {"prompt": "b", "constraints": {"max_cost_usd": 1, "a/b": True}}

    assert msgspec.to_builtins(spec_changes(before, after)) == [
        {"path": "/constraints/a~1b", "to": True},
        {"path": "/old", "from": [1, 2]},
        {"path": "/prompt", "from": "a", "to": "b"},
    ]


def test_one_is_not_true() -> None:
    """They are equal in Python, but not in JSON."""
    assert spec_changes({"a": 1}, {"a": True}) == [SpecChange(path="/a", before=1, after=True)]
    assert spec_changes({"a": {}}, {"a": []}) == [SpecChange(path="/a", before={}, after=[])]
