"""What agents print: lines for people on a terminal, JSON elsewhere."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lineshaft import Lineshaft, NewTask, RetrySpec
from lineshaft.model.states import Status
from tests.agent.helpers import PATIENCE
from tests.terminals import CTRL_C, terminal

pytestmark = pytest.mark.database_only("about processes and their terminals")

APP = """
import asyncio, os, sys
from lineshaft import Agent, TaskContext

agent = Agent("writer", max_concurrent_tasks=1)

@agent.task("write")
async def write(ctx: TaskContext, what: str) -> str:
    ctx.log.info("looking for %s", what)
    ctx.spend(0.02)
    if what == "bad" and ctx.attempt == 1:
        raise ValueError("no such thing")
    if what == "long":
        print("sleeping", flush=True)
        await asyncio.sleep(3600)
    return what

if __name__ == "__main__":
    agent.main(until_idle="--until-idle" in sys.argv)
"""
SOON = RetrySpec(strategy="fixed", initial_delay_sec=0.1, jitter=False)


@pytest.fixture
def folder(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    return tmp_path


@pytest.fixture
async def shaft(dsn: str) -> AsyncIterator[Lineshaft]:
    async with Lineshaft(dsn) as opened:
        yield opened


def writing(what: str) -> NewTask:
    return NewTask("write", spec={"what": what}, title=f"Write {what}", retry=SOON)


async def run_piped(folder: Path, *arguments: str, **variables: str) -> tuple[int, list[str]]:
    """The exit code and the lines on standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode or 0, errors.decode().splitlines()


@pytest.mark.slow("starts an agent")
async def test_an_agent_on_a_terminal(shaft: Lineshaft, folder: Path) -> None:
    """It prints what it waits for, a line per task, failures with their place, and what Ctrl-C does."""
    async with terminal("app.py", directory=folder) as shown:
        await shown.prints("writer: waiting for write on database ")
        good = await shaft.submit(writing("good"))
        await shown.prints("done in")
        bad = await shaft.submit(writing("bad"))
        await shown.prints("done in", times=2)
        long = await shaft.submit(writing("long"))
        await shown.prints("sleeping")
        await shown.press(CTRL_C)
        await shown.prints("Ctrl-C again hands it back")
        await shown.press(CTRL_C)
        code = await shown.ends()
    lines = shown.text.splitlines()

    assert code == 0, lines
    assert max(len(line) for line in lines if "File " not in line) <= 80, lines
    # Wrapped lines are joined again.
    text = re.sub(r"\n {9}", " ", shown.text)
    for expected in (
        rf"write {good.id} started: Write good\n",
        rf"write {good.id} looking for good\n",
        rf"write {good.id} done in [\d.]+ m?s for \$0\.02\n",
        rf"write {bad.id} failed after [\d.]+ m?s: ValueError: no such thing; will retry in 100 ms ",
        rf"write {bad.id} started: Write bad \(attempt 2 of 3\)\n",
        r"writer: finishing 1 task within 20 s; Ctrl-C again hands it back\n",
        r"writer: handing back 1 task\n",
        rf"write {long.id} handed back after .*: the agent stops\n",
        r"writer: ended: 2 tasks done, 1 attempt failed, 1 task handed back, \$0\.08 spent\n",
    ):
        assert re.search(rf"\d\d:\d\d:\d\d {expected}", text), (expected, text)
    assert re.search(r'\n {11}File ".*app\.py", line 12, in write\n', shown.text), shown.text
    task = await shaft.get(long)
    assert (task.status, task.attempts) == (Status.READY, 0)


@pytest.mark.slow("starts an agent")
async def test_elsewhere_its_lines_are_json_without_one_per_task(shaft: Lineshaft, folder: Path) -> None:
    await shaft.submit_many([writing("good"), writing("bad")])
    code, lines = await run_piped(folder, "app.py", "--until-idle")
    found = [json.loads(line) for line in lines]

    assert code == 0
    events = [line["event"] for line in found]
    assert events[0].startswith("writer: waiting for write on database ")
    assert "looking for good" in events
    assert not any(text.startswith(("started", "done")) for text in events)
    (failed,) = [line for line in found if line["level"] == "error"]
    assert (failed["task_type"], failed["attempt"], failed["agent_id"]) == ("write", 1, "writer")
    assert failed["task_id"].startswith("task_")
    assert failed["error"] == "ValueError: no such thing"
    assert 'raise ValueError("no such thing")' in failed["exception"]
    assert "spec" not in "".join(lines)


