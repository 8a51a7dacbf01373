"""The public API under mypy strict and pyright: right programs pass, mistakes are found where they are."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import which

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("good.py", "wrong.py")

#: Lines with errors, by file.
Errors = dict[str, dict[int, str]]

pytestmark = [
    pytest.mark.slow("a type checker reads the whole package"),
    # Minutes, on a busy machine and without a cache.
    pytest.mark.timeout(1200),
]


def mypy() -> Errors:
    command = [sys.executable, "-m", "mypy", "--no-pretty", *(str(HERE / name) for name in FILES)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found: Errors = {name: {} for name in FILES}
    for path, line, text in re.findall(r"^(.+?):(\d+): error: (.*)$", run.stdout, re.MULTILINE):
        found[Path(path).name][int(line)] = text
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    return found


def pyright() -> Errors:
    beside = str(Path(sys.executable).parent)
    program = which("pyright", path=beside) or which("basedpyright", path=beside) or which("pyright")
    if program is None:
        pytest.skip("NOT CHECKED: there is neither pyright nor basedpyright; install the dev extra")
    command = [program, "--outputjson", "--project", str(HERE), "--pythonpath", sys.executable]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] == len(FILES), report["summary"]
    found: Errors = {name: {} for name in FILES}
    for one in report["generalDiagnostics"]:
        if one["severity"] == "error":
            found[Path(one["file"]).name][one["range"]["start"]["line"] + 1] = one["message"]
    return found


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_right_programs_pass_and_mistakes_are_found(checker: Callable[[], Errors]) -> None:
    found = checker()
    expected = {
        number
        for number, line in enumerate((HERE / "wrong.py").read_text().splitlines(), 1)
        if line.endswith("# expect-error")
    }

    assert found["good.py"] == {}
    assert len(expected) > 25
    missed = sorted(expected - set(found["wrong.py"]))
    assert (missed, {line: text for line, text in found["wrong.py"].items() if line not in expected}) == (
        [],
        {},
    )
