"""Partitions of the event table: made ahead, rows moved into them, dropped with a record of it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import AsyncConnection

from lineshaft.clock import MovableClock
from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.feed.partitions import Dropped, Ensured, Partition, Partitions, Period, missing
from lineshaft.engine.postgres.database import Database
from lineshaft.errors import CursorExpiredError

START = datetime(2026, 2, 8, 9, 0, tzinfo=UTC)


@pytest.fixture
async def database(dsn: str, clock: MovableClock) -> AsyncIterator[Database]:
    async with Database(dsn, clock=clock, max_connections=4) as opened:
        yield opened


def write(connection: psycopg.Connection, kind: str, at: datetime = START) -> None:
    connection.execute("INSERT INTO lineshaft.event (at, kinds) VALUES (%s, %s)", [at, [kind]])


def where(connection: psycopg.Connection) -> dict[str, str]:
    """Which partition holds which event."""
    return dict(
        connection.execute(
            "SELECT kinds[1], relname FROM lineshaft.event JOIN pg_class ON oid = event.tableoid ORDER BY seq"
        ).fetchall()
    )


async def test_partitions_are_made_ahead_and_take_what_comes(
    database: Database, connection: psycopg.Connection
) -> None:
    partitions = Partitions(database)

    assert await partitions.ensure_partitions(60) == Ensured(("event_202602", "event_202603", "event_202604"))
    assert await partitions.ensure_partitions(60) == Ensured()

    write(connection, "february", START)
    write(connection, "last of march", datetime(2026, 3, 31, 23, 59, 59, tzinfo=UTC))
    write(connection, "april", datetime(2026, 4, 1, tzinfo=UTC))
    write(connection, "far", datetime(2030, 1, 1, tzinfo=UTC))
    assert where(connection) == {
        "february": "event_202602",
        "last of march": "event_202603",
        "april": "event_202604",
        "far": "event_default",
    }


async def test_a_partition_is_as_one_made_in_place(
    database: Database, connection: psycopg.Connection
) -> None:
    """Indexed, with its defaults, numbered by the table, and without the check it was attached with."""
    await Partitions(database).ensure_partitions(0)

    facts = {
        table: connection.execute(
            "SELECT ARRAY("
            "   SELECT replace(indexdef, relname, '') FROM pg_indexes WHERE tablename = relname ORDER BY 1"
            " ),"
            " ARRAY(SELECT attname || attnotnull FROM pg_attribute WHERE attrelid = pg_class.oid),"
            " (SELECT count(*) FROM pg_constraint WHERE conrelid = pg_class.oid AND contype = 'c')"
            " FROM pg_class WHERE relname = %s",
            [table],
        ).fetchone()
        for table in ("event_default", "event_202602")
    }
    assert facts["event_202602"] == facts["event_default"]
    write(connection, "a")
    assert connection.execute("SELECT xid IS NOT NULL, seq > 0 FROM lineshaft.event_202602").fetchone() == (
        True,
        True,
    )


async def test_rows_without_a_partition_are_moved_when_theirs_is_made(
    database: Database, connection: psycopg.Connection
) -> None:
    """... also those of months gone by; readers don't notice."""
    events = Events(database)
    cursor = (await events.read(NOW, limit=1)).next_cursor
    write(connection, "now")
    write(connection, "long ago", START - timedelta(days=100))
    write(connection, "ahead", START + timedelta(days=40))
    first = await events.read(cursor, limit=1)
    before = connection.execute(
        "SELECT seq, xid::text, at, kinds FROM lineshaft.event ORDER BY seq"
    ).fetchall()

    ensured = await Partitions(database).ensure_partitions(7)

    assert ensured == Ensured(("event_202510", "event_202602", "event_202603"), moved=3)
    assert where(connection) == {
        "now": "event_202602",
        "long ago": "event_202510",
        "ahead": "event_202603",
    }
    assert (
        before
        == connection.execute("SELECT seq, xid::text, at, kinds FROM lineshaft.event ORDER BY seq").fetchall()
    )
    assert [event.kind for event in (await events.read(first.next_cursor, limit=9)).items] == [
        "long ago",
        "ahead",
    ]


async def test_too_many_rows_stay_where_they_are(database: Database, connection: psycopg.Connection) -> None:
    """Moving them would keep everybody waiting; retention deletes them there."""
    for number in range(4):
        write(connection, f"{number}")
    partitions = Partitions(database, move_most=3)

    assert await partitions.ensure_partitions(30) == Ensured(("event_202603",), postponed=("event_202602",))
    assert set(where(connection).values()) == {"event_default"}

    dropped = await partitions.drop_partitions(START + timedelta(seconds=1))
    assert dropped == Dropped(deleted=4)
    assert await partitions.ensure_partitions(30) == Ensured(("event_202602",))


