"""Agents in processes of their own, started and watched by tests."""

import asyncio
import os
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
async def module(name: str, *arguments: str) -> AsyncIterator[AgentProcess]:
    async with _started("-m", name, *arguments) as process:
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


class CommandAgent:
    """A running `lineshaft agent`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def logs(self, text: str) -> str:
        """Wait for a line that contains the text."""
        assert self._process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            while text not in (line := (await self._process.stderr.readline()).decode()):
                assert line, f"It ended before it logged {text!r}"
        return line

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ends(self) -> tuple[int, list[str]]:
        """Its exit code, and the lines that were not read before."""
        _, errors = await asyncio.wait_for(self._process.communicate(), PATIENCE)
        assert self._process.returncode is not None
        return self._process.returncode, errors.decode().splitlines()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


@asynccontextmanager
async def command_agent(
    where: str, directory: Path, script: str, *options: str, token: str = ""
) -> AsyncIterator[CommandAgent]:
    """The agent `a`, which runs a shell script for tasks of type `t`."""
    path = directory / "script"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    name = "LINESHAFT_URL" if where.startswith("http") else "LINESHAFT_DATABASE_URL"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lineshaft.cli.main", "agent", "--id", "a", "--type", "t"),
        *("--exec", str(path), *options),
        env=os.environ | {name: where} | ({"LINESHAFT_TOKEN": token} if token else {}),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    agent = CommandAgent(process)
    try:
        yield agent
    finally:
        await agent.kill()
