"""Partitions of the event table: made ahead of time, dropped whole when retention has passed them.

A partition is named after what is in it, `event_202610` (October, UTC) or `event_20261004`, and that name is
all that is known about it here. It is created apart and then attached, which lets writers go on: creating it
in place would wait for every reader, with all writers waiting behind. No step waits for a lock longer than
`_WAIT_MS`; what could not be had in that time is postponed to the next call, which loses nothing: rows
without a partition of their own go to `event_default`, and are moved when theirs is made.

**A period that has begun is made under an exclusive lock of the table.** A reader's statement may have been
planned, without the new partition, before it was attached, and take its snapshot after: it would see a
transaction as finished whose rows are in a partition that it doesn't look into, and its cursor would pass
them for good. Nobody writes into a period that is yet to come, so there attaching alone is safe.

**Many rows are not moved.** More than `_MOVE_MOST` would keep everybody waiting too long; then that period
stays in the default partition, the others are made all the same, and retention deletes its rows there, piece
by piece.

Dropping detaches under an exclusive lock: DETACH … CONCURRENTLY is refused where there is a default
partition, and that one must stay, or a transition could fail for want of a partition.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial

import psycopg
from psycopg import sql

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database

_WAIT_MS = 500
_MOVE_MOST = 50_000
_DELETE_MOST = 10_000
#: A period this close counts as begun: clocks differ, and statements take time.
_MARGIN = timedelta(hours=1)
_NAME = re.compile(r"event_(\d{4})(\d{2})(\d{2})?")


class Period(StrEnum):
    MONTH = "month"
    DAY = "day"


@dataclass(frozen=True, slots=True, order=True)
class Partition:
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
        """None: it isn't one of ours."""
        if not (found := _NAME.fullmatch(name)):
            return None
        year, month, day = found.groups()
        try:
            start = datetime(int(year), int(month), int(day or 1), tzinfo=UTC)
        except ValueError:
            return None
        return cls.of(start, Period.DAY if day else Period.MONTH)

    def overlaps(self, others: Iterable["Partition"]) -> bool:
        return any(self.start < other.end and other.start < self.end for other in others)

    def days(self) -> Iterator["Partition"]:
        day = Partition.of(self.start, Period.DAY)
        while day.start < self.end:
            yield day
            day = Partition.of(day.end, Period.DAY)


@dataclass(frozen=True, slots=True)
class Ensured:
    made: tuple[str, ...] = ()
    #: Rows that had gone to the default partition meanwhile.
    moved: int = 0
    #: Somebody held the table, or there are too many rows to move: tried again with the next call.
    postponed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    dropped: tuple[str, ...] = ()
    #: Rows deleted from the default partition.
    deleted: int = 0
    postponed: tuple[str, ...] = ()


