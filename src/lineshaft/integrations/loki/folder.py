"""The files of a `.loki` folder: reading, atomic replacement, and what is left alone.

A file is replaced as a whole: written beside, flushed to the disk, renamed. So a reader sees the old or the
new one, also after a crash at any moment. A file that isn't JSON is kept as it is and never replaced. What is
written replaces links; it never follows them, because programs that use the folder may be less trusted.
"""

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from lineshaft.errors import LineshaftError
from lineshaft.integrations.loki import locks
from lineshaft.integrations.loki.records import QUEUES

#: A file that changed so shortly before it was read may change again without looking different.
_SETTLED_NS = 100_000_000
_WRAPPED = "tasks"
PAUSES = ("PAUSE", "STOP")


class UnreadableFileError(LineshaftError):
    """A file of a `.loki` folder isn't what it should be. It stays as it is."""


class Signature(NamedTuple):
    """What tells one version of a file from another, without reading it."""

    inode: int
    size: int
    changed_ns: int


class QueueFile(Struct, frozen=True):
    #: Records, each as it is in the file.
    records: list[Raw]
    #: The other fields of an object around the list; None: the file is a bare list.
    wrapper: dict[str, Any] | None = None
    signature: Signature | None = None
    #: False: it changed so recently that it may change again without another signature.
    settled: bool = True


_NEVER = Signature(0, -1, 0)


class Folder:
    def __init__(self, root: Path, *, wrapper: bool = False) -> None:
        """`wrapper`: files that don't exist yet become an object with the list in `tasks`."""
        self.root = root
        self._wrap = wrapper
        #: Bytes of queue files that were read and written, for tests and logs.
        self.bytes_read = 0
        self.bytes_written = 0

    def create(self) -> None:
        """Make the folders and the files that every reader expects."""
        for name in ("queue", "state/locks", "signals", "logs/decisions"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for name in (*QUEUES, "failed"):
            if not self.queue(name).exists():
                self.write(name, [], None)

    @contextmanager
    def locked(self, *, wait_sec: float = locks.WAIT_SEC) -> Iterator[None]:
        with locks.locked(self.root, wait_sec=wait_sec):
            yield

    @property
    def paused_by(self) -> str | None:
        """The file that stops new claims."""
        return next((name for name in PAUSES if os.path.lexists(self.root / name)), None)

    # Queue files.

    def queue(self, name: str) -> Path:
        return self.root / "queue" / f"{name}.json"

    def signature(self, name: str) -> Signature:
        """Of the file as it is now."""
        return _signature(self.queue(name))

    def read(self, name: str) -> QueueFile:
        """Raises UnreadableFileError for a file that isn't a list of records."""
        path = self.queue(name)
        before = _signature(path)
        try:
            content = _content(path)
        except FileNotFoundError:
            return QueueFile([], {} if self._wrap else None, _NEVER)
        except OSError as error:
            raise _unreadable(path, error.strerror or type(error).__name__) from None
        self.bytes_read += len(content)
        settled = before == _signature(path) and time.time_ns() - before.changed_ns > _SETTLED_NS
        records, wrapper = _parsed(path, content)
        return QueueFile(records, wrapper, before, settled)

    def write(
        self, name: str, records: Iterable[bytes | Raw], wrapper: Mapping[str, Any] | None
    ) -> Signature:
        """Replace a queue file; `wrapper` has the other fields of an object around the list."""
        body = b",\n".join(bytes(record) for record in records)
        listed = b"[\n" + body + b"\n]" if body else b"[]"
        if wrapper is None and self._wrap and not self.queue(name).exists():
            wrapper = {}
        if wrapper is not None:
            others = b"".join(
                msgspec.json.encode(key) + b": " + msgspec.json.encode(value) + b",\n"
                for key, value in wrapper.items()
            )
            listed = b"{\n" + others + b'"tasks": ' + listed + b"\n}"
        self.bytes_written += len(listed)
        replace(self.queue(name), listed + b"\n")
        return self.signature(name)


def _content(path: Path) -> bytes:
    """Raises OSError for pipes and devices: reading one may never end, while the folder is locked."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it isn't a regular file")
        return file.read()


def _parsed(path: Path, content: bytes) -> tuple[list[Raw], dict[str, Any] | None]:
    if not content.strip():
        return [], None
    try:
        if content.lstrip()[:1] != b"{":
            return msgspec.json.decode(content, type=list[Raw]), None
        whole = msgspec.json.decode(content, type=dict[str, Raw])
        records = msgspec.json.decode(whole.pop(_WRAPPED, b"[]"), type=list[Raw])
        return records, {name: msgspec.json.decode(value) for name, value in whole.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(path, f"it isn't a list of records in JSON: {error}") from None


def as_record(raw: Raw | bytes) -> dict[str, Any] | None:
    """An encoded record; None: it is something else, or has numbers or a depth that can't be read."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _unreadable(path: Path, why: str) -> UnreadableFileError:
    return UnreadableFileError(
        f"{path} can't be read ({why}). It is left as it is; repair or remove it, and its records are read."
    )


def _signature(path: Path) -> Signature:
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return _NEVER
    return Signature(found.st_ino, found.st_size, found.st_mtime_ns)


# Other files.


def replace(path: Path, content: bytes) -> None:
    """Write beside, flush, rename; a process that is killed leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.lineshaft")
    with suppress(FileNotFoundError):
        beside.unlink()
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        with suppress(OSError):
            mode = path.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                os.fchmod(descriptor, stat.S_IMODE(mode))
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    beside.rename(path)


def append_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Add lines at the end; a line that a killed process left unfinished is not continued."""
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        start = b"" if not size or file.read(1) == b"\n" else b"\n"
        os.write(file.fileno(), start + b"".join(line + b"\n" for line in lines))


def last_lines(path: Path, most_bytes: int = 1 << 16) -> list[bytes]:
    """The last whole lines of a file; none if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            found = file.read().split(b"\n")
    except OSError:
        return []
    return found[1 if size > most_bytes else 0 : -1]


def read_object(path: Path) -> dict[str, Any]:
    """A file with a JSON object; empty if there is none. Raises UnreadableFileError for anything else."""
    try:
        content = _content(path)
        found = msgspec.json.decode(content) if content.strip() else {}
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(found, dict):
        raise _unreadable(path, "it isn't an object")
    return found


def write_object(path: Path, value: object) -> None:
    replace(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
