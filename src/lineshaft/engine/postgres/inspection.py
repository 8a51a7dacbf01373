"""Access for people who look at the tables: with `psql`, or with a small reader where there is none."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lineshaft.embedded import find_binaries
from lineshaft.engine.postgres import catalog, migrate
from lineshaft.engine.postgres.session import connect_options
from lineshaft.errors import DatabaseError, UnavailableError
from lineshaft.settings import Settings

_SQL = catalog.load(__name__)
_SEARCH_PATH = "-csearch_path=lineshaft,public"
#: For looking: a forgotten WHERE changes nothing.
_READ_ONLY = "-cdefault_transaction_read_only=on"


def with_search_path(dsn: str, *more: str) -> str:
    """A DSN with which `SELECT * FROM tasks` finds the view, whatever the role is called."""
    own = conninfo_to_dict(dsn).get("options") or ""
    return make_conninfo(dsn, options=" ".join(filter(None, (str(own), _SEARCH_PATH, *more))))


def prepare(dsn: str, settings: Settings) -> None:
    """As every client does: only the embedded database is migrated automatically."""
    if settings.database_url is None:
        migrate.up(dsn)
    else:
        migrate.check_ready(dsn)


def psql() -> Path | None:
    """The machine's, else the one that came with an embedded PostgreSQL."""
    found = shutil.which("psql")
    places = [Path(found)] if found else [binaries.program("psql") for binaries in find_binaries()]
    return next((place for place in places if os.access(place, os.X_OK)), None)


class Invocation(NamedTuple):
    arguments: list[str]
    environment: Mapping[str, str]


def psql_invocation(program: Path, dsn: str, statement: str | None) -> Invocation:
    """The password is not among the arguments, which every process of the machine can read."""
    words = conninfo_to_dict(with_search_path(dsn, _READ_ONLY))
    password = words.pop("password", None)
    arguments = [str(program), "--dbname", make_conninfo("", **words)]
    if statement is not None:
        arguments += ["--command", statement]
    return Invocation(arguments, {} if password is None else {"PGPASSWORD": str(password)})


class QueryResult(NamedTuple):
    columns: list[str]
    rows: list[tuple[Any, ...]]


class ReadOnlyConnection:
    """Runs statements, one at a time."""

    def __init__(self, dsn: str, *, sessions: bool = True) -> None:
        """Without `sessions`, behind a pooler in transaction mode, each statement has its own transaction."""
        self._sessions = sessions
        # Such a pooler refuses options, and would share what a SET changes with other clients.
        shown = with_search_path(dsn, _READ_ONLY) if sessions else dsn
        try:
            self._connection = psycopg.connect(
                shown, autocommit=True, prepare_threshold=None, **connect_options(dsn)
            )
        except psycopg.OperationalError as error:
            raise UnavailableError(f"Can't reach the database: {_message(error)}.") from error

    def run(self, statement: str) -> QueryResult:
        """Raises DatabaseError with PostgreSQL's message."""
        try:
            with contextlib.nullcontext() if self._sessions else self._connection.transaction():
                if not self._sessions:
                    self._connection.execute(_SQL["read_only"])
                cursor = self._connection.execute(statement.encode())
                if cursor.description is None:
                    return QueryResult([], [])
                return QueryResult([column.name for column in cursor.description], cursor.fetchall())
        except psycopg.Error as error:
            raise DatabaseError(f"PostgreSQL rejects the statement: {_message(error)}.") from error

    def close(self) -> None:
        self._connection.close()


def disputed_tasks(dsn: str) -> int:
    """How many tasks have a cost that a person has to decide on."""
    with contextlib.closing(ReadOnlyConnection(dsn, sessions=False)) as connection:
        ((count,),) = connection.run(_SQL["disputed_tasks"]).rows
    return int(count)


def _message(error: psycopg.Error) -> str:
    return (error.diag.message_primary or str(error)).strip().splitlines()[0].rstrip(".")