def missing(
    now: datetime, until: datetime, strays: Iterable[datetime], existing: Iterable[Partition], period: Period
) -> list[Partition]:
    """What to make: from now until then, and wherever rows are already.

    Where a month has some of its days already (the period was changed), its other days are made.
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
        self._sql = catalog.load(__name__)

    async def ensure_partitions(self, ahead_days: int, *, period: Period = Period.MONTH) -> Ensured:
        """Make what is missing from now until `ahead_days` from now. Safe to call at any time, by many."""
        async with self._database.connection() as connection:
            now = await self._now(connection)
            existing = await self._existing(connection)
            found = await connection.execute(self._sql["list_stray_days"], {})
            strays = [day for (day,) in await found.fetchall()]
        made, postponed, moved = [], [], 0
        for part in missing(now, now + timedelta(days=ahead_days), strays, existing, period):
            try:
                rows = await self._database.run(partial(self._make, part), pipeline=False)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.CheckViolation, _TooManyError):
                # The check is the default partition's: a row slipped in that is dated ahead.
                postponed.append(part.name)
            else:
                if rows is not None:
                    made.append(part.name)
                    moved += rows
        return Ensured(tuple(made), moved, tuple(postponed))

    async def _make(self, part: Partition, connection: Connection) -> int | None:
        """Gives the number of rows that were moved into it; None: another process made it meanwhile."""
        await connection.execute(self._sql["lock_partitions"], {})
        if part.overlaps(await self._existing(connection)):
            return None
        strays = await self._strays(connection, part)
        if strays > self._move_most:
            raise _TooManyError
        table = sql.Identifier("lineshaft", part.name)
        start, end = sql.Literal(part.start), sql.Literal(part.end)
        # Identity belongs to the parent: from PostgreSQL 17 on a table with its own can't be attached. With
        # the check, attaching needn't read the table.
        await _run(
            connection,
            sql.SQL(
                "CREATE TABLE {} (LIKE lineshaft.event INCLUDING ALL EXCLUDING IDENTITY,"
                " CONSTRAINT in_range CHECK (at >= {} AND at < {}))"
            ).format(table, start, end),
        )
        await connection.execute(self._sql["limit_waiting"], {"milliseconds": _WAIT_MS})
        moved = 0
        if strays or part.start <= await self._now(connection) + _MARGIN:
            await connection.execute(self._sql["lock_feed"], {})
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
        """Drop what holds nothing newer, and record up to where cursors have expired."""
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
                except psycopg.errors.LockNotAvailable:
                    postponed.append(part.name)
        deleted = 0
        while some := await self._database.run(partial(self._delete_strays, older_than), pipeline=False):
            deleted += some
        return Dropped(tuple(dropped), deleted, tuple(postponed))

    async def _drop(self, part: Partition, connection: Connection) -> bool:
        await connection.execute(self._sql["lock_partitions"], {})
        if part not in await self._existing(connection):
            return False
        await connection.execute(self._sql["limit_waiting"], {"milliseconds": _WAIT_MS})
        table = sql.Identifier("lineshaft", part.name)
        await _run(connection, sql.SQL("ALTER TABLE lineshaft.event DETACH PARTITION {}").format(table))
        # Only now nobody writes into it any more.
        found = await connection.execute(
            sql.SQL("SELECT xid::text FROM {} ORDER BY xid DESC LIMIT 1").format(table), prepare=False
        )
        if row := await found.fetchone():
            await connection.execute(self._sql["record_horizon"], {"xid": row[0], "at": part.end})
        await _run(connection, sql.SQL("DROP TABLE {}").format(table))
        return True

    async def _delete_strays(self, older_than: datetime, connection: Connection) -> int:
        await connection.execute(self._sql["lock_partitions"], {})
        found = await connection.execute(
            self._sql["delete_strays"], {"older_than": older_than, "limit": _DELETE_MOST}
        )
        deleted, xid = await found.fetchone() or (0, None)
        if deleted:
            await connection.execute(self._sql["record_horizon"], {"xid": xid, "at": older_than})
        return int(deleted)

    async def _now(self, connection: Connection) -> datetime:
        found = await connection.execute(self._sql["read_clock"], self._database.now)
        row: tuple[datetime] | None = await found.fetchone()
        if row is None:
            raise AssertionError("the clock always answers")
        return row[0]

    async def _existing(self, connection: Connection) -> list[Partition]:
        found = await connection.execute(self._sql["list_partitions"], {})
        return [part for (name,) in await found.fetchall() if (part := Partition.named(name)) is not None]

    async def _strays(self, connection: Connection, part: Partition) -> int:
        found = await connection.execute(
            self._sql["count_strays"],
            {"start": part.start, "end": part.end, "limit": self._move_most + 1},
        )
        (count,) = await found.fetchone() or (0,)
        return int(count)


class _TooManyError(Exception):
    """More rows of the period are in the default partition than may be moved."""


async def _run(connection: Connection, statement: sql.Composed) -> int:
    """DDL is not worth preparing: each is sent once."""
    return (await connection.execute(statement, prepare=False)).rowcount
