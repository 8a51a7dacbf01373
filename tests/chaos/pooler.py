"""PgBouncer, by default in transaction mode, before the primary."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from psycopg.conninfo import make_conninfo

from lineshaft.embedded.account import SystemAccount, server_environment
from lineshaft.engine.postgres.database import PLAN_BY_INDEX
from tests.chaos.cluster import DATABASE, PASSWORD, ROLE
from tests.ports import reserved_port

#: Few, so that clients share them all the time.
SERVER_CONNECTIONS = 4
_PATIENCE_SEC = 60


class Pooler:
    def __init__(
        self,
        program: str,
        directory: Path,
        account: SystemAccount,
        port_of: Callable[[], int],
        mode: str = "transaction",
    ) -> None:
        """`port_of` returns the port of the primary."""
        self._program = program
        self._account = account
        self._port_of = port_of
        self._mode = mode
        self._config = directory / "pgbouncer.ini"
        self._log = directory / "pgbouncer.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = reserved_port()

    @property
    def dsn(self) -> str:
        return make_conninfo("", host="127.0.0.1", port=self.port, user=ROLE, dbname=DATABASE)

    async def start(self) -> None:
        """Returns when it takes connections."""
        self._launch()
        async with asyncio.timeout(_PATIENCE_SEC):
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    await writer.wait_closed()
                    return
                await asyncio.sleep(0.05)

    def _launch(self) -> None:
        self._write()
        account = self._account
        switch = {"user": account.uid, "group": account.gid, "extra_groups": ()} if account.switched else {}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # type: ignore[call-overload]  # the switch is typed well enough
                [self._program, str(self._config)],
                cwd="/",
                env=server_environment(),
                stdout=log,
                stderr=log,
                **switch,
            )

    def follow(self) -> None:
        """Lead to the primary of now."""
        self._write()
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _write(self) -> None:
        query = PLAN_BY_INDEX.replace("'", "''")
        server = f"host=127.0.0.1 port={self._port_of()} user={ROLE} password={PASSWORD} dbname={DATABASE}"
        self._config.write_text(
            f"""
[databases]
{DATABASE} = {server} connect_query='{query}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = {self._mode}
default_pool_size = {SERVER_CONNECTIONS}
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
server_login_retry = 1
server_connect_timeout = 3
query_wait_timeout = 10
"""
        )
        self._config.chmod(0o644)
