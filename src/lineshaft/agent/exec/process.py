"""A program with everything it starts: its process group, its pipes and its exit.

It ends when the started process exits; what that process left running in its group is killed then, and pipes
that other processes hold open are not waited for. Memory is bounded: output is passed on as it arrives.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from lineshaft.agent.threads import Threads
from lineshaft.guardian import Guardian

#: The descriptor for messages. A single digit: some shells accept no others in redirections.
AGENT_FD = 3
#: A program starts when its agent says so, after the guardian was informed. If the agent is killed before,
#: the pipe closes without a word, and the program doesn't start.
_GATE = ("/bin/sh", "-c", 'read -r go <&4 || exit; exec 4<&-; exec "$@"', "lineshaft")

#: Bytes, perhaps thousands of lines, before other tasks of the event loop get their turn.
_CHUNK = 1 << 14
#: What fits into the largest pipe, and is read after the exit: more comes from a process that still runs.
_LEFT_IN_PIPES = 1 << 20
_ANSWER_READ_WITHIN_SEC = 60.0


class Inflow:
    """What a process writes to one descriptor, until it closes it or exits."""

    def __init__(self, descriptor: int, close: Callable[[], object]) -> None:
        self._descriptor = descriptor
        self._close = close
        self._over = False
        self._wake = asyncio.Event()
        self._left = _LEFT_IN_PIPES
        os.set_blocking(descriptor, False)

    def finish(self) -> None:
        """The process has exited: return what is in the pipe, and don't wait for more."""
        self._over = True
        self._wake.set()

    def close(self) -> None:
        self._close()

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                if self._over:
                    return
                await self._readable()
                continue
            except OSError:
                return
            if not data:
                return
            if self._over:
                self._left -= len(data)
                if self._left < 0:
                    return
            yield data
            # There may always be more: let other tasks of the event loop run.
            await asyncio.sleep(0)

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            loop.remove_reader(self._descriptor)
            if not self._over:
                self._wake.clear()


class Process:
    """Created by `start`; `close` must follow, and leaves nothing running."""

    def __init__(
        self,
        pid: int,
        agent_end: socket.socket,
        outputs: tuple[int, int],
        exited: "Future[None]",
        guardian: Guardian,
    ) -> None:
        self.pid = pid
        self._socket = agent_end
        self._exited = exited
        self._guardian = guardian
        self.stdout, self.stderr = (Inflow(fd, partial(os.close, fd)) for fd in outputs)
        self.messages = Inflow(agent_end.fileno(), agent_end.close)

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        standard_input: bytes,
        threads: Threads,
        guardian: Guardian,
    ) -> "Process":
        """Start without a shell. Standard input is a file, so that writing it never blocks."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            file = theirs.enter_context(tempfile.TemporaryFile())
            file.write(standard_input)
            file.seek(0)
            (stdout, stdout_end), (stderr, stderr_end) = os.pipe(), os.pipe()
            agent_end, program_end = socket.socketpair()
            gate_end, gate = os.pipe()
            for descriptor in (stdout, stderr):
                ours.callback(os.close, descriptor)
            for descriptor in (stdout_end, stderr_end, gate_end, gate):
                theirs.callback(os.close, descriptor)
            ours.callback(agent_end.close)
            theirs.callback(program_end.close)
            moves = []
            sources = (file.fileno(), stdout_end, stderr_end, program_end.fileno(), gate_end)
            for source, target in zip(sources, (0, 1, 2, AGENT_FD, 4), strict=True):
                # To a high number first: a source must not be overwritten before it is used.
                high = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, 10)
                theirs.callback(os.close, high)
                moves.append((os.POSIX_SPAWN_DUP2, high, target))
            # `subprocess` isn't used, as it can't number descriptors without running Python in the child.
            pid = os.posix_spawn(
                _GATE[0],
                [*_GATE, *arguments],
                environment,
                file_actions=moves,
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
            guardian.guard(pid)
            os.write(gate, b"go\n")
            ours.pop_all()
        return cls(pid, agent_end, (stdout, stderr), threads.submit(partial(_wait_for, pid)), guardian)

    async def ended(self) -> None:
        """Wait until the process has exited."""
        await asyncio.shield(asyncio.wrap_future(self._exited))

    def finish(self) -> None:
        """After the exit: kill what it left running, and end its output."""
        self._signal(signal.SIGKILL)
        for flow in (self.stdout, self.stderr, self.messages):
            flow.finish()

    async def end(self, patience_sec: float) -> None:
        """Send SIGTERM to the group, and SIGKILL if it takes too long or the caller is cancelled."""
        try:
            self._signal(signal.SIGTERM)
            # A stopped process would not receive it.
            self._signal(signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_sec):
                    await self.ended()
        finally:
            self._signal(signal.SIGKILL)
        await self.ended()

    def _signal(self, number: signal.Signals) -> None:
        # PermissionError: the rest has changed its user, or (on macOS) is a zombie.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def answer(self, line: bytes) -> None:
        """Write to the program; raises TimeoutError if it doesn't read."""
        async with asyncio.timeout(_ANSWER_READ_WITHIN_SEC):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await asyncio.get_running_loop().sock_sendall(self._socket, line)

    def close(self) -> int:
        """Kill the rest and return the exit code, negative for a signal."""
        self._signal(signal.SIGKILL)
        self._guardian.forget(self.pid)
        for flow in (self.stdout, self.stderr, self.messages):
            flow.close()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def _wait_for(pid: int) -> None:
    """In a thread. The process stays a zombie until `close`, so that its number is not reused."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
