"""Brings a database to the schema of this version, forward only.

Migrations are numbered files in `migrations/`. Each runs in one transaction, under an advisory lock, together
with the record that it ran: several processes may start at once, and a killed one leaves nothing half done. A
step that PostgreSQL can't run in a transaction (a concurrent index) goes in a file whose first line is
`-- lineshaft: no transaction`; its statements are separated by lines `-- step`. After an interruption all of
them run again, so they must be idempotent.

A file that was applied is never changed: its checksum is recorded and compared.

Older processes go on working with a newer schema, so that versions can be replaced one process at a time. A
migration that they can't work with has `-- lineshaft: breaks older versions` among its first lines; this is
recorded with it, and processes that don't know the migration refuse the database.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from importlib.resources import files
from itertools import count, takewhile
from typing import Any, LiteralString

import psycopg
from msgspec import Struct
from psycopg.rows import class_row, scalar_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.session import answered_soon, connect_options, limit_idle_transactions
from lineshaft.errors import MigrationError, SettingsError, UnavailableError

OLDEST_POSTGRES = 14
LONGEST_VACUUM_PAUSE_SEC = 15
#: The remedy for a missing privilege.
OWNER_NEEDED = "Connect as the role that owns the schema lineshaft, or as a member of that role."
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_DIRECTIVE = "-- lineshaft: "
_NO_TRANSACTION, _BREAKS_OLDER = "no transaction", "breaks older versions"
_STEP = re.compile(r"^-- step\b.*$", re.MULTILINE)

#: How often two connections of a pooler are compared.
_POOLER_TRIES = 20
_SQL = catalog.load(__name__)
Connection = psycopg.Connection[Any]


class Migration(Struct, frozen=True):
    version: int
    name: str
    text: LiteralString

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def directives(self) -> set[str]:
        """What its first lines say about it."""
        first = takewhile(lambda line: line.startswith(_DIRECTIVE), self.text.splitlines())
        return {line.removeprefix(_DIRECTIVE).strip() for line in first}

    @property
    def transactional(self) -> bool:
        return _NO_TRANSACTION not in self.directives

    @property
    def breaks_older(self) -> bool:
        return _BREAKS_OLDER in self.directives

    @property
    def steps(self) -> list[LiteralString]:
        return [self.text] if self.transactional else [s for s in _STEP.split(self.text) if s.strip()]

    def __str__(self) -> str:
        return f"{self.version:04d} {self.name}"


class State(StrEnum):
    APPLIED = "applied"
    PENDING = "pending"
    #: Started and cut off; `up` runs it again.
    INTERRUPTED = "interrupted"
    #: The file differs from the one that was applied.
    CHANGED = "changed"
    #: Applied by a newer version of Lineshaft.
    UNKNOWN = "unknown"


class MigrationStatus(Struct, frozen=True):
    version: int
    name: str
    state: State
    applied_at: datetime | None
    #: Versions that don't know it can't use the database.
    breaks_older: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether this version works with a database where it is in this state."""
        return self.state is State.APPLIED or (self.state is State.UNKNOWN and not self.breaks_older)


class _ServerFacts(Struct, frozen=True):
    version: int
    encoding: str
    #: The process that answered.
    pid: int


class _RecordedMigration(Struct, frozen=True):
    version: int
    name: str
    checksum: str
    applied_at: datetime | None
    breaks_older: bool


def bundled() -> list[Migration]:
    """The migrations that this version of Lineshaft ships, in order."""
    found = [
        Migration(int(named[1]), named[2], entry.read_text(encoding="utf-8"))
        for entry in files(__package__).joinpath("migrations").iterdir()
        if (named := _FILE.fullmatch(entry.name))
    ]
    found.sort(key=lambda migration: migration.version)
    for expected, migration in zip(count(1), found, strict=False):
        if migration.version != expected:
            raise MigrationError(f"Migration {expected:04d} is missing: the next file is {migration}.")
    return found


