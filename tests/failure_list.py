"""The last lines of a failed run: the names of the tests that failed.

pytest prints them too, but not when a run ends early, e.g. because a worker process died.
"""

from typing import Any

import pytest

_ENDED_WELL = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR}


class FailureList:
    def __init__(self) -> None:
        #: In the order in which they failed. A dict is an ordered set.
        self._failed: dict[str, None] = {}
        self._running: dict[str, None] = {}
        self._exit_code: int = pytest.ExitCode.OK

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._exit_code = exitstatus

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or self._exit_code in _ENDED_WELL:
            return
        interrupted = [name for name in self._running if name not in self._failed]
        for title, names in (("Failed", self._failed), ("Running when the run ended", interrupted)):
            if names:
                terminal.write_line(f"{title}:", red=True, bold=True)
                for name in names:
                    terminal.write_line(f"  {name}")
