"""`lineshaft agent`, run as people run it: a process of its own, from the command line to the database."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lineshaft import Lineshaft, NewTask
from lineshaft.errors import NotFoundError
from lineshaft.saved_token import save_token
from lineshaft.types import AgentInfo
from tests.agent.helpers import PATIENCE, engine_of
from tests.client.helpers import engine_beside


@pytest.fixture
async def shaft(dsn: str) -> AsyncIterator[Lineshaft]:
    async with Lineshaft(dsn) as opened, engine_beside(opened, dsn):
        yield opened


async def start(dsn: str, directory: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lineshaft.cli.main", "agent", *arguments),
        cwd=directory,
        env=os.environ | {"LINESHAFT_DATABASE_URL": dsn},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(dsn: str, directory: Path, *arguments: str) -> tuple[int | None, str]:
    """Its exit code, and what it wrote to its standard error."""
    process = await start(dsn, directory, *arguments)
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode, errors.decode()


def script(directory: Path, text: str) -> None:
    path = directory / "work.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)


@pytest.mark.slow("starts an agent")
async def test_an_ordinary_script_works_until_all_is_done(shaft: Lineshaft, dsn: str, tmp_path: Path) -> None:
    script(tmp_path, 'echo "looking at $LINESHAFT_TASK_SPEC_FILE" >&2; echo "{\\"size\\": $(wc -c)}"')
    first, second = await shaft.submit_many(
        [NewTask("review", spec={"file": "a.py"}), NewTask("other", required_capabilities=["python"])]
    )
    code, errors = await run(
        *(dsn, tmp_path, "--exec", "./work.sh", "--type", "review", "--type", "other", "--id", "reviewer"),
        *("--capabilities", "python, web", "--models", "m1", "--slots", "2", "--budget", "4.50"),
        *("--heartbeat", "7", "--until-idle"),
    )

    assert code == 0, errors
    assert "looking at a.py" in errors
    for task in (first, second):
        assert (await shaft.get(task)).result["size"] > 100
    agent: AgentInfo = await engine_of(shaft).fleet.read("reviewer")
    assert (agent.capabilities, agent.models_available) == (["python", "web"], ["m1"])
    assert (agent.max_concurrent_tasks, float(agent.budget_usd or 0)) == (2, 4.5)
    assert (agent.heartbeat_interval_sec, agent.status) == (7, "offline")


@pytest.mark.slow("starts several processes")
async def test_a_saved_token_that_commands_can_read_is_warned_about(dsn: str, tmp_path: Path) -> None:
    agent = (dsn, tmp_path, "--exec", "true", "--type", "t", "--until-idle", "--quiet")
    assert "token" not in (await run(*agent))[1]
    path = save_token(tmp_path / ".lineshaft", "lsh_x")

    code, errors = await run(*agent)

    assert code == 0
    assert f"The command can read the token in {path}" in errors
    assert "--run-as USER" in errors


@pytest.mark.slow("starts several processes")
async def test_a_shell_only_when_it_is_asked_for(shaft: Lineshaft, dsn: str, tmp_path: Path) -> None:
    line = 'echo "$LINESHAFT_TASK_SPEC_X" | tr a-z A-Z'
    submitted = await shaft.submit(NewTask("t", spec={"x": "a; b"}))
    assert (await run(dsn, tmp_path, "--shell", "--exec", line, "--type", "t", "--until-idle"))[0] == 0
    assert (await shaft.get(submitted)).result == "A; B"

    submitted = await shaft.submit(NewTask("t", spec={"x": "a; b"}))
    assert (await run(dsn, tmp_path, "--exec", line, "--type", "t", "--until-idle"))[0] == 0
    assert (await shaft.get(submitted)).result == "$LINESHAFT_TASK_SPEC_X | tr a-z A-Z"


@pytest.mark.slow("starts several processes")
async def test_the_command_does_not_get_the_url_of_the_database(
    shaft: Lineshaft, dsn: str, tmp_path: Path
) -> None:
    options = ("--shell", "--exec", 'echo "[$LINESHAFT_DATABASE_URL]"', "--type", "t", "--until-idle")
    submitted = await shaft.submit(NewTask("t"))
    await run(dsn, tmp_path, *options)
    assert (await shaft.get(submitted)).result == []

    submitted = await shaft.submit(NewTask("t"))
    await run(dsn, tmp_path, *options, "--pass-env", "LINESHAFT_DATABASE_URL")
    assert (await shaft.get(submitted)).result == f"[{dsn}]"


@pytest.mark.slow("starts an agent")
async def test_a_signal_lets_it_finish(shaft: Lineshaft, dsn: str, tmp_path: Path) -> None:
    """R-081. The command doesn't get the signal: it has its own session."""
    go, there = tmp_path / "go", tmp_path / "there"
    os.mkfifo(go)
    os.mkfifo(there)
    script(tmp_path, f"echo here > {there}; cat {go}")
    submitted = await shaft.submit(NewTask("t"))
    process = await start(dsn, tmp_path, "--exec", "./work.sh", "--type", "t", "--id", "a")
    await asyncio.wait_for(asyncio.to_thread(there.read_text), PATIENCE)
    process.send_signal(signal.SIGTERM)
    while (await engine_of(shaft).fleet.read("a")).status != "draining":  # noqa: ASYNC110 - no event announces it
        await asyncio.sleep(0)
    await asyncio.to_thread(go.write_text, "finished")
    await asyncio.wait_for(process.communicate(), PATIENCE)

    assert process.returncode == 0
    assert (await shaft.get(submitted)).result == "finished"