def status(dsn: str, migrations: Sequence[Migration] | None = None) -> list[MigrationStatus]:
    """Every migration that this version or the database has; changes nothing."""
    with _connect(dsn) as connection, answered_soon(connection):
        return _compare(connection, bundled() if migrations is None else migrations)


def check_server(dsn: str, *, sessions: bool = False) -> str:
    """Reject a server that Lineshaft can't use; returns its description and changes nothing.

    With `sessions`, as below, also one behind a pooler in transaction mode: the process relies on sessions.
    """
    with _connect(dsn) as connection, answered_soon(connection):
        _check_server(connection, dsn if sessions else None)
        info = connection.info
        version = info.server_version // 10_000
        return f"PostgreSQL {version}, database {info.dbname} as {info.user} at {info.host}"


def advice(dsn: str) -> list[str]:
    """What would make the server faster; changes nothing."""
    with _connect(dsn) as connection, answered_soon(connection):
        pause_sec = _value(connection, "vacuum_pause")
    if pause_sec <= LONGEST_VACUUM_PAUSE_SEC:
        return []
    text = (
        f"Autovacuum looks for work every {pause_sec} s, so under load lineshaft.task_live can grow to "
        "hundreds of MB. A superuser of PostgreSQL can change that: ALTER SYSTEM SET autovacuum_naptime = "
        "'5s'; SELECT pg_reload_conf();"
    )
    return [text]


def check_ready(dsn: str, *, sessions: bool = False) -> None:
    """Reject a database that lacks a migration of this version, or has one that this version can't work with.

    Changes nothing.
    """
    with _connect(dsn) as connection, answered_soon(connection):
        _check_server(connection, dsn if sessions else None)
        known = bundled()
        pending = _next_pending(_compare(connection, known), known)
    if pending is not None:
        raise MigrationError(
            f"The database is not ready: migration {pending} is not applied. Run 'lineshaft migrate up'."
        )


def up(
    dsn: str,
    migrations: Sequence[Migration] | None = None,
    *,
    on_start: Callable[[Migration], None] = lambda _: None,
    wait_sec: float = 300,
    sessions: bool = False,
) -> list[Migration]:
    """Apply and return the pending migrations. Safe to call from any number of processes at once."""
    known = bundled() if migrations is None else migrations
    applied: list[Migration] = []
    with _connect(dsn) as connection:
        _check_server(connection, dsn if sessions else None)
        while (migration := _next_pending(_compare(connection, known), known)) is not None:
            if _apply(dsn, connection, migration, known, on_start=on_start, wait_sec=wait_sec):
                applied.append(migration)
        if migrations is None:
            _adopt_restored(connection)
    return applied


def _adopt_restored(connection: Connection) -> None:
    """After a restore into another cluster. If several processes notice it, one does the work."""
    if _value(connection, "is_restored"):
        with connection.transaction():
            if _value(connection, "try_lock"):
                connection.execute(_SQL["adopt_restored"])


@contextmanager
def _connect(dsn: str) -> Iterator[Connection]:
    """A connection, with the driver's errors translated into ours."""
    try:
        with _opened(dsn) as connection:
            yield connection
    except psycopg.errors.InsufficientPrivilege as error:
        raise MigrationError(
            f"Permission denied by the database: {_first_line(error)}. {OWNER_NEEDED}"
        ) from error
    except psycopg.Error as error:
        if error.sqlstate is None:
            # The driver's message about an invalid DSN may quote a password.
            raise MigrationError(
                "LINESHAFT_DATABASE_URL is not valid: it must be postgresql://USER@HOST:PORT/DATABASE, or "
                "PostgreSQL keywords such as host=… dbname=…."
            ) from None
        raise MigrationError(
            f"The database can't be used: {_first_line(error)}. Check its log, and that "
            "LINESHAFT_DATABASE_URL names the right database."
        ) from error


