"""A connection of the pool for the time of an `async with`, with the driver's errors told in our words.

A class, because every call begins with it: as generators, one in another, this was a tenth of what a single
submission cost the client.
"""

import asyncio
import contextlib
import os
import socket
from types import TracebackType
from typing import Any, TypeGuard

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from lineshaft.engine.postgres.migrate import OWNER_NEEDED
from lineshaft.errors import DatabaseError, InvalidInputError, UnavailableError

_OUT_OF_RANGE = "22003"


class PooledConnection:
    __slots__ = ("_answer_within_sec", "_connection", "_in_use", "_pool", "_timer")

    def __init__(
        self,
        pool: "AsyncConnectionPool[Any]",
        in_use: set[AsyncConnection[Any]],
        answer_within_sec: float | None,
    ) -> None:
        """A connection that is lent for longer than `answer_within_sec` is taken for dead, and cut.

        `in_use`: has those that are lent.
        """
        self._pool = pool
        self._in_use = in_use
        self._answer_within_sec = answer_within_sec
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> AsyncConnection[Any]:
        cancelled = _cancellations()
        try:
            connection: AsyncConnection[Any] = await self._pool.getconn()
        except psycopg.OperationalError as error:
            _tell(error)
            raise
        if _cancellations() > cancelled:
            # Python 3.11 forgets one that comes at the same instant as what was waited for (wait_for, which
            # the pool uses). Whoever cancelled would wait for ever.
            await self._pool.putconn(connection)
            raise asyncio.CancelledError
        self._connection = connection
        self._in_use.add(connection)
        if self._answer_within_sec is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._answer_within_sec, shut_down, connection)
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        connection = self._connection
        self._in_use.discard(connection)
        try:
            if isinstance(error, asyncio.CancelledError) or _is_read_only(error):
                # Nobody knows what it has still to say; or it leads to a server that others have taken over
                # from, and a new one may not. It is not used again.
                connection.pgconn.finish()
            elif connection.pgconn.transaction_status not in _AT_REST:
                with contextlib.suppress(psycopg.Error):
                    await connection.rollback()
        finally:
            await self._pool.putconn(connection)
        if error is not None:
            _tell(error)


#: Of a connection that was closed it is not known what it does.
_AT_REST = frozenset({TransactionStatus.IDLE, TransactionStatus.UNKNOWN})


def _tell(error: BaseException) -> None:
    """Raise what the error means to whoever called, if it is not for them already."""
    if isinstance(error, PoolTimeout):
        raise UnavailableError("No database connection became free within 10 s. Try again.") from None
    if _is_read_only(error) or isinstance(error, psycopg.OperationalError):
        if error.sqlstate is None or error.sqlstate.startswith(_AWAY):
            raise UnavailableError(f"The database is away: {_first_line(error)}. Try again.") from error
    elif isinstance(error, psycopg.errors.InsufficientPrivilege):
        raise DatabaseError(f"The database refuses its role: {_first_line(error)}. {OWNER_NEEDED}") from error
    elif isinstance(error, (UnicodeError, psycopg.DataError)):
        if _is_about_characters(error):
            # Data is checked by the name of its field (model/storable.py); this is for ids and the like.
            raise InvalidInputError(
                "The call has a text with a character that PostgreSQL can't store (U+0000, or half of a "
                "surrogate pair). Remove it; nothing was changed."
            ) from error
        if isinstance(error, psycopg.DataError) and error.sqlstate == _OUT_OF_RANGE:
            raise InvalidInputError(
                f"The call has a number that PostgreSQL can't store: {_first_line(error)}. Nothing was "
                "changed."
            ) from error


#: No connection, no resources, stopped by an operator, an error of the system; or a standby, which is what a
#: server is after another has taken over.
_READ_ONLY = "25006"
_AWAY = ("08", "53", "57", "58", _READ_ONLY)


def _is_read_only(error: BaseException | None) -> TypeGuard[psycopg.Error]:
    return isinstance(error, psycopg.Error) and error.sqlstate == _READ_ONLY


def _is_about_characters(error: UnicodeError | psycopg.DataError) -> bool:
    # Without a state: the driver itself refused to send it.
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


def shut_down(connection: AsyncConnection[Any]) -> None:
    """End whatever waits on a connection that doesn't answer: its call fails at once.

    Cancelling the call would try to reach the server first. Closing the connection would free its number for
    another socket too early.
    """
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as same,
    ):
        same.shutdown(socket.SHUT_RDWR)
