"""Keeps the driver's reports about our own connections at debug level.

The pool warns about every connection that it replaces or fails to open, several times each. Our errors say
the same once, in words that help. Connections that other code of the process has opened are not affected.
"""

import logging

from psycopg import AsyncConnection

#: Every pool of ours has this name: the driver's log names pools, not connections, when it can't connect.
POOL_NAME = "lineshaft"


class OwnConnection:
    """Marks the class of our connections."""


def _is_ours(record: logging.LogRecord) -> bool:
    subject = record.args[0] if isinstance(record.args, tuple) and record.args else None
    if isinstance(subject, str):
        return subject == POOL_NAME
    if not isinstance(subject, AsyncConnection):
        # A transaction, or a pipeline.
        subject = getattr(subject, "connection", getattr(subject, "_conn", None))
    return isinstance(subject, OwnConnection)


def _at_debug(record: logging.LogRecord) -> bool:
    if not _is_ours(record):
        return True
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


for _name in ("psycopg", "psycopg.pool"):
    logging.getLogger(_name).addFilter(_at_debug)
