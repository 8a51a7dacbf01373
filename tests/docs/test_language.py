"""Plain English in code and documentation: words that a native speaker would not use there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_links import CODE, PAGES, ROOT

SUFFIXES = {".py", ".sql", ".md"}
#: Between two words: also a line break with the comment sign of the next line.
_GAP = r"(?:\s|[#>*]|--)+"
_WORDS = re.compile(
    rf"""\b(?:
        (?P<word> told | whoever | nobody | for{_GAP}ever | anew | dear | mend(?:s|ed|ing)? )
        | (?P<there> there{_GAP} )? (?P<is_no> is{_GAP}no ) (?!{_GAP}longer)
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
#: Path and word, with the reason why the word is right there.
EXCEPTIONS = {("src/lineshaft/embedded/account.py", "nobody"): "the Unix account of that name"}


def found_words(text: str) -> Iterator[tuple[int, str]]:
    """The line and the word of each match."""
    for match in _WORDS.finditer(text):
        if match["there"]:
            continue
        name = "word" if match["word"] else "is_no"
        yield text.count("\n", 0, match.start(name)) + 1, re.sub(_GAP, " ", match[name])


def complaints(folder: Path) -> list[str]:
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    result = []
    for file in files:
        if file.suffix not in SUFFIXES:
            continue
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines()
        for line, word in found_words(text):
            if (str(file.relative_to(ROOT)), word) not in EXCEPTIONS:
                result.append(f"{file.relative_to(ROOT)}:{line}: {word!r}: {lines[line - 1].strip()}")
    return result


@pytest.mark.parametrize("where", ["docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_documentation_is_plain_english(where: str) -> None:
    found = complaints(ROOT / where)

    assert not found, "Use the terms of docs/glossary.md and plain words:\n" + "\n".join(found)


def test_source_code_is_plain_english() -> None:
    found = complaints(ROOT / "src")

    assert not found, "Use the terms of docs/glossary.md and plain words:\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_wraps_at_120_characters(page: Path) -> None:
    """Except tables and code blocks, which can't be wrapped."""
    text = CODE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
    long = [
        f"{page.relative_to(ROOT)}:{number}: {len(line)} characters"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > 120 and not line.startswith("|")
    ]

    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The caller is told.", [(1, "told")]),
        ("Whoever waits,\nnobody mends it.", [(1, "Whoever"), (2, "nobody"), (2, "mends")]),
        ("    # kept for\n    # ever", [(1, "for ever")]),
        ("-- begins anew; dear", [(1, "anew"), (1, "dear")]),
        ("'x' is no field of this", [(1, "is no")]),
        ("There is no task, and there\n# is no agent.", []),
        ("It is no longer, is no\n# longer valid.", []),
        ("stolder, amend, endear, is not, is nothing, is no_value, there's none", []),
    ],
)
def test_words_are_found(text: str, expected: list[tuple[int, str]]) -> None:
    assert list(found_words(text)) == expected
