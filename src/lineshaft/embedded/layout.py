"""Paths in the home directory of an embedded server."""

import os
from dataclasses import dataclass
from pathlib import Path

from lineshaft.embedded.watcher import SOCKET_DIRECTORY
from lineshaft.errors import EmbeddedServerError


@dataclass(frozen=True, slots=True)
class Layout:
    home: Path

    @property
    def data(self) -> Path:
        return self.home / "postgres"

    @property
    def socket_directory(self) -> Path:
        return self.data / SOCKET_DIRECTORY

    @property
    def pid_file(self) -> Path:
        return self.data / "postmaster.pid"

    @property
    def start_lock(self) -> Path:
        return self.home / "start.lock"

    @property
    def users_lock(self) -> Path:
        return self.home / "users.lock"

    @property
    def watcher_lock(self) -> Path:
        return self.home / "watcher.lock"

    @property
    def passfile(self) -> Path:
        return self.home / "pgpass"

    @property
    def log(self) -> Path:
        return self.home / "postgres.log"

    @property
    def binaries_record(self) -> Path:
        """Records the binaries of the running server, for processes that join it."""
        return self.home / "binaries.json"

    def data_major(self) -> int | None:
        """The major version of the data; None: no data yet."""
        try:
            text = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not text.isdigit():
            raise EmbeddedServerError(
                f"{self.data} contains no usable PostgreSQL data: its PG_VERSION is {text!r}. "
                "Restore it from a backup, or move the directory away to start with an empty database."
            )
        return int(text)


def write_private(path: Path, text: str) -> None:
    """Atomically write a file that only its owner can read."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
