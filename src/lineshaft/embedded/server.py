"""A PostgreSQL server that starts automatically, is shared by all its users, and stops after the last one.

`watcher` explains the protocol of the locks.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from lineshaft.embedded import address, cluster, copies, locks, processes
from lineshaft.embedded.account import SystemAccount, server_account, server_environment
from lineshaft.embedded.binaries import Binaries, find_binaries, fitting, read_record, write_record
from lineshaft.embedded.faults import explained, log_tail, start_failure
from lineshaft.embedded.layout import Layout
from lineshaft.embedded.watcher import DATA_FD, SOCKET_DIRECTORY
from lineshaft.errors import EmbeddedServerError

START_TIMEOUT_S = 60.0
# More than the watcher needs to stop a server.
LOCK_PATIENCE_S = 200.0
# Backends of a killed postmaster end automatically, but a busy one takes some seconds to notice.
ORPHANS_PATIENCE_S = 30.0
WATCHER_TIMEOUT_S = 30.0
_CHECK_EVERY_S = 0.02
_LOG_ROTATED_AT_BYTES = 1024 * 1024

_DEFAULT_OPTIONS = {
    "listen_addresses": "",
    "port": "5432",
    "cluster_name": "lineshaft",
    # Containers often have a /dev/shm of 64 MB, and systemd empties it when its owner logs out.
    "dynamic_shared_memory_type": "mmap",
    "unix_socket_permissions": "0700",
    # A queue's tables turn over within seconds: with the default of a minute they grow to hundreds of MB.
    "autovacuum_naptime": "5s",
}
if sys.platform == "linux":
    # A query whose client was killed ends and releases its locks, even while it only computes.
    _DEFAULT_OPTIONS["client_connection_check_interval"] = "5s"
_OWN_OPTIONS = {
    "data_directory",
    "config_file",
    "external_pid_file",
    "unix_socket_directories",
    "lineshaft.data",
}
_OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


class EmbeddedServer:
    """A share in the server of one home directory.

    The server runs as long as there is a share; a share ends with `close`, or with its process. A process may
    have several. A child of `fork` has its parent's share, too, until it closes it or ends.
    """

    __slots__ = ("_share", "binaries", "dsn", "home")

    def __init__(self, home: Path, binaries: Binaries, dsn: str, share: int) -> None:
        self.home = home
        self.binaries = binaries
        self.dsn = dsn
        """Contains no password, but the path of the passfile."""
        self._share: int | None = share

    @classmethod
    def start(
        cls, home: Path, *, binaries: Binaries | None = None, options: Mapping[str, str] | None = None
    ) -> Self:
        """Join the running server, or start it; returns when it is ready.

        `binaries` and `options` (settings as in postgresql.conf) only apply if this call starts the server.
        """
        if sys.platform == "win32":
            raise EmbeddedServerError(
                "The embedded PostgreSQL doesn't run on Windows. Give the DSN of a PostgreSQL server."
            )
        _check_options(options or {})
        layout = Layout(Path(home))
        with explained(layout):
            layout.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            layout = Layout(layout.home.resolve())
            starter = _Starter(layout, binaries, dict(options or {}))
            return cls(layout.home, *starter.start())

    def restart(self) -> None:
        """Restart a server that was killed while it had users; this share is kept."""
        layout = Layout(self.home)
        with explained(layout):
            *_, another = _Starter(layout, None, {}).start()
            os.close(another)

    def close(self) -> None:
        """Release this share; the watcher stops the server soon after the last one."""
        share, self._share = self._share, None
        if share is None:
            return
        os.close(share)
        if os.getpid() == 1:
            # The container ends with this process and would kill the server during its shutdown.
            _wait_for_end(Layout(self.home))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._share is None else "open"
        return f"<EmbeddedServer {self.home} PostgreSQL {self.binaries.version} {state}>"


@dataclass(frozen=True, slots=True)
class _RunningServer:
    pid: int
    binaries: Binaries
    log_from: int


@dataclass(frozen=True, slots=True)
class _Starter:
    layout: Layout
    requested: Binaries | None
    options: dict[str, str]

    def start(self) -> tuple[Binaries, str, int]:
        layout = self.layout
        with locks.exclusive(
            layout.start_lock,
            patience=LOCK_PATIENCE_S,
            waiting_for=f"another process that is starting or stopping {layout.home}",
        ):
            # From here on the watcher, existing or started below, knows about this user.
            share = locks.take_share(
                layout.users_lock, patience=LOCK_PATIENCE_S, waiting_for=f"the watcher of {layout.home}"
            )
            try:
                directory = address.client_directory(layout)
                link = None if directory == layout.socket_directory else directory.parent
                running = self._join(link) or self._launch(link)
            except BaseException:
                os.close(share)
                raise
        try:
            # Recovery after a crash may take long; others can join the wait.
            port = _wait_until_ready(layout, running)
        except BaseException:
            os.close(share)
            raise
        return running.binaries, address.dsn(layout, directory, port), share

    def _join(self, link: Path | None) -> _RunningServer | None:
        """The running server, with a new watcher if it has lost its own; None: neither is running."""
        started = time.monotonic()
        while True:
            postmaster = processes.find_postmaster(self.layout)
            watched = locks.is_held(self.layout.watcher_lock)
            if postmaster is not None and postmaster.status != "stopping":
                if not watched:
                    self._run_watcher(link, adopt=postmaster.pid)
                self._check_passfile()
                size = self.layout.log.stat().st_size if self.layout.log.exists() else 0
                return _RunningServer(postmaster.pid, self._recorded_binaries(), size)
            if postmaster is None and not watched:
                return None
            # A server may take long to stop; a watcher without a server ends immediately.
            patience = WATCHER_TIMEOUT_S if postmaster is None else LOCK_PATIENCE_S
            if time.monotonic() > started + patience:
                break
            time.sleep(_CHECK_EVERY_S)
        raise EmbeddedServerError(
            f"A process holds {self.layout.watcher_lock}, but no server is running on {self.layout.data}: "
            "it hangs, or it belongs to another container with the same directory. Only one container at a "
            "time can use a home: use another home (LINESHAFT_HOME), or give a DSN."
        )

    def _launch(self, link: Path | None) -> _RunningServer:
        layout = self.layout
        major = layout.data_major()
        account = server_account(layout)
        binaries = self._choose(account, major)
        sync = self.options.get("fsync", "on").lower() not in {"off", "false", "no", "0"}
        if major is None:
            cluster.create_data(layout, binaries, account, sync=sync)
        else:
            cluster.remove_drafts(layout)
            processes.remove_stale_pid_file(layout)
            if not layout.passfile.exists():
                cluster.replace_lost_password(layout, binaries, account)
        write_record(layout.binaries_record, binaries)
        _rotate_log(layout.log)
        deadline = time.monotonic() + ORPHANS_PATIENCE_S
        while True:
            log_from = layout.log.stat().st_size if layout.log.exists() else 0
            pid = self._run_watcher(link, command=self._command(binaries, account), account=account)
            if _wait_until_owned(layout, pid):
                return _RunningServer(pid, binaries, log_from)
            in_use = "shared memory block" in log_tail(layout.log, log_from)
            if not in_use or time.monotonic() > deadline:
                raise start_failure(layout, binaries, log_from)
            _wait_while(lambda: locks.is_held(layout.watcher_lock), WATCHER_TIMEOUT_S)

    def _choose(self, account: SystemAccount, data_major: int | None) -> Binaries:
        candidates = find_binaries() if self.requested is None else [self.requested]
        fit = fitting(candidates, self.layout.data, data_major)
        return choose_for_account(fit, account)

    def _command(self, binaries: Binaries, account: SystemAccount) -> list[str]:
        settings = (
            _DEFAULT_OPTIONS
            | self.options
            | {"unix_socket_directories": SOCKET_DIRECTORY}
            | dict([processes.data_mark(self.layout.data).split("=")])
        )
        command = [str(binaries.program("postgres")), "-D", account.data_argument(self.layout.data, DATA_FD)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _run_watcher(
        self,
        link: Path | None,
        *,
        adopt: int | None = None,
        command: list[str] | None = None,
        account: SystemAccount | None = None,
    ) -> int:
        order = {
            "adopt": adopt,
            "data": str(self.layout.data),
            "command": command,
            "environment": server_environment(),
            "account": [account.uid, account.gid] if account and account.switched else None,
            "link": None if link is None else str(link),
        }
        watcher = Path(__file__).with_name("watcher.py")
        log = os.open(self.layout.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            finished = subprocess.run(
                [sys.executable, "-I", "-S", str(watcher), str(self.layout.home)],
                input=json.dumps(order).encode(),
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env=server_environment(),
                timeout=WATCHER_TIMEOUT_S,
                check=False,
            )
            report = json.loads(finished.stdout or "{}")
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            report = {}
        finally:
            os.close(log)
        if not isinstance(report.get("postmaster"), int):
            fault = report.get("error", f"it ended without a result; see {self.layout.log}")
            raise EmbeddedServerError(
                f"The watcher of the embedded PostgreSQL didn't start: {fault}. Try again."
            )
        return int(report["postmaster"])

    def _check_passfile(self) -> None:
        if not self.layout.passfile.exists():
            raise EmbeddedServerError(
                f"The server in {self.layout.home} is running, but its password file {self.layout.passfile} "
                "is missing. End all processes that use the server, so that it stops; the next start creates "
                "a new password."
            )

    def _recorded_binaries(self) -> Binaries:
        # Without the record, assume what would be started now.
        return (
            read_record(self.layout.binaries_record)
            or fitting(find_binaries(), self.layout.data, self.layout.data_major())[0]
        )


def choose_for_account(fit: list[Binaries], account: SystemAccount) -> Binaries:
    """The first binaries that the account can run, otherwise a copy of the wheel's."""
    if not account.switched:
        return fit[0]
    if not account.can_be_used():
        raise EmbeddedServerError(
            f"PostgreSQL doesn't run as root, and this process can't switch to the account {account.name}. "
            "Run Lineshaft as an ordinary account, or give a DSN."
        )
    for binaries in fit:
        if account.can_run(binaries.program("postgres")):
            return binaries
    for binaries in fit:
        if binaries.source == "wheel":
            return copies.reachable_copy(binaries, account)
    raise EmbeddedServerError(
        f"The server must run as {account.name}, which can't run {fit[0]}: it can't enter a directory of the "
        "path. Run Lineshaft as an ordinary account, install PostgreSQL with the system's package manager, "
        "or give a DSN."
    )


