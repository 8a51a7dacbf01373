"""Partitions of the event table: created ahead of time, dropped when retention has passed them.

A partition is named after its period, `event_202610` (October, UTC) or `event_20261004`; the name is all that
this module knows about it. It is created separately and then attached, so that writers continue: creating it
in place would wait for every reader, with all writers waiting behind. No step waits for a lock longer than
`_WAIT_MS`; a step that times out is postponed to the next call. Nothing is lost: rows without a partition go
to `event_default`, and are moved when their partition is created.

**The partition of a period that has begun is created under an exclusive lock on the table.** Otherwise a
reader's statement could be planned before the partition was attached, and take its snapshot after: it would
see a transaction as finished whose rows are in a partition that it doesn't read, and its cursor would skip
them permanently. No rows are written into a future period, so there attaching without the lock is safe.

**A change of the period** applies to partitions that have no rows yet: a month that is empty and in the
future is replaced by days; the current month stays. From days back to months, the missing days of a month are
created.

**Many rows are not moved.** More than `_MOVE_MOST` would block writers for too long; then the period stays in
the default partition, and retention deletes its rows there, in batches.

Dropping detaches under an exclusive lock: PostgreSQL rejects DETACH … CONCURRENTLY if there is a default
partition, and there must be one, or a transition could fail for lack of a partition.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial

import psycopg
from msgspec import Struct
from psycopg import sql
from psycopg.rows import scalar_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.pool import LockedError
from lineshaft.engine.postgres.rows import fetch_column, fetch_value

_WAIT_MS = 500
_MOVE_MOST = 50_000
_DELETE_MOST = 10_000
#: A period that begins so soon counts as begun: clocks differ, and statements take time.
_MARGIN = timedelta(hours=1)
_NAME = re.compile(r"event_(\d{4})(\d{2})(\d{2})?")

_SQL = catalog.load(__name__)


#: Up to this retention, days are few enough: every reader of the feed looks into each partition.
_DAYS_UP_TO = timedelta(days=60)


class Period(StrEnum):
    MONTH = "month"
    DAY = "day"

    @classmethod
    def for_retention(cls, keep: timedelta | None) -> "Period":
        """Whole partitions are dropped, so their length is how much longer than asked events are kept."""
        return cls.DAY if keep is not None and keep <= _DAYS_UP_TO else cls.MONTH

    @property
    def ahead(self) -> timedelta:
        """How far ahead partitions are created: longer than any pause of the duties."""
        return timedelta(days=14 if self is Period.DAY else 40)


class Partition(Struct, frozen=True, order=True):
    start: datetime
    end: datetime
    name: str

    @classmethod
    def of(cls, instant: datetime, period: Period) -> "Partition":
        day = instant.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if period is Period.DAY:
            return cls(day, day + timedelta(days=1), f"event_{day:%Y%m%d}")
        first = day.replace(day=1)
        return cls(first, (first + timedelta(days=32)).replace(day=1), f"event_{first:%Y%m}")

    @classmethod
    def named(cls, name: str) -> "Partition | None":
        """None: not one of our partitions."""
        if not (found := _NAME.fullmatch(name)):
            return None
        year, month, day = found.groups()
        try:
            start = datetime(int(year), int(month), int(day or 1), tzinfo=UTC)
        except ValueError:
            return None
        return cls.of(start, Period.DAY if day else Period.MONTH)

    @property
    def period(self) -> Period:
        return Period.DAY if self.end - self.start == timedelta(days=1) else Period.MONTH

    def overlaps(self, others: Iterable["Partition"]) -> bool:
        return any(self.start < other.end and other.start < self.end for other in others)

    def days(self) -> Iterator["Partition"]:
        day = Partition.of(self.start, Period.DAY)
        while day.start < self.end:
            yield day
            day = Partition.of(day.end, Period.DAY)


class Ensured(Struct, frozen=True):
    made: tuple[str, ...] = ()
    #: Rows moved from the default partition.
    moved: int = 0
    #: The table was locked, or there are too many rows to move; the next call tries again.
    postponed: tuple[str, ...] = ()


class Dropped(Struct, frozen=True):
    dropped: tuple[str, ...] = ()
    #: Rows deleted from the default partition.
    deleted: int = 0
    postponed: tuple[str, ...] = ()


def missing(
    now: datetime, until: datetime, strays: Iterable[datetime], existing: Iterable[Partition], period: Period
) -> list[Partition]:
    """Partitions to create: from now until then, and where rows are in the default partition.

    If a month already has some of its days (the setting was changed), its other days are created.
    """
    there = list(existing)
    wanted = {Partition.of(stray, period) for stray in strays}
    ahead = Partition.of(now, period)
    while ahead.start <= until:
        wanted.add(ahead)
        ahead = Partition.of(ahead.end, period)
    result = []
    for part in sorted(wanted):
        parts = part.days() if part.overlaps(there) and part not in there else [part]
        result += [each for each in parts if not each.overlaps(there)]
    return result


class Partitions:
    def __init__(self, database: Database, *, move_most: int = _MOVE_MOST) -> None:
        self._database = database
        self._move_most = move_most

    async def ensure_partitions(self, ahead_days: int, *, period: Period = Period.MONTH) -> Ensured:
        """Create missing partitions up to `ahead_days` from now. Safe to call concurrently."""
        made, postponed, moved = [], [], 0
        if period is Period.DAY:
            postponed += await self._drop_future_months()
        async with self._database.connection() as connection:
            now = await self._now(connection)
            existing = await self._existing(connection)
            strays = await fetch_column(connection, _SQL["list_stray_days"], {})
        for part in missing(now, now + timedelta(days=ahead_days), strays, existing, period):
            try:
                rows = await self._database.run(partial(self._make, part), pipeline=False)
            except (LockedError, psycopg.errors.CheckViolation, _TooManyError):
                # A CheckViolation: the default partition has just got a row of this period.
                postponed.append(part.name)
            else:
                if rows is not None:
                    made.append(part.name)
                    moved += rows
        return Ensured(tuple(made), moved, tuple(postponed))

    async def _drop_future_months(self) -> list[str]:
        """Make room for days; returns months that are in use."""
        async with self._database.connection() as connection:
            soon = await self._now(connection) + _MARGIN
            months = [part for part in await self._existing(connection) if part.period is Period.MONTH]
        postponed = []
        for part in months:
            if part.start > soon:
                try:
                    await self._database.run(partial(self._drop, part, only_empty=True), pipeline=False)
                except (LockedError, _NotEmptyError):
                    postponed.append(part.name)
        return postponed

    async def _make(self, part: Partition, connection: Connection) -> int | None:
        """Returns the number of rows moved into it; None: another process has created it."""
        await connection.execute(_SQL["lock_partitions"], {})
        if part.overlaps(await self._existing(connection)):
            return None
        strays = await self._strays(connection, part)
        if strays > self._move_most:
            raise _TooManyError
        table = sql.Identifier("lineshaft", part.name)
        start, end = sql.Literal(part.start), sql.Literal(part.end)
        # Since PostgreSQL 17 a table with its own identity column can't be attached. With the constraint,
        # attaching doesn't scan the table.
        await _run(
            connection,
            sql.SQL(
                "CREATE TABLE {} (LIKE lineshaft.event INCLUDING ALL EXCLUDING IDENTITY,"
                " CONSTRAINT in_range CHECK (at >= {} AND at < {}))"
            ).format(table, start, end),
        )
        await connection.execute(_SQL["limit_waiting"], {"milliseconds": _WAIT_MS})
        moved = 0
        if strays or part.start <= await self._now(connection) + _MARGIN:
            await connection.execute(_SQL["lock_feed"], {})
            moved = await _run(
                connection,
                sql.SQL(
                    "WITH stray AS (DELETE FROM lineshaft.event_default WHERE at >= {} AND at < {}"
                    " RETURNING *) INSERT INTO {} SELECT * FROM stray"
                ).format(start, end, table),
            )
        await _run(
            connection,
            sql.SQL("ALTER TABLE lineshaft.event ATTACH PARTITION {} FOR VALUES FROM ({}) TO ({})").format(
                table, start, end
            ),
        )
        await _run(connection, sql.SQL("ALTER TABLE {} DROP CONSTRAINT in_range").format(table))
        return moved

    async def drop_partitions(self, older_than: datetime | timedelta) -> Dropped:
        """Drop partitions that have nothing newer, and record which cursors have expired."""
        async with self._database.connection() as connection:
            existing = await self._existing(connection)
            if isinstance(older_than, timedelta):
                older_than = await self._now(connection) - older_than
        dropped, postponed = [], []
        for part in sorted(existing):
            if part.end <= older_than:
                try:
                    if await self._database.run(partial(self._drop, part), pipeline=False):
                        dropped.append(part.name)
                except LockedError:
                    postponed.append(part.name)
        deleted = 0
        while some := await self._database.run(partial(self._delete_strays, older_than), pipeline=False):
            deleted += some
        return Dropped(tuple(dropped), deleted, tuple(postponed))

    async def _drop(self, part: Partition, connection: Connection, *, only_empty: bool = False) -> bool:
        await connection.execute(_SQL["lock_partitions"], {})
        if part not in await self._existing(connection):
            return False
        await connection.execute(_SQL["limit_waiting"], {"milliseconds": _WAIT_MS})
        table = sql.Identifier("lineshaft", part.name)
        await _run(connection, sql.SQL("ALTER TABLE lineshaft.event DETACH PARTITION {}").format(table))
        # After detaching there are no more writers.
        async with connection.cursor(row_factory=scalar_row) as cursor:
            last = sql.SQL("SELECT xid::text FROM {} ORDER BY xid DESC LIMIT 1").format(table)
            await cursor.execute(last, prepare=False)
            xid = await cursor.fetchone()
        if xid is not None:
            if only_empty:
                raise _NotEmptyError
            await connection.execute(_SQL["record_horizon"], {"xid": xid, "at": part.end})
        await _run(connection, sql.SQL("DROP TABLE {}").format(table))
        return True

    async def _delete_strays(self, older_than: datetime, connection: Connection) -> int:
        await connection.execute(_SQL["lock_partitions"], {})
        xids = await fetch_column(
            connection, _SQL["delete_strays"], {"older_than": older_than, "limit": _DELETE_MOST}
        )
        if xids:
            horizon = {"xid": str(max(map(int, xids))), "at": older_than}
            await connection.execute(_SQL["record_horizon"], horizon)
        return len(xids)

    async def _now(self, connection: Connection) -> datetime:
        now: datetime = await fetch_value(connection, _SQL["read_clock"], self._database.now)
        return now

    async def _existing(self, connection: Connection) -> list[Partition]:
        names = await fetch_column(connection, _SQL["list_partitions"], {})
        return [part for name in names if (part := Partition.named(name)) is not None]

    async def _strays(self, connection: Connection, part: Partition) -> int:
        period = {"start": part.start, "end": part.end, "limit": self._move_most + 1}
        return int(await fetch_value(connection, _SQL["count_strays"], period))


class _NotEmptyError(Exception):
    """The partition has rows."""


class _TooManyError(Exception):
    """The default partition has more rows of the period than may be moved."""


async def _run(connection: Connection, statement: sql.Composed) -> int:
    """Unprepared: each DDL statement is sent once."""
    return (await connection.execute(statement, prepare=False)).rowcount
