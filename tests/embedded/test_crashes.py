"""Crashes: the next start works, and the data is there."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from lineshaft.embedded import Binaries, EmbeddedServer, keeper, locks, watcher
from lineshaft.embedded.account import server_account
from lineshaft.embedded.layout import Layout
from lineshaft.embedded.processes import Identity, identify, is_running
from lineshaft.embedded.server import choose_for_account
from lineshaft.engine.postgres.location import database
from lineshaft.errors import EmbeddedServerError
from lineshaft.settings import Settings
from tests.embedded.helpers import (
    FAST,
    User,
    is_idle,
    postmaster_pid,
    query,
    wait_for_end,
    wait_until,
    wait_until_idle,
    watcher_pid,
)

pytestmark = pytest.mark.slow("starts, kills and restarts servers")


def test_a_killed_watcher_is_replaced_by_the_next_starter(home: Path) -> None:
    first = EmbeddedServer.start(home, options=FAST)
    server, lost = postmaster_pid(home), watcher_pid(home)
    os.kill(lost, signal.SIGKILL)
    wait_for_end(lost)
    assert query(first.dsn, "SELECT 1") == 1
    with EmbeddedServer.start(home) as second:
        assert postmaster_pid(home) == server
        assert watcher_pid(home) != lost
        first.close()
        assert query(second.dsn, "SELECT 1 FROM pg_sleep(1.2)") == 1
    wait_until_idle(home)
    assert not is_running(server)


def test_a_terminated_watcher_stops_the_server_first(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST):
        server = postmaster_pid(home)
        os.kill(watcher_pid(home), signal.SIGTERM)
        wait_until_idle(home)
        assert not is_running(server)
        assert "database system is shut down" in Layout(home).log.read_text()


def test_everything_killed(home: Path) -> None:
    with User(home) as user:
        dsn = user.answer().dsn
        query(dsn, "CREATE TABLE kept AS SELECT 42 AS answer")
        server, watching = postmaster_pid(home), watcher_pid(home)
        os.kill(watching, signal.SIGKILL)
        os.kill(server, signal.SIGKILL)
        user.kill()
        wait_for_end(server, watching)
    assert Layout(home).pid_file.exists()
    # Immediately: backends of the killed server may still be running.
    with EmbeddedServer.start(home, options=FAST) as again:
        assert query(again.dsn, "SELECT answer FROM kept") == 42


def test_waits_for_the_busy_backend_of_a_killed_server(home: Path) -> None:
    """Its shared memory is in use until it notices the loss of its client."""
    busy = """
        import sys, psycopg
        with psycopg.connect(sys.argv[1]) as connection:
            connection.execute("DO $$ BEGIN END $$")
            print(connection.info.backend_pid, flush=True)
            connection.execute("DO $$ BEGIN LOOP END LOOP; END $$")
    """
    program = "\n".join(
        line.strip() if "with" in line or "import" in line else line for line in busy.splitlines()
    )
    options = FAST | {"client_connection_check_interval": "200ms"}
    server = EmbeddedServer.start(home, options=options)
    with subprocess.Popen(
        [sys.executable, "-c", program, server.dsn], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        backend = int(client.stdout.readline())
        # Until then it would notice the end of the postmaster at once.
        active = f"SELECT query FROM pg_stat_activity WHERE pid = {backend} AND state = 'active'"
        wait_until(lambda: "LOOP" in (query(server.dsn, active) or ""), "the endless loop")
        postmaster, watching = postmaster_pid(home), watcher_pid(home)
        os.kill(watching, signal.SIGKILL)
        os.kill(postmaster, signal.SIGKILL)
        wait_for_end(watching, postmaster)
        started = threading.Event()
        threading.Thread(target=_kill_after_error, args=(home, client, started), daemon=True).start()
        with EmbeddedServer.start(home, options=options) as again:
            started.set()
            # It has let go of its memory, which is one of the last things that a process does.
            wait_for_end(backend)
            assert "still in use" in Layout(home).log.read_text()
            assert query(again.dsn, "SELECT 1") == 1
    server.close()


def _kill_after_error(home: Path, client: "subprocess.Popen[str]", started: threading.Event) -> None:
    log = Layout(home).log
    wait_until(lambda: started.is_set() or "still in use" in log.read_text(), "PostgreSQL's refusal")
    client.kill()


def test_a_killed_postmaster_is_restarted_for_the_next_user(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST) as first:
        lost = postmaster_pid(home)
        os.kill(lost, signal.SIGKILL)
        wait_for_end(lost)
        with EmbeddedServer.start(home, options=FAST) as second:
            assert query(second.dsn, "SELECT 1") == 1
            # The address stays the same, so that the first user can reconnect.
            assert query(first.dsn, "SELECT 1") == 1


def test_a_killed_server_is_restarted_for_its_users(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "CHECK_EVERY_S", 0.05)

    def answers() -> bool:
        with suppress(psycopg.OperationalError):
            return bool(query(dsn, "SELECT true"))
        return False

    with database(Settings(home=home)) as dsn:
        killed = postmaster_pid(home)
        os.kill(killed, signal.SIGKILL)
        wait_for_end(killed)
        wait_until(answers, "the server's return, at the same address")
    wait_until_idle(home)


def test_a_server_that_stopped_after_its_last_user_is_not_restarted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keeper is about to look when the user goes."""
    looking, stopped = threading.Event(), threading.Event()
    has_ended = keeper._has_ended

    def look_late(layout: Layout) -> bool:
        looking.set()
        return stopped.wait(60) and has_ended(layout)

    def starts() -> int:
        return Layout(home).log.read_text().count("ready to accept connections")

    monkeypatch.setattr(keeper, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(keeper, "_has_ended", look_late)
    before = set(threading.enumerate())
    with database(Settings(home=home)):
        (keeping,) = set(threading.enumerate()) - before
        assert looking.wait(60)
        started = starts()
    wait_until_idle(home)
    stopped.set()
    keeping.join(60)
    assert not keeping.is_alive()
    assert starts() == started


@contextmanager
def _process_of_the_server_account(home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    account = server_account(Layout(home))
    identity = {"user": account.uid, "group": account.gid, "extra_groups": []} if account.switched else {}
    with subprocess.Popen(["/bin/sleep", "60"], cwd="/", **identity) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def _write_stale_files(home: Path, pid: int) -> None:
    """Files of a killed server whose process id is in use again."""
    layout = Layout(home)
    lines = [
        str(pid),
        "/proc/self/fd/3",
        "1794789676",
        "5432",
        "socket",
        "",
        "  2146333         5",
        "ready   ",
    ]
    layout.pid_file.write_text("\n".join(lines) + "\n")
    (layout.socket_directory / ".s.PGSQL.5432.lock").write_text("\n".join(lines[:5]) + "\n")
    owner = layout.data.stat()
    for path in (layout.pid_file, layout.socket_directory / ".s.PGSQL.5432.lock"):
        os.chown(path, owner.st_uid, owner.st_gid)


def test_a_stale_pid_file_that_names_another_program(home: Path) -> None:
    with _process_of_the_server_account(home) as bystander:
        _write_stale_files(home, bystander.pid)
        assert identify(bystander.pid, Layout(home).data) is Identity.FOREIGN
        with EmbeddedServer.start(home, options=FAST) as server:
            assert query(server.dsn, "SELECT 1") == 1
        assert bystander.poll() is None


def test_a_stale_pid_file_that_names_another_homes_server(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")  # noqa: S108 - tmp_path is too long for a socket
    other = tmp_path / "other"
    with EmbeddedServer.start(other, options=FAST):
        pid = postmaster_pid(other)
        _write_stale_files(home, pid)
        with EmbeddedServer.start(home, options=FAST) as server:
            assert query(server.dsn, "SELECT 1") == 1
        assert is_running(pid)
    wait_until_idle(other)


@pytest.mark.parametrize("content", ["", "\n", "not a number\n", "-1\n", "0\n", "99999999\n"])
def test_a_damaged_pid_file_does_not_crash_the_search(home: Path, content: str) -> None:
    Layout(home).pid_file.write_text(content)
    assert is_idle(home)


PR_SET_CHILD_SUBREAPER = 36


@pytest.mark.skipif(sys.platform != "linux", reason="makes a zombie by means of Linux")
def test_a_zombie_postmaster(home: Path) -> None:
    """As in a container whose process 1 never reaps: the killed postmaster keeps its process id."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours: list[int] = []
    try:
        lost = EmbeddedServer.start(home, options=FAST)
        ours += [watcher_pid(home), postmaster_pid(home)]
        # In this order, so that the postmaster becomes a child of this process, which doesn't reap it.
        for pid in ours:
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
        os.kill(ours[1], 0)  # The process id still exists,
        assert identify(ours[1], Layout(home).data) is Identity.GONE  # but isn't a running process.
        lost.close()
        with EmbeddedServer.start(home, options=FAST) as server:
            assert query(server.dsn, "SELECT 1") == 1
            ours.append(watcher_pid(home))
        wait_until_idle(home)
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        for pid in ours:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


@pytest.fixture
def endless_initdb(short_directory: Path, new_home: Path, some_binaries: Binaries) -> Binaries:
    """Programs whose initdb does its work, but ends only after the test: its caller can't go on."""
    real = choose_for_account([some_binaries], server_account(Layout(new_home)))
    programs = short_directory / "programs"
    programs.mkdir()
    # The server's account must be able to run them.
    for directory in (short_directory, programs):
        directory.chmod(0o755)
    (programs / "postgres").symlink_to(real.program("postgres"))
    script = programs / "initdb"
    script.write_text(
        f'#!/bin/sh\n\'{real.program("initdb")}\' "$@"\nwhile [ -e "$0" ]; do sleep 0.1; done\n'
    )
    script.chmod(0o755)
    return replace(real, directory=programs)


def test_a_starter_killed_during_initdb(new_home: Path, endless_initdb: Binaries) -> None:
    with User(new_home, binaries=endless_initdb) as user:
        wait_until(lambda: any(new_home.glob("postgres.new-*/data/PG_VERSION")), "initdb at work")
        user.kill()
    assert not Layout(new_home).data.exists()
    with EmbeddedServer.start(new_home, options=FAST) as server:
        assert query(server.dsn, "SELECT 1") == 1
        assert not list(new_home.glob("postgres.new-*"))


def test_a_starter_killed_while_the_server_starts(home: Path) -> None:
    with User(home) as user:
        wait_until(Layout(home).pid_file.exists, "the postmaster")
        user.kill()
    wait_until_idle(home)
    with EmbeddedServer.start(home, options=FAST) as server:
        assert query(server.dsn, "SELECT 1") == 1


def test_a_lost_passfile_gets_a_new_password(home: Path) -> None:
    passfile = Layout(home).passfile
    old = passfile.read_text()
    passfile.unlink()
    with EmbeddedServer.start(home, options=FAST) as server:
        assert query(server.dsn, "SELECT 1") == 1
        assert passfile.read_text() != old
        passfile.unlink()
        with pytest.raises(EmbeddedServerError, match=r"password file .* is missing"):
            EmbeddedServer.start(home)


def test_a_server_started_manually_is_left_alone(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST) as server:
        binaries = server.binaries
    wait_until_idle(home)
    layout = Layout(home)
    account = server_account(layout)
    handle = os.open(layout.data, os.O_RDONLY | os.O_DIRECTORY)
    identity = {"user": account.uid, "group": account.gid, "extra_groups": []} if account.switched else {}
    command = [str(binaries.program("postgres")), "-D", account.data_argument(layout.data, handle)]
    command += ["-c", "listen_addresses=", "-c", "unix_socket_directories=socket", "-F"]
    with subprocess.Popen(  # type: ignore[call-overload]
        command, cwd="/", pass_fds=[handle], stderr=subprocess.DEVNULL, **identity
    ) as by_hand:
        os.close(handle)
        try:
            wait_until(
                lambda: layout.pid_file.exists() and "ready" in layout.pid_file.read_text(), "the server"
            )
            with pytest.raises(EmbeddedServerError, match=rf"Process {by_hand.pid} .* didn't start"):
                EmbeddedServer.start(home)
            assert layout.pid_file.exists()
        finally:
            by_hand.send_signal(signal.SIGQUIT)


def test_the_log_is_rotated_at_the_start(home: Path) -> None:
    log = Layout(home).log
    log.write_bytes(b"old line\n" * 200_000)
    with EmbeddedServer.start(home, options=FAST):
        assert "old line" not in log.read_text()
        assert "ready to accept connections" in log.read_text()
        assert log.with_name("postgres.log.1").stat().st_size == 9 * 200_000


def test_a_long_log_is_truncated(tmp_path: Path) -> None:
    log = tmp_path / "postgres.log"
    log.write_bytes(b"x" * (watcher.LOG_LIMIT_BYTES + 1) + b"the end\n")
    watcher._limit_log(str(log))
    assert log.stat().st_size == 0
    kept = log.with_name("postgres.log.1").read_bytes()
    assert len(kept) == watcher.LOG_KEPT_BYTES
    assert kept.endswith(b"the end\n")


def test_connections_of_a_user_survive_the_end_of_another(home: Path) -> None:
    with User(home) as starter:
        dsn = starter.answer().dsn
        with EmbeddedServer.start(home), psycopg.connect(dsn) as connection:
            starter.kill()
            connection.execute("SELECT pg_sleep(1.2)")
    wait_until_idle(home)
    assert not locks.is_held(Layout(home).watcher_lock)
