"""Folders of a command: its inputs, and what becomes of its outputs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lineshaft import Lineshaft, Status
from lineshaft.agent.exec import files
from lineshaft.agent.exec.files import delete_left_behind
from tests.agent.commands import Commands, commands_in
from tests.agent.helpers import one

pytestmark = pytest.mark.alike_over_http


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with commands_in(tmp_path) as made:
        yield made


async def test_artifacts_are_files_and_files_become_artifacts(
    shaft: Lineshaft, commands: Commands, tmp_path: Path
) -> None:
    one_, two = await shaft.artifacts.put("a.txt", b"one"), await shaft.artifacts.put("a.txt", b"two")
    evil = await shaft.artifacts.put("../../../etc/passwd", b"three")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    agent = commands.agent(
        'cd "$LINESHAFT_INPUTS" && ls | wc -l && cat a.txt && cat artifact_*-a.txt && cat passwd\n'
        'cd "$LINESHAFT_OUTPUTS" && mkdir -p charts && printf chart > charts/one.svg\n'
        "printf text > notes.txt\n"
        f"ln -s {secret} link.txt && ln -s {tmp_path} folder && mkfifo pipe"
    )

    task = await one(shaft, agent, "t", spec={"context_refs": [one_.ref, two.ref, evil.ref]})

    assert task.status is Status.COMPLETED, task.failure_history
    assert task.result.split() == ["3", "onetwothree"]
    made = [await shaft.artifacts.get(ref) for ref in task.output.artifacts]
    assert {each.name for each in made} == {"notes.txt", "charts/one.svg"}
    assert {await shaft.artifacts.read(each.ref) for each in made} == {b"chart", b"text"}
    assert all(each.task_id == task.id for each in made)
    assert os.listdir(tmp_path / "temporary") == []  # noqa: PTH208 - in a test


async def test_a_failed_command_stores_nothing(shaft: Lineshaft, commands: Commands, tmp_path: Path) -> None:
    agent = commands.agent('printf draft > "$LINESHAFT_OUTPUTS/draft" && exit 1')

    task = await one(shaft, agent, "t", max_attempts=1)

    assert task.status is Status.DEAD_LETTERED
    assert (await shaft.artifacts.list()).items == []
    assert os.listdir(tmp_path / "temporary") == []  # noqa: PTH208 - in a test


async def test_too_many_files_fail_the_attempt(
    shaft: Lineshaft, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = commands.agent('cd "$LINESHAFT_OUTPUTS" && touch 1 2 3 4')
    monkeypatch.setattr(files, "MAX_FILES", 3)

    task = await one(shaft, agent, "t", max_attempts=1)

    assert task.failure_category == "invalid_output"
    assert "more than 3 files" in str(task.failure_reason)


def test_folders_of_killed_agents_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import asyncio\nfrom lineshaft.agent.exec.files import attempt_files\n"
        "async def hold():\n async with attempt_files(None):\n"
        "  print(flush=True)\n  await asyncio.sleep(600)\n"
        "asyncio.run(hold())"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE
    )
    assert agent.stdout is not None
    agent.stdout.readline()
    (held,) = tmp_path.iterdir()
    delete_left_behind()
    assert held.exists()

    agent.kill()
    agent.communicate()
    delete_left_behind()

    assert not held.exists()