def _check_options(options: Mapping[str, str]) -> None:
    for name in options:
        if not _OPTION_NAME.fullmatch(name):
            raise EmbeddedServerError(f"{name!r} is not a valid name of a PostgreSQL setting.")
        if name.lower() in _OWN_OPTIONS:
            raise EmbeddedServerError(f"The server option {name} is reserved for Lineshaft; leave it out.")


def _wait_until_owned(layout: Layout, pid: int) -> bool:
    """Wait until the server owns its data and memory; False: it ended first.

    It writes its process id first, and its status only when no earlier server is in the way.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while processes.is_running(pid):
        found = processes.read_pid_file(layout)
        if found is not None and found.pid == pid and found.status:
            return True
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"The server (process {pid}) made no progress for {START_TIMEOUT_S:.0f} s. Log: {layout.log}."
            )
        time.sleep(_CHECK_EVERY_S)
    return False


def _wait_until_ready(layout: Layout, running: _RunningServer) -> int:
    """Wait until the server is ready; returns its port. A recovery may take any time."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while processes.is_running(running.pid):
        found = processes.read_pid_file(layout)
        if found is not None and found.pid == running.pid:
            if found.status == "ready":
                return found.port
            if found.status == "starting":
                deadline = time.monotonic() + START_TIMEOUT_S
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"The server (process {running.pid}) is running but not ready after {START_TIMEOUT_S:.0f} s. "
                f"The end of its log, {layout.log}:\n{log_tail(layout.log)}"
            )
        time.sleep(_CHECK_EVERY_S)
    raise start_failure(layout, running.binaries, running.log_from)


def _wait_for_end(layout: Layout, patience: float = 10.0) -> None:
    """Wait for the server, which ends after it has removed its pid file, and for its parent, the watcher."""
    _wait_while(
        lambda: processes.find_postmaster(layout) is not None or locks.is_held(layout.watcher_lock), patience
    )


def _wait_while(condition: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    while condition() and time.monotonic() < deadline:
        time.sleep(_CHECK_EVERY_S)


def _rotate_log(log: Path) -> None:
    if log.exists() and log.stat().st_size > _LOG_ROTATED_AT_BYTES:
        log.replace(log.with_name(log.name + ".1"))
