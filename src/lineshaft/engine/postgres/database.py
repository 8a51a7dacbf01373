"""The connection pool, transactions and retries.

A transition is a few statements sent in one pipeline, which PostgreSQL runs as one transaction and answers in
one round trip. A deadlock or a serialization failure rolls back all of it, so it is run again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import PQGen
from psycopg.adapt import Buffer, Loader
from psycopg.pq import Format
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from lineshaft.clock import Clock, DatabaseClock
from lineshaft.engine.caller import caller
from lineshaft.engine.postgres.driver_log import POOL_NAME, OwnConnection
from lineshaft.engine.postgres.dsn import checked_dsn
from lineshaft.engine.postgres.lane_reports import LaneReports, ReportingConnection
from lineshaft.engine.postgres.pool import TAKE_WITHIN_SEC, Pool, PooledConnection
from lineshaft.engine.postgres.session import (
    IDLE_IN_TRANSACTION_SEC,
    connect_options,
    limit_idle_transactions,
    shut_down,
)
from lineshaft.errors import UnavailableError

T = TypeVar("T")

_log = logging.getLogger("lineshaft.engine")

Connection = AsyncConnection[Any]
#: Follows a commit, on the same connection, in a transaction of its own.
Follower = Callable[[Connection], Awaitable[None]]

#: The transaction lost against another one, or its prepared statements were dropped (pipeline.py).
_RETRIED = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.InvalidSqlStatementName,
)

#: No statement takes nearly as long. A connection that was cut off silently looks like a slow one; without a
#: limit, its caller would wait until the operating system gives up, after 15 minutes or more.
ANSWER_WITHIN_SEC = 60.0
#: The limit of calls that should fail soon; see `Caller.fails_soon`.
FAIL_WITHIN_SEC = 5.0
#: The server cancels a read after this share of the limit, so that only silence breaks a connection.
_SHARE_OF_SERVER = 0.9
#: How long a statement waits for a row that another transaction holds: an open transaction of somebody else
#: must not hold up callers for longer.
_LOCK_WAIT = "10s"
#: Attempts at a transaction that loses against others, before the error is raised.
_TRIES = 10


#: The statistics of a queue are always out of date, and one plan that reads a whole table costs more than all
#: others together. Each statement has one plan that is right whatever the tables contain; these settings
#: select it. Times are returned in UTC, whatever the server's time zone.
PLAN_BY_INDEX = (
    "SELECT set_config('enable_seqscan', 'off', false), set_config('enable_mergejoin', 'off', false),"
    " set_config('enable_hashjoin', 'off', false), set_config('enable_material', 'off', false),"
    " set_config('TimeZone', 'UTC', false),"
    " set_config('jit', 'off', false), set_config('plan_cache_mode', 'force_generic_plan', false)"
)


class _RawJsonb(Loader):
    """JSON stays raw bytes: most of it is only passed on, and the rest is decoded where it is used."""

    format = Format.TEXT

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


class _RawJsonbBinary(Loader):
    format = Format.BINARY

    def load(self, data: Buffer) -> bytes:
        return bytes(data)[1:]  # the first byte is jsonb's version


class _Connection(ReportingConnection, OwnConnection):
    """A connection whose calls can be cancelled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: What follows the commit of its transaction.
        self.followers: list[Follower] = []

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        try:
            return await super().wait(gen, *args, **kwargs)
        except asyncio.CancelledError:
            # Otherwise the garbage collector closes the driver's generator later, and prints an error because
            # the connection is closed by then.
            with contextlib.suppress(Exception):
                gen.close()
            raise


