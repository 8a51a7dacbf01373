"""Submission from Django: in the transaction of a connection of Django's, or once it has committed."""

import atexit
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, TypeVar, Unpack, overload

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from lineshaft.client.blocking import LoopThread, SyncLineshaft
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.client.handles import SyncDagHandle, SyncTaskHandle
from lineshaft.client.lineshaft import Lineshaft
from lineshaft.engine.postgres.dsn import dsn_from
from lineshaft.errors import InvalidInputError, SettingsError
from lineshaft.model.durations import Duration
from lineshaft.model.tasks import NewTask, TaskOptions, resolve
from lineshaft.settings import Settings
from lineshaft.types.typed_task import TypedTask, check_new_tasks

R = TypeVar("R")


@overload
def submit(
    task: TypedTask[R],
    *,
    using: str = DEFAULT_DB_ALIAS,
    delay: Duration | None = None,
    **options: Unpack[TaskOptions],
) -> SyncTaskHandle[R]: ...


@overload
def submit(
    task: NewTask,
    *,
    using: str = DEFAULT_DB_ALIAS,
    delay: Duration | None = None,
    **options: Unpack[TaskOptions],
) -> SyncTaskHandle[Any]: ...


def submit(
    task: NewTask,
    *,
    using: str = DEFAULT_DB_ALIAS,
    delay: Duration | None = None,
    **options: Unpack[TaskOptions],
) -> SyncTaskHandle[Any]:
    """Submit a task as part of the current transaction: it exists once Django commits, else it never did.

    `using` is the database of the transaction. Lineshaft's schema must be in that database. Outside of a
    transaction the task exists at once.
    """
    driver = _driver(using)
    with connections[using].wrap_database_errors:
        return _in_database(using).submit(task, delay=delay, connection=driver, **options)


#: `submit` for asynchronous views: in the thread of Django's asynchronous queries, so on their connection.
asubmit = sync_to_async(submit, thread_sensitive=True)


def submit_many(tasks: Sequence[NewTask], *, using: str = DEFAULT_DB_ALIAS) -> list[SyncTaskHandle[Any]]:
    """Submit up to 10,000 standalone tasks, all or none, as part of the current transaction."""
    driver = _driver(using)
    with connections[using].wrap_database_errors:
        return _in_database(using).submit_many(tasks, connection=driver)


def submit_dag(
    title: str,
    tasks: Sequence[NewTask],
    *,
    using: str = DEFAULT_DB_ALIAS,
    budget_ceiling_usd: Decimal | float | None = None,
    created_by: str | None = None,
    idempotency_key: str | None = None,
) -> SyncDagHandle:
    """Submit tasks that depend on each other by `key`, all or none, as part of the current transaction."""
    driver = _driver(using)
    with connections[using].wrap_database_errors:
        return _in_database(using).submit_dag(
            title,
            tasks,
            budget_ceiling_usd=budget_ceiling_usd,
            created_by=created_by,
            idempotency_key=idempotency_key,
            connection=driver,
        )


def submit_on_commit(task: NewTask, *, using: str = DEFAULT_DB_ALIAS, **options: Unpack[TaskOptions]) -> None:
    """Submit a task once the current transaction has committed: to the server or database of LINESHAFT_URL.

    For a Lineshaft elsewhere. If the process dies after the commit, or LINESHAFT_URL can't be reached then,
    the task is lost; `submit` has no such gap. A task that is not valid raises here, before the commit.
    """
    check_new_tasks([task])
    if options:
        task = task.with_options(**options)
    resolve(task)
    transaction.on_commit(lambda: open_shaft(using).submit(task), using=using)


def open_shaft(using: str = DEFAULT_DB_ALIAS) -> SyncLineshaft:
    """The `SyncLineshaft` of this process: of LINESHAFT_URL in the settings, else of Django's database."""
    url = getattr(settings, "LINESHAFT_URL", None)
    return _in_database(using) if url is None else _opened(url, getattr(settings, "LINESHAFT_TOKEN", None))


def close() -> None:
    """Close the connections of this process, for instance before a test database is dropped."""
    with _lock:
        while _shafts:
            (pid, _, _), (shaft, loop) = _shafts.popitem()
            # Those from before a fork belong to the parent process.
            if pid == os.getpid():
                loop.run(shaft.shaft.close())
                loop.close()


atexit.register(close)


def dsn_of(using: str) -> str:
    """The DSN of a database of Django's."""
    return dsn_from(_on_postgresql(using).get_connection_params())


_lock = threading.Lock()
#: By process, URL and token.
_shafts: dict[tuple[int, str, str | None], tuple[SyncLineshaft, LoopThread]] = {}


def _in_database(using: str) -> SyncLineshaft:
    return _opened(dsn_of(using), None)


def _opened(url: str, token: str | None) -> SyncLineshaft:
    key = (os.getpid(), url, token)
    with _lock:
        found = _shafts.get(key)
        if found is None:
            loop = LoopThread("lineshaft django")
            try:
                shaft = _make(url, token)
                loop.run(shaft.open())
            except BaseException:
                loop.close()
                raise
            found = _shafts[key] = SyncLineshaft.around(shaft, loop), loop
        return found[0]


def _make(url: str, token: str | None) -> Lineshaft:
    if url.startswith(("http://", "https://")):
        return Lineshaft(url, token=token)
    # A transaction of Django's needs no connection of ours, and an open one would keep a test database from
    # being dropped.
    return Lineshaft(backend=DatabaseBackend(replace(Settings.load(), database_url=url), keep_connections=0))


def _on_postgresql(using: str) -> Any:
    connection = connections[using]
    if connection.vendor != "postgresql":
        raise SettingsError(
            f"Django's database {using!r} is {connection.display_name}, but Lineshaft needs PostgreSQL. Put "
            "it on PostgreSQL, or set LINESHAFT_URL in Django's settings to a server or database, and use "
            "submit_on_commit."
        )
    return connection


def _driver(using: str) -> Any:
    """The connection of psycopg under Django's."""
    connection = _on_postgresql(using)
    # Raises if an error has broken the transaction.
    connection.validate_no_broken_transaction()
    connection.ensure_connection()
    driver = connection.connection
    if not any(base.__module__.partition(".")[0] == "psycopg" for base in type(driver).__mro__):
        raise InvalidInputError(
            f"Django's database {using!r} uses {type(driver).__module__.partition('.')[0]}, but a task can "
            "be part of its transaction only with psycopg 3. Use django.db.backends.postgresql with psycopg "
            "3 installed, or submit_on_commit."
        )
    return driver
