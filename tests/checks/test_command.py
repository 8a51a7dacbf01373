"""test-pass: the operator's commands, in real processes."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lineshaft.checks.command import _GUARDIANS, CheckCommand, CommandCheck, read_commands
from lineshaft.checks.verdict import NoVerdict, Verdict
from lineshaft.errors import SettingsError
from tests.checks.candidate import candidate
from tests.processes import gone


async def run(
    *program: str, directory: Path | None = None, limit: float = 60.0, spec: Any = None, data: Any = None
) -> Verdict:
    check = CommandCheck({"mine": CheckCommand((sys.executable, "-c", *program), limit, directory)})
    return await check.check({"command": "mine"}, candidate(data, spec=spec))


async def test_exit_code_0_passes() -> None:
    """R-096."""
    assert (await run("pass")).passed


async def test_any_other_exit_code_rejects_with_the_end_of_the_output() -> None:
    """R-096, R-098: also when the command prints a lot."""
    verdict = await run(
        "import sys; print('first'); print('x' * 10_000_000);"
        "print('two tests failed', file=sys.stderr); sys.exit(3)"
    )

    (reason,) = verdict.reasons
    assert "ended with exit code 3" in reason
    assert reason.endswith("two tests failed")
    assert "first" not in reason
    assert len(reason) < 4_000


async def test_it_receives_the_task_and_its_output(tmp_path: Path) -> None:
    verdict = await run(
        "import json, os, sys; given = json.load(sys.stdin);"
        "open('seen.json', 'w').write(json.dumps([given, os.getcwd(), os.environ['LINESHAFT_TASK_ID']]))",
        directory=tmp_path,
        spec={"goal": "x"},
        data={"a": [1, 2]},
    )

    given, directory, task_id = json.loads((tmp_path / "seen.json").read_text())
    assert verdict.passed
    assert (given["task"]["spec"], given["output"]["data"]) == ({"goal": "x"}, {"a": [1, 2]})
    assert (directory, task_id) == (str(tmp_path), "task_1")


async def test_a_command_may_ignore_a_large_input() -> None:
    assert (await run("pass", data="x" * 5_000_000)).passed


async def test_it_receives_only_the_allowed_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINESHAFT_DATABASE_URL", "OPENAI_API_KEY", "LC_TIME", "PASSED"):
        monkeypatch.setenv(name, "x")
    program = "import os, sys; sys.exit(' '.join(sorted(n for n in os.environ if os.environ[n] == 'x')))"
    check = CommandCheck({"mine": CheckCommand((sys.executable, "-c", program), pass_env=("PASSED",))})

    verdict = await check.check({"command": "mine"}, candidate(None))

    assert verdict.reasons[0].endswith("last output: LC_TIME PASSED")


async def test_a_relative_program_is_the_operators_not_the_tasks(tmp_path: Path) -> None:
    """A task can't put a script of its own in place of the operator's."""
    operators, tasks = tmp_path / "operator", tmp_path / "tasks"
    for folder, code in ((operators, 0), (tasks / "evil", 1)):
        folder.mkdir(parents=True)
        (folder / "check.sh").write_text(f"#!/bin/sh\npwd; exit {code}\n")
        (folder / "check.sh").chmod(0o700)
    path = operators / "commands.yaml"
    path.write_text(f"tests: {{argv: [./check.sh], directory: {tasks}}}")
    check = CommandCheck(read_commands(path))

    verdict = await check.check({"command": "tests", "working_directory": "evil"}, candidate(None))

    assert verdict.passed, verdict


async def test_at_the_time_limit_the_whole_group_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-096: also the processes that the command started."""
    program = (
        "import os, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']);"
        "print('started', flush=True); open('pids', 'w').write(f'{os.getpid()} {child.pid}');"
        "time.sleep(1000)"
    )
    work = asyncio.create_task(run(program, directory=tmp_path, limit=500.0))
    while not _written(tmp_path / "pids"):  # noqa: ASYNC110 - another process writes the file
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    time = loop.time

    monkeypatch.setattr(loop, "time", lambda: time() + 500)
    verdict = await work

    (reason,) = verdict.reasons
    assert "did not finish within 500 s and was killed" in reason
    assert reason.endswith("started")
    for pid in (tmp_path / "pids").read_text().split():
        await gone(int(pid))


async def test_its_background_processes_are_killed(tmp_path: Path) -> None:
    """They would keep its pipe open, and the check would wait forever."""
    verdict = await run(
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']);"
        "open('pid', 'w').write(str(child.pid))",
        directory=tmp_path,
    )

    assert verdict.passed
    await gone(int((tmp_path / "pid").read_text()))


async def test_a_cancelled_check_kills_its_command(tmp_path: Path) -> None:
    work = asyncio.create_task(
        run("import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(1000)", directory=tmp_path)
    )
    while not _written(tmp_path / "pid"):  # noqa: ASYNC110 - another process writes the file
        await asyncio.sleep(0)

    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work

    await gone(int((tmp_path / "pid").read_text()))


