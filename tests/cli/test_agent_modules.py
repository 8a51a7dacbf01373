"""`lineshaft agent MODULE:AGENT`: agents of Python modules, in processes of their own."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from watchfiles import Change, watch

from lineshaft import Lineshaft, NewTask
from lineshaft.cli import agent_reload
from tests.agent.helpers import PATIENCE
from tests.cli.conftest import Cli
from tests.terminals import CTRL_C, terminal

APP = """
from lineshaft import Agent

writer = Agent("writer")
coder = Agent("coder")
empty = Agent("empty")
number = 3

@writer.task("write")
async def write(what: str) -> str:
    return what.upper()

@coder.task("code")
def code() -> str:
    return "code"
"""


@pytest.fixture
def folder(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module."""
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
async def shaft(dsn: str) -> AsyncIterator[Lineshaft]:
    async with Lineshaft(dsn) as opened:
        yield opened


@pytest.fixture
def fresh_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules of this test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("app", "broken", "unguarded"):
        sys.modules.pop(name, None)


@pytest.mark.slow("starts an agent")
async def test_several_agents_of_a_module_in_one_process(shaft: Lineshaft, folder: Path) -> None:
    """As `python -m lineshaft`, with a package below the current folder too."""
    (folder / "package").mkdir()
    (folder / "package" / "inner.py").write_text(APP.replace("upper", "lower").replace("writ", "edit"))
    tasks = await shaft.submit_many(
        [
            NewTask("write", spec={"what": "Text"}),
            NewTask("code"),
            NewTask("edite", spec={"what": "Text"}),
        ]
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lineshaft", "agent", "--until-idle"),
        *("app:writer", "app:coder", "package.inner:editer"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)

    assert process.returncode == 0, errors
    assert [await task.result(PATIENCE) for task in tasks] == ["TEXT", "code", "text"]


@pytest.mark.usefixtures("folder", "fresh_imports")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing:agent"], 2, "Module 'nothing' was not found in "),
        (["app.nothing:agent"], 2, "Module 'app.nothing' was not found in "),
        (["app"], 2, "'app' must be MODULE:AGENT. app.py has: writer, coder, empty."),
        (["app:"], 2, "'app:' must be MODULE:AGENT. app.py has: writer, coder, empty."),
        (["app:editor"], 2, "app.py has no 'editor'. app.py has: writer, coder, empty."),
        (["app:number"], 2, "app:number is of type int, not an Agent. app.py has: writer"),
        (["app:write"], 2, "app:write is the handler of 'write', not an Agent."),
        (["app:empty"], 1, "app:empty has no handlers. Give it one: @empty.task('TYPE')"),
        (["app.py:writer"], 2, "'app.py:writer' names a file. Name the module: app:writer."),
        (["./app:writer"], 2, "must be MODULE:AGENT, such as app:agent"),
        (["app:writer", "--slots", "5"], 2, "--slots is for commands."),
        (["app:writer", "--exec", "true"], 2, "--exec is for commands."),
        (["--exec", "true", "--type", "t", "--reload"], 2, "--reload is for agents of modules"),
        ([], 2, "--exec COMMAND is missing. Name agents, such as app:agent"),
    ],
)
def test_mistakes_are_explained_in_one_line(cli: Cli, arguments: list[str], code: int, message: str) -> None:
    said = cli("agent", *arguments)
    assert (said.code, len(said.err.splitlines())) == (code, 1), said.err
    assert message in said.err


@pytest.mark.usefixtures("fresh_imports")
@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("import nothing_like_this\n", "import nothing_like_this", "No module named 'nothing_like_this'"),
        ("def (\n", "def (", "SyntaxError: invalid syntax"),
        (
            "from lineshaft import Agent\nagent = Agent('a')\n@agent.task\nasync def review(): ...\n",
            "@agent.task",
            "@agent.task needs the name of a task type: write @agent.task('review').",
        ),
    ],
)
def test_a_module_that_fails_shows_where(cli: Cli, folder: Path, text: str, place: str, message: str) -> None:
    (folder / "broken.py").write_text(text)
    said = cli("agent", "broken:agent")
    assert said.code == 1
    assert place in said.err
    assert "<frozen importlib" not in said.err
    assert said.err.splitlines()[-1].startswith("lineshaft: Module 'broken' can't be imported: ")
    assert message in said.err.splitlines()[-1]


@pytest.mark.usefixtures("fresh_imports")
def test_a_module_that_would_run_its_agent_when_it_is_imported(cli: Cli, folder: Path) -> None:
    (folder / "unguarded.py").write_text(APP + "\nwriter.main()\n")
    said = cli("agent", "unguarded:writer")
    assert said.code == 1
    assert "if __name__ == '__main__': agent.main()" in said.err


def test_a_change_is_noticed_from_the_first_moment_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process started before changes were watched, and ran on with old code."""

    def slow(*paths: Path, **options: Any) -> Iterator[set[tuple[Change, str]]]:
        time.sleep(0.5)
        yield from watch(*paths, **options)

    monkeypatch.setattr(agent_reload, "watch", slow)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    program = (
        "import pathlib, sys, time; changed = pathlib.Path('changed.py')\n"
        "if changed.exists(): sys.exit(0)\n"
        "changed.touch(); time.sleep(30); pathlib.Path('unnoticed').touch()"
    )

    assert agent_reload._Reloader([sys.executable, "-c", program]).run() == 0
    assert not Path("unnoticed").exists()


@pytest.mark.slow("restarts a process several times")
async def test_it_reloads_and_releases_what_it_cannot_finish(shaft: Lineshaft, folder: Path) -> None:
    app = folder / "app.py"
    slow = APP.replace(
        "    return what.upper()",
        "    import asyncio\n    print('sleeping', flush=True)\n    await asyncio.sleep(3600)",
    )
    app.write_text(slow)
    task = await shaft.submit(NewTask("write", spec={"what": "text"}))
    async with terminal("-m", "lineshaft", "agent", "app:writer", "--reload", directory=folder) as shown:
        await shown.prints("sleeping")
        app.write_text("def (\n")
        await shown.prints("waiting for a change of a .py file")
        assert "app.py changed: restarting" in shown.text
        assert "handed back" in shown.text
        app.write_text(APP)
        assert await task.result(PATIENCE) == "TEXT"
        await shown.prints("done in")
        await shown.press(CTRL_C)
        assert await shown.ends() == 0
    assert (await shaft.get(task)).attempts == 0
