"""Programs under another account: they can't read the files of the agent, nor signal it."""

import os
import pwd
import sys
from collections.abc import Sequence

from msgspec import Struct

from lineshaft.errors import LineshaftError

#: Changes the account and becomes the program. In a process of its own: the agent stays what it is.
_BECOME = (
    "import os,sys;name,uid,gid=sys.argv[1],int(sys.argv[2]),int(sys.argv[3]);"
    "os.initgroups(name,gid);os.setgid(gid);os.setuid(uid);os.execvp(sys.argv[4],sys.argv[4:])"
)


class UnixAccount(Struct, frozen=True):
    name: str
    uid: int
    gid: int
    home: str

    @classmethod
    def find(cls, name: str) -> "UnixAccount":
        """The account to run programs under; raises unless this process may change to it."""
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise LineshaftError(
                f"--run-as {name!r}: there is no such account. Create one without a login: "
                "useradd --system --create-home NAME"
            ) from None
        if os.geteuid() != 0 and entry.pw_uid != os.geteuid():
            raise LineshaftError(
                f"--run-as {name!r} needs an agent that runs as root, which changes to that account for each "
                "program. Start the agent as root, or as that account without --run-as."
            )
        if entry.pw_uid == 0:
            raise LineshaftError(f"--run-as {name!r} is root. Name an account without rights.")
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir)

    @property
    def variables(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def wrapped(self, arguments: Sequence[str]) -> list[str]:
        """The arguments of a process that changes to the account and becomes the program."""
        if os.geteuid() == self.uid:
            return list(arguments)
        ids = (self.name, str(self.uid), str(self.gid))
        return [sys.executable, "-I", "-S", "-c", _BECOME, *ids, *arguments]
