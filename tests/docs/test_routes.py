"""The table of calls in docs/http.md, generated from the routes by `python -m tests.docs.test_routes`."""

import re
from pathlib import Path

from lineshaft.integrations.officeplane import routes as officeplane_routes
from lineshaft.server.app import RESOURCES
from lineshaft.server.framework.routing import summary_of

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
HEAD = "| call | scope | what it does |\n|---|---|---|\n"
_TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")


def table() -> str:
    operations = [operation for resource in RESOURCES for operation in resource.routes.operations]
    operations += officeplane_routes.routes.operations
    rows = []
    for operation in sorted(operations, key=lambda found: (found.path, found.method)):
        path = operation.path.replace(":path}", "}")
        scope = "none" if operation.scope is None else f"`{operation.scope}`"
        rows.append(f"| `{operation.method} {path}` | {scope} | {summary_of(operation)[0]} |\n")
    return HEAD + "".join(rows)


def test_every_call_is_listed_with_its_scope() -> None:
    assert _TABLE.findall(PAGE.read_text(encoding="utf-8")) == [table()]


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
