"""The outbox of notifications: what each destination is to be told, until it has been delivered.

Two steps, both safe on any number of nodes. `collect` reads the event feed from the destination's cursor; in
one transaction the cursor moves, if nobody else has moved it, and what was read is written down. So each
event is noted once. `take` chooses what goes out now, for the length of a lease; who took it sends it
outside any transaction and says how it went. Whoever dies in between leaves it to the next, which is the one
case in which something may arrive twice; it has the same id then.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.errors import CursorExpiredError
from lineshaft.model.notices import (
    DueNotice,
    Message,
    Notice,
    NoticeEvent,
    NoticeKind,
    events_of,
    message,
    notices,
    plan,
)
from lineshaft.types import Event

#: Events that are looked at, and noted, in one transaction.
_PAGE = 500
#: Notices that may wait for one destination. Beyond that the event log keeps them: nothing is read.
MAX_WAITING = 10_000
#: Of one kind, looked at in one go: so many can be told in one message.
_AT_ONCE = 1_000
#: So long somebody may take to send what it took.
LEASE_SEC = 60.0


@dataclass(frozen=True, slots=True)
class Throttle:
    """At most so many messages of one kind in a window; None: any number."""

    most: int | None = 10
    window_sec: float = 60.0


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message that was taken, to be delivered."""

    no: int
    #: This is which attempt to send it; also the fence against one that took too long.
    tries: int
    message: Message


@dataclass(frozen=True, slots=True)
class Collected:
    noted: int
    #: Some events were deleted before they could be read: the outbox was not looked after for too long.
    missed: bool = False


class Outbox:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._events = Events(database)
        self._sql = catalog.load(__name__)

    async def collect(self, name: str, kinds: Collection[NoticeKind]) -> Collected:
        """Note what happened since the last time that is of these kinds."""
        known = await self._cursor(name)
        after: str | None = known
        noted, missed = 0, False
        while await self._has_room(name):
            try:
                page = await self._events.read(after, limit=_PAGE, kinds=events_of(kinds))
            except CursorExpiredError:
                # What is left of the feed; some of it may be told again.
                after, missed = None, True
                continue
            found = notices([_notice_event(event) for event in page.items], kinds)
            if not await self._note(name, known, page.next_cursor, found):
                break  # another node does it
            noted += len(found)
            known = after = page.next_cursor
            if page.caught_up:
                break
        return Collected(noted, missed)

    async def _cursor(self, name: str) -> str:
        while True:
            async with self._database.connection() as connection:
                cursor = await connection.execute(self._sql["read_destination"], {"name": name})
                row = await cursor.fetchone()
            if row is not None:
                return str(row[0])
            start = (await self._events.read(NOW, limit=1)).next_cursor
            async with self._database.connection() as connection:
                await connection.execute(
                    self._sql["begin_destination"], {**self._database.now, "name": name, "cursor": start}
                )

    async def _has_room(self, name: str) -> bool:
        async with self._database.connection() as connection:
            cursor = await connection.execute(self._sql["count_waiting"], {"name": name, "most": MAX_WAITING})
            ((waiting,),) = await cursor.fetchall()
        return bool(waiting < MAX_WAITING)

    async def _note(self, name: str, known: str, cursor: str, found: Sequence[Notice]) -> bool:
        async def work(connection: Connection) -> bool:
            moved = await connection.execute(
                self._sql["advance"], {**self._database.now, "name": name, "known": known, "cursor": cursor}
            )
            if await moved.fetchone() is None:
                return False
            if found:
                await connection.execute(
                    self._sql["note"],
                    {
                        **self._database.now,
                        "name": name,
                        "kinds": [notice.kind for notice in found],
                        "bodies": [msgspec.json.encode(notice).decode() for notice in found],
                    },
                )
            return True

        return await self._database.run(work)

    async def take(self, name: str, throttle: Throttle, *, most: int) -> list[Parcel]:
        """What goes out now; nothing, while another node is choosing."""

        async def work(connection: Connection) -> list[Parcel]:
            cursor = await connection.execute(self._sql["lock_destination"], {"name": name})
            if await cursor.fetchone() is None:
                return []
            own = {**self._database.now, "name": name}
            cursor = await connection.execute(
                self._sql["waiting"], {**own, "kinds": list(NoticeKind), "most": _AT_ONCE}
            )
            due = [DueNotice(*row) for row in await cursor.fetchall()]
            if not due:
                return []
            cursor = await connection.execute(
                self._sql["sent_lately"], {**own, "window": throttle.window_sec}
            )
            sent = dict(await cursor.fetchall())
            chosen = plan(due, sent, most=throttle.most, room=most)
            cursor = await connection.execute(
                self._sql["take"],
                {
                    **self._database.now,
                    "ids": [one for ids in chosen for one in ids],
                    "messages": [ids[0] for ids in chosen for _ in ids],
                    "lease": LEASE_SEC,
                },
            )
            return _parcels(sorted(await cursor.fetchall()))

        return await self._database.run(work)

    async def delivered(self, parcel: Parcel) -> None:
        await self._done("delivered", parcel)

    async def failed(self, parcel: Parcel, error: str, *, again_in_sec: float | None) -> None:
        """`None`: it is given up."""
        await self._done("failed", parcel, error=error, delay=again_in_sec)

    async def _done(self, statement: str, parcel: Parcel, **told: str | float | None) -> None:
        async with self._database.connection() as connection:
            await connection.execute(
                self._sql[statement],
                {**self._database.now, "message": parcel.no, "tries": parcel.tries, **told},
            )

    async def forget(self, older_than_sec: float, limit: int) -> int:
        async with self._database.connection() as connection:
            cursor = await connection.execute(
                self._sql["forget"], {**self._database.now, "older_than": older_than_sec, "limit": limit}
            )
            return cursor.rowcount


def _parcels(rows: Sequence[tuple[int, int, int, bytes]]) -> list[Parcel]:
    """Of rows (notice, message, tries, body) in order."""
    notices_of: dict[tuple[int, int], list[Notice]] = {}
    for _, no, tries, body in rows:
        notices_of.setdefault((no, tries), []).append(_NOTICE.decode(body))
    return [Parcel(no, tries, message(f"msg_{no}", told)) for (no, tries), told in notices_of.items()]


_NOTICE = msgspec.json.Decoder(Notice)


def _notice_event(event: Event) -> NoticeEvent:
    try:
        data = event.data if isinstance(event.data, dict) else None
    except msgspec.DecodeError:
        # Numbers that only PostgreSQL can hold: the notice goes out without data.
        data = None
    return NoticeEvent(event.kind, event.at, event.task_id, event.dag_id, event.agent_id, data)
