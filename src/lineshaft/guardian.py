"""A process that kills the programs of a parent that was killed. This file also runs as a script.

An agent or a validator that gets SIGKILL can't stop the programs it has started, while another process takes
over its work. The guardian reads process groups from a pipe: started (`+PID`) and ended (`-PID`). When the
parent ends, the kernel closes the pipe, and the guardian kills the groups that are left.

A program must not start working before its guardian knows about it: a parent killed in between would leave it
running.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guardian:
    """The parent's side: starts the guardian process and reports process groups to it."""

    def __init__(self) -> None:
        # In its own session, so that signals to the parent's group (Ctrl-C) don't reach it.
        self._process = subprocess.Popen(  # noqa: S603 - runs this file
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, start_new_session=True
        )

    def guard(self, group: int) -> None:
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Call this before the group's number can be reused by another process."""
        self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed; work continues without it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
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
