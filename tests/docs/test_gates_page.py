"""The page about gates: its list of commands loads, every method is described."""

import re
from pathlib import Path

from lineshaft.checks.command import CheckCommand, read_commands
from lineshaft.checks.registry import Checks
from tests.docs.pages import ROOT

PAGE = "docs/gates.md"


def test_the_example_of_commands_loads(tmp_path: Path) -> None:
    (document,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "commands.yaml"
    path.write_text(document)

    command = CheckCommand(("make", "test"), 600.0, Path("/srv/checkouts"), ("VIRTUAL_ENV",))
    assert read_commands(path) == {"unit-tests": command}


def test_every_method_is_described() -> None:
    described = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / PAGE).read_text(), re.MULTILINE)

    assert set(Checks().names) <= set(described)