async def test_two_at_once_make_each_partition_once(
    database: Database, dsn: str, clock: MovableClock
) -> None:
    async with Database(dsn, clock=clock, max_connections=2) as other:
        results = await asyncio.gather(
            *(Partitions(each).ensure_partitions(100) for each in (database, other, database, other))
        )
    # What was postponed, because a reader among them was slow, is made now.
    results.append(await Partitions(database).ensure_partitions(100))

    made = sorted(name for result in results for name in result.made)
    assert made == ["event_202602", "event_202603", "event_202604", "event_202605"]
    assert not results[-1].postponed


async def test_old_partitions_are_dropped_and_cursors_into_them_expire(
    database: Database, connection: psycopg.Connection, clock: MovableClock
) -> None:
    partitions, events = Partitions(database), Events(database)
    await partitions.ensure_partitions(60)
    old = (await events.read(NOW, limit=1)).next_cursor
    write(connection, "february")
    write(connection, "march", START + timedelta(days=30))
    recent = (await events.read(NOW, limit=1)).next_cursor
    write(connection, "april", START + timedelta(days=60))
    clock.advance(60 * 86400)

    assert await partitions.drop_partitions(datetime(2026, 2, 28, 23, tzinfo=UTC)) == Dropped()
    assert [event.kind for event in (await events.read(old, limit=9)).items] == ["february", "march", "april"]
    dropped = await partitions.drop_partitions(datetime(2026, 4, 1, tzinfo=UTC))

    assert dropped == Dropped(("event_202602", "event_202603"))
    assert where(connection) == {"april": "event_202604"}
    assert connection.execute("SELECT count(*), max(at) FROM lineshaft.event_horizon").fetchone() == (
        1,
        datetime(2026, 4, 1, tzinfo=UTC),
    )
    with pytest.raises(CursorExpiredError):
        await events.read(old, limit=9)
    for after in (recent, None):
        assert [event.kind for event in (await events.read(after, limit=9)).items] == ["april"]
    assert await partitions.drop_partitions(datetime(2026, 4, 1, tzinfo=UTC)) == Dropped()


async def test_an_empty_partition_leaves_cursors_alone(database: Database) -> None:
    partitions, events = Partitions(database), Events(database)
    await partitions.ensure_partitions(0)
    cursor = (await events.read(NOW, limit=1)).next_cursor

    assert (await partitions.drop_partitions(datetime(2026, 3, 1, tzinfo=UTC))).dropped == ("event_202602",)
    assert (await events.read(cursor, limit=1)).items == []


async def test_a_long_read_postpones_and_blocks_no_writer(
    database: Database, connection: psycopg.Connection, dsn: str
) -> None:
    """Partitions wait half a second for it, writers no longer than that, and the next call works."""
    partitions = Partitions(database)
    with psycopg.connect(dsn) as reader:
        reader.execute("SELECT FROM lineshaft.event")

        ensured, _ = await asyncio.gather(
            partitions.ensure_partitions(0), asyncio.to_thread(write, connection, "in the meantime")
        )
        assert ensured == Ensured(postponed=("event_202602",))
        reader.commit()
        assert await partitions.ensure_partitions(0) == Ensured(("event_202602",), moved=1)

        reader.execute("SELECT FROM lineshaft.event")
        dropped, _ = await asyncio.gather(
            partitions.drop_partitions(datetime(2026, 3, 1, tzinfo=UTC)),
            asyncio.to_thread(write, connection, "again"),
        )
        assert dropped == Dropped(postponed=("event_202602",))
        reader.commit()
    assert (await partitions.drop_partitions(datetime(2026, 3, 1, tzinfo=UTC))).dropped == ("event_202602",)


