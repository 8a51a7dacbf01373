"""The event feed: no event is missed, doubled or given before its cause, and nobody waits for a stranger.

Numbers are taken before the commit, so transactions become visible out of their order, and "everything after
seq n" would skip what commits late. Stopping at the oldest transaction that is still open would be right, but
stalls behind any long one. So a reader walks in windows. A window lies between two snapshots of the database:
rows that `since` did not see (their transaction had not begun, or was in its list of those in progress) and
that `until` sees, in order of seq. When a window is used up, its `until` becomes the next `since`, and the
next `until` is a snapshot taken then.

Nothing is missed and nothing comes twice: of a row's transaction, each snapshot says either finished or not,
and once finished it stays so; its rows are in the one window where the answer changes. A transaction that
stays open is in no window until it commits, and then in the first one after; it holds up nobody else.

A cause comes first. Say B saw what A committed, and then wrote an event. Any snapshot that sees B sees A,
which had committed before B did; so A's window is B's or an earlier one. In the same window the order of seq
decides: A took its numbers before it committed, B took this one after it had seen that. (The sequence has no
cache, which would give numbers out in blocks.)

**Crashes.** After a crash PostgreSQL, or the standby that takes over, gives out again the ids of transactions
of which it had written nothing down yet. Those were rolled back: a commit is written before anybody sees it.
But a snapshot may have called them finished, and what comes with the same id later would be taken for seen.
So a cursor is given out only when they are written too: if some of a window were rolled back, something is
committed (`settle`), which takes all before it along, to the disk and to a synchronous standby.

Rows carry the id of the top transaction (`xid8`, which doesn't wrap), also inside savepoints, and snapshots
list top transactions only. Reads go to a primary: a standby's pg_current_snapshot() doesn't list what is in
progress.
"""

import base64
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.errors import CursorExpiredError, InvalidInputError
from lineshaft.types import Event, EventPage
from lineshaft.types.json import raw

#: Read after this: what happens from now on.
NOW = "now"

