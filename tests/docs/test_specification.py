"""docs/specification.md and the tests refer to each other: no tag dangles, and no built item goes unproven.

A tag counts where a person reads it: in a comment or a docstring.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "specification.md"

_TAG = re.compile(r"(?<![\w+/\\-])(?:R-\d{3}|F-\d{1,2}|U\d{1,2})(?![\w+-])")
_RANGE = re.compile(r"\s*(?:to|…|\.{2,3}|–)\s*")
_SECTION = re.compile(r"(?<![\w+/\\-])00[034] §\d+(?:\.\d+)*")
_ITEM = re.compile(r"^- \*\*(\S+)\*\* \S", re.MULTILINE)
_SECTION_ROW = re.compile(r"^\| (00\d §\d+) \|", re.MULTILINE)


class Specification(NamedTuple):
    built: list[str]
    planned: list[str]
    sections: list[str]

    @property
    def items(self) -> list[str]:
        return self.built + self.planned


class Tags(NamedTuple):
    single: set[str]
    ranges: set[tuple[str, str]]


def specification() -> Specification:
    text = PAGE.read_text(encoding="utf-8")
    built, heading, planned = text.partition("\n## Planned\n")
    assert heading, "The page has no heading 'Planned'"
    return Specification(_ITEM.findall(built), _ITEM.findall(planned), _SECTION_ROW.findall(text))


def tags_in(text: str) -> Tags:
    """All tags of a text. The ends of a range are tags themselves."""
    found = list(_TAG.finditer(text))
    ranges = {
        (one[0], two[0])
        for one, two in pairwise(found)
        if _RANGE.fullmatch(text, one.end(), two.start()) and _key(one[0])[0] == _key(two[0])[0]
    }
    return Tags({match[0] for match in found}, ranges)


def covered(tags: Tags, items: list[str]) -> set[str]:
    """The items that these tags name, those inside of ranges included."""
    return {
        item
        for item in items
        if item in tags.single or any(_key(first) <= _key(item) <= _key(last) for first, last in tags.ranges)
    }


def _key(tag: str) -> tuple[str, int]:
    kind = tag.rstrip("0123456789")
    return kind, int(tag.removeprefix(kind))


def prose(source: str) -> Iterator[str]:
    """The docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def prose_of_tests() -> list[tuple[str, str]]:
    return [
        (str(path.relative_to(ROOT)), text)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for text in prose(path.read_text(encoding="utf-8"))
    ]


def test_every_item_is_listed_once() -> None:
    items = specification().items

    assert [item for item, times in Counter(items).items() if times > 1] == []
    assert [item for item in items if tags_in(item).single != {item}] == [], "not a tag"


@pytest.mark.slow("reads all tests")
def test_every_tag_in_a_test_is_in_the_specification() -> None:
    items = set(specification().items)

    dangling = {
        (path, tag) for path, text in prose_of_tests() for tag in tags_in(text).single if tag not in items
    }

    assert sorted(dangling) == []


@pytest.mark.slow("reads all tests")
def test_every_section_in_a_test_is_in_the_specification() -> None:
    sections = specification().sections

    dangling = {
        (path, section)
        for path, text in prose_of_tests()
        for section in _SECTION.findall(text)
        if section.partition(".")[0] not in sections
    }

    assert sorted(dangling) == []


@pytest.mark.slow("reads all tests")
def test_a_test_names_every_item_that_is_not_planned() -> None:
    built = specification().built
    named: set[str] = set()
    for _, text in prose_of_tests():
        named |= covered(tags_in(text), built)

    assert sorted(set(built) - named, key=_key) == []


def test_tags_on_the_page_itself_lead_to_an_item() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert tags_in(text).single - set(specification().items) == set()


@pytest.mark.parametrize(
    ("text", "single", "ranges"),
    [
        ("R-136, U6 (F-14).", {"R-136", "U6", "F-14"}, set()),
        ("R-230 to R-234, R-237", {"R-230", "R-234", "R-237"}, {("R-230", "R-234")}),
        ("R-200…R-209", {"R-200", "R-209"}, {("R-200", "R-209")}),
        ("F-1..F-6", {"F-1", "F-6"}, {("F-1", "F-6")}),
        ("U2 to F-4", {"U2", "F-4"}, set()),
        ("R-030 leads to R-040", {"R-030", "R-040"}, set()),
        ("U+0000, \\U0001F600, an F-string, UTF-8, U8x, F-150, R-1, R-1000, AR-100, R-100-a", set(), set()),
    ],
)
def test_what_is_a_tag(text: str, single: set[str], ranges: set[tuple[str, str]]) -> None:
    assert tags_in(text) == Tags(single, ranges)


def test_a_range_names_what_is_in_it() -> None:
    tags = tags_in("R-181 to R-183, U2")

    assert covered(tags, ["R-180", "R-181", "R-182", "R-183", "R-184", "F-182", "U2"]) == {
        *("R-181", "R-182", "R-183", "U2"),
    }


def test_only_docstrings_and_comments_are_read() -> None:
    source = '"""R-001."""\nname = "R-002"  # R-003\n\n\ndef function():\n    """U1."""\n    return "U2"\n'

    assert list(prose(source)) == ["R-001.", "U1.", "# R-003"]


def test_source_code_has_no_tags() -> None:
    """Requirements are named by the tests that prove them; a comment gives the reason itself."""
    found = {
        (str(path.relative_to(ROOT)), tag)
        for path in sorted((ROOT / "src").rglob("*"))
        if path.suffix in {".py", ".sql", ".md"}
        for tag in tags_in(path.read_text(encoding="utf-8")).single
    }

    assert sorted(found) == []
