"""A server in a process of its own under attack: it stays alive, and its memory stays small."""

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, address
from tests.server.client import Client

MAX_GROWTH_BYTES = 200 << 20
MAX_DELAY_SEC = 1.0
#: Ends a server that fails, before it takes the memory of the machine.
_ADDRESS_SPACE = 3 << 30


@dataclass
class Target:
    process: "subprocess.Popen[str]"
    port: int
    #: The server's standard error.
    log: Path
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(self.port)

    @property
    def memory(self) -> int:
        return self._status("VmRSS")

    @property
    def peak_memory(self) -> int:
        return self._status("VmHWM")

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def _count_peak_from_here(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        found = next((line for line in lines if line.startswith(f"{name}:")), None)
        assert found is not None, "the server has ended"
        return int(found.split()[1]) << 10

    @asynccontextmanager
    async def unharmed(self) -> AsyncIterator["_HealthWatch"]:
        """Within this, /healthz answers within a second, and memory grows by less than 200 MB."""
        self._count_peak_from_here()
        before = self.memory
        watch = _HealthWatch(self)
        watch.start()
        try:
            yield watch
        finally:
            await asyncio.to_thread(watch.stop)
        assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-2000:]}"
        assert watch.worst_sec < MAX_DELAY_SEC, f"/healthz took {watch.worst_sec:.1f} s"
        growth = self.peak_memory - before
        assert growth < MAX_GROWTH_BYTES, f"memory grew by {growth >> 20} MB"

    def health(self) -> float:
        """Seconds until /healthz answered, without those in which one of both waited for a processor."""
        began, queued = time.monotonic(), self._queued_sec()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
        except (OSError, HTTPException):
            return 30.0
        finally:
            connection.close()
        waited = sum(max(0.0, sec - queued.get(thread, 0.0)) for thread, sec in self._queued_sec().items())
        return time.monotonic() - began - waited

    def _queued_sec(self) -> dict[str, float]:
        """How long each thread of the server and of this process was ready to run, but other processes ran.

        All threads: one that waits for a processor may have the interpreter's lock, for which others wait.
        """
        found: dict[str, float] = {}
        for process in (self.process.pid, os.getpid()):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with contextlib.suppress(OSError):  # it has ended
                    found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        return found


class _HealthWatch:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.worst_sec = 0.0
        self.start = self._thread.start

    def _watch(self) -> None:
        while True:
            self.worst_sec = max(self.worst_sec, self._target.health())
            if self._ending.wait(0.05):
                return

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()


Serving = Callable[..., AbstractContextManager[Target]]


@pytest.fixture
def serving(dsn: str, tmp_path: Path) -> Serving:
    """Starts servers on the test's database."""

    @contextmanager
    def start(*arguments: str, descriptors: int | None = None, **variables: str) -> Iterator[Target]:
        with running_server(dsn, tmp_path, arguments, descriptors, variables) as target:
            yield target

    return start


@pytest.fixture
def target(serving: Serving) -> Iterator[Target]:
    with serving() as found:
        yield found


@contextmanager
def running_server(
    dsn: str | None,
    folder: Path,
    arguments: tuple[str, ...],
    descriptors: int | None,
    variables: dict[str, str],
) -> Iterator[Target]:
    """Without a DSN, it starts an embedded database in the folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    log = folder / "server.log"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "lineshaft.cli.main", "up", "--json", "--port", "0", *arguments],
            cwd=folder,
            env=environment
            | {"LINESHAFT_DATABASE_URL": dsn or "", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
            | variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=limit,  # noqa: PLW1509 - no thread is running yet that could hold a lock it needs
        ) as process,
    ):
        try:
            yield Target(process, int(address(process).rpartition(":")[2]), log)
        finally:
            process.kill()
