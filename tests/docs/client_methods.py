"""The table of methods on the page client.md of the documentation site, which mkdocs_hooks.py makes.

It is made from the source of the client, where a comment such as `# Tasks.` begins an area.
"""

import inspect
import re

from lineshaft import Artifacts, Lineshaft, Sources
from lineshaft.client.administration import Administration

#: Where the page has the table.
MARK = "<!-- The site has a table of all methods here. -->"
#: The classes, with their first area and what a program writes before their methods.
_CLASSES = (
    (Lineshaft, "The client itself", ""),
    (Administration, "", ""),
    (Artifacts, "Artifacts", "artifacts."),
    (Sources, "Sources", "sources."),
)
#: Pages about an area.
_PAGES = {
    "Approvals and reports": "gates.md#approvals",
    "Artifacts": "artifacts.md",
    "Dead letters": "dead-letters.md",
    "Guards": "guard-rails.md",
    "Sources": "sources.md",
}
_AREA = re.compile(r"    # ([A-Z].*)\.")
_METHOD = re.compile(r"    (?:async )?def ([a-z]\w*)\(")


def areas() -> dict[str, list[str]]:
    """The names of the methods of each area, in the order of the source."""
    methods: dict[str, str] = {}
    for owner, area, prefix in _CLASSES:
        for line in inspect.getsource(owner).splitlines():
            if heading := _AREA.fullmatch(line):
                area = heading[1]  # noqa: PLW2901 - the next area of this class
            elif (method := _METHOD.match(line)) and callable(getattr(owner, method[1])):
                methods[f"{prefix}{method[1]}"] = area
    return {area: [name for name in methods if methods[name] == area] for area in methods.values()}


def table() -> str:
    rows = ["| about | methods |", "|---|---|"]
    for area, methods in areas().items():
        about = f"[{area}]({_PAGES[area]})" if area in _PAGES else area
        rows.append(f"| {about} | {', '.join(f'`{name}`' for name in methods)} |")
    return "\n".join(rows)
