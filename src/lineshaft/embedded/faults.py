"""Explanations of errors from PostgreSQL and from the operating system."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lineshaft.embedded.account import account_name
from lineshaft.embedded.binaries import Binaries
from lineshaft.embedded.layout import Layout
from lineshaft.errors import EmbeddedServerError

SHOWN_LOG_LINES = 15
_SHOWN_LOG_BYTES = 4000

_REMEDIES = (
    (
        r"No space left on device|Disk quota exceeded|Check free disk space",
        "Free some space on that disk, or use another home (LINESHAFT_HOME).",
    ),
    (
        r"unrecognized configuration parameter|invalid value for parameter|outside the valid range",
        "Fix the server option named above.",
    ),
    (
        r"shared memory block .* still in use",
        "Processes of an earlier server are still running: end them, then start again.",
    ),
    (
        r"shared memory|Cannot allocate memory",
        "The machine has too little memory: lower the server option shared_buffers.",
    ),
    (
        r"lock file .* already exists",
        "Check whether the process named above is a PostgreSQL server, and stop it.",
    ),
    (r"Address already in use", "Choose another port."),
    (r"Permission denied", "Let the server's account reach that path, or use another home (LINESHAFT_HOME)."),
)


@contextmanager
def explained(layout: Layout) -> Iterator[None]:
    """Turn errors of the operating system into EmbeddedServerError."""
    try:
        yield
    except OSError as error:
        raise EmbeddedServerError(_explain(error, layout)) from error


def start_failure(layout: Layout, binaries: Binaries, since: int) -> EmbeddedServerError:
    """The error for a server that ended instead of starting; its part of the log begins at `since`."""
    tail = log_tail(layout.log, since)
    remedy = remedy_for(tail) or "Read the whole log, or give the DSN of another PostgreSQL."
    shown = "\n".join(f"  {line}" for line in tail.splitlines()) or "  (empty)"
    return EmbeddedServerError(f"{binaries} didn't start. The end of {layout.log}:\n{shown}\n{remedy}")


def remedy_for(output: str) -> str | None:
    """What to do about an error message of PostgreSQL."""
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, output)), None)


def log_tail(log: Path, since: int = 0) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(since, size), size - _SHOWN_LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-SHOWN_LOG_LINES:])


def _explain(error: OSError, layout: Layout) -> str:
    place = error.filename if isinstance(error.filename, str) else str(layout.home)
    reason = error.strerror or str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            advice = "Free some space there, or use another home (LINESHAFT_HOME)."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            advice = (
                f"It belongs to {_owner(place)}, and this process runs as {account_name(os.geteuid())}. Use "
                "a home of your own (LINESHAFT_HOME), or give the DSN of another PostgreSQL."
            )
        case _:
            advice = "Use another home (LINESHAFT_HOME), or give the DSN of another PostgreSQL."
    return f"The embedded PostgreSQL in {layout.home} can't be used: {place}: {reason}. {advice}"


def _owner(place: str) -> str:
    """The owner of a path or, if it doesn't exist, of the nearest existing directory above it."""
    for path in (Path(place), *Path(place).parents):
        try:
            return account_name(path.stat().st_uid)
        except OSError:
            continue
    return "another account"
