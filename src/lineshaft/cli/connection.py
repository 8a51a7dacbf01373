"""The connection of a command to the queue: a server's HTTP API, or the database of the settings."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from lineshaft.cli.output import add_json_flag
from lineshaft.cli.usage import UsageError
from lineshaft.errors import ForbiddenError, LineshaftError, NotFoundError
from lineshaft.settings import HOME_NAME, PREFIX, Settings

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import Page

T = TypeVar("T")
_PAGE = 500
_SOURCE = "Uses the server of --url or LINESHAFT_URL; without one, the database of the settings."


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags of every command that uses the queue."""
    command.add_argument("--url", help="the server to use (default: LINESHAFT_URL)")
    command.epilog = " ".join(filter(None, (command.epilog, _SOURCE)))
    add_json_flag(command)


def add_reason(command: argparse.ArgumentParser) -> None:
    """Add the flag of a command that is recorded with who does it."""
    command.add_argument("--reason", metavar="TEXT", help="why, for the event that is recorded")


@contextlib.contextmanager
def connect(args: argparse.Namespace, *, create: bool = False) -> "Iterator[SyncLineshaft]":
    """`create`: create the embedded database if there is none. Commands that only read never do."""
    from lineshaft.client.account import account  # noqa: PLC0415 - slow to import
    from lineshaft.client.blocking import SyncLineshaft  # noqa: PLC0415 - slow to import

    url = args.url
    if url is not None and not url.startswith(("http://", "https://")):
        raise UsageError(f"--url must be http://HOST:PORT or https://HOST, got {url!r}.")
    settings = Settings.load()
    url = url or settings.url
    if url is None and not create:
        require_database(settings)
    #: For messages.
    args.place = f"the server {url}" if url is not None else place(settings)
    actor = account() if url is None else None
    with SyncLineshaft(url, settings=settings, max_connections=2, actor=actor) as shaft:
        try:
            yield shaft
        except NotFoundError as error:
            raise NotFoundError(f"{error} (Looked in {args.place}.)") from None


def as_person(submit: "Callable[[str | None], T]") -> "T":
    """Submit with this account as the creator."""
    from lineshaft.client.account import user  # noqa: PLC0415 - slow to import

    try:
        return submit(f"human:{user()}")
    except ForbiddenError:
        # A token that is bound to an agent may not name others.
        return submit(None)


def place(settings: Settings) -> str:
    """Which database the settings name, without secrets."""
    if settings.database_url is None:
        return f"the embedded database in {settings.home}"
    named = f"{PREFIX}DATABASE_URL"
    return f"the database of {named if os.environ.get(named) else 'lineshaft.toml'}"


def require_database(settings: Settings) -> None:
    """Refuse to create an embedded database: an empty one would answer a question about another one."""
    if settings.database_url is not None or (settings.home / "postgres" / "PG_VERSION").exists():
        return
    above = "" if f"{PREFIX}HOME" in os.environ else f", and no folder above has a {HOME_NAME}"
    raise LineshaftError(
        f"There is no database in {settings.home}{above}. 'lineshaft up', 'lineshaft submit' or an agent "
        "creates one there. To use another one, go to its folder, or set LINESHAFT_HOME, "
        "LINESHAFT_DATABASE_URL or LINESHAFT_URL."
    )


def collect(read: "Callable[[int, str | None], Page[T]]", most: int | None = None) -> tuple[list[T], bool]:
    """The items of a list, page by page, and whether there are more; `most` None reads all."""
    items: list[T] = []
    cursor: str | None = None
    while True:
        page = read(_PAGE if most is None else min(most - len(items), _PAGE), cursor)
        items += page.items
        cursor = page.next_cursor
        if cursor is None or len(items) == most:
            return items, cursor is not None
