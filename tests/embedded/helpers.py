"""Helpers for tests of the embedded server: homes, users in separate processes, and waiting."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from lineshaft.embedded import Binaries, locks
from lineshaft.embedded.layout import Layout
from lineshaft.embedded.processes import find_postmaster, is_running

# Power failures are not tested here; killed processes lose nothing without fsync.
FAST = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "16MB"}

SOURCES = Path(__file__).parents[2] / "src"

USER_PROGRAM = """
import json, sys
from pathlib import Path
from lineshaft.embedded import Binaries, EmbeddedServer
from lineshaft.errors import EmbeddedServerError
home, options, binaries = (json.loads(word) for word in sys.argv[1:])
if binaries:
    binaries["directory"] = Path(binaries["directory"])
    binaries = Binaries(**binaries)
try:
    server = EmbeddedServer.start(Path(home), binaries=binaries, options=options)
except EmbeddedServerError as error:
    print(json.dumps({"error": str(error)}), flush=True)
else:
    print(json.dumps({"dsn": server.dsn, "version": server.binaries.version}), flush=True)
    sys.stdin.read()
"""


def wait_until(condition: Callable[[], bool], what: str, within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"waited {within} s in vain: {what}"
        time.sleep(0.01)


def wait_for_end(*pids: int, within: float = 60.0) -> None:
    wait_until(lambda: not any(map(is_running, pids)), f"the end of the processes {pids}", within)


def postmaster_pid(home: Path) -> int:
    found = find_postmaster(Layout(home))
    assert found is not None, f"no server runs in {home}"
    return found.pid


def watcher_pid(home: Path) -> int:
    lock = Layout(home).watcher_lock
    assert locks.is_held(lock), f"no watcher is at work in {home}"
    wait_until(lambda: lock.read_text().strip().isdigit(), "the watcher's process id")
    return int(lock.read_text())


def is_idle(home: Path) -> bool:
    layout = Layout(home)
    return find_postmaster(layout) is None and not locks.is_held(layout.watcher_lock)


def wait_until_idle(home: Path, within: float = 60.0) -> None:
    wait_until(lambda: is_idle(home), f"the end of the server and the watcher of {home}", within)


def stop_server(home: Path) -> None:
    """Stop the server, however the test ended."""
    layout = Layout(home)
    if locks.is_held(layout.watcher_lock):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(layout.watcher_lock.read_text()), signal.SIGTERM)
        wait_until(lambda: not locks.is_held(layout.watcher_lock), "the end of the watcher")
    found = find_postmaster(layout)
    if found is not None:
        os.kill(found.pid, signal.SIGQUIT)
        wait_for_end(found.pid)


def query(dsn: str, statement: str) -> Any:
    with psycopg.connect(dsn) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


@dataclass(frozen=True, slots=True)
class Answer:
    dsn: str = ""
    version: str = ""
    error: str = ""


class User:
    """A process that starts or joins the server of a home and uses it until it is ended."""

    def __init__(
        self,
        home: Path,
        *,
        binaries: Binaries | None = None,
        options: Mapping[str, str] = FAST,
        python: str = sys.executable,
        uid: int | None = None,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        chosen = None
        if binaries:
            chosen = {
                "directory": str(binaries.directory),
                "version": binaries.version,
                "major": binaries.major,
                "source": binaries.source,
            }
        words = [json.dumps(word) for word in (str(home), dict(options), chosen)]
        self.process = subprocess.Popen(
            [*wrapper, python, "-c", USER_PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(SOURCES), **(environment or {})},
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )

    def answer(self) -> Answer:
        assert self.process.stdout is not None
        return Answer(**json.loads(self.process.stdout.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
