"""Agents that may no longer work: superseded, or refused by the server. They end at once, with one line."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.errors import SupersededError
from lineshaft.types import NewAgent
from tests.agent.agent_process import CommandAgent, command_agent
from tests.agent.helpers import PATIENCE, engine_of, soon
from tests.processes import gone
from tests.server.conftest import Served, serving

#: It would go on for a long time, and ignores SIGTERM. The line on its standard error is in the agent's log.
STUBBORN = """
trap '' TERM
echo "running as $$" >&2
while :; do sleep 0.1; done
"""


@asynccontextmanager
async def stubborn_command(where: str, directory: Path, token: str = "") -> AsyncIterator[CommandAgent]:
    # Neither time is waited for.
    options = ("--kill-after", "1000", "--grace", "1000", "--heartbeat", "0.3", "--instance", "x")
    async with command_agent(where, directory, STUBBORN, *options, token=token) as agent:
        yield agent


async def command_pid(agent: CommandAgent) -> int:
    """Wait until its command runs."""
    return int(json.loads(await agent.logs("running as "))["event"].split()[-1])


def url_of(served: Served) -> str:
    return f"http://127.0.0.1:{served.client.port}"


@pytest.mark.slow("starts agents")
async def test_a_superseded_agent_of_commands_ends_with_one_line(
    shaft: Lineshaft, where: str, tmp_path: Path
) -> None:
    await shaft.submit(NewTask("t"))
    async with stubborn_command(where, tmp_path) as agent:
        pid = await command_pid(agent)
        await engine_of(shaft).fleet.register(NewAgent(id="a", instance="x"))
        code, lines = await agent.ends()

    assert code == 1
    (line,) = plain(lines)
    # Its claim or its heartbeat notices it first.
    assert re.match(r"lineshaft: (Instance 'x'|Incarnation 1) of agent 'a' .*registered again", line)
    await asyncio.wait_for(gone(pid), PATIENCE)


def plain(lines: Sequence[str]) -> list[str]:
    """Lines for people; the log is JSON, as standard error isn't a terminal, and has no traceback."""
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert not any("exception" in line for line in logged), logged
    return [line for line in lines if not line.startswith("{")]


PROGRAM = """
import asyncio, sys
from lineshaft import Agent

agent = Agent("a", instance="x", poll_interval_sec=0.1)

@agent.task("t")
async def work() -> None:
    print("working", flush=True)
    await asyncio.sleep(3600)

agent.main(sys.argv[1])
"""


@pytest.mark.slow("starts programs")
async def test_a_superseded_program_ends_with_one_line(shaft: Lineshaft, where: str) -> None:
    await shaft.submit(NewTask("t"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", PROGRAM, where),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"working\n"
        await engine_of(shaft).fleet.register(NewAgent(id="a", instance="x"))
        _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert process.returncode == 1
    lines = errors.decode().splitlines()
    (line,) = plain(lines)
    assert re.match(r"lineshaft: (Instance 'x'|Incarnation 1) of agent 'a' .*registered again", line)


async def test_a_superseded_agent_leaves_the_hook_for_exceptions_as_it_was(shaft: Lineshaft) -> None:
    agent = Agent("a", instance="x", heartbeat_interval_sec=0.2)
    working = asyncio.Event()

    @agent.task("t")
    async def work() -> None:
        working.set()
        await asyncio.Event().wait()

    hook = sys.excepthook
    await shaft.submit(NewTask("t"))
    run = asyncio.create_task(agent.run(shaft))
    await soon(working)
    await engine_of(shaft).fleet.register(NewAgent(id="a", instance="x"))

    with pytest.raises(SupersededError):
        await asyncio.wait_for(run, PATIENCE)
    assert sys.excepthook is hook


@pytest.mark.slow("starts an agent")
async def test_an_agent_whose_token_is_revoked_ends_with_one_line(dsn: str, tmp_path: Path) -> None:
    async with Lineshaft(dsn) as shaft, serving(dsn, auth=True) as served:
        made = await shaft.create_token("agents", "agent")
        await shaft.submit(NewTask("t"))
        async with stubborn_command(url_of(served), tmp_path, made.token) as agent:
            pid = await command_pid(agent)
            await shaft.revoke_token(made.id)
            code, lines = await agent.ends()

    assert code == 1
    (line,) = plain(lines)
    assert line.startswith("lineshaft: ")
    assert "token" in line
    await asyncio.wait_for(gone(pid), PATIENCE)


@pytest.mark.slow("starts an agent")
async def test_an_agent_without_a_token_ends_with_one_line_when_the_first_one_is_created(
    dsn: str, tmp_path: Path
) -> None:
    async with Lineshaft(dsn) as shaft, serving(dsn) as served:
        await shaft.submit(NewTask("t"))
        async with stubborn_command(url_of(served), tmp_path) as agent:
            pid = await command_pid(agent)
            await shaft.create_token("first", "read")
            code, lines = await agent.ends()

    assert code == 1
    (line,) = plain(lines)
    assert "This server needs a token" in line
    await asyncio.wait_for(gone(pid), PATIENCE)


@pytest.mark.slow("starts an agent")
async def test_an_agent_whose_registration_is_refused_ends_with_one_line(dsn: str, tmp_path: Path) -> None:
    async with Lineshaft(dsn) as shaft, serving(dsn, auth=True) as served:
        made = await shaft.create_token("reader", "read")
        async with stubborn_command(url_of(served), tmp_path, made.token) as agent:
            code, lines = await agent.ends()

    assert code == 1
    (line,) = plain(lines)
    assert line.startswith("lineshaft: ")


async def test_a_superseded_agent_waits_neither_for_threads_nor_for_stubborn_handlers(
    shaft: Lineshaft,
) -> None:
    agent = Agent("a", instance="x", heartbeat_interval_sec=0.2)
    both, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    running: list[str] = []

    def started(name: str) -> None:
        running.append(name)
        if len(running) == 2:
            both.set()

    @agent.task("thread")
    def thread() -> None:
        loop.call_soon_threadsafe(started, "thread")
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()

    @agent.task("stubborn")
    async def stubborn() -> None:
        started("stubborn")
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    await shaft.submit_many([NewTask("thread"), NewTask("stubborn")])
    run = asyncio.create_task(agent.run(shaft, handle_signals=False))
    await soon(both)
    await engine_of(shaft).fleet.register(NewAgent(id="a", instance="x"))

    # Both handlers still run when the error is raised.
    with pytest.raises(SupersededError, match="'a'"):
        await asyncio.wait_for(run, PATIENCE)
    go.set()
