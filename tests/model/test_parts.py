"""Parts of outputs, and for_each as people write it."""

from typing import Any

import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.model.parts import ForEach, NoSuchPartError, Part, Source, part_named, part_of
from lineshaft.model.tasks import NewTask, resolve


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", {"a": {"b": [1, {"c.d": 2}]}, "": 0}),
        ("a.b", [1, {"c.d": 2}]),
        ("a.b.0", 1),
        ("a.b.1", {"c.d": 2}),
    ],
)
def test_a_path_leads_to_a_part(path: str, value: Any) -> None:
    """Names of fields and positions in lists."""
    assert part_of({"a": {"b": [1, {"c.d": 2}]}, "": 0}, path) == value


@pytest.mark.parametrize(
    ("output", "path", "error"),
    [
        ({"a": 1}, "b", "there is no 'b' in the output: it is an object with 'a'"),
        ({}, "b", "there is no 'b' in the output: it is an empty object"),
        ({"a": [1, 2]}, "a.2", "there is no '2' in 'a': it is a list of 2 items"),
        ({"a": [1, 2]}, "a.-1", "there is no '-1' in 'a': it is a list of 2 items"),
        ({"a": [1, 2]}, "a.²", "there is no '²' in 'a': it is a list of 2 items"),
        ({"a": "text"}, "a.0", "there is no '0' in 'a': it is 'text'"),
        (None, "a", "there is no 'a' in the output: it is None"),
        (
            {f"f{n}": n for n in range(12)},
            "b",
            "there is no 'b' in the output: it is an object with "
            + ", ".join(f"'f{n}'" for n in range(10))
            + " and 2 more",
        ),
    ],
)
def test_a_path_that_leads_nowhere_is_explained(output: Any, path: str, error: str) -> None:
    with pytest.raises(NoSuchPartError) as raised:
        part_of(output, path)
    assert str(raised.value) == error


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("scan", "scan"),
        ("scan.files", Part("scan", "files")),
        ("scan.files.0.name", Part("scan", "files.0.name")),
        # A key may have dots: the longest one is meant.
        ("v1.2", "v1.2"),
        ("v1.2.files", Part("v1.2", "files")),
        ("v1.files", Part("v1", "files")),
        # Existing tasks: with a path only if Lineshaft made the id, because ids of others may have dots.
        ("task_01M7TWN.files", Part("task_01M7TWN", "files")),
        ("build.yesterday", "build.yesterday"),
    ],
)
def test_a_reference_is_a_task_and_perhaps_a_path(text: str, named: Source) -> None:
    assert part_named(text, {"scan", "v1", "v1.2"}) == named


@pytest.mark.parametrize(
    ("fields", "errors"),
    [
        ({"for_each": ForEach("")}, ["for_each.over"]),
        ({"for_each": ForEach("a", max=0)}, ["for_each.max"]),
        ({"for_each": ForEach("a", max=10_001, concurrency=0)}, ["for_each.max", "for_each.concurrency"]),
        ({"for_each": ForEach("a"), "children": [NewTask("b")]}, ["children"]),
        ({"for_each": ForEach("a"), "inputs": {"item": "b"}}, ["for_each"]),
        ({"for_each": ForEach("a"), "spec": {"index": 1}}, ["for_each"]),
        ({"for_each": {"over": "a", "limit": 3}}, ["for_each"]),
        ({"for_each": "a"}, ["for_each"]),
    ],
)
def test_faults_of_for_each_are_named(fields: dict[str, Any], errors: list[str]) -> None:
    with pytest.raises(InvalidInputError) as raised:
        resolve(NewTask("review", **fields))
    assert [place for place, _ in raised.value.errors] == errors


def test_for_each_may_be_a_dict() -> None:
    """As it is in files and over HTTP."""
    for_each: Any = {"over": "a.b", "max": 3}

    assert resolve(NewTask("review", for_each=for_each)).for_each == ForEach("a.b", max=3)
