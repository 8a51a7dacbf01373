"""Examples in the documentation: each page runs from top to bottom, on its own database.

Python blocks share their names. A shell block that begins with #! is saved under the name in its second line;
any other shell block is run.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(found[1], text.count("\n", 0, found.start(2)), found[2]) for found in _BLOCK.finditer(text)]


async def run_python(block: Block, page: str, names: dict[str, Any]) -> None:
    # With the line numbers of the page, so that a failure shows where it is.
    code = compile("\n" * block.line + block.text, str(ROOT / page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)  # noqa: S307 - our own documentation
    if inspect.isawaitable(result):
        await result


def run_shell(block: Block, directory: Path) -> None:
    if block.text.startswith("#!"):
        script = directory / block.text.splitlines()[1].removeprefix("# ")
        script.write_text(block.text)
        script.chmod(0o700)
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["/bin/sh", "-euc", block.text], cwd=directory, env=os.environ | {"PATH": path}, check=True
    )


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("docs/quick-start.md", marks=pytest.mark.slow("initdb, and a server")),
        "docs/agents.md",
        "docs/durable-steps.md",
        "docs/artifacts.md",
        pytest.param("docs/deploying-agents.md", marks=pytest.mark.slow("three processes")),
    ],
)
async def test_a_page_from_top_to_bottom(
    page: str, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    monkeypatch.setenv("LINESHAFT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    found = blocks(page)
    assert len(found) >= 2
    for block in found:
        if block.language == "python":
            await run_python(block, page, names)
        else:
            run_shell(block, tmp_path)


async def test_readme_examples(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the Python blocks. The shell blocks set up the project, which the tests already run in."""
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    monkeypatch.chdir(tmp_path)
    python = [block for block in blocks("README.md") if block.language == "python"]
    assert python
    names: dict[str, Any] = {"__name__": "page"}
    for block in python:
        await run_python(block, "README.md", names)
