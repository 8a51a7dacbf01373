"""Which server, if any, runs on a data directory.

A process id in postmaster.pid proves nothing: its process may have ended, be a zombie that nobody reaps, or
be another program that was given the same id since. Each server of ours therefore carries a mark on its
command line, which everybody may read.
"""

import os
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lineshaft.embedded.layout import Layout
from lineshaft.embedded.watcher import beginning_of
from lineshaft.errors import EmbeddedServerError

PROC = Path("/proc")


class Identity(Enum):
    OURS = "a server of ours on this data directory"
    BY_HAND = "a server on this data directory that was started by hand"
    FOREIGN = "another program"
    UNCLEAR = "a server, perhaps on this data directory"
    GONE = "nothing: the process has ended"


@dataclass(frozen=True, slots=True)
class Postmaster:
    pid: int
    port: int
    status: str
    """starting, ready, stopping or standby; empty while the server hasn't said yet."""


def data_mark(data: Path) -> str:
    """Names the directory itself, not its path: it is still the same one after a move."""
    found = data.stat()
    return f"lineshaft.data={found.st_dev}:{found.st_ino}"


def is_running(pid: int) -> bool:
    """Whether the process does anything: a zombie doesn't."""
    if (PROC / "self").exists():
        return beginning_of(pid) is not None
    state = _ask_ps(pid, "stat=")
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
        # A postmaster works in its data directory. Root without CAP_SYS_PTRACE may not look.
        return Identity.BY_HAND if (PROC / str(pid) / "cwd").samefile(data) else Identity.FOREIGN
    except OSError:
        return Identity.UNCLEAR


def read_pid_file(layout: Layout) -> Postmaster | None:
    """What postmaster.pid says, true or not; None: it doesn't exist or is only being written."""
    try:
        lines = layout.pid_file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    pid = lines[0].strip() if lines else ""
    if not pid.isdigit() or int(pid) <= 0:
        return None
    port = lines[3].strip() if len(lines) > 3 else ""  # noqa: PLR2004 - the lines' places are PostgreSQL's
    status = lines[7].strip() if len(lines) > 7 else ""  # noqa: PLR2004 - as above
    return Postmaster(pid=int(pid), port=int(port) if port.isdigit() else 5432, status=status)


def find_postmaster(layout: Layout) -> Postmaster | None:
    """The running server of ours; a server on our data that isn't ours is an error."""
    postmaster = read_pid_file(layout)
    if postmaster is None:
        return None
    identity = identify(postmaster.pid, layout.data)
    if identity is Identity.BY_HAND:
        raise EmbeddedServerError(
            f"Process {postmaster.pid} is a PostgreSQL server on {layout.data} that Lineshaft didn't start. "
            f"Stop it first: pg_ctl stop -D {layout.data}"
        )
    return postmaster if identity is Identity.OURS else None


def remove_stale_pid_file(layout: Layout) -> None:
    """Remove a postmaster.pid that names something that isn't a server; only while holding the start lock.

    PostgreSQL itself sees that a process id is free, but takes a zombie or another program of the same
    account for a running server. That no process of an earlier server still works on the data is checked by
    PostgreSQL once more, on its shared memory.
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
        return _ask_ps(pid, "command=").split()
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(part) for part in raw.split(b"\0") if part]


def _ask_ps(pid: int, column: str) -> str:
    asked = ["/bin/ps", "-ww", "-o", column, "-p", str(pid)]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