class Database:
    def __init__(
        self,
        dsn: str,
        *,
        clock: Clock | None = None,
        max_connections: int = 10,
        read_connections: int = 0,
        keep_connections: int = 1,
        prepare: bool = True,
        idle_in_transaction_sec: float = IDLE_IN_TRANSACTION_SEC,
        fail_within_sec: float = FAIL_WITHIN_SEC,
        reports: LaneReports | None = None,
    ) -> None:
        """`prepare=False` is for a pooler in transaction mode that doesn't support prepared statements.

        `keep_connections` are open at all times. `fail_within_sec` is the limit of calls that `fails_soon`.
        `reports` gets the lanes with new tasks, if it is active.
        """
        self.dsn = dsn
        self._reports = reports
        self._fail_within_sec = fail_within_sec
        #: A connection in use for longer than this is considered dead, and shut down. None: no limit.
        self.answer_within_sec: float | None = ANSWER_WITHIN_SEC
        self._clock = clock or DatabaseClock()
        self._prepare = prepare
        self._idle_in_transaction_sec = idle_in_transaction_sec
        options = str(checked_dsn(dsn).get("options"))
        self._limits_lock_wait = "lock_timeout" not in options
        # Behind a pooler, the setting would stay on a connection that others write with.
        self._limits_reads = prepare and "statement_timeout" not in options
        self._in_use: set[Connection] = set()
        self._keep_connections = keep_connections
        self._pool = self._make_pool(max_connections)
        #: For calls that only read; none: they share the other one.
        self._read_pool = self._make_pool(read_connections, reads=True) if read_connections else self._pool

    def _make_pool(self, connections: int, *, reads: bool = False) -> Pool:
        return Pool(
            AsyncConnectionPool(
                self.dsn,
                name=POOL_NAME,
                connection_class=_Connection,
                min_size=self._keep_connections,
                max_size=connections,
                open=False,
                configure=partial(self._configure, reads=reads),
                kwargs={"autocommit": True, "application_name": "lineshaft"} | connect_options(self.dsn),
                # The pool doubles its pause after each failure, up to minutes, even if the database is
                # back. So it gives up early, and starts again as long as there are waiters.
                reconnect_timeout=1.0,
                reconnect_failed=self._reconnect,
            )
        )

    async def _reconnect(self, pool: "AsyncConnectionPool[Any]") -> None:
        if pool.get_stats().get("requests_waiting"):
            with contextlib.suppress(PoolClosed):
                await pool.check()

    async def _configure(self, connection: Connection, *, reads: bool = False) -> None:
        # One that goes silent now would keep a worker of the pool forever, and there are three.
        within_sec = min(self.answer_within_sec or TAKE_WITHIN_SEC, TAKE_WITHIN_SEC)
        timer = asyncio.get_running_loop().call_later(within_sec, shut_down, connection)
        limits = {}
        if self._limits_lock_wait:
            limits["lock_timeout"] = _LOCK_WAIT
        if reads and self._limits_reads:
            limits["statement_timeout"] = str(round(self._fail_within_sec * 1_000 * _SHARE_OF_SERVER))
        try:
            await set_up(
                connection, prepare=self._prepare, idle_in_transaction_sec=self._idle_in_transaction_sec
            )
            for name, value in limits.items():
                await connection.execute("SELECT set_config(%s, %s, false)", [name, value])
        finally:
            timer.cancel()

    async def open(self) -> None:
        try:
            for pool in {self._pool, self._read_pool}:
                await pool.open()
        except BaseException as error:
            await self.close()
            if not isinstance(error, PoolTimeout):
                raise
            raise UnavailableError(
                "The database doesn't answer. Check that it runs and that LINESHAFT_DATABASE_URL names it."
            ) from None

    async def close(self) -> None:
        for pool in {self._pool, self._read_pool}:
            await pool.close()

    @property
    def is_closed(self) -> bool:
        return self._pool.is_closed and self._read_pool.is_closed

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def now(self) -> dict[str, Any]:
        """The parameter that every statement takes."""
        return {"now": self._clock.now()}

    def connection(self) -> PooledConnection:
        who = caller()
        reads = who.only_reads
        pool = self._read_pool if reads else self._pool
        if not (reads or who.fails_soon):
            return PooledConnection(pool, self._in_use, self.answer_within_sec, reports=self._reports)
        within_sec = min(self._fail_within_sec, self.answer_within_sec or self._fail_within_sec)
        return PooledConnection(
            *(pool, self._in_use, within_sec),
            take_within_sec=within_sec,
            check=reads,
            reports=None if reads else self._reports,
        )

    def hang_up(self) -> None:
        """Shut down all connections in use: pending calls fail with `UnavailableError`."""
        for connection in self._in_use:
            shut_down(connection)

    async def run(self, work: Callable[[Connection], Awaitable[T]], *, pipeline: bool = True) -> T:
        """Run `work` in one transaction; again, from the start, if it loses against another transaction.

        In a pipeline, statements are sent without waiting for results, until a result is fetched. COPY can't
        be part of a pipeline.
        """

        async def in_transaction(connection: Connection) -> T:
            if not pipeline:
                async with connection.transaction():
                    return await work(connection)
            async with connection.pipeline(), connection.transaction():
                return await work(connection)

        return await self.run_alone(in_transaction)

    async def run_alone(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """As `run`, for work that begins and ends its own transaction, or is a single statement."""
        for attempt in range(1, _TRIES + 1):
            try:
                async with self.connection() as connection:
                    result = await work(connection)
                    if isinstance(connection, _Connection) and connection.followers:
                        await _follow(connection)
                    return result
            except _RETRIED:
                if attempt == _TRIES:
                    raise
                # The transactions should not collide again at once.
                await asyncio.sleep(0.002 * attempt)
        raise AssertionError("unreachable")


def after_commit(connection: Connection, follower: Follower) -> None:
    """Run `follower` once the transaction of `connection` is committed; not on connections of callers.

    Its failure is no failure of the transaction: a duty must find what is left to do.
    """
    if isinstance(connection, _Connection):
        connection.followers.append(follower)


async def _follow(connection: _Connection) -> None:
    followers, connection.followers = connection.followers, []
    for follower in followers:
        try:
            await follower(connection)
        except psycopg.Error as error:
            _log.warning("What follows a commit failed, and is left to a duty: %s", error)


async def set_up(
    connection: Connection,
    *,
    prepare: bool = True,
    idle_in_transaction_sec: float = IDLE_IN_TRANSACTION_SEC,
) -> None:
    """Set up a connection of our own, not a caller's."""
    configure(connection, prepare=prepare)
    await connection.execute(PLAN_BY_INDEX)
    await connection.execute(limit_idle_transactions(idle_in_transaction_sec))


def configure(connection: Connection, *, prepare: bool = True) -> None:
    """Set up a connection for our statements; harmless to other code that uses it."""
    connection.prepare_threshold = 0 if prepare else None
    adapters = connection.adapters
    for name in ("json", "jsonb"):
        adapters.register_loader(name, _RawJsonb)
    adapters.register_loader("jsonb", _RawJsonbBinary)
