"""The connection pool, and what every store module has in common: transactions, retries, errors, JSON.

A transition is a few statements sent in one pipeline, which PostgreSQL runs as one transaction and answers in
one round trip. A deadlock or a serialization failure rolls it back whole, so it is simply run again.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import PQGen
from psycopg.adapt import Buffer, Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from lineshaft.clock import Clock, DatabaseClock
from lineshaft.engine.postgres.pool import PooledConnection, shut_down
from lineshaft.errors import UnavailableError

T = TypeVar("T")

Connection = AsyncConnection[Any]

#: It lost against another transaction, or its prepared statements were dropped (pipeline.py).
_TRY_AGAIN = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.InvalidSqlStatementName,
)

_CONNECT_SEC = 10
#: No statement takes nearly as long. A connection that was cut off without a word looks like a slow one, and
#: without a limit whoever waits on it does so until the system gives up, for a quarter of an hour or more.
PATIENCE_SEC = 60.0
#: A transaction that lost against another is tried this often before the error is shown.
_TRIES = 10


#: The statistics of a queue are always wrong, and one plan that reads a whole table costs more than all the
#: others together. Each statement has one plan that is right whatever the tables hold: keep to it.
#: Times are given in UTC, whatever zone the server is in.
PLAN_BY_INDEX = (
    "SELECT set_config('enable_seqscan', 'off', false), set_config('enable_mergejoin', 'off', false),"
    " set_config('enable_hashjoin', 'off', false), set_config('enable_material', 'off', false),"
    " set_config('TimeZone', 'UTC', false),"
    " set_config('jit', 'off', false), set_config('plan_cache_mode', 'force_generic_plan', false)"
)


class _RawJsonb(Loader):
    """JSON stays as it came: whoever needs a value decodes it, and most of it is only passed on."""

    format = Format.TEXT

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


class _RawJsonbBinary(Loader):
    format = Format.BINARY

    def load(self, data: Buffer) -> bytes:
        return bytes(data)[1:]  # the first byte is jsonb's version


class _Connection(AsyncConnection[Any]):
    """One on which a call may be cancelled."""

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        try:
            return await super().wait(gen, *args, **kwargs)
        except asyncio.CancelledError:
            # What the driver leaves unfinished would be closed by the garbage collector, who complains on
            # standard error that it can't end in good order on a connection which is given up by then.
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
        prepare: bool = True,
    ) -> None:
        """`prepare=False` is for a pooler in transaction mode that doesn't know prepared statements."""
        self.dsn = dsn
        #: A connection that was given out for longer than this is taken for dead, and cut. None: never.
        self.answer_within_sec: float | None = PATIENCE_SEC
        self._clock = clock or DatabaseClock()
        self._prepare = prepare
        self._in_use: set[Connection] = set()
        self._pool = AsyncConnectionPool(
            dsn,
            connection_class=_Connection,
            min_size=1,
            max_size=max_connections,
            open=False,
            configure=self._configure,
            kwargs={"autocommit": True, "application_name": "lineshaft"} | _connect_timeout(dsn),
            timeout=10,
            # The pool waits twice as long after each failure, for minutes in the end, though the database may
            # be back. So it gives up soon, and begins anew while anybody waits.
            reconnect_timeout=1.0,
            reconnect_failed=self._try_again,
        )

    async def _try_again(self, pool: "AsyncConnectionPool[Any]") -> None:
        if pool.get_stats().get("requests_waiting"):
            with contextlib.suppress(PoolClosed):
                await pool.check()

    async def _configure(self, connection: Connection) -> None:
        configure(connection, prepare=self._prepare)
        await connection.execute(PLAN_BY_INDEX)

    async def open(self) -> None:
        try:
            await self._pool.open(wait=True, timeout=10)
        except PoolTimeout:
            await self._pool.close()
            raise UnavailableError(
                "The database doesn't answer. Check that it runs and that LINESHAFT_DATABASE_URL names it."
            ) from None

    async def close(self) -> None:
        # Longer than this only one takes that tries to reach a server which doesn't answer.
        await self._pool.close(timeout=1)

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
        return PooledConnection(self._pool, self._in_use, self.answer_within_sec)

    def hang_up(self) -> None:
        """Whoever waits for an answer gets an `UnavailableError`: what can't wait any longer is to end."""
        for connection in self._in_use:
            shut_down(connection)

    async def run(self, work: Callable[[Connection], Awaitable[T]], *, pipeline: bool = True) -> T:
        """Run `work` in one transaction; again, from the start, if it lost against another transaction.

        In a pipeline statements are sent without waiting for answers, until one is asked for. COPY can't be
        part of one.
        """

        async def in_transaction(connection: Connection) -> T:
            if not pipeline:
                async with connection.transaction():
                    return await work(connection)
            async with connection.pipeline(), connection.transaction():
                return await work(connection)

        return await self.run_alone(in_transaction)

    async def run_alone(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """As `run`, for work that is one statement, and so a transaction by itself."""
        for attempt in range(1, _TRIES + 1):
            try:
                async with self.connection() as connection:
                    return await work(connection)
            except _TRY_AGAIN:
                if attempt == _TRIES:
                    raise
                # Whoever collided should not meet again at once.
                await asyncio.sleep(0.002 * attempt)
        raise AssertionError("unreachable")


def _connect_timeout(dsn: str) -> dict[str, Any]:
    """A server that doesn't answer at all is noticed in seconds, unless the DSN says otherwise."""
    return {} if "connect_timeout" in conninfo_to_dict(dsn) else {"connect_timeout": _CONNECT_SEC}


def configure(connection: Connection, *, prepare: bool = True) -> None:
    """What our statements expect of a connection; harmless to others that use it."""
    connection.prepare_threshold = 0 if prepare else None
    adapters = connection.adapters
    for name in ("json", "jsonb"):
        adapters.register_loader(name, _RawJsonb)
    adapters.register_loader("jsonb", _RawJsonbBinary)
