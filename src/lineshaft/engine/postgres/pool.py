"""The connections to a database, and what their errors mean to callers."""

import asyncio
import contextlib
import select
from types import TracebackType
from typing import Any, TypeGuard

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from lineshaft.engine.postgres.lane_reports import LaneReports
from lineshaft.engine.postgres.migrate import OWNER_NEEDED
from lineshaft.engine.postgres.session import shut_down
from lineshaft.errors import DatabaseError, InvalidInputError, UnavailableError

_OUT_OF_RANGE = "22003"


class LockedError(UnavailableError):
    """Another transaction holds what the call needs, and didn't let go of it in time."""


#: How long a call waits for a connection.
TAKE_WITHIN_SEC = 10.0
#: How long a connection is preferred before the pool may look at it again, and replace one that is old.
_PREFERRED_SEC = 600.0


class Pool:
    """The driver's pool, with a connection at hand for the next call.

    Calls that follow each other then use the same server process, whose caches are warm, and don't wait for
    the pool's lock: a cycle of one task costs a tenth less than with connections that take turns. One
    connection is preferred, because the first claim on another takes ten times as long as the next ones.
    """

    def __init__(self, connections: "AsyncConnectionPool[Any]") -> None:
        self._connections = connections
        self._preferred: AsyncConnection[Any] | None = None
        self._preferred_until = 0.0
        self._at_hand: AsyncConnection[Any] | None = None
        self.waiting = 0

    @property
    def max_size(self) -> int:
        return self._connections.max_size

    @property
    def is_closed(self) -> bool:
        return self._connections.closed

    async def open(self) -> None:
        await self._connections.open(wait=True, timeout=TAKE_WITHIN_SEC)

    async def close(self) -> None:
        kept, self._at_hand = self._at_hand, None
        if kept is not None:
            await self._connections.putconn(kept)
        # Only a connection to a server that doesn't answer takes longer than this.
        await self._connections.close(timeout=1)

    async def take(self, within_sec: float = TAKE_WITHIN_SEC) -> AsyncConnection[Any]:
        kept, self._at_hand = self._at_hand, None
        if kept is not None:
            return kept
        self.waiting += 1
        try:
            connection: AsyncConnection[Any] = await self._connections.getconn(within_sec)
        except PoolTimeout:
            raise UnavailableError(
                f"No connection to the database became available within {within_sec:g} s: it doesn't answer, "
                "or too many calls use it. Try again."
            ) from None
        else:
            return connection
        finally:
            self.waiting -= 1

    async def give_back(self, connection: AsyncConnection[Any]) -> None:
        now = asyncio.get_running_loop().time()
        if self._preferred is None:
            self._preferred = connection
            self._preferred_until = now + _PREFERRED_SEC
        is_reusable = (
            not self.waiting
            and connection.pgconn.transaction_status == TransactionStatus.IDLE
            and not self._connections.closed
        )
        if connection is self._preferred and (not is_reusable or now >= self._preferred_until):
            self._preferred = None
        elif is_reusable and (self._at_hand is None or connection is self._preferred):
            replaced, self._at_hand = self._at_hand, connection
            if replaced is None:
                return
            connection = replaced
        await self._connections.putconn(connection)


class PooledConnection:
    """A connection for the duration of an `async with`; the driver's errors become ours.

    A class instead of nested generators, because every call begins with it: the generators were a tenth of
    the client's cost of a single submission.
    """

    __slots__ = (
        "_answer_within_sec",
        "_cancellations",
        "_check",
        "_connection",
        "_in_use",
        "_is_late",
        "_pool",
        "_reports",
        "_take_within_sec",
        "_timer",
    )

    def __init__(
        self,
        pool: Pool,
        in_use: set[AsyncConnection[Any]],
        answer_within_sec: float | None,
        *,
        take_within_sec: float = TAKE_WITHIN_SEC,
        check: bool = False,
        reports: LaneReports | None = None,
    ) -> None:
        """A connection in use for longer than `answer_within_sec` is considered dead, and shut down.

        `in_use` has the connections in use. With `check`, connections that the server has closed since they
        were last used, as after a fail-over, are passed over. That takes 5 µs, which calls that write don't
        spend: their clients repeat them.
        """
        self._pool = pool
        self._in_use = in_use
        self._check = check
        self._answer_within_sec = answer_within_sec
        self._take_within_sec = take_within_sec
        self._timer: asyncio.TimerHandle | None = None
        self._is_late = False
        self._reports = reports

    async def __aenter__(self) -> AsyncConnection[Any]:
        self._cancellations = _cancellations()
        try:
            connection: AsyncConnection[Any] = await self._pool.take(self._take_within_sec)
            # At most all of them, and those that the pool opens in their place.
            for _ in range(2 * self._pool.max_size if self._check else 0):
                if not _is_closed_by_server(connection):
                    break
                connection.pgconn.finish()
                await self._pool.give_back(connection)
                connection = await self._pool.take(self._take_within_sec)
        except (psycopg.OperationalError, UnavailableError) as error:
            if self._is_cancelled:
                raise asyncio.CancelledError from error
            raise_translated(error)
            raise
        if self._is_cancelled:
            await self._pool.give_back(connection)
            raise asyncio.CancelledError
        self._connection = connection
        self._in_use.add(connection)
        if self._answer_within_sec is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._answer_within_sec, self._give_up)
        if self._reports is not None:
            try:
                await self._reports.prepare(connection)
            except BaseException as error:
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
        return connection

    def _give_up(self) -> None:
        self._is_late = True
        shut_down(self._connection)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        connection = self._connection
        self._in_use.discard(connection)
        hides_cancellation = isinstance(error, Exception) and self._is_cancelled
        try:
            is_cancelled = isinstance(error, asyncio.CancelledError) or hides_cancellation
            if is_cancelled or self._is_late or _is_read_only(error):
                # Results may still be in flight; or it was shut down; or the server is a standby now, and a
                # new connection may lead to the primary. The connection is not used again.
                connection.pgconn.finish()
            elif connection.pgconn.transaction_status not in _AT_REST:
                with contextlib.suppress(psycopg.Error):
                    await connection.rollback()
        finally:
            if self._reports is not None:
                self._reports.collect(connection)
            await self._pool.give_back(connection)
        if hides_cancellation:
            raise asyncio.CancelledError from error
        # A read that takes long is cancelled by the server itself.
        is_late = self._is_late or (self._check and isinstance(error, psycopg.errors.QueryCanceled))
        if is_late and isinstance(error, psycopg.OperationalError):
            raise UnavailableError(
                f"The database has not answered within {self._answer_within_sec:g} s. Try again; if it stays "
                "so, check that PostgreSQL runs and isn't overloaded."
                + (" LINESHAFT_READ_TIMEOUT_SEC gives reads more time." if self._check else "")
            ) from error
        if error is not None:
            raise_translated(error)

    @property
    def _is_cancelled(self) -> bool:
        """Whether the task was cancelled since it asked for the connection.

        Two things lose a cancellation, and the canceller would wait forever for a task that tries again.
        `wait_for` of Python 3.11, which the pool uses, loses one that arrives together with the result. The
        driver waits for the end of the cancelled statement, and if the connection breaks then, raises that.
        """
        return _cancellations() > self._cancellations


