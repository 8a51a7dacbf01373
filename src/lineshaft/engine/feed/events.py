"""The event feed: no event is missed, repeated or delivered before its cause, and no reader is held up.

Sequence numbers are assigned before the commit, so transactions become visible out of order, and a reader of
"everything after seq n" would skip late commits. Stopping at the oldest open transaction would be correct,
but would stall behind any long one. So a reader proceeds in windows. A window lies between two snapshots of
the database: it has the rows that `since` did not see (their transaction had not begun, or was in progress)
and that `until` sees, in order of seq. At the end of a window, its `until` becomes the next `since`, and the
next `until` is a new snapshot.

Each event is delivered exactly once: for each snapshot a transaction is either finished or not, and a
finished one stays finished; its rows are in the one window where that changes. An open transaction is in no
window until it commits, and then in the next one; it holds up no other.

Causes come first. Suppose B saw what A committed, and then wrote an event. Any snapshot that sees B sees A,
which committed earlier; so A's window is B's or an earlier one. Within one window the order of seq decides: A
took its numbers before its commit, B took its number after that. (The sequence has no cache, which would
assign numbers in blocks.)

**Crashes.** After a crash, PostgreSQL or the standby that takes over reuses the ids of transactions of which
nothing was written to the log. They were rolled back: a commit is logged before it becomes visible. But a
snapshot may have counted them as finished, and a later transaction with the same id would be taken for seen.
So a cursor is returned only when they are in the log too: if part of a window was rolled back, `settle`
commits something, which flushes everything before it to the disk and to a synchronous standby.

Rows have the id of the top-level transaction (`xid8`, which doesn't wrap), even inside savepoints, and
snapshots list top-level transactions only. Reads need a primary: on a standby pg_current_snapshot() doesn't
list transactions in progress.
"""

import base64
import zlib
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self

from msgspec import Raw, Struct
from msgspec.structs import replace

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_value
from lineshaft.errors import CursorExpiredError, InvalidInputError
from lineshaft.types import Event, EventPage
from lineshaft.types.json import raw

#: A cursor for events from now on.
NOW = "now"

_SQL = catalog.load(__name__)

_VERSION = 1
_HAS_UNTIL, _WIDE, _BEGINNING = 1, 2, 4
#: After a crash PostgreSQL reuses the ids of transactions in progress; there are never more than this.
_REUSED_IDS = 10_000
#: Limit of numbers in a cursor: never reached, and sums with it still fit into a bigint.
_LARGEST = 2**62
#: How much earlier an event may be than one with a lower number, for a search by time.
_LONGEST_TRANSACTION = timedelta(minutes=1)
#: The data of a virtual DAG's events.
_SINGLE = Raw(b'{"single":true}')
#: The data of `dag.completed` after a completed task was run again.
_RERUN = Raw(b'{"rerun":true}')
_SINGLE_RERUN = Raw(b'{"single":true,"rerun":true}')
#: Characters of an invalid cursor in the error.
_SHOWN = 60


class EventRow(NamedTuple):
    """A row of the reading statements, whose columns are these, in this order (a test compares them).

    Rows are plain tuples, because named ones would make the feed a fifth slower.
    """

    until: str
    horizon: str | None
    next_xid: str
    complete: bool
    #: This and what follows describe an event. They are None in the only row of a window without events.
    seq: int
    kinds: list[str]
    at: datetime
    task_id: str | None
    dag_id: str | None
    agent_id: str | None
    epoch: int | None
    data: bytes | None
    dag_kind: str | None
    #: A DAG completed after one of its tasks had been run again.
    rerun: bool
    type: str | None
    title: str | None


class Snapshot(Struct, frozen=True):
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


