"""Where measurements take place: the servers, and the processes of one measurement. Nothing outlives them."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks import common
from benchmarks.peers import usage
from benchmarks.peers.drivers.harness import BOARD_SIZE, Board
from benchmarks.peers.environments import ROOT
from benchmarks.peers.subjects import Subject
from lineshaft.embedded import EmbeddedServer
from lineshaft.guardian import Guardian

_DATABASE = "bench_peers"
_SERVER_START_SEC = 20.0
_SETUP_SEC = 60.0
_LOG_TAIL = 3000


class MeasurementError(Exception):
    """A measurement came to nothing; the others go on."""


@dataclass(slots=True)
class Stage:
    """What one run has: servers, a guardian for all that is started, and a folder that goes with it."""

    folder: Path
    postgres: EmbeddedServer
    #: Its socket; None: not installed.
    redis: Path | None
    guardian: Guardian
    server_pids: list[int]

    def fresh_database(self) -> str:
        with psycopg.connect(self.postgres.dsn, autocommit=True) as admin:
            # Not WITH (FORCE): only a superuser may end an autovacuum that way. A plain DROP ends it.
            admin.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE datname = %s AND usename = current_user",
                [_DATABASE],
            )
            admin.execute(f"DROP DATABASE IF EXISTS {_DATABASE}".encode())
            admin.execute(f"CREATE DATABASE {_DATABASE}".encode())
            # What others left to be written must not be written while this one is measured.
            admin.execute("CHECKPOINT")
        return make_conninfo(self.postgres.dsn, dbname=_DATABASE)

    def checkpoint(self) -> None:
        with psycopg.connect(self.postgres.dsn, autocommit=True) as admin:
            admin.execute("CHECKPOINT")

    def empty_redis(self) -> None:
        if self.redis is not None:
            client = shutil.which("redis-cli") or "redis-cli"
            subprocess.run(  # noqa: S603 - by its full path
                [client, "-s", str(self.redis), "flushall"], check=True, capture_output=True, timeout=60
            )


@contextmanager
def set_up() -> Iterator[Stage]:
    """Start the servers; they stop with it, and with this process if it is killed."""
    with ExitStack() as stack:
        guardian = Guardian()
        stack.callback(guardian.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lineshaft-peers-")))
        postgres = stack.enter_context(common.server())
        redis, redis_pid = stack.enter_context(_redis(folder, guardian))
        with psycopg.connect(postgres.dsn) as connection:
            postmaster = _parent(connection.info.backend_pid)
        pids = [pid for pid in (postmaster, redis_pid) if pid is not None]
        yield Stage(folder, postgres, redis, guardian, pids)


@contextmanager
def _redis(folder: Path, guardian: Guardian) -> Iterator[tuple[Path | None, int | None]]:
    program = shutil.which("redis-server")
    if program is None:
        yield None, None
        return
    socket = folder / "redis.sock"
    # As durable as Redis is commonly run: what it accepted in the last second may be lost.
    # (The socket by its name in that folder: a path may be too long for one.)
    options = ["--port", "0", "--unixsocket", socket.name, "--dir", folder, "--save", ""]
    durable = ["--appendonly", "yes", "--appendfsync", "everysec"]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - by its full path
            [program, *map(str, options), *durable], stdout=log, stderr=log, start_new_session=True
        )
    guardian.guard(process.pid)
    try:
        until = time.monotonic() + _SERVER_START_SEC
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"redis-server doesn't start:\n{_tail(folder / 'redis.log')}")
            time.sleep(0.02)
        yield socket, process.pid
    finally:
        _kill(process, guardian)


@dataclass(slots=True)
class Session:
    """One measurement of one queue: an empty database, a producer that takes orders, and workers."""

    stage: Stage
    subject: Subject
    python: Path
    board: Board = field(init=False)
    dsn: str = field(init=False)
    _producer: "subprocess.Popen[bytes]" = field(init=False)
    _workers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    _log: IO[bytes] = field(init=False)

    def __enter__(self) -> Self:
        board = self.stage.folder / "board"
        board.write_bytes(bytes(BOARD_SIZE))
        self.board = Board(board)
        self._log = (self.stage.folder / "log").open("wb")
        self.dsn = self.stage.fresh_database()
        if self.subject.store == "redis":
            self.stage.empty_redis()
        self._producer = self._start("serve")
        try:
            self.order("setup", within_sec=_SETUP_SEC)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_workers()
        _kill(self._producer, self.stage.guardian)
        self._log.close()

    def order(self, name: str, *arguments: object, within_sec: float) -> tuple[float, Any]:
        """Have the producer do something; how many seconds it took, and its answer."""
        process = self._producer
        assert process.stdin is not None  # noqa: S101 - for mypy
        assert process.stdout is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], within_sec)
        line = process.stdout.readline() if ready else b""
        if not line:
            why = f"has not answered within {within_sec:g} s" if not ready else "ended"
            raise MeasurementError(
                f"The driver of {self.subject.name} was asked to '{name}' and {why}:\n{self.log_tail()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise MeasurementError(f"The driver of {self.subject.name} can't '{name}':\n{answer['error']}")
        return answer["seconds"], answer["answer"]

    def left(self) -> int:
        return int(self.order("left", within_sec=60)[1])

    def start_workers(self, count: int, *, for_graphs: bool = False) -> None:
        for number in range(count):
            self._workers.append(self._start("work-on-graph" if for_graphs else "work", number))

    def stop_workers(self) -> None:
        while self._workers:
            _kill(self._workers.pop(), self.stage.guardian)

    def check_workers(self) -> None:
        for worker in self._workers:
            if worker.poll() is not None:
                raise MeasurementError(f"A worker of {self.subject.name} ended:\n{self.log_tail()}")

    def memory_mb(self) -> float:
        return usage.memory_mb(worker.pid for worker in self._workers)

    def cpu_sec(self) -> tuple[float, float] | None:
        """CPU time of the workers and of the servers so far; None: not known on this system."""
        workers = usage.cpu_sec(groups=[worker.pid for worker in self._workers])
        servers = usage.cpu_sec(parents=self.stage.server_pids)
        return None if workers is None or servers is None else (workers, servers)

    def log_tail(self) -> str:
        self._log.flush()
        return _tail(self.stage.folder / "log")

    def _start(self, what: str, number: int = 0) -> "subprocess.Popen[bytes]":
        # PYTHONPATH: a program of a virtual environment finds the drivers, and nothing else, here.
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")},
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "BENCH_BOARD": str(self.stage.folder / "board"),
            "BENCH_DSN": _url(self.dsn),
            "BENCH_REDIS": f"unix://{self.stage.redis}",
            "BENCH_WORKER": str(number),
        }
        process = subprocess.Popen(  # noqa: S603 - our own driver
            [str(self.python), "-m", f"benchmarks.peers.drivers.{self.subject.name}", what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if what == "serve" else self._log,
            stderr=self._log,
            env=environment,
            # An empty folder: no queue may find a file that configures it.
            cwd=self.stage.folder,
            start_new_session=True,
        )
        self.stage.guardian.guard(process.pid)
        return process


def _kill(process: "subprocess.Popen[bytes]", guardian: Guardian) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    guardian.forget(process.pid)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _parent(pid: int) -> int:
    listed = subprocess.run(  # noqa: S603 - a number
        ["ps", "-o", "ppid=", "-p", str(pid)],  # noqa: S607 - wherever the system has it
        check=True,
        capture_output=True,
        text=True,
    )
    return int(listed.stdout)


def _tail(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]


def _url(dsn: str) -> str:
    """The same as a URL, which all libraries understand."""
    words = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    user, name = quote(words.pop("user")), quote(words.pop("dbname"))
    return f"postgresql://{user}@/{name}?{urlencode(words)}"


def this_python() -> Path:
    return Path(sys.executable)
