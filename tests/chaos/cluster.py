"""PostgreSQL servers that can be killed, restarted and replaced by their standby.

The product's embedded server restarts automatically and is shared by all of its users. Here the point is to
break it, so the same programs are run by hand. Data is as durable as a crash of a process needs: the machine
doesn't lose power, so nothing is synced.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from lineshaft.embedded.account import SystemAccount, server_account, server_environment
from lineshaft.embedded.binaries import Binaries, find_binaries
from lineshaft.embedded.layout import Layout
from lineshaft.embedded.server import choose_for_account
from tests.ports import reserved_port

ROLE, DATABASE, PASSWORD = "lineshaft", "postgres", "chaos"
_PATIENCE_SEC = 60.0
_OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "max_connections": "200",
    "wal_keep_size": "512MB",
    "client_connection_check_interval": "1s",
    # Backends of a killed primary must not wait forever.
    "wal_receiver_timeout": "5s",
    "wal_sender_timeout": "5s",
}


#: A database that forgets: commits are answered long before they are written down.
_LOSSY = {"synchronous_commit": "off", "wal_writer_delay": "10s"}


class Node:
    """One server: its data, its port, and its process while it runs."""

    def __init__(
        self, directory: Path, name: str, binaries: Binaries, account: SystemAccount, options: dict[str, str]
    ) -> None:
        self.name = name
        self._options = options
        self.port = reserved_port()
        self.data = directory / name
        self._log = directory / f"{name}.log"
        self._binaries = binaries
        self._account = account
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return make_conninfo(
            "", host="127.0.0.1", port=self.port, user=ROLE, password=PASSWORD, dbname=DATABASE
        )

    def create(self) -> None:
        secret = self.data.with_name("password")
        secret.write_text(PASSWORD)
        self._account.give(secret)
        self._make_directory()
        self._run(
            "initdb",
            f"--pgdata={self.data}",
            f"--username={ROLE}",
            f"--pwfile={secret}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        )

    def copy_from(self, primary: "Node") -> None:
        """Become a standby of it."""
        shutil.rmtree(self.data, ignore_errors=True)
        self._make_directory()
        self._run(
            "pg_basebackup",
            f"--pgdata={self.data}",
            f"--dbname={primary.dsn} application_name={self.name}",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
        )

    def start(self) -> None:
        command = [str(self._binaries.program("postgres")), "-D", str(self.data), "-c", f"port={self.port}"]
        for name, value in self._options.items():
            command += ["-c", f"{name}={value}"]
        account = self._account
        switch = {"user": account.uid, "group": account.gid, "extra_groups": ()} if account.switched else {}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # type: ignore[call-overload]  # the switch is typed well enough
                command, cwd="/", env=server_environment(), stdout=log, stderr=log, **switch
            )

    async def answers(self, *, as_standby: bool = False) -> None:
        """Returns when it does."""
        deadline = time.monotonic() + _PATIENCE_SEC
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self.dsn, connect_timeout=10) as connection:
                    cursor = await connection.execute("SELECT pg_is_in_recovery()")
                    if await cursor.fetchone() == (as_standby,):
                        return
            except psycopg.OperationalError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} doesn't answer; its log is {self._log}")
            await asyncio.sleep(0.05)

    async def stop(self, how: signal.Signals) -> None:
        """SIGTERM: smart, SIGINT: fast, SIGQUIT: immediate, SIGKILL: as if it were gone."""
        process, self._process = self._process, None
        if process is None:
            return
        children = _children(process.pid)
        process.send_signal(how)
        if how is signal.SIGKILL:
            # Backends end when they notice; a machine that is gone takes them along at once.
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        await asyncio.to_thread(process.wait, _PATIENCE_SEC)

    async def execute(self, statement: str) -> list[tuple[object, ...]]:
        async with await psycopg.AsyncConnection.connect(
            self.dsn, autocommit=True, connect_timeout=30
        ) as connection:
            cursor = await connection.execute(statement.encode())
            return await cursor.fetchall() if cursor.description else []

    def _make_directory(self) -> None:
        self.data.mkdir(mode=0o700)
        self._account.give(self.data)

    def _run(self, program: str, *arguments: str) -> None:
        answer = self._account.run([str(self._binaries.program(program)), *arguments])
        if answer.returncode:
            raise RuntimeError(f"{program} failed: {answer.stderr[-2000:]}")


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


class Cluster:
    """A primary and, if wanted, a synchronous standby."""

    def __init__(self, directory: Path, *, major: int | None = None, lossy: bool = False) -> None:
        account = server_account(Layout(directory))
        found = [each for each in find_binaries() if major in {None, each.major}]
        # The newest, which is the one that most people will meet.
        found.sort(key=lambda each: each.major, reverse=True)
        binaries = choose_for_account(found, account)
        self.account = account
        self.version = binaries.version
        options = _OPTIONS | (_LOSSY if lossy else {})
        self.primary = Node(directory, "first", binaries, account, options)
        self.spare = Node(directory, "second", binaries, account, options)
        self._has_standby = False
        #: Called when there is another primary.
        self.followers: list[Callable[[], None]] = []

    async def start(self, *, standby: bool) -> None:
        await asyncio.to_thread(self.primary.create)
        self.primary.start()
        await self.primary.answers()
        if standby:
            await self._add_standby()

    async def _add_standby(self) -> None:
        await asyncio.to_thread(self.spare.copy_from, self.primary)
        self.spare.start()
        await self.spare.answers(as_standby=True)
        await self._wait_for_standby()
        await self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        await self.primary.execute("SELECT pg_reload_conf()")
        await self._wait_for_standby("sync_state = 'sync'")
        self._has_standby = True

    async def _wait_for_standby(self, condition: str = "state = 'streaming'") -> None:
        """Until it has everything that the primary has now."""
        deadline = time.monotonic() + _PATIENCE_SEC
        ((now,),) = await self.primary.execute("SELECT pg_current_wal_lsn()::text")
        query = f"SELECT 1 FROM pg_stat_replication WHERE {condition} AND flush_lsn >= '{now}'::pg_lsn"
        while not await self.primary.execute(query):
            if time.monotonic() > deadline:
                raise TimeoutError("the standby doesn't catch up")
            await asyncio.sleep(0.05)

    async def restart(self, how: signal.Signals, away_sec: float) -> None:
        await self.primary.stop(how)
        await asyncio.sleep(away_sec)
        self.primary.start()
        await self.primary.answers()

    async def fail_over(self) -> None:
        """The primary is gone; its standby takes over. Whatever was answered is there."""
        # A commit whose wait for the standby was broken off (by pg_terminate_backend, or a restart) is
        # visible here before it is there; PostgreSQL promises nothing about it. Those are let through first.
        await self._wait_for_standby("sync_state = 'sync'")
        gone, heir = self.primary, self.spare
        await gone.stop(signal.SIGKILL)
        await heir.execute("SELECT pg_promote()")
        await heir.answers()
        # It has the settings of the primary that it was copied from.
        await heir.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await heir.execute("SELECT pg_reload_conf()")
        self.primary, self.spare = heir, gone
        self._has_standby = False
        for follow in self.followers:
            follow()

    async def replace_standby(self) -> None:
        if not self._has_standby:
            await self._add_standby()

    async def only_read(self, seconds: float) -> None:
        await self.primary.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        try:
            await self.primary.execute("SELECT pg_reload_conf()")
            await asyncio.sleep(seconds)
        finally:
            await self.primary.execute("ALTER SYSTEM RESET default_transaction_read_only")
            await self.primary.execute("SELECT pg_reload_conf()")

    async def terminate_backends(self) -> int:
        """Those of our clients."""
        rows = await self.primary.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return len(rows)

    async def stop(self) -> None:
        for node in (self.primary, self.spare):
            await node.stop(signal.SIGQUIT)
