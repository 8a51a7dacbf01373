"""The page about guard rails: its examples run, its thresholds load, its list of reasons is complete."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lineshaft.cli.main import main
from lineshaft.engine.guards.rules import read_breakers
from lineshaft.model.breaker import BreakerConfig
from lineshaft.types import ReasonCode
from tests.docs.test_examples import ROOT, blocks, run_python

PAGE = "docs/guard-rails.md"


async def test_guard_rails_from_top_to_bottom(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls the commands of shell blocks in this process: each would take a second to start."""
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    names: dict[str, Any] = {"__name__": "page"}
    found = blocks(PAGE)
    languages = ["python", "sh", "python", "sh", "python", "sh", "python", "sh"]
    assert [block.language for block in found] == languages
    for block in found:
        if block.language == "python":
            await run_python(block, PAGE, names)
        else:
            for line in block.text.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                assert program == "lineshaft"
                assert await asyncio.to_thread(main, arguments) == 0, line


def test_the_example_of_thresholds_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (document,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "circuit-breakers.yaml"
    path.write_text(document)

    policy = read_breakers(path)

    assert caplog.text == ""
    assert policy.defaults == BreakerConfig()
    assert policy.config_for("ops-security").failure_threshold == 3
    assert policy.config_for("model:large").half_open_after_sec == 300


def test_every_reason_is_described() -> None:
    described = re.findall(
        r"^\| `([a-z_]+)` \| ", (ROOT / PAGE).read_text().partition("## What `why` reports")[2], re.MULTILINE
    )

    assert set(described) == {code.value for code in ReasonCode}
