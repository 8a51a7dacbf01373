"""The examples of the documentation under mypy strict and pyright."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from tests.docs.pages import ROOT, all_pages, blocks

pytestmark = pytest.mark.slow("a type checker reads the whole package")
#: Django has no annotations.
_UNTYPED = ("shop/",)


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    """A folder for each page, with its programs."""
    found = []
    for page in all_pages():
        folder = tmp_path / Path(page).stem
        for block in blocks(page):
            if block.language == "python" and block.is_file and not block.title.startswith(_UNTYPED):
                folder.mkdir(exist_ok=True)
                (folder / block.title).write_text(block.text, encoding="utf-8")
        if folder.exists():
            found.append(folder)
    assert len(found) > 5
    return found


@pytest.mark.timeout(900)
def test_mypy_strict_accepts_every_example(pages: list[Path], tmp_path: Path) -> None:
    complaints = []
    for page in pages:
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-pretty",
            "--config-file",
            str(ROOT / "pyproject.toml"),
        ]
        command += ["--cache-dir", str(tmp_path / "cache"), *sorted(path.name for path in page.glob("*.py"))]
        run = subprocess.run(command, cwd=page, capture_output=True, text=True, check=False)
        if run.returncode:
            complaints.append(f"{page.name}: {run.stdout}{run.stderr}")
    assert not complaints, "\n".join(complaints)


def test_pyright_accepts_every_example(pages: list[Path], tmp_path: Path) -> None:
    beside = str(Path(sys.executable).parent)
    program = which("pyright", path=beside) or which("basedpyright", path=beside) or which("pyright")
    if program is None:
        pytest.skip("NOT CHECKED: there is neither pyright nor basedpyright; install the dev extra")
    config = {
        "include": [page.name for page in pages],
        "executionEnvironments": [{"root": page.name} for page in pages],
        "typeCheckingMode": "standard",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [program, "--outputjson", "--project", str(tmp_path), "--pythonpath", sys.executable]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] > 10
    complaints = [
        f"{one['file']}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in report["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert not complaints, "\n".join(complaints)
