"""What all connections of our own have in common: how a dead peer is detected, on both sides."""

from typing import Any

from lineshaft.engine.postgres.dsn import checked_dsn

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
