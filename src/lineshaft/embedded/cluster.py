"""Creation of the data directory, complete or not at all."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lineshaft.embedded.account import SystemAccount, has_name
from lineshaft.embedded.binaries import Binaries
from lineshaft.embedded.faults import remedy_for
from lineshaft.embedded.layout import Layout, write_private
from lineshaft.errors import EmbeddedServerError

DATABASE = "lineshaft"
#: Owns the database and may create others, for tests. It can't read files or run programs of the machine.
ROLE = "lineshaft"
#: Acts only while there is no server: its password is forgotten.
_SUPERUSER = "postgres"
_HAS_CHECKPOINT_ROLE = 15
_DRAFT_PREFIX = "postgres.new-"
_ORPHAN_PATIENCE_S = 5.0
_NEEDED_BYTES = 150 * 1024 * 1024


def create_data(layout: Layout, binaries: Binaries, account: SystemAccount, *, sync: bool) -> None:
    """Create the data beside its place and move it there when it is complete; needs the start lock."""
    remove_drafts(layout)
    _check_place(layout)
    if not has_name(account.uid):
        raise EmbeddedServerError(
            f"This process runs as uid {account.uid}, which has no name in /etc/passwd; PostgreSQL's initdb "
            "needs one. Add an entry, run as an account that has one, or give a DSN."
        )
    password = secrets.token_hex(24)
    draft = Path(tempfile.mkdtemp(prefix=_DRAFT_PREFIX, dir=layout.home))
    try:
        data, pwfile = draft / "data", draft / "password"
        data.mkdir(mode=0o700)
        write_private(pwfile, secrets.token_hex(24) + "\n")
        account.give(data, pwfile, draft)
        _run_initdb(data, binaries, account, sync=sync)
        _run_single_user(
            data,
            binaries,
            account,
            f"CREATE ROLE {ROLE} LOGIN CREATEDB PASSWORD '{password}';\n"
            # Benchmarks need it, and it reveals and changes nothing.
            + (f"GRANT pg_checkpoint TO {ROLE};\n" if binaries.major >= _HAS_CHECKPOINT_ROLE else "")
            + f"CREATE DATABASE {DATABASE} OWNER {ROLE};",
            database="postgres",
            sync=sync,
            secret=password,
        )
        # The password first: data with a lost password would be worse than a password without data.
        _write_passfile(layout, password)
        data.rename(layout.data)
        _sync_directory(layout.home)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_drafts(layout: Layout) -> None:
    """Remove what a killed start left behind; needs the start lock."""
    deadline = time.monotonic() + _ORPHAN_PATIENCE_S
    while leftovers := list(layout.home.glob(f"{_DRAFT_PREFIX}*")):
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)
        # An initdb that outlived its killed starter may still be writing; it fails once its files are gone.
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def replace_lost_password(layout: Layout, binaries: Binaries, account: SystemAccount) -> None:
    """Give the role a new password; the server must not be running."""
    password = secrets.token_hex(24)
    statement = f"ALTER ROLE {ROLE} PASSWORD '{password}';"
    _run_single_user(layout.data, binaries, account, statement, database=DATABASE, sync=True, secret=password)
    _write_passfile(layout, password)


def _check_place(layout: Layout) -> None:
    if layout.data.is_symlink() or (layout.data.exists() and any(layout.data.iterdir())):
        raise EmbeddedServerError(
            f"{layout.data} exists but contains no PostgreSQL data. Move it away, or use another home "
            "(LINESHAFT_HOME)."
        )
    free = shutil.disk_usage(layout.home).free
    if free < _NEEDED_BYTES:
        raise EmbeddedServerError(
            f"The embedded PostgreSQL needs about {_NEEDED_BYTES >> 20} MiB to start, but only "
            f"{free >> 20} MiB are free at {layout.home}. Free some space, or use another home "
            "(LINESHAFT_HOME)."
        )


def _run_initdb(data: Path, binaries: Binaries, account: SystemAccount, *, sync: bool) -> None:
    with _opened(data) as handle:
        place = account.data_argument(data, handle)
        command = [
            str(binaries.program("initdb")),
            f"--pgdata={place}",
            f"--username={_SUPERUSER}",
            f"--pwfile={place}/../password",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",  # the only one that is the same on every machine
            "--data-checksums",
            "--no-instructions",
            *([] if sync else ["--no-sync"]),
        ]
        result = account.run(command, keep=[handle])
    if result.returncode:
        raise EmbeddedServerError(
            f"{binaries} could not create a database for {account.name} in {data.parent.parent}:\n"
            f"{_explained(result.stderr)}"
        )


def _run_single_user(
    data: Path,
    binaries: Binaries,
    account: SystemAccount,
    statement: str,
    *,
    database: str,
    sync: bool,
    secret: str = "",
) -> None:
    """Run a statement without a server, in PostgreSQL's single-user mode, which needs no password."""
    with _opened(data) as handle:
        command = [
            str(binaries.program("postgres")),
            "--single",
            "-D",
            account.data_argument(data, handle),
            *([] if sync else ["-c", "fsync=off"]),
            database,
        ]
        result = account.run(command, keep=[handle], text_in=statement + "\n")
    # The exit code is 0 even if the statement failed.
    if result.returncode or any(word in result.stderr for word in ("ERROR:", "FATAL:", "PANIC:")):
        output = result.stderr.replace(secret, "***") if secret else result.stderr
        raise EmbeddedServerError(f"{binaries} could not prepare the data in {data}:\n{_explained(output)}")


def _explained(output: str) -> str:
    remedy = remedy_for(output) or "Fix that and start again, or give the DSN of another PostgreSQL."
    return f"{output.strip()[-2000:]}\n{remedy}"


def _write_passfile(layout: Layout, password: str) -> None:
    write_private(layout.passfile, f"*:*:*:{ROLE}:{password}\n")


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def _sync_directory(directory: Path) -> None:
    with _opened(directory) as handle:
        os.fsync(handle)
