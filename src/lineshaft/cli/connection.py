"""The connection of a command to the queue: a server's HTTP API, or the database of the settings."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from lineshaft.cli.output import add_json_flag
from lineshaft.cli.usage import UsageError

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


@contextlib.contextmanager
def connect(args: argparse.Namespace) -> "Iterator[SyncLineshaft]":
    from lineshaft.client.blocking import SyncLineshaft  # noqa: PLC0415 - slow to import

    url = args.url
    if url is not None and not url.startswith(("http://", "https://")):
        raise UsageError(f"--url must be http://HOST:PORT or https://HOST, got {url!r}.")
    with SyncLineshaft(url, max_connections=2) as shaft:
        yield shaft


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
