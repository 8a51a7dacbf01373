"""The page about gates: its examples run, its list of commands loads."""

import re
from pathlib import Path
from typing import Any

import pytest

from lineshaft.checks.command import Command, read_commands
from lineshaft.checks.registry import Checks
from tests.docs.test_examples import ROOT, blocks, run_python

PAGE = "docs/gates.md"


async def test_gates_page_from_top_to_bottom(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    names: dict[str, Any] = {"__name__": "page"}
    found = blocks(PAGE)
    assert len(found) == 5
    for block in found:
        await run_python(block, PAGE, names)


def test_the_example_of_commands_loads(tmp_path: Path) -> None:
    (document,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "commands.yaml"
    path.write_text(document)

    command = Command(("make", "test"), 600.0, Path("/srv/checkouts"), ("VIRTUAL_ENV",))
    assert read_commands(path) == {"unit-tests": command}


def test_every_method_is_described() -> None:
    described = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / PAGE).read_text(), re.MULTILINE)

    assert set(Checks().names) <= set(described)
