"""Links between the pages of the documentation: each leads to a file, and to a heading if it names one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.md")])
CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}, which doesn't exist"
        if anchor:
            assert anchor in anchors(target), (
                f"{page.name} links to {link}; {target.name} has no such heading"
            )


def test_every_page_is_linked_from_the_readme() -> None:
    links = set(_LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}

    assert pages <= links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_the_text_exist(page: Path) -> None:
    """`tests/…`, `src/…`, `docs/…` and `benchmarks/…` in backticks; results of a run needn't be there."""
    if page.name == "CHANGELOG.md":
        return  # Entries describe the past.
    for path in re.findall(r"`((?:tests|src|docs|benchmarks)/[\w./-]+)`", page.read_text(encoding="utf-8")):
        if not path.startswith(("benchmarks/results", "benchmarks/.environments")):
            assert (ROOT / path).exists(), f"{page.name} names {path}, which doesn't exist"
