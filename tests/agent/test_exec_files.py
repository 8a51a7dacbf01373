"""Folders of a command: its inputs, and what becomes of its outputs."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lineshaft import Agent, Lineshaft, Status
from lineshaft.agent.exec import UnixAccount, files
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another account")
async def test_folders_belong_to_the_account_of_the_command(
    shaft: Lineshaft, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads, changes and writes its files, and nothing of them is left."""
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        # The account must get there.
        os.chmod(temporary, 0o711)  # noqa: PTH101, S103 - in a test
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        given = await shaft.artifacts.put("a.txt", b"one")
        command = commands.command(
            *("/bin/sh", "-ec"),
            'id -un; cat "$LINESHAFT_INPUTS/a.txt"; echo more >> "$LINESHAFT_INPUTS/a.txt"\n'
            'touch "$LINESHAFT_INPUTS/new"; ls "$LINESHAFT_INPUTS/.." 2>&1 | tail -c 18\n'
            'cd "$LINESHAFT_OUTPUTS" && mkdir charts && printf chart > charts/one.svg\n'
            "umask 077; printf secret > mine; mkdir locked && touch locked/x && chmod 000 locked\n"
            "ln -s /etc/shadow link",
            account=UnixAccount.find("nobody"),
        )
        agent = Agent("a")
        agent.task("t")(command)

        task = await one(shaft, agent, "t", spec={"context_refs": [given.ref]})

        assert task.status is Status.COMPLETED, task.failure_history
        assert task.result.split("\n") == ["nobody", "onePermission denied"]
        made = [await shaft.artifacts.get(ref) for ref in task.output.artifacts]
        assert {each.name for each in made} == {"charts/one.svg", "mine", "locked/x"}
        assert os.listdir(temporary) == []  # noqa: PTH208 - in a test


def test_folders_that_can_only_be_read_are_deleted(tmp_path: Path) -> None:
    code = (
        "import asyncio,os,sys\nfrom lineshaft.agent.exec.files import attempt_files\n"
        "async def use():\n async with attempt_files(None) as files:\n"
        "  below=files.variables['LINESHAFT_OUTPUTS']+'/cache'\n  os.mkdir(below)\n"
        "  os.mkdir(below+'/deep')\n  open(below+'/deep/file','w').close()\n"
        "  os.symlink(sys.argv[1],below+'/link')\n"
        "  os.chmod(below+'/deep',0o500)\n  os.chmod(below,0o500)\n"
        "asyncio.run(use())"
    )
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    folder = tmp_path / "temporary"
    folder.mkdir()
    program = [sys.executable, "-c", code, str(kept)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may delete anything, and there is no setpriv to take that right away")
        # Root may delete anything; without that right it is an account like any other.
        program = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", *program]
    subprocess.run(program, env={**os.environ, "TMPDIR": str(folder)}, check=True)

    assert list(folder.iterdir()) == []
    assert kept.stat().st_mode & 0o777 == 0o500


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