class Cursor(Struct, frozen=True):
    """A place in the feed. Its text is opaque to clients."""

    since: Snapshot
    #: None: the window has no upper end yet.
    until: Snapshot | None = None
    #: The row to continue with ...
    seq: int = 0
    #: ... and the number of its kinds that were delivered already.
    skip: int = 0
    #: The window is large: read it by sequence number, not by transaction.
    wide: bool = False
    #: The window has no lower end; `since` is the end of deleted events at the time when it was opened.
    beginning: bool = False

    def encode(self) -> str:
        return _seal(self.head(), self.seq, self.skip)

    def head(self) -> bytes:
        """The part of a cursor that is the same for all places in a window."""
        flags = (self.until is not None) * _HAS_UNTIL | self.wide * _WIDE | self.beginning * _BEGINNING
        head = bytearray([_VERSION << 4 | flags])
        for snapshot in (self.since, self.until):
            if snapshot is not None:
                _put(head, snapshot.xmax)
                _put(head, len(snapshot.xip))
                # Distances from the top: transactions in progress are close together, so most take one byte.
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
                f"{shown!r} is not a cursor of the event feed. Use the cursor of an event, or next_cursor, "
                "unchanged; omit it to read from the beginning."
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
        # Checks the version, the checksum, and that there are no extra bytes.
        if cursor.encode() != text:
            raise ValueError
        return cursor

    def opened(self, until: str, horizon: int | None) -> "Cursor":
        """With the upper end that the database has chosen for the window."""
        if self.until is not None:
            return self
        top = Snapshot.parse(until)
        if self.beginning:
            return replace(self, since=Snapshot((horizon or 0) + 1), until=top)
        # Transactions in progress in both snapshots are not in this window; without them cursors stay short.
        running = set(top.xip)
        finished = tuple(xid for xid in self.since.xip if xid not in running)
        return replace(self, since=Snapshot(self.since.xmax, finished), until=top)

    def has_expired(self, horizon: int | None) -> bool:
        """Whether undelivered rows were deleted: `horizon` is the highest transaction of any deleted row.

        A transaction that was open until its rows were deleted doesn't count: otherwise one that stays open
        for longer than retention would expire every cursor.
        """
        begins = self.beginning and self.until is None
        return horizon is not None and not begins and horizon >= self.since.xmax

    def is_from_another_cluster(self, next_xid: int) -> bool:
        """Whether it comes from the cluster that this database was restored from, which was ahead."""
        ends = self.since if self.until is None else self.until
        return ends.xmax > next_xid + _REUSED_IDS


_FROM_THE_BEGINNING = Cursor(Snapshot(1), wide=True, beginning=True)


class _Filter(Struct, frozen=True):
    task_id: str | None
    dag_id: str | None
    kinds: frozenset[str] | None

    def parameters(self) -> dict[str, Any]:
        kinds = None if self.kinds is None else sorted(self.kinds)
        # A virtual DAG has no events of its own: they are derived from those of its task.
        derived = [kind for kind in kinds or () if kind.startswith("dag.")] if self.task_id is None else []
        return {"task_id": self.task_id, "dag_id": self.dag_id, "kinds": kinds, "dag_kinds": derived or None}


class Events:
    def __init__(self, database: Database, *, most_recent: int = 2_000, span: int = 20_000) -> None:
        """`most_recent`: rows of a window that is read at once; `span`: numbers of a larger one at a time."""
        self._database = database
        self._most_recent = most_recent
        self._span = span

    async def read(
        self,
        after: str | None,
        *,
        limit: int,
        task_id: str | None = None,
        dag_id: str | None = None,
        kinds: Collection[str] | None = None,
    ) -> EventPage:
        """Events after a cursor; None: from the beginning, `NOW`: no events, but a cursor to continue from.

        One statement for a reader that keeps up, two if a window ends within the page, two more when a large
        window is opened. A short or empty page may have more behind it: see `caught_up`.
        """
        if limit < 1:
            raise InvalidInputError(errors=[("limit", f"must be at least 1, not {limit}")])
        filters = _Filter(task_id, dag_id, frozenset(kinds) if kinds else None)
        if after == NOW:
            async with self._database.connection() as connection:
                now = await fetch_value(connection, _SQL["read_now"], {})
                await connection.execute(_SQL["settle"], {"since": None, "until": now})
            return EventPage([], Cursor(Snapshot.parse(now)).encode(), caught_up=True)
        cursor = _FROM_THE_BEGINNING if after is None else Cursor.decode(after)
        items: list[Event] = []
        fresh = cursor.until is None
        async with self._database.connection() as connection:
            cursor = await self._read_window(connection, cursor, filters, items, limit)
            if cursor.until is None and not fresh and len(items) < limit:
                fresh = True
                cursor = await self._read_window(connection, cursor, filters, items, limit)
        return EventPage(items, cursor.encode(), caught_up=fresh and cursor.until is None)

    async def fixed(self, after: str) -> str:
        """The same place, where reading gives the same events each time, up to those of now."""
        cursor = Cursor.decode(after)
        if cursor.until is not None:
            return after
        async with self._database.connection() as connection:
            now = await fetch_value(connection, _SQL["read_now"], {})
            await connection.execute(_SQL["settle"], {"since": str(cursor.since), "until": now})
        return cursor.opened(now, None).encode()

    async def cursor_before_end(self, numbers: int) -> tuple[str, bool]:
        """A cursor for the events with the last so many numbers; and whether these are all."""
        async with self._database.connection() as connection:
            seq = await fetch_value(connection, _SQL["last_seq"], {}) + 1 - numbers
        return replace(_FROM_THE_BEGINNING, seq=max(seq, 0)).encode(), seq <= 0

    async def cursor_of_time(self, time: datetime) -> str:
        """A cursor for the events since about this time; some of the minute before come first.

        Numbers grow with time, apart from the duration of transactions, so this is a binary search.
        """
        time -= _LONGEST_TRANSACTION
        async with self._database.connection() as connection:
            low, high = 0, await fetch_value(connection, _SQL["last_seq"], {}) + 1
            while high - low > self._most_recent:
                middle = (low + high) // 2
                place = {"seq": middle, "span": self._span}
                at = await fetch_value(connection, _SQL["first_at"], place)
                # Without an event: retention has deleted it.
                low, high = (middle, high) if at is None or at < time else (low, middle)
        return replace(_FROM_THE_BEGINNING, seq=low).encode()

    async def _read_window(
        self, connection: Connection, cursor: Cursor, filters: _Filter, items: list[Event], limit: int
    ) -> Cursor:
        """Add events of the window to the items; returns the place to continue from."""
        room = limit - len(items)
        if not cursor.wide:
            cursor, complete, rows = await self._select(connection, "read_recent", cursor, filters, room)
            if complete:
                return _take(cursor, rows, filters, items, limit, end=None)
            first = {"since": str(cursor.since), "until": str(cursor.until)}
            seq = await fetch_value(connection, _SQL["find_first"], first)
            cursor = replace(cursor, wide=True, seq=seq)
        statement = "read_span" if filters.task_id is None else "read_task"
        cursor, complete, rows = await self._select(connection, statement, cursor, filters, room)
        end = None if complete else cursor.seq + self._span
        return _take(cursor, rows, filters, items, limit, end=end)

    async def _select(
        self, connection: Connection, statement: str, cursor: Cursor, filters: _Filter, room: int
    ) -> tuple[Cursor, bool, Sequence[EventRow]]:
        """The cursor with an open window, whether the rows are all that it has, and rows."""
        since = None if cursor.beginning else str(cursor.since)
        selected = await connection.execute(
            _SQL[statement],
            {
                "since": since,
                "until": None if cursor.until is None else str(cursor.until),
                "seq": cursor.seq,
                "most": self._most_recent,
                "span": self._span,
                # All kinds of the first row may be delivered already, or unwanted.
                "limit": room + 1,
                **filters.parameters(),
            },
        )
        rows: list[EventRow] = await selected.fetchall()
        window: tuple[Any, ...] = rows[0]
        until, deleted, next_xid, complete, first_seq, *_ = window
        horizon = None if deleted is None else int(deleted)
        if cursor.has_expired(horizon) or cursor.is_from_another_cluster(int(next_xid)):
            raise CursorExpiredError
        if cursor.until is None and Snapshot.parse(until) != cursor.since:
            await connection.execute(_SQL["settle"], {"since": since, "until": until})
        return cursor.opened(until, horizon), complete, rows if first_seq is not None else []