@contextmanager
def _opened(dsn: str) -> Iterator[Connection]:
    options = connect_options(dsn)
    try:
        with psycopg.connect(
            dsn, autocommit=True, application_name="lineshaft migrate", prepare_threshold=None, **options
        ) as connection:
            # Behind a pooler, the first statement shows whether the database itself answers.
            with answered_soon(connection):
                connection.execute(limit_idle_transactions())
            yield connection
    except psycopg.OperationalError as error:
        if error.sqlstate is not None and not error.sqlstate.startswith(("08", "57P")):
            raise
        raise UnavailableError(
            f"Can't reach the database: {_first_line(error)}. Check that it runs and that "
            "LINESHAFT_DATABASE_URL is correct."
        ) from error


def _check_server(connection: Connection, sessions_at: str | None = None) -> None:
    """`sessions_at`: the DSN, if the connection has to have a session of its own."""
    with connection.cursor(row_factory=class_row(_ServerFacts)) as cursor:
        (facts,) = cursor.execute(_SQL["server_facts"])
    if facts.version < OLDEST_POSTGRES * 10_000:
        raise MigrationError(
            f"Lineshaft needs PostgreSQL {OLDEST_POSTGRES} or newer; this server is "
            f"{facts.version // 10_000}."
        )
    if facts.encoding != "UTF8":
        raise MigrationError(
            f"Lineshaft needs a database with encoding UTF8; this one has {facts.encoding}. "
            "Create one with: CREATE DATABASE lineshaft ENCODING 'UTF8' TEMPLATE template0"
        )
    # A pooler answers in place of the process that does the work, so their numbers differ.
    if sessions_at is not None and facts.pid != connection.info.backend_pid and _shares(sessions_at):
        raise SettingsError(
            "The database URL leads to a pooler in transaction mode, such as PgBouncer, which gives each "
            "transaction another session; prepared statements and notifications don't work there. Set "
            "LINESHAFT_POOLER=transaction, or connect to PostgreSQL directly, or use a pool in session mode."
        )


def _shares(dsn: str) -> bool:
    """Whether a pooler lets two open connections use one session.

    A pool in transaction mode gives the session that was used last to the client that asks next. If it is
    busy, that may be another client.
    """
    with _opened(dsn) as one, _opened(dsn) as other:
        return any(_pid(one) == _pid(other) for _ in range(_POOLER_TRIES))


def _pid(connection: Connection) -> int:
    with connection.cursor(row_factory=class_row(_ServerFacts)) as cursor:
        (facts,) = cursor.execute(_SQL["server_facts"])
    return facts.pid


def _compare(connection: Connection, migrations: Sequence[Migration]) -> list[MigrationStatus]:
    recorded: dict[int, _RecordedMigration] = {}
    if _value(connection, "has_table"):
        with connection.cursor(row_factory=class_row(_RecordedMigration)) as cursor:
            cursor.execute(_SQL["list_recorded"])
            recorded = {row.version: row for row in cursor}
    statuses = []
    for migration in migrations:
        row = recorded.pop(migration.version, None)
        if row is None:
            state = State.PENDING
        elif row.applied_at is None:
            state = State.INTERRUPTED
        else:
            state = State.APPLIED if row.checksum == migration.checksum else State.CHANGED
        statuses.append(
            MigrationStatus(migration.version, migration.name, state, row.applied_at if row else None)
        )
    unknown = [
        MigrationStatus(row.version, row.name, State.UNKNOWN, row.applied_at, row.breaks_older)
        for row in recorded.values()
    ]
    return statuses + unknown