_VERSION = 1
_HAS_UNTIL, _WIDE, _BEGINNING = 1, 2, 4
#: After a crash PostgreSQL gives out again the ids of those that were in progress; there are never so many.
_GIVEN_AGAIN = 10_000
#: Of any number in a cursor: far past what is ever reached, and sums with it still fit into a bigint.
_LARGEST = 2**62
#: Of a text that is no cursor, in the message.
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Transactions below `xmax` have finished, except those in `xip`, which is in ascending order."""

    xmax: int
    xip: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """PostgreSQL's own form, xmin:xmax:xip,xip,…."""
        _, xmax, xip = text.split(":")
        return cls(int(xmax), tuple(map(int, xip.split(","))) if xip else ())

    def __str__(self) -> str:
        return f"{self.xip[0] if self.xip else self.xmax}:{self.xmax}:{','.join(map(str, self.xip))}"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the feed. Its text is opaque to clients."""

    since: Snapshot
    #: None: the window is not open yet.
    until: Snapshot | None = None
    #: The row to go on with ...
    seq: int = 0
    #: ... and how many of its kinds were passed already.
    skip: int = 0
    #: The window is large: read by number, not by transaction.
    wide: bool = False
    #: The window has no lower end; `since` only says up to where events had been dropped when it was opened.
    beginning: bool = False

    def encode(self) -> str:
        return _seal(self.head(), self.seq, self.skip)

    def head(self) -> bytes:
        """What all places in a window have in common."""
        flags = (self.until is not None) * _HAS_UNTIL | self.wide * _WIDE | self.beginning * _BEGINNING
        head = bytearray([_VERSION << 4 | flags])
        for snapshot in (self.since, self.until):
            if snapshot is not None:
                _put(head, snapshot.xmax)
                _put(head, len(snapshot.xip))
                # Distances, from the top: transactions in progress are close together, most take one byte.
                above = snapshot.xmax
                for xid in reversed(snapshot.xip):
                    _put(head, above - xid)
                    above = xid
        return bytes(head)

    @classmethod
    def decode(cls, text: str) -> Self:
        try:
            return cls._decode(text)
        except (ValueError, IndexError, StopIteration):
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise InvalidInputError(
                f"{shown!r} is no cursor of the event feed. Use the cursor of an event, or next_cursor, as "
                "it was given; leave it out to read from the beginning."
            ) from None

    @classmethod
    def _decode(cls, text: str) -> Self:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        sealed = base64.b64decode(padded, altchars=b"-_", validate=True)
        flags, numbers = sealed[0], _numbers(sealed[1:-4])
        since = _take_snapshot(numbers)
        until = _take_snapshot(numbers) if flags & _HAS_UNTIL else None
        cursor = cls(
            since,
            until,
            next(numbers),
            next(numbers),
            wide=bool(flags & _WIDE),
            beginning=bool(flags & _BEGINNING),
        )
        # Checks the version, the checksum, and that nothing is left over.
        if cursor.encode() != text:
            raise ValueError
        return cursor

    def opened(self, until: str, horizon: int | None) -> "Cursor":
        """With the upper end that the database gave to the window."""
        if self.until is not None:
            return self
        top = Snapshot.parse(until)
        if self.beginning:
            return replace(self, since=Snapshot((horizon or 0) + 1), until=top)
        # What is still in progress in both is not in this window. Cursors stay short though many write.
        running = set(top.xip)
        finished = tuple(xid for xid in self.since.xip if xid not in running)
        return replace(self, since=Snapshot(self.since.xmax, finished), until=top)

    def has_expired(self, horizon: int | None) -> bool:
        """Whether rows were dropped that it had not passed: `horizon` is the highest transaction of any.

        A transaction that was open all the time until its rows were dropped doesn't count: because of one
        that is left open for longer than retention, every cursor would expire.
        """
        begins = self.beginning and self.until is None
        return horizon is not None and not begins and horizon >= self.since.xmax

    def comes_from_elsewhere(self, next_xid: int) -> bool:
        """Whether it was given out by the cluster that this database was restored from, which was further."""
        ends = self.since if self.until is None else self.until
        return ends.xmax > next_xid + _GIVEN_AGAIN


_FROM_THE_BEGINNING = Cursor(Snapshot(1), wide=True, beginning=True)


@dataclass(frozen=True, slots=True)
class _Filter:
    task_id: str | None
    dag_id: str | None
    kinds: frozenset[str] | None

    def parameters(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "dag_id": self.dag_id,
            "kinds": None if self.kinds is None else sorted(self.kinds),
        }


class Events:
    def __init__(self, database: Database, *, most_recent: int = 2_000, span: int = 20_000) -> None:
        """`most_recent`: rows of a window that are read at once; `span`: numbers of a larger one."""
        self._database = database
        self._most_recent = most_recent
        self._span = span
        self._sql = catalog.load(__name__)

    async def read(
        self,
        after: str | None,
        *,
        limit: int,
        task_id: str | None = None,
        dag_id: str | None = None,
        kinds: Collection[str] | None = None,
    ) -> EventPage:
        """The events after a cursor; None: from the beginning, `NOW`: none yet, but a cursor to go on from.

        One statement for a reader that keeps up, two where a window ends within the page (two more when a
        large window is opened). A page may be short, even empty, and have more behind it: see `caught_up`.
        """
        if limit < 1:
            raise InvalidInputError(errors=[("limit", f"must be at least 1, not {limit}")])
        wanted = _Filter(task_id, dag_id, frozenset(kinds) if kinds else None)
        if after == NOW:
            async with self._database.connection() as connection:
                (now,) = await _one(connection, self._sql["read_now"], {})
                await connection.execute(self._sql["settle"], {"since": None, "until": now})
            return EventPage([], Cursor(Snapshot.parse(now)).encode(), caught_up=True)
        cursor = _FROM_THE_BEGINNING if after is None else Cursor.decode(after)
        items: list[Event] = []
        fresh = cursor.until is None
        async with self._database.connection() as connection:
            cursor = await self._read_window(connection, cursor, wanted, items, limit)
            if cursor.until is None and not fresh and len(items) < limit:
                fresh = True
                cursor = await self._read_window(connection, cursor, wanted, items, limit)
        return EventPage(items, cursor.encode(), caught_up=fresh and cursor.until is None)

    async def _read_window(
        self, connection: Connection, cursor: Cursor, wanted: _Filter, items: list[Event], limit: int
    ) -> Cursor:
        """Add what the window has to the items; gives the place to go on from."""
        room = limit - len(items)
        if not cursor.wide:
            cursor, complete, rows = await self._select(connection, "read_recent", cursor, wanted, room)
            if complete:
                return _take(cursor, rows, wanted, items, limit, end=None)
            first = {"since": str(cursor.since), "until": str(cursor.until)}
            (seq,) = await _one(connection, self._sql["find_first"], first)
            cursor = replace(cursor, wide=True, seq=seq)
        statement = "read_span" if wanted.task_id is None else "read_task"
        cursor, complete, rows = await self._select(connection, statement, cursor, wanted, room)
        end = None if complete else cursor.seq + self._span
        return _take(cursor, rows, wanted, items, limit, end=end)

    async def _select(
        self, connection: Connection, statement: str, cursor: Cursor, wanted: _Filter, room: int
    ) -> tuple[Cursor, bool, Sequence[tuple[Any, ...]]]:
        found = await connection.execute(
            self._sql[statement],
            {
                "since": None if cursor.beginning else str(cursor.since),
                "until": None if cursor.until is None else str(cursor.until),
                "seq": cursor.seq,
                "most": self._most_recent,
                "span": self._span,
                # All kinds of the first row may have been passed, or not be wanted.
                "limit": room + 1,
                **wanted.parameters(),
            },
        )
        rows = await found.fetchall()
        until, horizon, next_xid, complete = rows[0][:4]
        dropped = None if horizon is None else int(horizon)
        if cursor.has_expired(dropped) or cursor.comes_from_elsewhere(int(next_xid)):
            raise CursorExpiredError
        if cursor.until is None and Snapshot.parse(until) != cursor.since:
            since = None if cursor.beginning else str(cursor.since)
            await connection.execute(self._sql["settle"], {"since": since, "until": until})
        return cursor.opened(until, dropped), complete, [row[4:] for row in rows if row[4] is not None]


def _take(
    cursor: Cursor,
    rows: Sequence[tuple[Any, ...]],
    wanted: _Filter,
    items: list[Event],
    limit: int,
    *,
    end: int | None,
) -> Cursor:
    """Make events of rows, one of each kind, until the page is full.

    `end`: up to where the window was looked at; None: to its end.
    """
    head = cursor.head()
    room = limit - len(items)
    seq, skip = cursor.seq, cursor.skip
    for number, kinds, at, task_id, dag_id, agent_id, epoch, data in rows:
        passed = cursor.skip if number == cursor.seq else 0
        for place, kind in enumerate(kinds[passed:], passed + 1):
            if wanted.kinds is not None and kind not in wanted.kinds:
                continue
            if len(items) == limit:
                return replace(cursor, seq=seq, skip=skip)
            seq, skip = (number, place) if place < len(kinds) else (number + 1, 0)
            sealed = _seal(head, seq, skip)
            items.append(Event(sealed, kind, at, task_id, dag_id, agent_id, epoch, raw(data)))
    if len(rows) > room:
        return replace(cursor, seq=seq, skip=skip)
    if end is not None:
        return replace(cursor, seq=end, skip=0)
    if cursor.until is None:
        raise AssertionError("a window that was read is open")
    return Cursor(cursor.until)


async def _one(connection: Connection, statement: Any, parameters: dict[str, Any]) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = await (await connection.execute(statement, parameters)).fetchone()
    if row is None:
        raise AssertionError("the statement always answers with a row")
    return row


def _seal(head: bytes, seq: int, skip: int) -> str:
    body = bytearray(head)
    _put(body, seq)
    _put(body, skip)
    # Clients copy cursors by hand: half of one must not pass for another place.
    body += zlib.crc32(body).to_bytes(4, "big")
    return base64.urlsafe_b64encode(body).rstrip(b"=").decode("ascii")


def _put(target: bytearray, number: int) -> None:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    while number > 0x7F:  # noqa: PLR2004
        target.append(number & 0x7F | 0x80)
        number >>= 7
    target.append(number)


def _numbers(encoded: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in encoded:
        number |= (byte & 0x7F) << shift
        shift += 7
        if number > _LARGEST:
            raise ValueError
        if byte < 0x80:  # noqa: PLR2004
            yield number
            number = shift = 0
    if shift:
        raise ValueError


def _take_snapshot(numbers: Iterator[int]) -> Snapshot:
    above = xmax = next(numbers)
    xip = []
    for _ in range(next(numbers)):
        above -= next(numbers)
        xip.append(above)
    # Each below the one before it: Snapshot and PostgreSQL rely on the order.
    if above < 1 or [*xip] != sorted({*xip} - {xmax}, reverse=True):
        raise ValueError
    return Snapshot(xmax, tuple(reversed(xip)))
