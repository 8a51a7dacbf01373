"""docs/http.md lists every code, metric and route. Its examples are run by tests/docs/test_examples.py."""

import re
from pathlib import Path

from lineshaft.server.app import OPERATIONS
from lineshaft.server.framework.problems import STATUSES
from tests.server.test_openapi import METRICS

PAGE = (Path(__file__).parents[2] / "docs/http.md").read_text(encoding="utf-8")


def test_every_code_and_metric_is_described() -> None:
    described = set(re.findall(r"`([a-z_]+)`", PAGE))

    assert set(STATUSES) - {"internal"} <= described
    assert set(METRICS) <= described


def test_every_route_is_listed_with_its_scope() -> None:
    """All that read only are summed up in one line."""
    lines = re.findall(r"^\| `?(\w+)`? \| [^|]*\| ([^|]*`[^|]*) \|$", PAGE, re.MULTILINE)
    listed = {scope: set(re.findall(r"`([^`]+)`", routes)) for scope, routes in lines}
    for operation in OPERATIONS:
        scope = "none" if operation.scope is None else str(operation.scope)
        path = operation.path.replace(":path", "")
        if scope == "read" and operation.method == "GET" and path != "/metrics":
            continue
        if path.startswith("/v1/work/") and operation.method == "POST":
            path = "/v1/work/…"
        tail = re.search(r"/(?:steps/)?[^/]+$", path)
        short = f"…{tail[0]}" if tail else path
        assert {f"{operation.method} {path}", short} & listed[scope], operation.name
