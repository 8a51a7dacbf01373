"""Programs on a terminal, as people see them."""

import asyncio
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from fcntl import ioctl
from pathlib import Path

from tests.agent.helpers import PATIENCE

_STYLE = re.compile(r"\x1b\[[\d;]*m")
CTRL_C = b"\x03"


class Terminal:
    """A program with a terminal of its own, on which Ctrl-C is a signal."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._output = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def text(self) -> str:
        """What it has printed so far, without colours."""
        # The last character may have arrived in part.
        shown = getincrementaldecoder("utf-8")().decode(self._output)
        return _STYLE.sub("", shown).replace("\r\n", "\n")

    async def prints(self, text: str, times: int = 1) -> None:
        """Wait until the text was printed so often."""
        async with asyncio.timeout(PATIENCE):
            while self.text.count(text) < times:
                assert await self._more(), f"It ended before it printed {text!r}: {self.text}"

    async def ends(self) -> int:
        async with asyncio.timeout(PATIENCE):
            while await self._more():
                pass
            return await asyncio.to_thread(self._process.wait)

    async def press(self, key: bytes) -> None:
        await asyncio.to_thread(os.write, self._descriptor, key)

    async def _more(self) -> bool:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._descriptor, readable.set)
        try:
            await readable.wait()
            part = os.read(self._descriptor, 1 << 16)
        except OSError:  # the last process has closed it
            return False
        finally:
            loop.remove_reader(self._descriptor)
        self._output += part
        return bool(part)


@asynccontextmanager
async def terminal(
    *arguments: str, directory: Path, columns: int = 80, environment: Mapping[str, str] = {}
) -> AsyncIterator[Terminal]:
    """Run Python with these arguments on a terminal."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "TERM": "xterm", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - its controlling terminal
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)
