"""A server starts automatically, is shared by its users, and stops after the last one."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from lineshaft.embedded import Binaries, EmbeddedServer, locks
from lineshaft.embedded.layout import Layout
from lineshaft.embedded.processes import is_running
from lineshaft.engine.postgres import migrate
from tests.embedded.helpers import (
    FAST,
    User,
    postmaster_pid,
    query,
    wait_for_end,
    wait_until_idle,
    watcher_pid,
)


@pytest.mark.slow("creates a database cluster")
def test_starts_from_nothing_and_keeps_the_data(new_home: Path, binaries: Binaries) -> None:
    with EmbeddedServer.start(new_home, binaries=binaries, options=FAST) as server:
        assert server.home == new_home
        assert server.binaries.version == binaries.version
        assert query(server.dsn, "SHOW server_version_num").startswith(str(binaries.major))
        assert (
            query(server.dsn, "SELECT current_user || ' in ' || current_database()")
            == "lineshaft in lineshaft"
        )
        assert query(server.dsn, "SHOW data_checksums") == "on"
        assert query(server.dsn, "SHOW server_encoding") == "UTF8"
        assert query(server.dsn, "SHOW listen_addresses") == ""
        query(server.dsn, "CREATE TABLE kept AS SELECT 42 AS answer")
        first = postmaster_pid(new_home)
    wait_until_idle(new_home)
    with EmbeddedServer.start(new_home, binaries=binaries, options=FAST) as server:
        assert query(server.dsn, "SELECT answer FROM kept") == 42
        assert postmaster_pid(new_home) != first


def test_durable_by_default(home: Path) -> None:
    with EmbeddedServer.start(home) as server:
        assert query(server.dsn, "SHOW fsync") == "on"
        assert query(server.dsn, "SHOW full_page_writes") == "on"
        assert query(server.dsn, "SHOW synchronous_commit") == "on"
        assert query(server.dsn, "SHOW autovacuum_naptime") == "5s"
        assert migrate.advice(server.dsn) == []


def test_a_long_pause_of_autovacuum_is_reported(home: Path) -> None:
    with EmbeddedServer.start(home, options={**FAST, "autovacuum_naptime": "1min"}) as server:
        (advice,) = migrate.advice(server.dsn)
    assert advice.startswith("Autovacuum looks for work every 60 s")


def test_the_dsn_has_no_password_and_the_passfile_is_private(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST) as server:
        passfile = Layout(home).passfile
        password = passfile.read_text().strip().rpartition(":")[2]
        assert len(password) >= 32
        assert "password" not in server.dsn
        assert password not in server.dsn
        assert password not in repr(server)
        assert passfile.stat().st_mode & 0o777 == 0o600
        assert passfile.stat().st_uid == os.geteuid()
        assert password not in Layout(home).log.read_text()


def test_a_wrong_password_is_rejected(home: Path, short_directory: Path) -> None:
    wrong = short_directory / "wrong"
    wrong.write_text("*:*:*:lineshaft:wrong\n")
    wrong.chmod(0o600)
    with (
        EmbeddedServer.start(home, options=FAST) as server,
        pytest.raises(Exception, match="password authentication failed"),
    ):
        query(server.dsn.replace(str(Layout(home).passfile), str(wrong)), "SELECT 1")


def test_psql_accepts_the_dsn(home: Path) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("no psql here")
    with EmbeddedServer.start(home, options=FAST) as server:
        answer = subprocess.run(
            [psql, "-w", "-Atc", "SELECT 1 + 1", server.dsn], capture_output=True, text=True, check=False
        )
        assert answer.stdout == "2\n", answer.stderr


def test_several_shares_in_one_process_are_one_server(home: Path) -> None:
    first = EmbeddedServer.start(home, options=FAST)
    second = EmbeddedServer.start(home)
    pid = postmaster_pid(home)
    assert second.dsn == first.dsn
    assert second.binaries == first.binaries
    first.close()
    first.close()
    # The watcher checks twice a second: a whole second of answers proves that it keeps the server.
    third = EmbeddedServer.start(home)
    assert query(second.dsn, "SELECT 1 FROM pg_sleep(1.2)") == 1
    third.close()
    assert postmaster_pid(home) == pid
    second.close()
    wait_until_idle(home)


@pytest.mark.slow("starts many processes")
def test_simultaneous_starters_get_one_server(new_home: Path) -> None:
    with ExitStack() as stack:
        users = [stack.enter_context(User(new_home)) for _ in range(4)]
        answers = [user.answer() for user in users]
        assert [answer.error for answer in answers] == [""] * 4
        started = {query(answer.dsn, "SELECT pg_postmaster_start_time()") for answer in answers}
        assert len(started) == 1
        assert len({answer.dsn for answer in answers}) == 1
    wait_until_idle(new_home)


def test_threads_that_start_at_once_get_one_server(home: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        servers = list(pool.map(lambda _: EmbeddedServer.start(home, options=FAST), range(4)))
    assert len({server.dsn for server in servers}) == 1
    for server in servers:
        server.close()


def test_stops_after_all_users_were_killed(home: Path) -> None:
    with User(home) as first, User(home) as second:
        assert first.answer().dsn == second.answer().dsn
        pid, watcher = postmaster_pid(home), watcher_pid(home)
        first.kill()
        assert is_running(pid)
        second.kill()
        wait_for_end(pid, watcher)


@pytest.mark.slow("a dozen starts and stops")
def test_a_newcomer_while_the_server_stops_gets_a_server(home: Path) -> None:
    """Joins and leaves at all moments of the watcher's interval; each time a server must answer."""
    for round_ in range(12):
        with EmbeddedServer.start(home, options=FAST) as server:
            assert query(server.dsn, "SELECT 1") == 1
        # From 0 to 0.66 s, so that some rounds fall before, some into and some after the shutdown.
        threading.Event().wait(0.06 * round_)
    wait_until_idle(home)


