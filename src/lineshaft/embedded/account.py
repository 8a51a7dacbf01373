"""The account that the server runs as: PostgreSQL refuses to run as root.

If this process is root, the server uses an existing account. That account owns the data, but often can't
enter the directories above (a working directory in /root). Their permissions stay unchanged: the data
directory is opened here, as root, and the server inherits the descriptor and reaches it as /proc/self/fd/<n>,
which needs no permissions on the path.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from lineshaft.embedded.layout import Layout
from lineshaft.errors import EmbeddedServerError

with suppress(ImportError):  # Not on Windows, where `EmbeddedServer.start` raises an error earlier.
    import pwd

PREFERRED_ACCOUNTS = ("postgres", "nobody")

# The server outlives its starter, under an account that may be shared ("nobody"): it gets only the variables
# that programs need, and none of the starter's secrets.
PASSED_VARIABLES = ("PATH", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")


class _Switch(TypedDict, total=False):
    user: int
    group: int
    extra_groups: Sequence[int]


@dataclass(frozen=True, slots=True)
class SystemAccount:
    name: str
    uid: int
    gid: int
    switched: bool
    """Whether it differs from the account of this process."""

    def run(
        self, command: Sequence[str], *, keep: Sequence[int] = (), text_in: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this account and wait for it; it inherits the descriptors in `keep`."""
        switch: _Switch = {"user": self.uid, "group": self.gid, "extra_groups": ()} if self.switched else {}
        return subprocess.run(
            command,
            cwd="/",
            env=server_environment(),
            umask=0o077,
            pass_fds=keep,
            input=text_in,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            **switch,
        )

    def can_be_used(self) -> bool:
        """Whether this process can switch to it: in some containers root can't."""
        return not self.switched or self._succeeds(["/bin/sh", "-c", ":"])

    def can_run(self, program: Path) -> bool:
        return self._succeeds([str(program), "--version"])

    def _succeeds(self, command: Sequence[str]) -> bool:
        try:
            return self.run(command).returncode == 0
        except OSError:
            return False

    def give(self, *paths: Path) -> None:
        if self.switched:
            for path in paths:
                os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def data_argument(self, data: Path, handle: int) -> str:
        """The path under which this account reaches the data directory that it inherits as `handle`."""
        # Without /proc the account needs permissions on the whole path.
        by_handle = self.switched and Path("/proc/self/fd").is_dir()
        return f"/proc/self/fd/{handle}" if by_handle else str(data)


def server_account(layout: Layout) -> SystemAccount:
    """The owner of existing data, otherwise an existing account of the machine."""
    own = os.geteuid()
    owner = _owner_of(layout.data) if layout.data_major() is not None else None
    if own != 0:
        if owner is not None and owner[0] != own:
            raise EmbeddedServerError(
                f"The data in {layout.data} belongs to {account_name(owner[0])}, but this process runs as "
                f"{account_name(own)}. Run Lineshaft as that account, use another home (LINESHAFT_HOME), or "
                "give a DSN."
            )
        return SystemAccount(name=account_name(own), uid=own, gid=os.getegid(), switched=False)
    if owner is not None and owner[0] != 0:
        return SystemAccount(name=account_name(owner[0]), uid=owner[0], gid=owner[1], switched=True)
    if owner is not None:
        raise EmbeddedServerError(
            f"The data in {layout.data} belongs to root, but PostgreSQL doesn't run as root. Give it to an "
            f"ordinary account (chown -R <account> {layout.data}), or move it away to start with an empty "
            "database."
        )
    for name in PREFERRED_ACCOUNTS:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return SystemAccount(name=name, uid=found.pw_uid, gid=found.pw_gid, switched=True)
    raise EmbeddedServerError(
        f"PostgreSQL doesn't run as root, and none of the accounts {', '.join(PREFERRED_ACCOUNTS)} exists "
        "here. Run Lineshaft as an ordinary account, or give a DSN."
    )


def server_environment() -> dict[str, str]:
    passed: Mapping[str, str] = os.environ
    return {name: passed[name] for name in PASSED_VARIABLES if name in passed} | {"LC_ALL": "C"}


def account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _owner_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid
