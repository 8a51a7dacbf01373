"""Databases for tests: one template is prepared, and each test gets a copy of it within milliseconds."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

#: The advisory lock for preparing a template; an arbitrary number.
_TEMPLATE_LOCK = 0x6C696E6573686674
_HAS_STRATEGIES = 15_00_00
#: A busy machine may take seconds to end a session; DROP DATABASE itself waits for five.
_SESSIONS_END_SEC = 10.0
_numbers = count(1)


def template(server: str, name: str, prepare: Callable[[str], object]) -> None:
    """Create the database `name` unless it exists; it gets its name only when it is complete."""
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute("SELECT pg_advisory_lock(%s)", [_TEMPLATE_LOCK])
        if admin.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone() is not None:
            return
        draft = f"{name}_draft"
        admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(draft)))
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(draft)))
        prepare(make_conninfo(server, dbname=draft))
        admin.execute(
            sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(draft), sql.Identifier(name))
        )


def clone(admin: "psycopg.Connection[Any]", name: str, template: str) -> None:
    """Create a copy of a database."""
    # The default since 15 copies page by page through the WAL. That saves a busy server two checkpoints, but
    # takes eight times as long for small databases.
    by_file = sql.SQL("STRATEGY file_copy" if admin.info.server_version >= _HAS_STRATEGIES else "")
    admin.execute(
        sql.SQL("CREATE DATABASE {} TEMPLATE {} {}").format(
            sql.Identifier(name), sql.Identifier(template), by_file
        )
    )


@contextmanager
def copy_of(server: str, name: str) -> Iterator[str]:
    """A copy of the template for the duration of the block; yields its DSN."""
    own = f"lineshaft_test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server, autocommit=True) as admin:
        # A killed process with the same number may have left one.
        admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(own)))
        clone(admin, own, name)
        try:
            yield make_conninfo(server, dbname=own)
        finally:
            drop(admin, own)


def drop(admin: "psycopg.Connection[Any]", name: str) -> None:
    """Drop a database and end its sessions.

    DROP DATABASE sleeps for 100 ms if a session is still ending, as it is right after a client has closed
    its connection. That is much longer than dropping takes.
    """
    sessions = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = %s AND backend_type = 'client backend' AND usename = current_user"
    )
    deadline = time.monotonic() + _SESSIONS_END_SEC
    while admin.execute(sessions, [name]).fetchall() and time.monotonic() < deadline:
        time.sleep(0.001)
    # Without FORCE, which only a superuser may use while autovacuum is in the database; this ends autovacuum.
    admin.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))
