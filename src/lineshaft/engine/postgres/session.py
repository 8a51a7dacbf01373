"""What all connections of our own have in common: how a dead peer is detected, on both sides."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psycopg

from lineshaft.engine.postgres.dsn import checked_dsn
from lineshaft.errors import UnavailableError

#: How long the first statements on a new connection may take.
FIRST_ANSWER_SEC = 10.0

#: A server that doesn't answer is detected within seconds. A connection that was cut off silently is detected
#: within a minute, even while it only waits for notifications: the defaults of operating systems are hours.
#: Ignored for sockets in the file system.
_CONNECT_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}

#: Our transactions never wait for anything but the database. The session of a process that was cut off
#: silently in the middle of one must not keep its locks; the server would wait for that process for hours.
IDLE_IN_TRANSACTION_SEC = 30.0


def connect_options(dsn: str) -> dict[str, Any]:
    """Arguments of `connect`, except those that the DSN has."""
    given = checked_dsn(dsn)
    return {name: value for name, value in _CONNECT_OPTIONS.items() if name not in given}


def limit_idle_transactions(seconds: float = IDLE_IN_TRANSACTION_SEC) -> bytes:
    """The statement for each connection that can hold locks.

    Not one of the options for connecting: poolers refuse it there.
    """
    return f"SET idle_in_transaction_session_timeout = {round(seconds * 1_000)}".encode()


def shut_down(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Make the pending call on a connection that doesn't answer fail at once.

    Cancelling the call would contact the server first. Closing the connection would free its file descriptor
    for another socket too early.
    """
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as same,
    ):
        same.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def answered_soon(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Raise UnavailableError if the statements of the block take too long; for a synchronous connection.

    A proxy or a pooler can accept a connection whose statements nothing answers.
    """
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        shut_down(connection)

    timer = threading.Timer(FIRST_ANSWER_SEC, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except psycopg.OperationalError as error:
        if not is_late.is_set():
            raise
        raise UnavailableError(
            "The database accepted a connection, but has not answered a statement within "
            f"{FIRST_ANSWER_SEC:g} s. "
            "Check that PostgreSQL runs and isn't overloaded, also behind a pooler or proxy, and try again."
        ) from error
    finally:
        timer.cancel()
