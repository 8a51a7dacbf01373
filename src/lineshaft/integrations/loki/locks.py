"""The locks of a folder, both kinds, so that every program that uses the folder is kept out.

Document 000 takes `flock` on `state/locks/queue.lock`. Other programs make a directory, with the id of their
process in it: the one that makes it has the lock. The kernel releases a `flock` when its process dies; a
directory stays, and is taken over once it is 30 s old and its process is dead.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lineshaft.errors import LineshaftError

#: How long to wait for the locks (document 000).
WAIT_SEC = 10.0
STALE_SEC = 30.0
QUEUE_LOCK = "state/locks/queue.lock"
DIRECTORIES = ("queue/.pending.lock.lockdir", "queue/.in-progress.lock.lockdir")
OWNER = "owner.pid"
_PAUSE_SEC = 0.01


class FolderLockedError(LineshaftError):
    """Another program holds the lock of a `.loki` folder."""


@contextmanager
def locked(root: Path, *, wait_sec: float = WAIT_SEC) -> Iterator[None]:
    """Hold all locks of a folder; raises FolderLockedError if they aren't free in time."""
    deadline = time.monotonic() + wait_sec
    with ExitStack() as held:
        held.enter_context(_flock(root / QUEUE_LOCK, deadline))
        for name in DIRECTORIES:
            held.enter_context(_directory(root / name, deadline))
        yield


@contextmanager
def held_alone(path: Path) -> Iterator[bool]:
    """Whether this process now holds the file's lock, as long as it likes; never waits."""
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def inode(path: Path) -> int | None:
    """Which file has this name now; None: there is none."""
    try:
        return path.stat(follow_symlinks=False).st_ino
    except OSError:
        return None


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


@contextmanager
def _flock(path: Path, deadline: float) -> Iterator[None]:
    descriptor = _open(path)
    try:
        _until(deadline, path, lambda: _try_flock(descriptor))
        yield
    finally:
        os.close(descriptor)


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _directory(path: Path, deadline: float) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    _until(deadline, path, lambda: _try_directory(path))
    try:
        (path / OWNER).write_text(f"{os.getpid()}\n")
        yield
    finally:
        _remove(path)


def _try_directory(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        if _is_stale(path):
            _remove(path)
        return False
    return True


def _is_stale(path: Path) -> bool:
    """Whether its process is dead, and it was made long ago: the id may not have been written yet."""
    try:
        age = time.time() - path.stat().st_mtime
        if age < STALE_SEC:
            return False
        pid = int((path / OWNER).read_text().strip() or "0")
    except FileNotFoundError:
        return path.exists()
    except (OSError, ValueError):
        return False
    return pid <= 0 or not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another account
    return True


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        (path / OWNER).unlink()
    with suppress(OSError):
        path.rmdir()


def _until(deadline: float, path: Path, attempt: Callable[[], bool]) -> None:
    while not attempt():
        if time.monotonic() >= deadline:
            raise FolderLockedError(
                f"Another program holds {path}. Wait until it has finished; if it hangs, end it."
            )
        time.sleep(_PAUSE_SEC)
