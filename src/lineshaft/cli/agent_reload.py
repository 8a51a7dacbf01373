"""`lineshaft agent --reload`: runs agents in a process that is started again when a .py file changes."""

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from watchfiles import PythonFilter, watch

from lineshaft.logs import shown

_log = logging.getLogger("lineshaft.agent")

#: Running tasks may finish within this time; then they are released, without using an attempt.
_FINISH_WITHIN_SEC = 3.0


class _Changed(NamedTuple):
    files: str


class _Exited(NamedTuple):
    process: "subprocess.Popen[bytes]"


_Event = _Changed | _Exited | signal.Signals


def run_reloading(arguments: Sequence[str]) -> int:
    """Run `lineshaft agent` with these arguments until it is stopped; returns its exit code."""
    with shown():
        return _Reloader([sys.executable, "-m", "lineshaft", "agent", *arguments]).run()


class _Watching:
    """Stands for the event that ends `watch`, which asks for it again and again once it sees changes."""

    def __init__(self) -> None:
        self.began = threading.Event()

    def is_set(self) -> bool:
        self.began.set()
        return False


class _Reloader:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = False

    def run(self) -> int:
        watching = _Watching()
        threading.Thread(target=self._watch, args=(watching,), daemon=True).start()
        # A change that the first process doesn't read must be noticed.
        watching.began.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: self._events.put(signal.Signals(received)))
        self._start()
        while True:
            match self._events.get():
                case _Changed(files):
                    _log.info("%s changed: restarting", files)
                    self._stop()
                    self._start()
                case _Exited(process) if process is self._process:
                    self._process = None
                    if self._ends or process.returncode == 0:
                        return process.returncode
                    _log.info("waiting for a change of a .py file")
                case signal.SIGTERM | signal.SIGINT as number:
                    self._ends = True
                    if self._process is None:
                        return 0
                    if number is signal.SIGTERM:
                        # A Ctrl-C reaches all processes of the terminal, and so the agents too.
                        self._process.terminate()

    def _watch(self, watching: "_Watching") -> None:
        here, python = Path.cwd(), PythonFilter()
        try:
            for changes in watch(
                here, watch_filter=python, stop_event=watching, ignore_permission_denied=True
            ):
                names = sorted({str(Path(path).relative_to(here)) for _, path in changes})
                self._events.put(_Changed(names[0] + (f" and {len(names) - 1} more" if names[1:] else "")))
        finally:
            watching.began.set()

    def _start(self) -> None:
        if self._ends:
            return
        process = self._process = subprocess.Popen(self._command)  # noqa: S603 - this program again
        threading.Thread(target=self._wait_for, args=(process,), daemon=True).start()

    def _wait_for(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        self._events.put(_Exited(process))

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_FINISH_WITHIN_SEC)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