async def test_readers_and_writers_go_on_while_partitions_come_and_go(database: Database, dsn: str) -> None:
    """Nothing is missed though rows are moved and partitions attached under the reader's feet."""
    partitions, events = Partitions(database), Events(database)
    total = 300
    done = asyncio.Event()

    async def writer() -> None:
        async with await AsyncConnection.connect(dsn, autocommit=True) as connection:
            for number in range(total):
                month = START + timedelta(days=30 * (number // 30))
                await connection.execute(
                    "INSERT INTO lineshaft.event (at, kinds) VALUES (%s, %s)", [month, [f"{number}"]]
                )
        done.set()

    async def janitor() -> None:
        old = START - timedelta(days=400)
        for day in range(400):
            # An empty partition far back comes and goes; those of the rows are made as the rows appear.
            made = Partition.of(old + timedelta(days=day), Period.DAY)
            await partitions.ensure_partitions(0)
            await partitions.drop_partitions(made.end)
            if done.is_set():
                return

    async def reader(cursor: str) -> list[str]:
        found: list[str] = []
        while True:
            over = done.is_set()
            page = await events.read(cursor, limit=7)
            found += [event.kind for event in page.items]
            cursor = page.next_cursor
            if over and page.caught_up:
                return found

    start = (await events.read(NOW, limit=1)).next_cursor
    found, _, _ = await asyncio.gather(reader(start), writer(), janitor())

    assert found == [str(number) for number in range(total)]


def test_days_fill_what_a_change_of_period_left_open() -> None:
    made = [Partition.of(START + timedelta(days=number), Period.DAY) for number in range(3)]
    assert [part.name for part in made] == ["event_20260208", "event_20260209", "event_20260210"]

    wanted = missing(START, START + timedelta(days=30), [], made, Period.MONTH)

    assert [part.name for part in wanted[:8]] == [
        f"event_202602{day:02}" for day in (1, 2, 3, 4, 5, 6, 7, 11)
    ]
    assert [part.name for part in wanted[-2:]] == ["event_20260228", "event_202603"]
    month = Partition.of(START, Period.MONTH)
    assert missing(START, START + timedelta(days=3), [], [month], Period.DAY) == []


@pytest.mark.parametrize(
    "name", ["event_default", "event_2026", "event_202613", "event_20260230", "my_event_202601"]
)
def test_tables_of_others_are_not_ours(name: str) -> None:
    assert Partition.named(name) is None


@pytest.mark.parametrize(
    ("days", "period"),
    [(None, Period.MONTH), (1, Period.DAY), (60, Period.DAY), (60.5, Period.MONTH), (365, Period.MONTH)],
)
def test_a_short_retention_has_days(days: float | None, period: Period) -> None:
    assert Period.for_retention(None if days is None else timedelta(days=days)) is period


async def test_a_retention_of_a_day_keeps_no_more_than_two(
    database: Database, connection: psycopg.Connection, clock: MovableClock
) -> None:
    partitions = Partitions(database)
    await partitions.ensure_partitions(14, period=Period.DAY)
    for hours in (0, 20, 40):
        write(connection, f"after {hours} h", START + timedelta(hours=hours))
    clock.advance(40 * 3600)

    dropped = await partitions.drop_partitions(timedelta(days=1))

    assert dropped == Dropped(("event_20260208",))
    assert where(connection) == {"after 20 h": "event_20260209", "after 40 h": "event_20260210"}


@pytest.mark.slow("many partitions")
async def test_from_months_to_days_and_back(
    database: Database, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """No event is lost on the way, readers miss none, and each has a partition."""
    partitions, events = Partitions(database), Events(database)
    cursor = (await events.read(NOW, limit=1)).next_cursor
    written, homes = [], []

    async def live_on(days: int, period: Period) -> Ensured:
        ensured = await partitions.ensure_partitions(period.ahead.days, period=period)
        now = clock.now()
        assert now is not None
        written.append(f"{now:%m-%d}")
        write(connection, written[-1], now)
        homes.append(where(connection)[written[-1]])
        clock.advance(days * 86400)
        return ensured

    await live_on(1, Period.MONTH)
    ensured = await live_on(15, Period.DAY)
    assert ensured == Ensured()  # the days until the end of next week are in the current month
    # March was empty: it is replaced. (February has events and stays.)
    ensured = await live_on(10, Period.DAY)
    assert ensured.made == tuple(f"event_202603{day:02}" for day in range(1, 11))
    await live_on(20, Period.DAY)
    await live_on(10, Period.DAY)
    ensured = await live_on(30, Period.MONTH)
    assert ensured.made[-1] == "event_202605"
    assert "event_20260430" in ensured.made
    await live_on(30, Period.MONTH)

    assert homes == [
        "event_202602",
        "event_202602",
        "event_202602",
        "event_20260306",
        "event_20260326",
        "event_20260405",
        "event_202605",
    ]
    assert [event.kind for event in (await events.read(cursor, limit=99)).items] == written


async def test_a_future_month_with_events_is_not_replaced(
    database: Database, connection: psycopg.Connection
) -> None:
    partitions = Partitions(database)
    await partitions.ensure_partitions(40)
    write(connection, "of a clock that is ahead", START + timedelta(days=30))

    assert await partitions.ensure_partitions(30, period=Period.DAY) == Ensured(postponed=("event_202603",))
    assert where(connection) == {"of a clock that is ahead": "event_202603"}


@pytest.mark.parametrize("name", ["event_202612", "event_20240229"])
def test_a_name_tells_the_range(name: str) -> None:
    part = Partition.named(name)

    assert part is not None
    assert part.name == name
    assert part.start < part.end


def test_postgresql_refuses_to_detach_concurrently_beside_a_default(connection: psycopg.Connection) -> None:
    """Why dropping takes a lock, for a moment."""
    connection.execute(
        "CREATE TABLE lineshaft.event_202601 PARTITION OF lineshaft.event"
        " FOR VALUES FROM ('2026-01-01Z') TO ('2026-02-01Z')"
    )
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="default partition exists"):
        connection.execute("ALTER TABLE lineshaft.event DETACH PARTITION lineshaft.event_202601 CONCURRENTLY")