def _use_until(dsn: str, connected: Event, enough: Event) -> None:
    query(dsn, "SELECT 1")
    connected.set()
    enough.wait(60)
    query(dsn, "SELECT 1")


@pytest.mark.slow("starts processes and a server")
def test_a_forked_child_keeps_the_server_until_it_ends(home: Path) -> None:
    fork = multiprocessing.get_context("fork")
    connected, enough = fork.Event(), fork.Event()
    server = EmbeddedServer.start(home, options=FAST)
    child = fork.Process(target=_use_until, args=(server.dsn, connected, enough))
    child.start()
    assert connected.wait(60)
    server.close()
    assert query(server.dsn, "SELECT 1 FROM pg_sleep(1.2)") == 1
    enough.set()
    child.join(60)
    assert child.exitcode == 0
    wait_until_idle(home)


@pytest.mark.slow("starts processes and a server")
def test_a_program_of_a_user_inherits_no_locks(home: Path) -> None:
    """Neither PostgreSQL nor any other child may hold the locks of its starter."""
    server = EmbeddedServer.start(home, options=FAST)
    with subprocess.Popen(["/bin/sleep", "60"]) as bystander:
        server.close()
        wait_until_idle(home)
        bystander.kill()


@pytest.mark.slow("starts processes and a server")
def test_the_watcher_is_small_and_pins_no_directory(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST):
        proc = Path("/proc") / str(watcher_pid(home))
        if not proc.exists():
            pytest.skip("no /proc here")
        resident = next(
            line for line in (proc / "status").read_text().splitlines() if line.startswith("VmRSS")
        )
        assert int(resident.split()[1]) < 20_000
        assert (proc / "cwd").readlink() == Path("/")
        assert [(proc / "fd" / str(number)).readlink() for number in (0, 1)] == [Path(os.devnull)] * 2


@pytest.mark.slow("starts servers")
def test_options_reach_the_server_and_a_port_reaches_the_dsn(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST | {"work_mem": "7MB", "port": "6543"}) as server:
        assert query(server.dsn, "SHOW work_mem") == "7MB"
        with EmbeddedServer.start(home) as joined:
            assert joined.dsn == server.dsn
            assert query(joined.dsn, "SHOW port") == "6543"


@pytest.mark.slow("starts several servers")
def test_each_home_has_its_own_server(
    home: Path,
    short_directory: Path,
    some_binaries: Binaries,
    copy_of_made_home: Callable[[Binaries, Path], None],
) -> None:
    other = short_directory / "other"
    copy_of_made_home(some_binaries, other)
    with EmbeddedServer.start(home, options=FAST), EmbeddedServer.start(other, options=FAST):
        assert postmaster_pid(home) != postmaster_pid(other)
    wait_until_idle(other)


def test_the_start_lock_is_free_afterwards(home: Path) -> None:
    with EmbeddedServer.start(home, options=FAST):
        assert not locks.is_held(Layout(home).start_lock)


@pytest.mark.slow("starts processes and a server")
def test_process_1_of_a_container_waits_for_the_shutdown(home: Path) -> None:
    """All others are killed when it ends, the watcher too."""
    unshare = shutil.which("unshare")
    alone = [str(unshare), "--pid", "--fork", "--mount-proc", "--kill-child"]
    if unshare is None or subprocess.run([*alone, "/bin/true"], capture_output=True, check=False).returncode:
        pytest.skip("can't make a process namespace here")
    program = (
        "import os, sys; from pathlib import Path; from lineshaft.embedded import EmbeddedServer, locks; "
        "from lineshaft.embedded.layout import Layout; home = Path(sys.argv[1]); "
        "assert os.getpid() == 1; EmbeddedServer.start(home).close(); "
        "assert not locks.is_held(Layout(home).watcher_lock)"
    )
    subprocess.run([*alone, sys.executable, "-c", program, str(home)], check=True)
    assert "database system is shut down" in Layout(home).log.read_text().splitlines()[-1]
    assert not Layout(home).pid_file.exists()