def _next_pending(statuses: Sequence[MigrationStatus], migrations: Sequence[Migration]) -> Migration | None:
    """The migration to apply next; rejects a database that this version must not change."""
    breaking = [s for s in statuses if s.state is State.UNKNOWN and not s.is_usable]
    if breaking:
        raise MigrationError(
            f"The database is newer than this Lineshaft: it has migration {breaking[-1].version:04d} "
            f"{breaking[-1].name}, which versions that know only up to {len(migrations):04d} can't work "
            "with. Upgrade Lineshaft."
        )
    changed = [s for s in statuses if s.state is State.CHANGED]
    if changed:
        raise MigrationError(
            f"Migration {changed[0].version:04d} {changed[0].name} was applied to this database with "
            "different content than this version has. Install the version that was used, or restore the file."
        )
    todo = {s.version for s in statuses if not s.is_usable}
    return next((m for m in migrations if m.version in todo), None)


def _apply(
    dsn: str,
    connection: Connection,
    migration: Migration,
    migrations: Sequence[Migration],
    *,
    on_start: Callable[[Migration], None],
    wait_sec: float,
) -> bool:
    """Take the lock and apply a migration; False if another process got there first."""
    deadline = time.monotonic() + wait_sec
    while True:
        try:
            with connection.transaction():
                if _value(connection, "try_lock"):
                    if _next_pending(_compare(connection, migrations), migrations) is not migration:
                        return False
                    on_start(migration)
                    _run(dsn, connection, migration)
                    return True
        except MigrationError as error:
            # With processes that work on the tables: PostgreSQL has rolled back one of them.
            if (
                not isinstance(error.__cause__, psycopg.errors.DeadlockDetected)
                or time.monotonic() > deadline
            ):
                raise
        if time.monotonic() > deadline:
            raise MigrationError(
                f"Another process has been migrating this database for {wait_sec:.0f} s. Look for its "
                "connection in pg_stat_activity: the application_name is 'lineshaft migrate'."
            )
        time.sleep(0.05)


def _run(dsn: str, connection: Connection, migration: Migration) -> None:
    """Called under the lock, inside the transaction that holds it."""
    record = {
        "version": migration.version,
        "name": migration.name,
        "checksum": migration.checksum,
        "breaks_older": migration.breaks_older,
    }
    try:
        if migration.transactional:
            connection.execute(_SQL["limit_lock_wait"])
            _record_started(connection, record)
            _execute(connection, migration.text)
            connection.execute(_SQL["record_applied"], record)
        else:
            # Each step commits, so the steps need a separate connection; this one holds the lock.
            with _opened(dsn) as worker:
                _record_started(worker, record)
                for step in migration.steps:
                    _execute(worker, step)
                worker.execute(_SQL["record_applied"], record)
    except psycopg.Error as error:
        raise MigrationError(_failure(migration, error)) from error


def _record_started(connection: Connection, record: dict[str, object]) -> None:
    if not _value(connection, "has_table"):
        connection.execute(_SQL["create_schema"])
        connection.execute(_SQL["create_table"])
    connection.execute(_SQL["record_started"], record)


def _execute(connection: Connection, text: LiteralString) -> None:
    # Without parameters psycopg sends the text unchanged, several statements at once.
    connection.execute(text)


def _value(connection: Connection, name: str) -> Any:
    with connection.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(_SQL[name]).fetchone()


def _failure(migration: Migration, error: psycopg.Error) -> str:
    place = ""
    if position := error.diag.statement_position:
        place = f" (line {migration.text.count(chr(10), 0, int(position)) + 1})"
    remedy = (
        "Nothing of it was applied." if migration.transactional else "The next 'migrate up' runs it again."
    )
    if isinstance(error, psycopg.errors.LockNotAvailable):
        remedy += (
            " A table was busy for 10 s; end long transactions on it and run 'lineshaft migrate up' again."
        )
    elif isinstance(error, psycopg.errors.InsufficientPrivilege):
        remedy += " The role needs CREATE on the database, or must own the schema lineshaft."
    return f"Migration {migration} failed{place}: {_first_line(error)}. {remedy}"


def _first_line(error: psycopg.Error) -> str:
    return (error.diag.message_primary or str(error)).strip().splitlines()[0].rstrip(".")
