"""docs/http.md names every kind of event that a statement writes, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SUBJECTS = "task|dag|breaker|signal|budget|limits|queue|agent|token|source|lock|approval"
_KIND = re.compile(rf"\b(?:{_SUBJECTS})\.[a-z_]+")
#: In a statement an array of kinds, in Python one of them.
_WRITTEN = re.compile(r"""'\{([a-z_.,]+)\}'|"([a-z]+\.[a-z_]+)\"""")
#: Made of `dag.` and the status.
_MADE = {"dag.completed", "dag.failed", "dag.cancelled", "dag.running"}


def written() -> set[str]:
    found = set(_MADE)
    sources = [ROOT / "src/lineshaft/model/breaker.py", *(ROOT / "src/lineshaft/engine").rglob("*")]
    for path in sources:
        if path.suffix in {".py", ".sql"}:
            for match in _WRITTEN.finditer(path.read_text(encoding="utf-8")):
                found.update((match[1] or match[2]).split(","))
    return {name for name in found if _KIND.fullmatch(name)}


def test_the_kinds_of_events_are_those_of_the_documentation() -> None:
    """R-244."""
    page = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    table = page[page.index("Kinds of events") : page.index("## Tokens")]

    assert written() == set(_KIND.findall(table))
    assert "`alert`" in table