@pytest.mark.slow("starts a process for each mistake")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--exec", "no-such-command", "--type", "t"], 1, "./no-such-command for a file in this directory"),
        (["--exec", "/no/such/command", "--type", "t"], 1, "Command '/no/such/command' was not found"),
        (["--exec", "echo 'half", "--type", "t"], 1, "Check its quotes"),
        (["--exec", " ", "--type", "t"], 1, "--exec is empty"),
        (["--exec", "true"], 2, "--type"),
        (["--type", "t"], 2, "--exec"),
        (["--exec", "true", "--type", "t", "--budget", "much"], 2, "must be an amount of dollars"),
        (["--exec", "true", "--type", "t", "--time-limit", "0"], 2, "must be a number of seconds above 0"),
        (["--exec", "true", "--type", "t", "--slots", "0"], 2, "must be a whole number above 0"),
    ],
)
async def test_called_wrongly(
    dsn: str, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    found, errors = await run(dsn, tmp_path, *arguments)
    assert (found, message in errors, "Traceback" in errors) == (code, True, False), errors


@pytest.mark.slow("starts several processes")
async def test_registered_elsewhere_it_ends_with_a_message(
    shaft: Lineshaft, dsn: str, tmp_path: Path
) -> None:
    same = ("--exec", "true", "--type", "t", "--id", "same", "--instance", "only")
    first = await start(dsn, tmp_path, *same, "--heartbeat", "0.2")
    # Once it has done something it is registered.
    await shaft.wait(await shaft.submit(NewTask("t")), PATIENCE)
    await run(dsn, tmp_path, *same, "--until-idle")
    _, errors = await asyncio.wait_for(first.communicate(), PATIENCE)

    assert first.returncode == 1
    assert "Instance 'only' of agent 'same' was registered again" in errors.decode()


@pytest.mark.slow("starts several processes")
async def test_replicas_of_one_id_and_a_name_that_is_used_again(
    shaft: Lineshaft, dsn: str, tmp_path: Path
) -> None:
    script(tmp_path, "echo started; sleep 60")
    options = (
        *("--exec", "./work.sh", "--type", "t", "--id", "a", "--slots", "1", "--version", "7"),
        *("--heartbeat", "0.5", "--grace", "0.1"),
    )
    await shaft.submit_many([NewTask("t") for _ in range(3)])

    async def holders(number: int) -> AgentInfo:
        while True:
            with contextlib.suppress(NotFoundError):
                agent = await shaft.get_agent("a")
                if agent.current_tasks == number:
                    return agent
            await asyncio.sleep(0.02)

    processes = [await start(dsn, tmp_path, *options, "--instance", name) for name in ("pod-1", "pod-2")]
    agent = await asyncio.wait_for(holders(2), PATIENCE)
    assert {(each.instance, each.version) for each in agent.instances} == {("pod-1", "7"), ("pod-2", "7")}

    again = await start(dsn, tmp_path, *options, "--instance", "pod-1")
    _, errors = await asyncio.wait_for(processes[0].communicate(), PATIENCE)
    assert processes[0].returncode == 1
    assert "'pod-1' of agent 'a' was registered again" in errors.decode().splitlines()[-1]

    for process in (processes[1], again):
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), PATIENCE)
