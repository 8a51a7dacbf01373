"""The place of a stream in the event feed: events are numbered, and one server at a time publishes them.

The place moves only after a batch was published. A crash in between publishes the batch again, with the same
numbers: before a batch, the end of its window is stored, so that reading it again gives the same events.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_row, fetch_value
from lineshaft.errors import CursorExpiredError
from lineshaft.types import Event

_SQL = catalog.load(__name__)
_log = logging.getLogger(__name__)

#: Publishes events; the first has this number, and the others follow.
Publish = Callable[[int, Sequence[Event]], Awaitable[None]]


class _Place(Struct, frozen=True):
    cursor: str
    seq: int


class EventStream:
    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._events = Events(database)
        self._name = name

    async def publish_next(self, publish: Publish, *, most: int, move_on: bool = True) -> tuple[int, bool]:
        """The number of events that were published, and whether there are more.

        Without `move_on`, the place stays if there are no events: moving it is a commit.
        """
        place = await self._place()
        try:
            page = await self._events.read(place.cursor, limit=1)
            if not page.items and page.caught_up:
                if move_on:
                    await self._move(place.cursor, page.next_cursor)
                return 0, False
            start = await self._events.fixed(place.cursor)
            if start != place.cursor and not await self._move(place.cursor, start):
                return 0, False
            page = await self._events.read(start, limit=most)
        except CursorExpiredError:
            _log.warning("Events were deleted before they were published to %s: it goes on.", self._name)
            await self._move(place.cursor, (await self._events.read(NOW, limit=1)).next_cursor)
            return 0, True

        async def work(connection: Connection) -> bool:
            own = {"name": self._name, "known": start}
            seq = await fetch_value(connection, _SQL["lock_at"], own)
            if seq is None:
                return False
            if page.items:
                # The row stays locked: no other server publishes meanwhile.
                await publish(seq + 1, page.items)
            await self._move_in(connection, start, page.next_cursor, len(page.items))
            return True

        if not await self._database.run(work, pipeline=False):
            return 0, False
        return len(page.items), not page.caught_up

    async def _place(self) -> _Place:
        own = {"name": self._name}
        async with self._database.connection() as connection:
            found = await fetch_row(connection, _Place, _SQL["read_place"], own)
        if found is not None:
            return found
        now = (await self._events.read(NOW, limit=1)).next_cursor
        async with self._database.connection() as connection:
            await connection.execute(_SQL["begin"], own | {"cursor": now})
        return await self._place()

    async def _move(self, known: str, cursor: str) -> bool:
        async with self._database.connection() as connection:
            return await self._move_in(connection, known, cursor, 0)

    async def _move_in(self, connection: Connection, known: str, cursor: str, events: int) -> bool:
        moved = await connection.execute(
            _SQL["move"],
            {**self._database.now, "name": self._name, "known": known, "cursor": cursor, "events": events},
        )
        return moved.rowcount == 1
