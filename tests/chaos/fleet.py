"""The processes of a run: each with a way to the database of its own, started again whenever it has ended."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from psycopg.conninfo import make_conninfo

from tests.chaos.cluster import DATABASE, PASSWORD, ROLE
from tests.proxy import Proxy, Streams, listening

ROOT = Path(__file__).parents[2]
_STOP_SEC = 40.0
_PAUSE_SEC = 0.3
#: What a server writes when it is ready.
_READY = b'"url": "http'
#: How long a process that doesn't stop may take to write where it is.
_EXPLAIN_SEC = 2.0


class Line:
    """The way of one process to the database: a proxy for each server that it knows of."""

    def __init__(self) -> None:
        self.proxies: list[Proxy] = []
        self.ports: list[int] = []

    async def add(self, stack: AsyncExitStack, port_of: Callable[[], int]) -> None:
        async def connect() -> Streams:
            return await asyncio.open_connection("127.0.0.1", port_of())

        proxy = Proxy(connect)
        self.ports.append(await stack.enter_async_context(listening(proxy)))
        self.proxies.append(proxy)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def dsn(self) -> str:
        ports = ",".join(map(str, self.ports))
        hosts = ",".join(["127.0.0.1"] * len(self.ports))
        which = "read-write" if len(self.ports) > 1 else "any"
        return make_conninfo(
            "",
            host=hosts,
            port=ports,
            user=ROLE,
            password=PASSWORD,
            dbname=DATABASE,
            target_session_attrs=which,
            connect_timeout=3,
        )


class Member:
    """A process that is restarted after it was killed or ended."""

    def __init__(
        self,
        name: str,
        line: Line,
        command: Sequence[str],
        variables: dict[str, str],
        *,
        log: Path,
        code: Path,
    ) -> None:
        self.name = name
        self.line = line
        self._command = command
        self._environment = {
            n: v for n, v in os.environ.items() if not n.startswith(("LINESHAFT_", "PYTEST_"))
        } | {"PYTHONPATH": str(code / "src"), **variables}
        self._code = code
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        #: Set while it may run; cleared while it is to stay away.
        self._wanted = asyncio.Event()
        self._ending = asyncio.Event()
        #: The process that was killed or stopped on purpose.
        self._sent_away: asyncio.subprocess.Process | None = None
        self._paused: int | None = None
        #: How often it was started, and its exit codes when it was not killed.
        self.starts = 0
        self.own_ends: Counter[int] = Counter()
        #: How often it ended although it had been ready. One that starts while the database is away may end.
        self.ended_at_work = 0

    def start(self) -> None:
        self._wanted.set()
        self._watching = asyncio.create_task(self._watch(), name=self.name)

    async def _watch(self) -> None:
        while not self._ending.is_set():
            await self._wanted.wait()
            with self._log.open("ab") as log:
                began = log.tell()
                process = self._process = await asyncio.create_subprocess_exec(
                    *self._command, cwd=self._code, env=self._environment, stdout=log, stderr=log
                )
            if self._ending.is_set():
                # `stop` was called while it was being started.
                process.terminate()
            self.starts += 1
            code = await process.wait()
            self._process = None
            if self._sent_away is not process and code != -signal.SIGKILL and not self._ending.is_set():
                self.own_ends[code] += 1
                self.ended_at_work += _READY in self._log.read_bytes()[began:]
                await asyncio.sleep(_PAUSE_SEC)

    @property
    def runs(self) -> bool:
        return self._process is not None

    async def kill(self, away_sec: float) -> bool:
        return await self._away(signal.SIGKILL, away_sec)

    async def terminate(self, away_sec: float) -> bool:
        """Let it finish or hand back what it has; it is started again once it has ended.

        Raises TimeoutError if it had to be killed.
        """
        if self._paused is not None:
            return False
        return await self._away(signal.SIGTERM, away_sec)

    async def _away(self, number: signal.Signals, seconds: float) -> bool:
        process = self._process
        if process is None or not self._wanted.is_set():
            return False
        self._wanted.clear()
        self._sent_away = process
        process.send_signal(number)
        ending = asyncio.create_task(process.wait())
        await asyncio.wait({ending}, timeout=_STOP_SEC)
        in_time = ending.done()
        if not in_time:
            await self._explain(process)
            if process.returncode is None:
                process.kill()
            await ending
        await asyncio.sleep(seconds)
        self._wanted.set()
        if not in_time:
            raise TimeoutError(f"{self.name} was asked to stop, and had to be killed")
        return True

    async def _explain(self, process: asyncio.subprocess.Process) -> None:
        """Have it write to its log where it is; see `dump.py`. One that can't ends."""
        process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(_EXPLAIN_SEC)

    async def pause(self, seconds: float) -> bool:
        process = self._process
        if process is None or self._paused is not None:
            return False
        self._paused = process.pid
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.resume()
        return True

    def resume(self) -> None:
        pid, self._paused = self._paused, None
        # Not another one that was started in the meantime.
        if pid is not None and self._process is not None and self._process.pid == pid:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)

    async def stop(self) -> int | None:
        """Ask it to end, and wait for it; None: it had to be killed."""
        self._ending.set()
        self._wanted.set()
        self.resume()
        if self._watching is None:
            return 0
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
        done, _ = await asyncio.wait({self._watching}, timeout=_STOP_SEC)
        if done:
            return 0 if process is None else process.returncode
        if process is not None:
            await self._explain(process)
        await self.destroy()
        return None

    async def destroy(self) -> None:
        self._ending.set()
        self._wanted.set()
        while self._watching is not None and not self._watching.done():
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            await asyncio.wait({self._watching}, timeout=0.2)


def copy_code(directory: Path) -> Path:
    """A copy of the code for the processes, so that edits don't change a run that is under way."""
    code = directory / "code"
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
    return code


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
