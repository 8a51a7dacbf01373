"""Ends programs whose starter was killed. Run as a script, beside the starter, knowing nothing but this file.

An agent or a validator that gets SIGKILL can't stop what it has started, and somebody else is given its work.
The guardian reads from a pipe which process groups there are (`+PID`) and which have ended (`-PID`). However
the starter ends, the kernel closes the pipe; what is left then is killed.

A program must not begin before its guardian knows of it: what was killed in between would leave it running.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guardian:
    """The starter's end of it."""

    def __init__(self) -> None:
        # In a session of its own: what is meant for the starter (Ctrl-C, a stop of its group) is not for it.
        self._process = subprocess.Popen(  # noqa: S603 - this very file
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, start_new_session=True
        )

    def guard(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """To be called while the number is still taken: later it may be somebody else's."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guardian; work goes on without it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.communicate()


def _watch() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _watch()
