"""How a run ends: which tests failed, and which are unstable.

A test that failed runs once more, alone, after all others. If it fails again, the run fails. If it passes, it
is unstable: the last lines name it, with both outcomes, and it counts as passed. More than two unstable tests
fail the run.

Some failures are final: a race or an injected fault that breaks something once has found a fault, and so has
a failed invariant. A run that ended early is final too: it says nothing about the tests that didn't run.
"""

import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.invariants import BrokenInvariantsError

MAX_UNSTABLE = 2
#: More failures than this have a common cause, and no result of running them again would let the run pass.
MAX_REPEATED = 10
FINAL_FOLDERS = ("tests/races/", "tests/chaos/")

_ENDED_WELL = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR}


@dataclass(frozen=True)
class _Unstable:
    failure: pytest.TestReport
    #: The last line of the second run.
    second: str


class RunOutcome:
    #: A second run leaves this plug-in out.
    NAME = "run-outcome"

    def __init__(self) -> None:
        #: The first failure of each test, in the order in which they failed.
        self._failures: dict[str, pytest.TestReport | pytest.CollectReport] = {}
        self._unstable: list[_Unstable] = []
        self._running: dict[str, None] = {}
        self._exit_code: int = pytest.ExitCode.OK

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, report)

    @pytest.hookimpl(trylast=True)  # The processes of a parallel run have ended.
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.TESTS_FAILED and not (session.shouldfail or session.shouldstop):
            self._repeat_failures(session.config)
            if len(self._unstable) <= MAX_UNSTABLE:
                for unstable in self._unstable:
                    self._count_as_passed(session.config, unstable.failure)
                session.testsfailed = len(self._failures)
                if not self._failures:
                    session.exitstatus = pytest.ExitCode.OK
        self._exit_code = session.exitstatus

    def _repeat_failures(self, config: pytest.Config) -> None:
        reports = self._failures.values()
        repeatable = [
            report for report in reports if isinstance(report, pytest.TestReport) and _may_repeat(report)
        ]
        if len(repeatable) > MAX_REPEATED:
            return
        for report in repeatable:
            _terminal(config).write_line(f"\nRunning again, alone: {report.nodeid}", yellow=True)
            if (second := _passes_alone(config, report.nodeid)) is not None:
                self._unstable.append(_Unstable(report, second))

    def _count_as_passed(self, config: pytest.Config, failure: pytest.TestReport) -> None:
        statistics: dict[str, list[Any]] = _terminal(config).stats
        for category in ("failed", "error"):
            reports = statistics.pop(category, [])
            if others := [report for report in reports if report.nodeid != failure.nodeid]:
                statistics[category] = others
        passed = statistics.setdefault("passed", [])
        if all(report.nodeid != failure.nodeid for report in passed):  # Only its end may have failed.
            passed.append(
                pytest.TestReport(failure.nodeid, failure.location, {}, "passed", longrepr=None, when="call")
            )
        del self._failures[failure.nodeid]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, config: pytest.Config) -> Generator[None]:
        yield
        # Only the closing line of pytest follows.
        terminal = _terminal(config)
        for unstable in self._unstable:
            terminal.section(f"first run of {unstable.failure.nodeid}", yellow=True)
            terminal.write_line(unstable.failure.longreprtext)
        count = f"{len(self._unstable)} unstable"
        if len(self._unstable) > MAX_UNSTABLE:
            count += f": more than {MAX_UNSTABLE} fail the run"
        terminal.section(count, yellow=bool(self._unstable), green=not self._unstable)
        for unstable in self._unstable:
            terminal.write_line(unstable.failure.nodeid)
            terminal.write_line(f"  first run: {_short(unstable.failure)}")
            terminal.write_line(f"  run again, alone: {unstable.second}")

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Name what failed. pytest does too, but not when a run ends early, e.g. because a worker died."""
        if config.pluginmanager.get_plugin("terminalreporter") is None or self._exit_code in _ENDED_WELL:
            return
        interrupted = [name for name in self._running if name not in self._failures]
        for title, names in (("Failed", self._failures), ("Running when the run ended", interrupted)):
            if names:
                _terminal(config).write_line(f"{title}:", red=True, bold=True)
                for name in names:
                    _terminal(config).write_line(f"  {name}")


def _terminal(config: pytest.Config) -> Any:
    return config.pluginmanager.get_plugin("terminalreporter")


def _may_repeat(failure: pytest.TestReport) -> bool:
    # The report of another process has only the text of an exception.
    is_invariant = BrokenInvariantsError.__name__ in failure.longreprtext
    return not is_invariant and not failure.nodeid.startswith(FINAL_FOLDERS)


def _short(failure: pytest.TestReport) -> str:
    crash = getattr(failure.longrepr, "reprcrash", None)
    text = str(failure.longrepr) if crash is None else str(crash.message)
    return text.strip().partition("\n")[0]


def _passes_alone(config: pytest.Config, nodeid: str) -> str | None:
    """Run the test in a process of its own, with the options of this run; None if it fails again."""
    paths = set(config.option.file_or_dir)
    options = [str(option) for option in config.invocation_params.args if str(option) not in paths]
    with tempfile.TemporaryDirectory() as folder:
        # What the first run has written stays, and the closing line of the second one is readable.
        alone = ["-n", "0", "--color", "no", "--verbosity", "0", "-p", f"no:{RunOutcome.NAME}"]
        alone += ["-o", f"cache_dir={folder}", "--junit-xml", f"{folder}/report.xml"]
        process = subprocess.run(
            # A path would change the names of parameters with slashes.
            [sys.executable, "-m", "pytest", *options, *alone, f"{config.rootpath}/{nodeid}"],
            cwd=config.invocation_params.dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    closing = process.stdout.strip().rpartition("\n")[2].strip("= ")
    return closing if process.returncode == pytest.ExitCode.OK and closing.startswith("1 passed") else None
