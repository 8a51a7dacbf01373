"""Small suites of their own, run by pytest in a process of its own, with the plug-in of this suite."""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("starts pytest several times")

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.run_outcome import RunOutcome

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunOutcome(), RunOutcome.NAME)
"""
#: Passes from its second run on.
FAILS_ONCE = """
from pathlib import Path

def test_{name}():
    mark = Path(__file__).with_suffix(".{name}")
    if not mark.exists():
        mark.touch()
        {failure}
"""
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): raise ValueError('always')\n"


def fails_once(name: str = "fails_once", failure: str = "raise ValueError('the first time')") -> str:
    return FAILS_ONCE.format(name=name, failure=failure)


@dataclass(frozen=True)
class Ended:
    code: int
    lines: list[str]

    @property
    def closing(self) -> str:
        """The line of pytest with the numbers of tests, without the time."""
        (line,) = (line for line in self.lines if re.search(r"^(=|\d).* in [0-9.]+s", line))
        return line.strip("= ").partition(" in ")[0]

    @property
    def unstable(self) -> list[str]:
        """What stands in the section of unstable tests."""
        start = next(n for n, line in enumerate(self.lines) if re.search(r"= \d+ unstable", line))
        section = itertools.takewhile(lambda line: re.match(r"[^=!\d]", line), self.lines[start + 1 :])
        return [self.lines[start].strip("= "), *section]


class Suite:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("conftest.py", CONFTEST)
        self.write("pytest.ini", "[pytest]\n")

    def write(self, name: str, *parts: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(parts))

    def run(self, *options: str) -> Ended:
        process = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "xdist.plugin", *options],
            cwd=self.folder,
            # Other plug-ins take longer to load than these tests to run.
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return Ended(process.returncode, process.stdout.splitlines())


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


PARALLEL = pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one process"),
        pytest.param(("-n", "2", "--dist", "worksteal"), id="parallel"),
    ],
)


def test_a_run_without_failures_says_so(suite: Suite) -> None:
    suite.write("tests/test_a.py", PASSES)

    ended = suite.run()

    assert (ended.code, ended.closing, ended.unstable) == (0, "1 passed", ["0 unstable"])


@PARALLEL
def test_a_test_that_passes_alone_is_unstable(suite: Suite, options: tuple[str, ...]) -> None:
    suite.write("tests/test_a.py", PASSES, fails_once())

    ended = suite.run(*options, "tests")

    assert (ended.code, ended.closing) == (0, "2 passed")
    count, name, first, second = ended.unstable
    assert (count, name) == ("1 unstable", "tests/test_a.py::test_fails_once")
    assert first == "  first run: ValueError: the first time"
    assert second.startswith("  run again, alone: 1 passed in ")
    assert "Failed:" not in ended.lines
    # Only the closing line follows.
    assert ended.lines[-2] == second


@PARALLEL
def test_a_test_that_fails_twice_fails_the_run(suite: Suite, options: tuple[str, ...]) -> None:
    suite.write("tests/test_a.py", PASSES, fails_once(), FAILS)

    ended = suite.run(*options)

    assert (ended.code, ended.closing) == (1, "1 failed, 2 passed")
    assert ended.unstable[:2] == ["1 unstable", "tests/test_a.py::test_fails_once"]
    assert ended.lines[-2:] == ["Failed:", "  tests/test_a.py::test_fails"]


@pytest.mark.parametrize("folder", ["races", "chaos"])
def test_races_and_injected_faults_are_not_run_again(suite: Suite, folder: str) -> None:
    suite.write(f"tests/{folder}/test_a.py", fails_once())

    ended = suite.run()

    assert (ended.code, ended.closing, ended.unstable) == (1, "1 failed", ["0 unstable"])


@PARALLEL
def test_a_failed_invariant_is_not_run_again(suite: Suite, options: tuple[str, ...]) -> None:
    broken = "raise ExceptionGroup('', [BrokenInvariantsError({'a rule': ['a row']})])"
    suite.write(
        "tests/test_a.py", "from tests.invariants import BrokenInvariantsError", fails_once(failure=broken)
    )

    ended = suite.run(*options)

    assert (ended.code, ended.closing, ended.unstable) == (1, "1 failed", ["0 unstable"])


def test_more_than_two_unstable_tests_fail_the_run(suite: Suite) -> None:
    suite.write("tests/test_a.py", *map(fails_once, ("a", "b", "c")))

    ended = suite.run()

    assert (ended.code, ended.closing) == (1, "3 failed")
    assert ended.unstable[0] == "3 unstable: more than 2 fail the run"
    assert [line for line in ended.unstable if line.startswith("tests/")] == [
        f"tests/test_a.py::test_{name}" for name in ("a", "b", "c")
    ]


def test_two_unstable_tests_pass(suite: Suite) -> None:
    suite.write("tests/test_a.py", *map(fails_once, ("a", "b")))

    ended = suite.run()

    assert (ended.code, ended.closing, ended.unstable[0]) == (0, "2 passed", "2 unstable")


def test_many_failures_have_one_cause_and_are_not_run_again(suite: Suite) -> None:
    suite.write("tests/test_a.py", *(fails_once(f"n{n}") for n in range(11)))

    ended = suite.run()

    assert (ended.code, ended.closing, ended.unstable) == (1, "11 failed", ["0 unstable"])


def test_a_worker_that_dies_once(suite: Suite) -> None:
    suite.write("tests/test_a.py", PASSES, fails_once(failure="import os; os._exit(3)"))

    ended = suite.run("-n", "2")

    assert (ended.code, ended.closing) == (0, "2 passed")
    assert ended.unstable[1] == "tests/test_a.py::test_fails_once"
    assert "crashed" in ended.unstable[2]


def test_a_test_that_kills_its_process_twice_fails_the_run(suite: Suite) -> None:
    suite.write("tests/test_a.py", PASSES, "import os\ndef test_dies(): os._exit(0)\n")

    ended = suite.run("-n", "2")

    assert (ended.code, ended.closing, ended.unstable) == (1, "1 failed, 1 passed", ["0 unstable"])


@PARALLEL
def test_an_error_of_collection_fails_at_once(suite: Suite, options: tuple[str, ...]) -> None:
    suite.write("tests/test_a.py", PASSES)
    suite.write("tests/test_b.py", "import a_module_that_does_not_exist\n")

    ended = suite.run(*options)

    assert ended.code in {1, 2}
    assert ended.closing.endswith("1 error")
    assert ended.unstable == ["0 unstable"]


@PARALLEL
def test_a_run_that_stops_at_the_first_failure_fails(suite: Suite, options: tuple[str, ...]) -> None:
    """The tests that didn't run may fail too."""
    suite.write("tests/test_a.py", fails_once(), PASSES)

    ended = suite.run("-x", *options)

    assert ended.code in {1, 2}
    assert ended.closing.startswith("1 failed")
    assert ended.unstable == ["0 unstable"]