@pytest.mark.slow("starts processes one after the other")
async def test_the_level_and_the_format_can_be_chosen(shaft: Lineshaft, folder: Path) -> None:
    first = await shaft.submit(writing("good"))
    _, lines = await run_piped(
        folder, "app.py", "--until-idle", LINESHAFT_LOG_LEVEL="info", LINESHAFT_LOG_FORMAT="text"
    )
    assert re.match(rf"\d\d:\d\d:\d\d write {first.id} started: Write good$", lines[1])
    assert any(re.search(rf"write {first.id} done in ", line) for line in lines)

    await shaft.submit(writing("good"))
    assert await run_piped(folder, "app.py", "--until-idle", LINESHAFT_LOG_LEVEL="error") == (0, [])

    async with terminal(
        *("app.py", "--until-idle"), directory=folder, environment={"LINESHAFT_LOG_FORMAT": "json"}
    ) as shown:
        assert await shown.ends() == 0
    assert all(json.loads(line) for line in shown.text.splitlines())


@pytest.mark.slow("starts processes one after the other")
@pytest.mark.parametrize(
    "configuration",
    [
        "logging.basicConfig(format='mine: %(message)s', level='ERROR')",
        "logging.getLogger('lineshaft.agent').addHandler(handler)",
    ],
)
async def test_a_program_keeps_its_own_logging(shaft: Lineshaft, folder: Path, configuration: str) -> None:
    await shaft.submit(writing("bad"))
    own = (
        "import logging; handler = logging.StreamHandler();"
        "handler.setFormatter(logging.Formatter('mine: %(message)s'));"
        f"{configuration}\n"
    )
    (folder / "app.py").write_text(own + APP)
    code, lines = await run_piped(folder, "app.py", "--until-idle")

    assert code == 0
    assert "ValueError: no such thing; will retry in" in lines[0]
    assert lines[0].startswith("mine: failed after")
    assert not any(line.startswith("{") for line in lines)


@pytest.mark.slow("starts an agent on a terminal")
async def test_hostile_titles_and_errors_do_not_reach_the_terminal(shaft: Lineshaft, folder: Path) -> None:
    attack = "\x1b]0;owned\x07\x1b[2J\n00:00:00 forged"
    (folder / "app.py").write_text(APP.replace("no such thing", "\\x1b[2J\\x9b2J\\nforged"))
    await shaft.submit(NewTask("write", spec={"what": "bad"}, title=f"t {attack}", retry=SOON))
    async with terminal("app.py", "--until-idle", directory=folder) as shown:
        assert await shown.ends() == 0

    assert "\\u001b[2J" in shown.text
    assert not any(found in shown.text for found in ("\x1b", "\x07", "\x9b", "\n00:00:00 forged", "\nforged"))


@pytest.mark.slow("starts an agent")
async def test_main_ends_with_one_line_and_code_1(folder: Path) -> None:
    code, lines = await run_piped(folder, "app.py", LINESHAFT_DATABASE_URL="postgresql://127.0.0.1:1/nothing")
    assert (code, len(lines)) == (1, 1), lines
    assert lines[0].startswith("lineshaft: ")
    away = {"LINESHAFT_DATABASE_URL": "postgresql://127.0.0.1:1/nothing"}
    async with terminal("app.py", directory=folder, environment=away) as shown:
        assert await shown.ends() == 1
    wrapped = shown.text.splitlines()
    assert len(wrapped) > 1, "between words, on a terminal"
    assert max(map(len, wrapped)) <= 80, wrapped

    (folder / "app.py").write_text(
        "import asyncio\n"
        + APP.replace("__main__", "never")
        + ("\nasync def main(): agent.main()\nasyncio.run(main())\n")
    )
    code, lines = await run_piped(folder, "app.py")
    assert code == 1
    assert "Use 'await agent.run(shaft)' in it" in lines[-1]


@pytest.mark.slow("starts processes one after the other")
async def test_sigterm_says_what_a_second_one_does(shaft: Lineshaft, folder: Path) -> None:
    await shaft.submit(writing("long"))
    async with terminal("-m", "lineshaft", "agent", "app:agent", directory=folder) as shown:
        await shown.prints("sleeping")
        os.kill(shown.pid, signal.SIGTERM)
        await shown.prints("a second signal hands it back")
        os.kill(shown.pid, signal.SIGTERM)
        assert await shown.ends() == 0
