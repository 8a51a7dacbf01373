"""Where the tests' servers keep their data: in memory if there is plenty of it, else on disk.

Each test has its own database. Creating and dropping one writes and removes hundreds of files. On a disk that
takes ten times as long as in memory.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

_MEMORY = Path("/dev/shm")  # noqa: S108 - not a temporary file: private directories are made in it
#: The tests use some 500 MB. The rest is for programs that start later: if memory runs out, the kernel kills
#: a process, and what is in /dev/shm can't be moved elsewhere.
_NEEDED_BYTES = 4 * 1024**3
_PREFIX = "lineshaft-tests-"
_CGROUP = Path("/sys/fs/cgroup")


def memory_folder() -> Path | None:
    """A folder in memory, or None if memory is short or there is no such folder."""
    if not os.access(_MEMORY, os.W_OK):
        return None
    free = min(shutil.disk_usage(_MEMORY).free, _available_bytes())
    return _MEMORY if free > _NEEDED_BYTES else None


def _available_bytes() -> int:
    """What processes can still allocate, within the limit of the container.

    The free space of /dev/shm doesn't show that: it is a limit, whatever other programs use.
    """
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        available = int(fields["MemAvailable"].split()[0]) * 1024
        with contextlib.suppress(OSError, ValueError):  # There may be no limit.
            limit = int((_CGROUP / "memory.max").read_text())
            available = min(available, limit - int((_CGROUP / "memory.current").read_text()))
        return available
    return 0


def home_of_servers(shared: Path, run: int) -> Path:
    """The same folder for all processes of a run, whose pid is `run`; `shared` is theirs too."""
    link = shared / "servers"
    if not link.is_symlink():
        home = shared
        if (memory := memory_folder()) is not None:
            home = memory / f"{_PREFIX}{run}"
            home.mkdir(mode=0o700, exist_ok=True)
        # If another process of this run was first, its choice counts.
        with contextlib.suppress(FileExistsError):
            link.symlink_to(home)
    return link.readlink()


def remove_folders(run: int) -> None:
    """Remove what this run has left in memory, and what killed runs have."""
    for home in _MEMORY.glob(f"{_PREFIX}*"):
        owner = home.name.removeprefix(_PREFIX)
        if owner == str(run) or (owner.isdigit() and not Path(f"/proc/{owner}").exists()):
            _await_stop(home)
            shutil.rmtree(home, ignore_errors=True)


def _await_stop(home: Path) -> None:
    """A server stops shortly after its last user has gone."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(home.glob("*/postgres/postmaster.pid")):
        time.sleep(0.05)
