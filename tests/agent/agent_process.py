"""Agents in processes of their own, started and watched by tests."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.agent.helpers import PATIENCE

ROOT = Path(__file__).parents[2]


class AgentProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def reaches(self, point: str) -> None:
        """Wait until it reports this point."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while (line := (await self._process.stdout.readline()).decode().strip()) != point:
                assert line, f"It ended before {point!r}, with code {await self._process.wait()}"

    prints = reaches

    async def write(self, line: str) -> None:
        """To its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ends(self) -> int:
        return await asyncio.wait_for(self._process.wait(), PATIENCE)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self.ends()


@asynccontextmanager
async def agent_process(where: str, log: Path, *options: str) -> AsyncIterator[AgentProcess]:
    async with _started("-m", "tests.agent.agent_program", where, str(log), *options) as process:
        yield process


@asynccontextmanager
async def program(text: str, *arguments: str) -> AsyncIterator[AgentProcess]:
    """Run the text of a Python program."""
    async with _started("-c", text, *arguments) as process:
        yield process


@asynccontextmanager
async def _started(*arguments: str) -> AsyncIterator[AgentProcess]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    process = AgentProcess(started)
    try:
        yield process
    finally:
        await process.kill()
        # The pipe is read to its end, or it would be closed by the garbage collector, who complains.
        assert started.stdout is not None
        await started.stdout.read()