def _is_closed_by_server(connection: AsyncConnection[Any]) -> bool:
    """Whether there is something to read before anything was asked: the end, or the reason for it.

    A change of the server's settings is reported too. Then a connection is replaced that would still work.
    """
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


#: UNKNOWN is the status of a closed connection.
_AT_REST = frozenset({TransactionStatus.IDLE, TransactionStatus.UNKNOWN})


def raise_translated(error: BaseException) -> None:
    """Raise the LineshaftError that a driver's error means to the caller, if there is one."""
    if isinstance(error, psycopg.errors.ProgramLimitExceeded):
        # Limits on fields count characters, of which an index holds fewer if they take several bytes.
        raise InvalidInputError(
            f"The call contains a value that is too long: {_first_line(error)}. Shorten it; nothing was "
            "changed."
        ) from error
    if isinstance(error, psycopg.errors.LockNotAvailable):
        raise LockedError(
            "Another transaction has locked a row that this call needs, for longer than the call waits "
            "(10 s, unless lock_timeout in the database URL says otherwise). Nothing was changed; try again. "
            "If it stays so, pg_stat_activity shows the transaction."
        ) from error
    if _is_read_only(error) or _is_cut_off(error) or isinstance(error, psycopg.OperationalError):
        if error.sqlstate is None or error.sqlstate.startswith(_UNAVAILABLE):
            raise UnavailableError(
                f"The database is unavailable: {_first_line(error)}. Try again."
            ) from error
    elif isinstance(error, psycopg.errors.InsufficientPrivilege):
        raise DatabaseError(
            f"Permission denied by the database: {_first_line(error)}. {OWNER_NEEDED}"
        ) from error
    elif isinstance(error, (UnicodeError, psycopg.DataError)):
        if _is_about_characters(error):
            # model/storable.py checks data by field; this is for ids.
            raise InvalidInputError(
                "The call contains text with a character that PostgreSQL can't store (U+0000 or an unpaired "
                "surrogate). Remove it; nothing was changed."
            ) from error
        if isinstance(error, psycopg.DataError) and error.sqlstate == _OUT_OF_RANGE:
            raise InvalidInputError(
                f"The call contains a number that PostgreSQL can't store: {_first_line(error)}. Nothing was "
                "changed."
            ) from error


_READ_ONLY = "25006"
#: No connection, no resources, stopped by an operator, a system error; or read-only, because the server has
#: become a standby.
_UNAVAILABLE = ("08", "53", "57", "58", _READ_ONLY)


def _is_read_only(error: BaseException | None) -> TypeGuard[psycopg.Error]:
    return isinstance(error, psycopg.Error) and error.sqlstate == _READ_ONLY


def _is_cut_off(error: BaseException) -> TypeGuard[psycopg.InternalError]:
    """Whether the server ended the session right after it had answered.

    The driver then finds two results of one command. The server's own internal errors have an SQLSTATE.
    """
    return isinstance(error, psycopg.InternalError) and error.sqlstate is None


def _is_about_characters(error: UnicodeError | psycopg.DataError) -> bool:
    # Without an SQLSTATE: the driver refused to send it.
    return (
        isinstance(error, UnicodeError)
        or error.sqlstate in {"22021", "22P05"}
        or (error.sqlstate is None and "NUL" in str(error))
    )


def _first_line(error: psycopg.Error) -> str:
    return (error.diag.message_primary or str(error)).strip().splitlines()[0].rstrip(".")


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
