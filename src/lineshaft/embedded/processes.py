"""Identifies the server that runs on a data directory.

A process id in postmaster.pid proves nothing: its process may have ended, be a zombie, or be another program
that got the same id later. Each embedded server therefore has a mark on its command line.
"""

import os
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lineshaft.embedded.layout import Layout
from lineshaft.embedded.watcher import start_time_of
from lineshaft.errors import EmbeddedServerError

PROC = Path("/proc")


class Identity(Enum):
    OURS = "an embedded server on this data directory"
    MANUAL = "a server on this data directory that was started manually"
    FOREIGN = "another program"
    UNCLEAR = "a server, possibly on this data directory"
    GONE = "nothing: the process has ended"


@dataclass(frozen=True, slots=True)
class Postmaster:
    pid: int
    port: int
    status: str
    """starting, ready, stopping or standby; empty while unknown."""


def data_mark(data: Path) -> str:
    """Identifies the directory itself, not its path, so that it survives a move."""
    found = data.stat()
    return f"lineshaft.data={found.st_dev}:{found.st_ino}"


def is_running(pid: int) -> bool:
    """Whether the process exists and isn't a zombie."""
    if (PROC / "self").exists():
        return start_time_of(pid) is not None
    state = _read_ps(pid, "stat=")
    return bool(state) and not state.startswith("Z")


def identify(pid: int, data: Path) -> Identity:
    if not is_running(pid):
        return Identity.GONE
    command = _command_line(pid)
    if data_mark(data) in command:
        return Identity.OURS
    program = Path(command[0]).name if command else ""
    if not program.startswith(("postgres", "postmaster")):
        return Identity.FOREIGN
    try:
        # A postmaster's working directory is its data directory. Root without CAP_SYS_PTRACE can't read it.
        return Identity.MANUAL if (PROC / str(pid) / "cwd").samefile(data) else Identity.FOREIGN
    except OSError:
        return Identity.UNCLEAR


def read_pid_file(layout: Layout) -> Postmaster | None:
    """The content of postmaster.pid, which may be stale; None: it doesn't exist or is being written."""
    try:
        lines = layout.pid_file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    pid = lines[0].strip() if lines else ""
    if not pid.isdigit() or int(pid) <= 0:
        return None
    port = lines[3].strip() if len(lines) > 3 else ""  # noqa: PLR2004 - PostgreSQL's line numbers
    status = lines[7].strip() if len(lines) > 7 else ""  # noqa: PLR2004 - as above
    return Postmaster(pid=int(pid), port=int(port) if port.isdigit() else 5432, status=status)


def find_postmaster(layout: Layout) -> Postmaster | None:
    """The running embedded server; raises an error for a server on this data that Lineshaft didn't start."""
    postmaster = read_pid_file(layout)
    if postmaster is None:
        return None
    identity = identify(postmaster.pid, layout.data)
    if identity is Identity.MANUAL:
        raise EmbeddedServerError(
            f"Process {postmaster.pid} is a PostgreSQL server on {layout.data} that Lineshaft didn't start. "
            f"Stop it first: pg_ctl stop -D {layout.data}"
        )
    return postmaster if identity is Identity.OURS else None


def remove_stale_pid_file(layout: Layout) -> None:
    """Remove a postmaster.pid whose process isn't a server; needs the start lock.

    PostgreSQL detects an unused process id, but takes a zombie or another program of the same account for a
    running server. PostgreSQL checks by its shared memory that no process of an earlier server uses the data.
    """
    postmaster = read_pid_file(layout)
    if postmaster is None:
        return
    if identify(postmaster.pid, layout.data) in {Identity.GONE, Identity.FOREIGN} and _is_in_use(
        postmaster.pid
    ):
        layout.pid_file.unlink(missing_ok=True)


def _is_in_use(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _command_line(pid: int) -> list[str]:
    if not (PROC / "self").exists():
        return _read_ps(pid, "command=").split()
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(part) for part in raw.split(b"\0") if part]


def _read_ps(pid: int, column: str) -> str:
    command = ["/bin/ps", "-ww", "-o", column, "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
