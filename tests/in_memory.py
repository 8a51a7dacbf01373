"""Where the tests' servers keep their data: in memory, where there is room.

A test has a database of its own. Making and dropping one is some hundred files, which costs ten times as
much on a disk as in memory: most of the suite's time.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

_MEMORY = Path("/dev/shm")  # noqa: S108 - not a temporary file: a folder of our own in it
_ROOM_BYTES = 4 * 1024**3
_PREFIX = "lineshaft-tests-"


def home_of_servers(shared: Path, run: int) -> Path:
    """The same folder for all processes of a run, whose pid is `run`; `shared` is theirs too."""
    link = shared / "servers"
    if not link.is_symlink():
        home = shared
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
            home = _MEMORY / f"{_PREFIX}{run}"
            home.mkdir(mode=0o700, exist_ok=True)
        # Another process of this run may be quicker: then what it found counts.
        with contextlib.suppress(FileExistsError):
            link.symlink_to(home)
    return link.readlink()


def clear_away(run: int) -> None:
    """What this run has left in memory, and what runs did that were killed."""
    for home in _MEMORY.glob(f"{_PREFIX}*"):
        owner = home.name.removeprefix(_PREFIX)
        if owner == str(run) or (owner.isdigit() and not Path(f"/proc/{owner}").exists()):
            _await_stop(home)
            shutil.rmtree(home, ignore_errors=True)


def _await_stop(home: Path) -> None:
    """A server stops by itself shortly after its last user has gone."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(home.glob("*/postgres/data/postmaster.pid")):
        time.sleep(0.05)
