"""The outbox of notifications: notices for each destination, until they are delivered.

Two steps, both safe on any number of nodes. `collect` reads the event feed from the destination's cursor; one
transaction moves the cursor, if no other node has moved it, and stores the notices. So each event is stored
once. `take` selects what to send now, under a lease; the node sends it outside any transaction and records
the result. If it dies in between, the lease expires and another node sends the message again, with the same
id. That is the only case in which a message may arrive twice.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows, fetch_value
from lineshaft.errors import CursorExpiredError
from lineshaft.model.notices import (
    DueNotice,
    Notice,
    NoticeEvent,
    NoticeKind,
    Notification,
    events_of,
    message,
    notices,
    plan,
)
from lineshaft.types import Event

#: Events that one transaction reads.
_PAGE = 500
#: Notices that may wait for one destination. With more, the feed is not read until some are delivered.
MAX_WAITING = 10_000
#: Notices of one kind in one message.
_MAX_PER_MESSAGE = 1_000
#: Time to send a message before another node may send it.
LEASE_SEC = 60.0

_SQL = catalog.load(__name__)
_NOTICE = msgspec.json.Decoder(Notice)


class Throttle(Struct, frozen=True):
    """The most messages of one kind in a window; None: no limit."""

    most: int | None = 10
    window_sec: float = 60.0


class TakenMessage(Struct, frozen=True):
    """A message under a lease, to be delivered."""

    no: int
    #: The number of this attempt to send it; also the fence against an earlier one that took too long.
    tries: int
    message: Notification


class _SentCount(NamedTuple):
    kind: str
    messages: int


class _TakenNotice(NamedTuple):
    id: int
    message: int
    tries: int
    body: bytes


class Collected(Struct, frozen=True):
    noted: int
    #: Retention deleted some events before they were read.
    missed: bool = False


class Outbox:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._events = Events(database)

    async def collect(
        self, name: str, kinds: Collection[NoticeKind], *, sources: Collection[str] = ()
    ) -> Collected:
        """Store notices of these kinds about events since the last call.

        `sources`: only about their work.
        """
        known = await self._cursor(name)
        after: str | None = known
        noted, missed = 0, False
        while await self._has_room(name):
            try:
                page = await self._events.read(after, limit=_PAGE, kinds=events_of(kinds))
            except CursorExpiredError:
                # Read what is left of the feed; some of it may be repeated.
                after, missed = None, True
                continue
            events = await self._of_sources(page.items, sources) if sources else page.items
            found = notices([_notice_event(event) for event in events], kinds)
            if not await self._note(name, known, page.next_cursor, found):
                break  # another node has moved the cursor
            noted += len(found)
            known = after = page.next_cursor
            if page.caught_up:
                break
        return Collected(noted, missed)

    async def _cursor(self, name: str) -> str:
        while True:
            async with self._database.connection() as connection:
                known = await fetch_value(connection, _SQL["read_destination"], {"name": name})
            if known is not None:
                return str(known)
            start = (await self._events.read(NOW, limit=1)).next_cursor
            async with self._database.connection() as connection:
                await connection.execute(
                    _SQL["begin_destination"], {**self._database.now, "name": name, "cursor": start}
                )

    async def _of_sources(self, events: Sequence[Event], sources: Collection[str]) -> list[Event]:
        dags = {event.dag_id for event in events if event.dag_id is not None}
        values = {"dag_ids": sorted(dags), "sources": sorted(sources)}
        async with self._database.connection() as connection:
            known = set(await fetch_column(connection, _SQL["dags_of_sources"], values))
        return [event for event in events if event.dag_id in known]

    async def _has_room(self, name: str) -> bool:
        async with self._database.connection() as connection:
            values = {"name": name, "most": MAX_WAITING}
            waiting = await fetch_value(connection, _SQL["count_waiting"], values)
        return bool(waiting < MAX_WAITING)

    async def _note(self, name: str, known: str, cursor: str, found: Sequence[Notice]) -> bool:
        async def work(connection: Connection) -> bool:
            moved = await connection.execute(
                _SQL["advance"], {**self._database.now, "name": name, "known": known, "cursor": cursor}
            )
            if await moved.fetchone() is None:
                return False
            if found:
                await connection.execute(
                    _SQL["note"],
                    {
                        **self._database.now,
                        "name": name,
                        "kinds": [notice.kind for notice in found],
                        "bodies": [msgspec.json.encode(notice).decode() for notice in found],
                    },
                )
            return True

        return await self._database.run(work)

    async def take(self, name: str, throttle: Throttle, *, most: int) -> list[TakenMessage]:
        """Messages to send now; none while another node selects."""

        async def work(connection: Connection) -> list[TakenMessage]:
            if await fetch_value(connection, _SQL["lock_destination"], {"name": name}) is None:
                return []
            own = {**self._database.now, "name": name}
            kinds = {"kinds": list(NoticeKind), "most": _MAX_PER_MESSAGE}
            due = await fetch_rows(connection, DueNotice, _SQL["waiting"], {**own, **kinds})
            if not due:
                return []
            window = {"window": throttle.window_sec}
            counts = await fetch_rows(connection, _SentCount, _SQL["sent_lately"], {**own, **window})
            sent = {count.kind: count.messages for count in counts}
            chosen = plan(due, sent, most=throttle.most, room=most)
            taken = await fetch_rows(
                connection,
                _TakenNotice,
                _SQL["take"],
                {
                    **self._database.now,
                    "ids": [one for ids in chosen for one in ids],
                    "messages": [ids[0] for ids in chosen for _ in ids],
                    "lease": LEASE_SEC,
                },
            )
            return _messages(sorted(taken))

        return await self._database.run(work)

    async def delivered(self, taken: TakenMessage) -> None:
        await self._done("delivered", taken)

    async def failed(self, taken: TakenMessage, error: str, *, again_in_sec: float | None) -> None:
        """`again_in_sec`: None gives up."""
        await self._done("failed", taken, error=error, delay=again_in_sec)

    async def _done(self, statement: str, taken: TakenMessage, **result: str | float | None) -> None:
        async with self._database.connection() as connection:
            await connection.execute(
                _SQL[statement],
                {**self._database.now, "message": taken.no, "tries": taken.tries, **result},
            )

    async def forget(self, older_than_sec: float, limit: int) -> int:
        async with self._database.connection() as connection:
            cursor = await connection.execute(
                _SQL["forget"], {**self._database.now, "older_than": older_than_sec, "limit": limit}
            )
            return cursor.rowcount


def _messages(taken: Iterable[_TakenNotice]) -> list[TakenMessage]:
    grouped: dict[tuple[int, int], list[Notice]] = {}
    for row in taken:
        grouped.setdefault((row.message, row.tries), []).append(_NOTICE.decode(row.body))
    return [TakenMessage(no, tries, message(f"msg_{no}", found)) for (no, tries), found in grouped.items()]


def _notice_event(event: Event) -> NoticeEvent:
    try:
        data = event.data if isinstance(event.data, dict) else None
    except msgspec.DecodeError:
        # Numbers that only PostgreSQL can hold: the notice goes out without data.
        data = None
    return NoticeEvent(
        event.kind, event.at, event.task_id, event.dag_id, event.agent_id, data, event.type, event.title
    )
