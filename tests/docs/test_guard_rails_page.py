"""The page about guard rails: its thresholds load, its list of reasons is complete."""

import re
from pathlib import Path

import pytest

from lineshaft.engine.guards.rules import read_breakers
from lineshaft.model.breaker import BreakerConfig
from lineshaft.types import ReasonCode
from tests.docs.pages import ROOT

PAGE = "docs/guard-rails.md"


def test_the_example_of_thresholds_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (document,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "circuit-breakers.yaml"
    path.write_text(document)

    policy = read_breakers(path)

    assert caplog.text == ""
    assert policy is not None
    assert policy.defaults == BreakerConfig()
    assert policy.config_for("ops-security").failure_threshold == 3
    assert policy.config_for("model:large").half_open_after_sec == 300


def test_every_reason_is_described() -> None:
    described = re.findall(
        r"^\| `([a-z_]+)` \| ", (ROOT / PAGE).read_text().partition("## What `why` reports")[2], re.MULTILINE
    )

    assert set(described) == {code.value for code in ReasonCode}
