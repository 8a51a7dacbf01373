"""File locks that the kernel gives up when their holder ends, however it ends.

A lock belongs to the opened file. A child made by `fork` without `exec` (multiprocessing's "fork") shares the
opened file, and with it the lock:

- the exclusive lock is therefore released by name (LOCK_UN), which releases it for such a child as well;
- a share is only closed: a forked child that may still use the server keeps it until it ends, or closes it
  itself. Programs run by `exec` never get either: Python opens files so that `exec` closes them.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lineshaft.errors import EmbeddedServerError

with suppress(
    ImportError
):  # There is none on Windows, where `EmbeddedServer.start` says so before it comes here.
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
    """A shared lock; closing the returned file descriptor gives it up."""
    handle = _open(path)
    try:
        _take(handle, fcntl.LOCK_SH, patience=patience, waiting_for=waiting_for)
    except BaseException:
        os.close(handle)
        raise
    return handle


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock exclusively; nothing is made or kept."""
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
                    f"Waited {patience:.0f} s for {waiting_for}, in vain. "
                    "See with `ps` whether that process hangs, end it, and try again."
                ) from None
            time.sleep(CHECK_EVERY_S)
        else:
            return
