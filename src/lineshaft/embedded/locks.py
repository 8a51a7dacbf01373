"""File locks that the kernel releases when their holder ends in any way.

A lock belongs to the open file. A child of `fork` without `exec` (multiprocessing's "fork") shares the open
file, and with it the lock:

- the exclusive lock is therefore released explicitly (LOCK_UN), which releases it for such a child, too;
- a share is only closed: a forked child may still use the server and keeps the share until it closes it or
  ends. Programs run by `exec` inherit neither: Python's files are closed by `exec`.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lineshaft.errors import EmbeddedServerError

with suppress(ImportError):  # Not on Windows, where `EmbeddedServer.start` raises an error earlier.
    import fcntl

CHECK_EVERY_S = 0.02


@contextmanager
def exclusive(path: Path, *, patience: float, waiting_for: str) -> Iterator[None]:
    handle = _open(path)
    try:
        _take(handle, fcntl.LOCK_EX, patience=patience, waiting_for=waiting_for)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def take_share(path: Path, *, patience: float, waiting_for: str) -> int:
    """Take a shared lock; closing the returned file descriptor releases it."""
    handle = _open(path)
    try:
        _take(handle, fcntl.LOCK_SH, patience=patience, waiting_for=waiting_for)
    except BaseException:
        os.close(handle)
        raise
    return handle


def is_held(path: Path) -> bool:
    """Whether a process holds the lock exclusively. Creates no file and keeps no lock."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        fcntl.flock(handle, fcntl.LOCK_UN)
        return False
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _take(handle: int, kind: int, *, patience: float, waiting_for: str) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise EmbeddedServerError(
                    f"Timed out after {patience:.0f} s waiting for {waiting_for}. "
                    "Check with `ps` whether that process hangs, end it, and try again."
                ) from None
            time.sleep(CHECK_EVERY_S)
        else:
            return
