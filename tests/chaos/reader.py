"""A reader of the event feed in a chaos run: `python -m tests.chaos.reader`.

It reads page after page from the beginning, and goes on after a crash where its last recorded page ended.
When asked to stop, it reads on until it has seen everything.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

from lineshaft import Lineshaft
from lineshaft.settings import Settings
from tests.chaos.calling import ANSWER_SEC, call
from tests.chaos.history import Recorder, read_file

_PAUSE_SEC = 0.1
_LIMIT = 200
#: Cursor, kind, task.
Seen = list[list[str | None]]


class Feed(Protocol):
    async def read(self, cursor: str | None) -> tuple[Seen, str, bool]:
        """Events, where to go on, and whether that was all."""
        ...


class OverDatabase:
    def __init__(self, shaft: Lineshaft) -> None:
        self._shaft = shaft

    async def read(self, cursor: str | None) -> tuple[Seen, str, bool]:
        page = await self._shaft.read_events(cursor, limit=_LIMIT)
        return [[e.cursor, e.kind, e.task_id] for e in page.items], page.next_cursor, page.caught_up


class OverHttp:
    def __init__(self, urls: list[str]) -> None:
        self._urls = urls

    async def read(self, cursor: str | None) -> tuple[Seen, str, bool]:
        query = urlencode({"limit": _LIMIT} | ({} if cursor is None else {"after": cursor}))
        status, page = await call(self._urls, "GET", f"/v1/events?{query}")
        assert status == 200, (status, page)
        seen = [[item["cursor"], item["kind"], item["task_id"]] for item in page["items"]]
        return seen, page["next_cursor"], len(seen) < _LIMIT


@asynccontextmanager
async def _feed(dsn: str, urls: list[str]) -> AsyncIterator[Feed]:
    if urls:
        yield OverHttp(urls)
        return
    settings = Settings.load(os.environ | {"LINESHAFT_DATABASE_URL": dsn})
    async with Lineshaft(settings=settings, max_connections=1) as shaft:
        shaft.backend.expect_answers_within(ANSWER_SEC)
        yield OverDatabase(shaft)


async def _read_to_the_end(feed: Feed, cursor: str | None, record: Recorder, stopping: asyncio.Event) -> None:
    """Read until it is asked to stop and nothing is left."""
    while True:
        last = stopping.is_set()
        seen, cursor, caught_up = await feed.read(cursor)
        if seen:
            record("page", events=seen, next=cursor)
        if caught_up and last:
            record("caught_up")
            return
        if caught_up:
            await asyncio.sleep(_PAUSE_SEC)


def _place(path: Path) -> str | None:
    """Where the last recorded page ended."""
    pages = [record["next"] for record in read_file(path) if record["what"] == "page"]
    return pages[-1] if pages else None


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("history", type=Path)
    parser.add_argument("--dsn", default="")
    parser.add_argument("--url", action="append", default=[])
    args = parser.parse_args()
    path = args.history / f"{args.name}.jsonl"
    record = Recorder(path, args.name)
    record("started")
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    while True:
        try:
            async with _feed(args.dsn, args.url) as feed:
                await _read_to_the_end(feed, _place(path), record, stopping)
        except Exception as error:  # noqa: BLE001 - the feed goes on when the database is back
            record("interrupted", error=f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(_PAUSE_SEC)
        else:
            return


if __name__ == "__main__":
    asyncio.run(main())