@pytest.mark.parametrize("before_the_test", [True, False])
def test_a_fixture_that_fails_once(suite: Suite, before_the_test: bool) -> None:
    fixture = ["    yield", *fails_once("name").splitlines()[4:]]
    if before_the_test:
        fixture = [*fixture[1:], fixture[0]]
    suite.write(
        "tests/test_a.py",
        "import pytest\nfrom pathlib import Path\n@pytest.fixture\ndef fixture():",
        *fixture,
        "def test_fixture(fixture): pass",
    )

    ended = suite.run()

    assert (ended.code, ended.closing, ended.unstable[0]) == (0, "1 passed", "1 unstable")


def test_the_second_run_has_the_options_of_the_first(suite: Suite) -> None:
    suite.write("tests/test_a.py", fails_once(failure="assert False"), PASSES)

    ended = suite.run("-q", "--tb", "short", "-k", "once", "tests/test_a.py")

    assert (ended.code, ended.closing, ended.unstable[0]) == (0, "1 passed, 1 deselected", "1 unstable")


def test_names_of_parameters_are_passed_on_as_they_are(suite: Suite) -> None:
    parameter = (
        "import pytest\n@pytest.fixture(params=['http://a/../b?c=[1]&d= e'])\ndef url(request): pass\n"
    )
    suite.write("tests/test_a.py", parameter, fails_once().replace("():", "(url):", 1))

    ended = suite.run()

    assert (ended.code, ended.closing, ended.unstable[0]) == (0, "1 passed", "1 unstable")


def test_the_second_run_can_be_read_however_little_the_first_prints(suite: Suite) -> None:
    suite.write("tests/test_a.py", fails_once())

    ended = suite.run("-qq")

    assert (ended.code, ended.unstable[0]) == (0, "1 unstable")


def test_the_report_of_the_first_run_is_kept(suite: Suite) -> None:
    suite.write("tests/test_a.py", PASSES, fails_once())

    ended = suite.run("--junit-xml", "report.xml")

    assert ended.code == 0
    assert 'tests="2"' in (suite.folder / "report.xml").read_text()


def test_a_test_that_fails_only_after_others_is_alone_in_its_second_run(suite: Suite) -> None:
    """Also where the options name it beside others."""
    suite.write(
        "tests/test_a.py", "seen = []\ndef test_first(): seen.append(1)\ndef test_second(): assert not seen"
    )

    ended = suite.run("tests/test_a.py::test_first", "tests/test_a.py::test_second")

    assert (ended.code, ended.closing, ended.unstable[0]) == (0, "2 passed", "1 unstable")
