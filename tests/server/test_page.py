"""docs/http.md lists every code and metric. Its routes and examples are tested in tests/docs."""

import re
from pathlib import Path

from lineshaft.server.framework.problems import STATUSES
from tests.server.test_openapi import METRICS

PAGE = (Path(__file__).parents[2] / "docs/http.md").read_text(encoding="utf-8")


def test_every_code_and_metric_is_described() -> None:
    described = set(re.findall(r"`([a-z_]+)`", PAGE))

    assert set(STATUSES) - {"internal"} <= described
    assert set(METRICS) <= described