def _take(
    cursor: Cursor,
    rows: Sequence[EventRow],
    filters: _Filter,
    items: list[Event],
    limit: int,
    *,
    end: int | None,
) -> Cursor:
    """Turn rows into events, one for each kind, until the page is full.

    `end`: the sequence number up to which the window was read; None: all of it.
    """
    head = cursor.head()
    room = limit - len(items)
    seq, skip = cursor.seq, cursor.skip
    for row in rows:
        # Without the columns of the window.
        number, kinds, at, task_id, dag_id, agent_id, epoch, data, dag_kind, rerun, type_, title = row[4:]
        passed = cursor.skip if number == cursor.seq else 0
        if dag_kind is not None:
            kinds.append(dag_kind)
        for place, kind in enumerate(kinds[passed:], passed + 1):
            if filters.kinds is not None and kind not in filters.kinds:
                continue
            if len(items) == limit:
                return replace(cursor, seq=seq, skip=skip)
            seq, skip = (number, place) if place < len(kinds) else (number + 1, 0)
            sealed = _seal(head, seq, skip)
            if kind is dag_kind:
                agent = agent_id if kind == "dag.running" else None
                single = _SINGLE_RERUN if rerun and kind == "dag.completed" else _SINGLE
                items.append(Event(sealed, kind, at, None, dag_id, agent, None, single, None, title))
            else:
                shown = _RERUN if rerun and kind == "dag.completed" else raw(data)
                event = Event(sealed, kind, at, task_id, dag_id, agent_id, epoch, shown, type_, title)
                items.append(event)
    if len(rows) > room:
        return replace(cursor, seq=seq, skip=skip)
    if end is not None:
        return replace(cursor, seq=end, skip=0)
    if cursor.until is None:
        raise AssertionError("a window that was read is open")
    return Cursor(cursor.until)


def _seal(head: bytes, seq: int, skip: int) -> str:
    body = bytearray(head)
    _put(body, seq)
    _put(body, skip)
    # People copy cursors: a truncated one must not be valid.
    body += zlib.crc32(body).to_bytes(4, "big")
    return base64.urlsafe_b64encode(body).rstrip(b"=").decode("ascii")


def _put(target: bytearray, number: int) -> None:
    """Seven bits per byte, the lowest first; the eighth bit means that more bytes follow."""
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
    # In descending order: Snapshot and PostgreSQL rely on it.
    if above < 1 or [*xip] != sorted({*xip} - {xmax}, reverse=True):
        raise ValueError
    return Snapshot(xmax, tuple(reversed(xip)))
