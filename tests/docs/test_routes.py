"""The table of calls in docs/http.md, generated from the table of operations.

`python -m tests.docs.test_routes` writes it. A change of a scope shows up there, for its reviewer.
"""

import re
from pathlib import Path

from lineshaft.server.app import OPERATIONS

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
HEAD = "| call | scope | what it does |\n|---|---|---|\n"
_TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")


def table() -> str:
    rows = []
    for operation in sorted(OPERATIONS, key=lambda found: (found.path, found.method)):
        path = operation.path.replace(":path}", "}")
        scope = "none" if operation.scope is None else f"`{operation.scope}`"
        rows.append(f"| `{operation.method} {path}` | {scope} | {operation.summary[0]} |\n")
    return HEAD + "".join(rows)


def test_every_call_is_listed_with_its_scope() -> None:
    assert _TABLE.findall(PAGE.read_text(encoding="utf-8")) == [table()]


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
