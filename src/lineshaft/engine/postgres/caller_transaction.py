"""Submission as part of the caller's transaction, on the caller's connection.

The engine uses asynchronous psycopg connections. SQLAlchemy connections and sessions contain a driver's
connection, which is unwrapped; a synchronous connection is wrapped so that every await completes at once, and
one of asyncpg so that it looks like psycopg's. Neither SQLAlchemy nor asyncpg is imported here.
"""

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self, TypeVar, cast

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from lineshaft.engine.postgres.asyncpg_connection import AsyncpgConnection, is_asyncpg
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.pool import raise_translated
from lineshaft.engine.postgres.session import connect_options, limit_idle_transactions
from lineshaft.errors import InvalidInputError

T = TypeVar("T")


_ASYNC_NAMES = frozenset({"AsyncConnection", "AsyncSession", "async_scoped_session"})


def refuse_async(given: Any) -> None:
    """Reject an asynchronous connection in a synchronous call, before anything is sent."""
    if is_asyncpg(given) or not _ASYNC_NAMES.isdisjoint(base.__name__ for base in type(given).__mro__):
        fault = "is asynchronous: use the asynchronous Lineshaft, and await the call"
        raise InvalidInputError(errors=[("connection", fault)])


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, because it uses a synchronous connection."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    coroutine.close()
    raise AssertionError("a call on a synchronous connection must not suspend")


@asynccontextmanager
async def adapted(given: Any) -> AsyncIterator[Connection | None]:
    """The caller's connection as the engine needs it; None stays None: the engine takes one from its pool."""
    yield None if given is None else await _adapt(given)


@asynccontextmanager
async def nested(connection: Connection) -> AsyncIterator[None]:
    """A savepoint in the caller's transaction: an error leaves nothing behind, and the connection usable."""
    other_driver: object = connection
    if isinstance(other_driver, AsyncpgConnection):
        async with other_driver.nested():
            yield
        return
    if connection.info.transaction_status == TransactionStatus.IDLE and not connection.autocommit:
        # Otherwise ours would be the outermost transaction, and be committed here.
        await connection.execute("SELECT")
    theirs, connection.row_factory = connection.row_factory, tuple_row
    try:
        async with connection.transaction():
            yield
    finally:
        connection.row_factory = theirs


@asynccontextmanager
async def outside(connection: Connection, database: Database) -> AsyncIterator[Connection]:
    """Another connection to the same database, for what must not wait for the caller's commit.

    The pool's belong to its event loop, so a blocking call opens one of its own: rarely.
    """
    if not isinstance(cast("object", connection), _Blocking):
        async with database.connection() as own:
            yield own
        return
    try:
        with psycopg.connect(
            database.dsn, autocommit=True, application_name="lineshaft", **connect_options(database.dsn)
        ) as blocking:
            blocking.execute(limit_idle_transactions())
            yield cast("Connection", _Blocking(blocking))
    except psycopg.Error as error:
        raise_translated(error)
        raise


class UniqueViolation(NamedTuple):
    table: str | None
    detail: str | None


def unique_violation(error: Exception) -> UniqueViolation | None:
    """What a driver reports about a value that exists already; None for any other error."""
    if isinstance(error, psycopg.errors.UniqueViolation):
        return UniqueViolation(error.diag.table_name, error.diag.message_detail)
    if is_asyncpg(error) and getattr(error, "sqlstate", None) == psycopg.errors.UniqueViolation.sqlstate:
        return UniqueViolation(getattr(error, "table_name", None), getattr(error, "detail", None))
    return None


def sqlstate(error: Exception) -> str | None:
    """The code of a driver's error; None for any other error."""
    return getattr(error, "sqlstate", None) if isinstance(error, psycopg.Error) or is_asyncpg(error) else None


async def _adapt(given: Any) -> Connection:
    if isinstance(given, psycopg.AsyncConnection):
        return given
    if isinstance(given, psycopg.Connection):
        return cast("Connection", _Blocking(given))
    if is_asyncpg(given):
        return cast("Connection", AsyncpgConnection(given))
    if type(given).__module__.partition(".")[0] == "sqlalchemy" or _is_sqlalchemy(given):
        return await _adapt(await _inside_sqlalchemy(given))
    fault = (
        "must be a connection of psycopg or asyncpg, or a connection or session of SQLAlchemy that uses one, "
        f"got {type(given).__module__}.{type(given).__qualname__}"
    )
    raise InvalidInputError(errors=[("connection", fault)])


def _is_sqlalchemy(given: Any) -> bool:
    """A subclass of its sessions, or a scoped one."""
    return any(base.__module__.partition(".")[0] == "sqlalchemy" for base in type(given).__mro__)


async def _inside_sqlalchemy(given: Any) -> Any:
    """The driver's connection under a session or a connection, with its transaction begun."""
    names = {base.__name__ for base in type(given).__mro__}
    if names & {"AsyncSession", "async_scoped_session"}:
        given = await given.connection()
        names = {"AsyncConnection"}
    elif names & {"Session", "scoped_session"}:
        given = given.connection()
        names = {"Connection"}
    if "AsyncConnection" in names:
        if not given.in_transaction():
            await given.begin()
        driver = (await given.get_raw_connection()).driver_connection
        if is_asyncpg(driver):
            # SQLAlchemy begins the transaction with the first statement.
            await given.exec_driver_sql("SELECT 1")
            return driver
    elif "Connection" in names:
        # Otherwise SQLAlchemy would not know about the transaction, and its commit would do nothing.
        if not given.in_transaction():
            given.begin()
        driver = given.connection.driver_connection
    else:
        driver = given
    if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        fault = (
            f"SQLAlchemy uses {type(driver).__module__} here, but only psycopg 3 and asyncpg are supported: "
            "create the engine with postgresql+psycopg://…, or an asynchronous one with postgresql+asyncpg://…"
        )
        raise InvalidInputError(errors=[("connection", fault)])
    return driver


class _Blocking:
    """A synchronous connection with the interface of an asynchronous one; every await completes at once."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    async def execute(self, *arguments: Any) -> "_BlockingCursor":
        return _BlockingCursor(self._connection.execute(*arguments))

    async def wait(self, generator: Any) -> Any:
        return self._connection.wait(generator)

    def cursor(self, **options: Any) -> "_BlockingCursor":
        return _BlockingCursor(self._connection.cursor(**options))

    def transaction(self) -> "_Entered":
        return _Entered(self._connection.transaction())

    def pipeline(self) -> "_Entered":
        return _Entered(self._connection.pipeline())

    @property
    def row_factory(self) -> Any:
        return self._connection.row_factory

    @row_factory.setter
    def row_factory(self, factory: Any) -> None:
        self._connection.row_factory = factory

    def __getattr__(self, name: str) -> Any:
        # info, autocommit, adapters and others are the same in both.
        return getattr(self._connection, name)


class _BlockingCursor:
    def __init__(self, cursor: psycopg.Cursor[Any]) -> None:
        self._cursor = cursor

    async def execute(self, *arguments: Any) -> "_BlockingCursor":
        self._cursor.execute(*arguments)
        return self

    async def fetchone(self) -> Any:
        return self._cursor.fetchone()

    async def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cursor.close()


class _Entered:
    """A synchronous context manager with the interface of an asynchronous one."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def __aenter__(self) -> Any:
        return self._manager.__enter__()

    async def __aexit__(self, *details: object) -> Any:
        return self._manager.__exit__(*details)
