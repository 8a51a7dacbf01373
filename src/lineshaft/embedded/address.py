"""The address of the server for clients: the socket's directory and the DSN.

The server creates its socket in its own data directory by a relative path, so the length of the full path
doesn't matter to it. Clients need a path of about a hundred bytes at most. If the path is longer (or has a
comma, which libpq reads as a list of hosts), clients use a symbolic link in a short private directory. Each
client creates a missing link, so nothing is recorded, and cleaning up the temporary directory does no harm.
"""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from lineshaft.embedded.cluster import DATABASE, ROLE
from lineshaft.embedded.layout import Layout
from lineshaft.embedded.watcher import SOCKET_DIRECTORY
from lineshaft.errors import EmbeddedServerError

LONGEST_SOCKET_PATH = 103
"""macOS allows 103 bytes, Linux 107."""
_LONGEST_SOCKET_NAME = ".s.PGSQL.65535"


def client_directory(layout: Layout) -> Path:
    """The socket's directory under a path that clients can use; creates the link if one is needed."""
    direct = layout.socket_directory
    if _is_usable(direct):
        return direct
    faults = []
    for place in _link_places(layout):
        if not _is_usable(place / SOCKET_DIRECTORY):
            faults.append(f"{place}: also too long")
            continue
        try:
            _make_link(place, direct)
        except OSError as error:
            faults.append(f"{place}: {error.strerror or error}")
            continue
        return place / SOCKET_DIRECTORY
    raise EmbeddedServerError(
        f"The socket's path {direct} is longer than {LONGEST_SOCKET_PATH - len(_LONGEST_SOCKET_NAME) - 1} "
        f"bytes or has a comma, and no short private directory is available ({'; '.join(faults)}). Use a "
        "shorter home (LINESHAFT_HOME), or set TMPDIR to a directory of your own."
    )


def dsn(layout: Layout, directory: Path, port: int) -> str:
    words = {
        "host": str(directory),
        "port": str(port),
        "dbname": DATABASE,
        "user": ROLE,
        "passfile": str(layout.passfile),
    }
    return " ".join(f"{name}={_quoted(value)}" for name, value in words.items())


def _is_usable(directory: Path) -> bool:
    longest = directory / _LONGEST_SOCKET_NAME
    return len(os.fsencode(longest)) <= LONGEST_SOCKET_PATH and "," not in str(directory)


def _link_places(layout: Layout) -> list[Path]:
    digest = hashlib.sha256(os.fsencode(layout.home)).hexdigest()[:12]
    name = f"lineshaft-{os.geteuid()}-{digest}"
    bases = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]  # noqa: S108 - owner and mode are checked
    usable = [Path(base) for base in bases if base and Path(base).is_dir()]
    return [base.absolute() / name for base in dict.fromkeys(usable)]


def _make_link(place: Path, target: Path) -> None:
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        # In a shared place another account may have created this directory to impersonate the server.
        found = place.lstat()
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not private or found.st_uid != os.geteuid():
            raise PermissionError(0, "exists, but isn't a private directory of this account") from None
    link = place / SOCKET_DIRECTORY
    if link.is_symlink() and link.readlink() == target:
        return
    draft = place / f"{SOCKET_DIRECTORY}.{os.getpid()}.new"
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)


def _quoted(value: str) -> str:
    if value and not any(character.isspace() or character in "'\\" for character in value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
