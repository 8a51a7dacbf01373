"""Databases by the dozen: one is made ready, and each test gets a copy of it, which takes milliseconds."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

#: Any number that nobody else uses: who prepares a template holds this lock.
_PREPARING = 0x6C696E6573686674
_KNOWS_STRATEGIES = 15_00_00
_numbers = count(1)


def template(server: str, name: str, prepare: Callable[[str], object]) -> None:
    """Make the database `name` unless there is one; it appears under its name only when it is complete."""
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute("SELECT pg_advisory_lock(%s)", [_PREPARING])
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
    """Make a database like another one."""
    # The default since 15 copies it page by page through the log. That spares a busy server two checkpoints,
    # but takes eight times as long for a database as small as these.
    by_file = sql.SQL("STRATEGY file_copy" if admin.info.server_version >= _KNOWS_STRATEGIES else "")
    admin.execute(
        sql.SQL("CREATE DATABASE {} TEMPLATE {} {}").format(
            sql.Identifier(name), sql.Identifier(template), by_file
        )
    )


@contextmanager
def copy_of(server: str, name: str) -> Iterator[str]:
    """A database like the template, for as long as the block lasts; gives its DSN."""
    own = f"lineshaft_test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server, autocommit=True) as admin:
        # One of a process that was killed, and had the same number.
        admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(own)))
        clone(admin, own, name)
        try:
            yield make_conninfo(server, dbname=own)
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(own)))
