"""Links between the pages of the documentation: each leads to a file, and to a heading if it names one."""

import re
from pathlib import Path

import msgspec.yaml
import pytest

from tests.docs import python_reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.md")])
CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
#: Built with the site, and not committed.
REFERENCE = ROOT / "docs" / "python-reference.md"
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = CODE.sub("", python_reference.page() if page == REFERENCE else page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists() or target == REFERENCE, f"{page.name} links to {link}, which doesn't exist"
        if anchor:
            assert anchor in anchors(target), (
                f"{page.name} links to {link}; {target.name} has no such heading"
            )


def navigation() -> dict[str, list[str]]:
    """The pages of the site by group."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    first, *groups = msgspec.yaml.decode(text[text.index("nav:") : text.index("markdown_extensions:")])["nav"]
    assert first == {"Lineshaft": "index.md"}
    return {title: pages for group in groups for title, pages in group.items()}


def test_every_page_has_one_place_on_the_site() -> None:
    places = sorted(page for pages in navigation().values() for page in pages)
    root = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}

    assert places == sorted({page.name for page in (ROOT / "docs").glob("*.md")} | {REFERENCE.name} | root)


def test_the_readme_has_few_links_in_the_groups_of_the_site() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, *parts = re.split(
        r"^- \*\*([\w -]+)\*\*: ", text.partition("\n## Documentation\n")[2], flags=re.MULTILINE
    )
    groups = dict(zip(parts[::2], parts[1::2], strict=True))

    assert len(re.findall(r"(?<!!)\[[^\]]*\]\(", text)) <= 12
    assert list(groups) == list(navigation())
    for title, part in groups.items():
        links = [link.removeprefix("docs/") for link in _LINK.findall(part)]
        assert links
        assert set(links) <= set(navigation()[title]), title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_the_text_exist(page: Path) -> None:
    """`tests/…`, `src/…`, `docs/…` and `benchmarks/…` in backticks; results of a run needn't be there."""
    if page.name == "CHANGELOG.md":
        return  # Entries describe the past.
    for path in re.findall(r"`((?:tests|src|docs|benchmarks)/[\w./-]+)`", page.read_text(encoding="utf-8")):
        if not path.startswith(("benchmarks/results", "benchmarks/.environments")):
            assert (ROOT / path).exists(), f"{page.name} names {path}, which doesn't exist"