def _written(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


async def test_a_killed_guardian_is_replaced() -> None:
    """A command whose guardian is killed keeps running."""
    assert (await run("pass")).passed
    first = _GUARDIANS.get()

    verdict = await run(f"import os, signal; os.kill({first._process.pid}, signal.SIGKILL)")

    assert verdict.passed
    first.close()
    assert (await run("pass")).passed
    assert _GUARDIANS.get() is not first


# Working directories.


async def test_a_task_names_a_directory_within_the_operators(tmp_path: Path) -> None:
    (tmp_path / "job" / "src").mkdir(parents=True)
    look = "import os; open('here', 'w').write('x')"

    assert (await run(look, directory=tmp_path, spec={"working_directory": "job/src"})).passed

    assert (tmp_path / "job" / "src" / "here").exists()
    check = CommandCheck({"mine": CheckCommand((sys.executable, "-c", look), 60, tmp_path)})
    named = {"command": "mine", "working_directory": str(tmp_path / "job")}
    assert (await check.check(named, candidate())).passed
    assert (tmp_path / "job" / "here").exists()


@pytest.mark.parametrize("wanted", ["..", "/", "job/../..", "away", "\0", "nowhere", 7])
async def test_no_directory_outside_is_used(tmp_path: Path, wanted: Any) -> None:
    """Hostile input: not by a symbolic link either."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "away").symlink_to(tmp_path)
    marker = tmp_path / "ran"

    with pytest.raises(NoVerdict, match="working directory"):
        await run(f"open({str(marker)!r}, 'w')", directory=root, spec={"working_directory": wanted})

    assert not marker.exists()


# Commands that a task may name.


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (None, 'must be {"command": NAME}'),
        ("tests", 'must be {"command": NAME}'),
        ({}, 'must be {"command": NAME}'),
        ({"command": ["rm", "-rf", "/"]}, "where NAME is a string"),
        ({"command": "rm -rf /"}, "is not allowed"),
        ({"command": "tests; rm -rf /"}, "LINESHAFT_VALIDATION_COMMANDS: tests"),
        ({"command": "tests", "argv": ["rm"]}, 'must be {"command": NAME}'),
        ({"command": "tests", "working_directory": 1}, "must be a path"),
    ],
)
def test_only_commands_that_the_operator_allows(schema: Any, said: str) -> None:
    """R-096; hostile input: rejected at submission."""
    assert said in (CommandCheck({"tests": CheckCommand(("true",))}).fault(schema) or "")


async def test_an_unknown_command_gives_no_verdict() -> None:
    """The list may have changed, or may differ on this node: no attempt fails for it."""
    with pytest.raises(NoVerdict, match="not allowed on this node"):
        await CommandCheck({}).check({"command": "tests"}, candidate())
    missing = CommandCheck({"tests": CheckCommand(("/nowhere/to/be/found",))})
    with pytest.raises(NoVerdict, match="can't be started"):
        await missing.check({"command": "tests"}, candidate())


# The operator's file.


def test_the_operators_file(tmp_path: Path) -> None:
    path = tmp_path / "commands.yaml"
    path.write_text(
        "tests:\n  argv: [make, test]\n  time_limit_sec: 2.5\n  directory: /srv/jobs\nlint: {argv: [ruff]}\n"
    )

    assert read_commands(path) == {
        "tests": CheckCommand(("make", "test"), 2.5, Path("/srv/jobs")),
        "lint": CheckCommand(("ruff",), 300.0, None),
    }
    path.write_text("")
    assert read_commands(path) == {}


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "- tests",
        "tests: make test",
        "tests: {argv: make}",
        "tests: {argv: []}",
        "tests: {argv: [1]}",
        "tests: {argv: [make], shell: true}",
        "tests: {argv: [make], time_limit_sec: 0}",
        "tests: {argv: [make], time_limit_sec: .nan}",
        "tests: {argv: [make], time_limit_sec: true}",
        "tests: {argv: [make], directory: 7}",
        "tests: {argv: [make], pass_env: PATH}",
        "!!python/object/apply:os.system ['true']",
    ],
)
def test_a_file_with_a_mistake_is_rejected(tmp_path: Path, text: str) -> None:
    """It allows no command at all."""
    path = tmp_path / "commands.yaml"
    path.write_text(text)

    with pytest.raises(SettingsError, match=str(path)):
        read_commands(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Can't read"):
        read_commands(tmp_path / "nowhere.yaml")


def test_names_are_shown_sorted() -> None:
    names: Sequence[str] = ("b", "a")
    check = CommandCheck({name: CheckCommand(("true",)) for name in names})
    assert "COMMANDS: a, b" in (check.fault({"command": "c"}) or "")
