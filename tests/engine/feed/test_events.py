"""The event feed: nothing missed, nothing doubled, no effect before its cause, no waiting for strangers."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import AsyncConnection

from lineshaft.engine.feed.events import NOW, Cursor, Events, Snapshot
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.errors import CursorExpiredError, InvalidInputError
from lineshaft.types import Event, EventPage

#: Windows read at once, and windows that are too large for that.
BY_TRANSACTION = {"most_recent": 10_000, "span": 20_000}
BY_NUMBER = {"most_recent": 2, "span": 3}
SIZES = pytest.mark.parametrize("sizes", [BY_TRANSACTION, BY_NUMBER], ids=["by transaction", "by number"])


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    async with Database(dsn, max_connections=3) as opened:
        yield opened


def write(connection: psycopg.Connection, *kinds: str, **columns: Any) -> None:
    connection.execute(
        "INSERT INTO lineshaft.event (kinds, task_id, dag_id, data) VALUES (%s, %s, %s, %s)",
        [list(kinds), columns.get("task_id"), columns.get("dag_id"), columns.get("data")],
    )


async def read_all(
    events: Events, after: str | None = None, *, limits: Iterable[int] = (), **wanted: Any
) -> tuple[list[Event], str]:
    """Until caught up, in pages of these sizes and then of 100."""
    sizes = iter(limits)
    found: list[Event] = []
    while True:
        limit = next(sizes, 100)
        page = await events.read(after, limit=limit, **wanted)
        assert len(page.items) <= limit
        found += page.items
        after = page.next_cursor
        if page.caught_up:
            return found, after


def kinds_of(page: EventPage | Collection[Event]) -> list[str]:
    return [event.kind for event in (page.items if isinstance(page, EventPage) else page)]


async def test_an_event_tells_all_that_is_known(database: Database, connection: psycopg.Connection) -> None:
    connection.execute(
        "INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch, data)"
        " VALUES ('2026-02-08T09:00Z', '{task.claimed,task.started}', 't', 'd', 'a', 3, '{\"x\": 1}')"
    )

    page = await Events(database).read(None, limit=10)

    claimed, started = page.items
    assert (claimed.kind, started.kind) == ("task.claimed", "task.started")
    for event in page.items:
        assert (event.task_id, event.dag_id, event.agent_id, event.epoch) == ("t", "d", "a", 3)
        assert event.at.isoformat() == "2026-02-08T09:00:00+00:00"
        assert event.data == {"x": 1}
    assert page.caught_up
    assert page.next_cursor != started.cursor


async def test_an_empty_feed_has_a_cursor_to_go_on_from(
    database: Database, connection: psycopg.Connection
) -> None:
    events = Events(database)
    page = await events.read(None, limit=10)
    assert (page.items, page.caught_up) == ([], True)

    write(connection, "a")

    assert kinds_of(await events.read(page.next_cursor, limit=10)) == ["a"]


async def test_now_gives_only_what_comes(database: Database, connection: psycopg.Connection) -> None:
    events = Events(database)
    write(connection, "before")

    page = await events.read(NOW, limit=10)
    assert (page.items, page.caught_up) == ([], True)
    write(connection, "after")

    assert kinds_of(await events.read(page.next_cursor, limit=10)) == ["after"]


@SIZES
async def test_a_late_commit_is_not_missed_and_holds_up_no_reader(
    database: Database, connection: psycopg.Connection, dsn: str, sizes: dict[str, int]
) -> None:
    """The number of the first is lower, yet it comes later: once."""
    events = Events(database, **sizes)
    start = (await events.read(NOW, limit=1)).next_cursor
    with psycopg.connect(dsn) as late:
        write(late, "late")
        for number in range(5):
            write(connection, f"early {number}")
        found, cursor = await read_all(events, start)
        assert kinds_of(found) == [f"early {number}" for number in range(5)]
        assert (await read_all(events, cursor))[0] == []

        late.commit()
        write(connection, "last")
        found, cursor = await read_all(events, cursor)

    assert kinds_of(found) == ["late", "last"]
    assert (await read_all(events, cursor))[0] == []


@SIZES
async def test_savepoints_belong_to_their_transaction(
    database: Database, connection: psycopg.Connection, dsn: str, sizes: dict[str, int]
) -> None:
    events = Events(database, **sizes)
    with psycopg.connect(dsn) as writer:
        write(writer, "outer")
        with writer.transaction():
            write(writer, "inner")
        with writer.transaction(force_rollback=True):
            write(writer, "rolled back")
        write(connection, "other")
        before, cursor = await read_all(events)
        writer.commit()
        after, _ = await read_all(events, cursor)

    assert kinds_of(before) == ["other"]
    assert kinds_of(after) == ["outer", "inner"]


@SIZES
async def test_pages_of_any_size_give_the_same_events(
    database: Database, connection: psycopg.Connection, sizes: dict[str, int]
) -> None:
    """Also where a page ends between the kinds of one row, and from the beginning as from any place."""
    chance = random.Random(1)
    events = Events(database, **sizes)
    now = (await events.read(NOW, limit=1)).next_cursor
    expected = []
    for row in range(30):
        kinds = [f"{row}.{number}" for number in range(chance.randint(1, 4))]
        write(connection, *kinds)
        expected += kinds
        if chance.random() < 0.2:  # numbers that are never seen
            with connection.transaction(force_rollback=True):
                write(connection, "rolled back")

    for start in (None, now):
        for _ in range(8):
            limits = [chance.randint(1, 7) for _ in range(100)]
            found, _ = await read_all(events, start, limits=limits)
            assert kinds_of(found) == expected
            assert len({event.cursor for event in found}) == len(found)


@SIZES
async def test_reading_goes_on_from_any_event(
    database: Database, connection: psycopg.Connection, sizes: dict[str, int]
) -> None:
    events = Events(database, **sizes)
    now = (await events.read(NOW, limit=1)).next_cursor
    for number in range(8):
        write(connection, f"{number}a", f"{number}b")
    for start in (None, now):
        found, _ = await read_all(events, start, limits=[3, 4, 5])
        write(connection, f"later {start is None}")
        rest, _ = await read_all(events, found[-1].cursor)
        for place, event in enumerate(found):
            again, _ = await read_all(events, event.cursor, limits=[2, 3])
            assert kinds_of(again) == kinds_of(found[place + 1 :]) + kinds_of(rest)


@SIZES
async def test_filters_choose_events_and_leave_the_cursor_alone(
    database: Database, connection: psycopg.Connection, sizes: dict[str, int]
) -> None:
    events = Events(database, **sizes)
    now = (await events.read(NOW, limit=1)).next_cursor
    for number in range(24):
        write(
            connection, "x", f"even.{number % 2 == 0}", "z", task_id=f"t{number % 3}", dag_id=f"d{number % 4}"
        )
    for start in (None, now):
        everything, _ = await read_all(events, start)

        for wanted, fits in (
            ({"task_id": "t1"}, lambda e: e.task_id == "t1"),
            ({"dag_id": "d3"}, lambda e: e.dag_id == "d3"),
            ({"task_id": "t1", "dag_id": "d3"}, lambda e: e.task_id == "t1" and e.dag_id == "d3"),
            ({"kinds": ["z", "even.True"]}, lambda e: e.kind in ("z", "even.True")),
            ({"kinds": ["x"], "task_id": "t0"}, lambda e: e.kind == "x" and e.task_id == "t0"),
            ({"kinds": []}, lambda _: True),
            ({"kinds": ["none"]}, lambda _: False),
            ({"task_id": "unknown"}, lambda _: False),
        ):
            found, end = await read_all(events, start, limits=[1, 2, 3, 5], **wanted)
            expected = [event for event in everything if fits(event)]
            assert [(e.kind, e.task_id, e.dag_id) for e in found] == [
                (e.kind, e.task_id, e.dag_id) for e in expected
            ]
            # A cursor says where, not what: without the filter it goes on behind the same event.
            if found:
                behind = len(everything) - everything.index(expected[0]) - 1 if start else None
                rest, _ = await read_all(events, found[0].cursor)
                assert behind is None or len(rest) == behind
            assert (await events.read(end, limit=1)).items == []


async def test_a_page_without_a_match_advances(database: Database, connection: psycopg.Connection) -> None:
    """A filter that fits nothing doesn't read the history in one go, and doesn't stay where it is."""
    events = Events(database, most_recent=5, span=10)
    for _ in range(40):
        write(connection, "x")
    write(connection, "y")

    pages, after = [], None
    for _ in range(6):
        page = await events.read(after, limit=5, kinds=["y"])
        pages.append((kinds_of(page), page.caught_up))
        after = page.next_cursor

    assert pages[:4] == [([], False)] * 4
    assert pages[4] == (["y"], True)
    assert pages[5] == ([], True)


async def test_a_window_that_ends_within_a_page_is_followed_by_the_next(
    database: Database, connection: psycopg.Connection
) -> None:
    events = Events(database)
    for kind in "abc":
        write(connection, kind)
    first = await events.read(None, limit=2)
    write(connection, "d")

    page = await events.read(first.next_cursor, limit=2)

    assert (kinds_of(first), first.caught_up) == (["a", "b"], False)
    assert (kinds_of(page), page.caught_up) == (["c", "d"], True)


@SIZES
async def test_a_cursor_expires_when_what_it_had_not_reached_was_dropped(
    database: Database, connection: psycopg.Connection, sizes: dict[str, int]
) -> None:
    """... and the beginning is then the first event that is left."""
    events = Events(database, **sizes)
    old = await events.read(NOW, limit=1)
    for kind in "abcdef":
        write(connection, kind)
    middle = await events.read(None, limit=2)
    _, recent = await read_all(events)
    for kind in "xyz":
        write(connection, kind)
    connection.execute(
        "WITH gone AS (DELETE FROM lineshaft.event WHERE kinds[1] IN ('a', 'b', 'c', 'd') RETURNING xid)"
        " INSERT INTO lineshaft.event_horizon SELECT xid, now() FROM gone ORDER BY xid DESC LIMIT 1"
    )

    for expired in (old.next_cursor, middle.next_cursor, middle.items[0].cursor):
        with pytest.raises(CursorExpiredError) as caught:
            await events.read(expired, limit=10)
        assert caught.value.code == "cursor_expired"
    assert kinds_of((await read_all(events, recent))[0]) == ["x", "y", "z"]
    assert kinds_of((await read_all(events, limits=[1] * 10))[0]) == ["e", "f", "x", "y", "z"]


async def test_many_transactions_in_progress(
    database: Database, connection: psycopg.Connection, dsn: str
) -> None:
    """The cursor grows with them, but what stays open isn't repeated, and all of it comes in the end."""
    events = Events(database)
    writers = [await AsyncConnection.connect(dsn) for _ in range(60)]
    try:
        for number, writer in enumerate(writers):
            await writer.execute("INSERT INTO lineshaft.event (kinds) VALUES (%s)", [[f"w{number}"]])
        cursor = (await events.read(NOW, limit=1)).next_cursor
        assert_short(cursor)
        for number in range(3):
            write(connection, f"{number}")
        page = await events.read(cursor, limit=1)
        assert kinds_of(page) == ["0"]
        assert_short(page.items[0].cursor)
        found = kinds_of((await read_all(events, page.next_cursor))[0])
        cursor = (await read_all(events, page.next_cursor))[1]
        for writer in reversed(writers):
            await writer.commit()
            ended, cursor = await read_all(events, cursor)
            found += kinds_of(ended)
    finally:
        for writer in writers:
            await writer.close()

    assert found == ["1", "2", *(f"w{number}" for number in reversed(range(60)))]


def assert_short(cursor: str) -> None:
    """At most two bytes for each transaction in progress, of whichever database, and none is there twice."""
    place = Cursor.decode(cursor)
    ends = () if place.until is None else place.until.xip
    assert set(ends).isdisjoint(place.since.xip)
    assert len(cursor) < 40 + 3 * len((*place.since.xip, *ends))


class Traffic:
    """Writers whose transactions see each other's, commit out of order, roll back, and use savepoints.

    Each moves one or two of a few cells, and its events have the version it made and those it saw.
    """

    cells = 4
    transactions = 25

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.committed: set[str] = set()

    async def prepare(self) -> None:
        async with await AsyncConnection.connect(self.dsn) as connection:
            await connection.execute("CREATE TABLE public.cell (id integer PRIMARY KEY, version integer)")
            await connection.execute(
                "INSERT INTO public.cell SELECT n, 0 FROM generate_series(1, %s) AS n", [self.cells]
            )

    async def write(self, name: str) -> None:
        chance = random.Random(name)
        async with await AsyncConnection.connect(self.dsn) as connection:
            for number in range(self.transactions):
                written = await self._transaction(connection, f"{name}.{number}", chance)
                if chance.random() < 0.15:
                    await connection.rollback()
                else:
                    await connection.commit()
                    self.committed |= written

    async def _transaction(
        self, connection: AsyncConnection[Any], name: str, chance: random.Random
    ) -> set[str]:
        # Numbered before it waits for anybody: most commit in another order than this.
        await self._event(connection, f"{name}.early", "{}")
        written = {f"{name}.early"}
        for cell in sorted(chance.sample(range(1, self.cells + 1), chance.randint(1, 2))):
            moved = await connection.execute(
                "UPDATE public.cell SET version = version + 1 WHERE id = %s RETURNING version", [cell]
            )
            (version,) = await moved.fetchone() or (0,)
            seen = await connection.execute("SELECT id, version FROM public.cell")
            saw = {str(id_): number for id_, number in await seen.fetchall() if id_ != cell}
            data = msgspec.json.encode({"cell": str(cell), "version": version, "saw": saw}).decode()
            kind = f"{name}.{cell}"
            if chance.random() < 0.3:
                async with connection.transaction():
                    await self._event(connection, kind, data)
            else:
                await self._event(connection, kind, data)
            written |= {kind, f"{kind}.more"}
        return written

    async def _event(self, connection: AsyncConnection[Any], kind: str, data: str) -> None:
        kinds = [kind] if kind.endswith("early") else [kind, f"{kind}.more"]
        await connection.execute("INSERT INTO lineshaft.event (kinds, data) VALUES (%s, %s)", [kinds, data])


def assert_causes_come_first(found: Iterable[Event]) -> None:
    shown: dict[str, int] = {}
    for event in found:
        data = event.data or {}
        if data and not event.kind.endswith(".more"):
            assert data["version"] == shown.get(data["cell"], 0) + 1, (
                f"{event.kind}: a version was passed over"
            )
            own = event.kind.rsplit(".", 1)[0]
            shown[data["cell"]] = data["version"]
            for cell, version in data["saw"].items():
                assert version <= shown.get(cell, 0), f"{own} saw {version} of {cell} before it was shown"


@pytest.mark.slow("many writers and readers")
@SIZES
async def test_nothing_is_missed_doubled_or_before_its_cause(
    database: Database, dsn: str, sizes: dict[str, int]
) -> None:
    traffic = Traffic(dsn)
    await traffic.prepare()
    events = Events(database, **sizes)
    chance = random.Random(7)
    found: list[Event] = []
    cursor: str | None = None
    async with await AsyncConnection.connect(dsn) as stranger:
        await stranger.execute("INSERT INTO lineshaft.event (kinds) VALUES ('{stranger}')")
        writers = asyncio.gather(*(traffic.write(f"w{number}") for number in range(8)))
        while True:
            over = writers.done()
            page = await events.read(cursor, limit=chance.randint(1, 40))
            found += page.items
            cursor = page.next_cursor
            if over and page.caught_up:
                break
        await writers
        assert sorted(kinds_of(found)) == sorted(traffic.committed)
        assert_causes_come_first(found)

        await stranger.commit()
    found += (await read_all(events, cursor))[0]

    assert kinds_of(found).count("stranger") == 1
    # From any place that was reached on the way, all the rest comes.
    for place in chance.sample(range(len(found)), 10):
        rest, _ = await read_all(
            events, found[place].cursor, limits=[chance.randint(1, 60) for _ in range(9)]
        )
        assert sorted(kinds_of(rest)) == sorted(kinds_of(found[place + 1 :]))
    again, _ = await read_all(events)
    assert_causes_come_first(event for event in again if event.kind != "stranger")
    assert sorted(kinds_of(again)) == sorted(kinds_of(found))


def test_who_keeps_up_is_served_by_index(connection: psycopg.Connection) -> None:
    """With a plan made before the parameters are known, as for any prepared statement that is used often."""
    connection.execute(
        "INSERT INTO lineshaft.event (xid, kinds)"
        " SELECT (n / 3 + 1000)::text::xid8, '{x}' FROM generate_series(1, 20000) AS n"
    )
    connection.execute("ANALYZE lineshaft.event")
    connection.execute("SET plan_cache_mode = force_generic_plan")
    values = {"since": "'7000:7600:7000,7001'", "seq": "0", "most": "2000", "limit": "101"}
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    statement = re.sub(r"%\((\w+)\)s", number, catalog.load("lineshaft.engine.feed.events")["read_recent"])
    connection.execute(f"PREPARE reading AS {statement}".encode())
    execute = f"EXPLAIN EXECUTE reading ({', '.join(values.get(name, 'NULL') for name in names)})"
    plan = "\n".join(line for (line,) in connection.execute(execute.encode()).fetchall())

    assert plan.count("event_default_xid_idx") >= 2
    assert "Seq Scan on event_default" not in plan


snapshots = st.builds(
    lambda xids, gap: Snapshot(max(xids) + gap, tuple(sorted(xids)) if gap else ()),
    st.sets(st.integers(1, 2**40), min_size=1, max_size=300),
    st.integers(0, 1000),
)


@given(
    since=snapshots,
    until=st.none() | snapshots,
    seq=st.integers(0, 2**50),
    skip=st.integers(0, 20),
    wide=st.booleans(),
    beginning=st.booleans(),
)
def test_a_cursor_is_read_as_it_was_written(
    *, since: Snapshot, until: Snapshot | None, seq: int, skip: int, wide: bool, beginning: bool
) -> None:
    cursor = Cursor(since, until, seq, skip, wide=wide, beginning=beginning)
    text = cursor.encode()

    assert Cursor.decode(text) == cursor
    assert text.replace("-", "").replace("_", "").isalnum()
    assert Snapshot.parse(str(since)) == since


@given(cut=st.integers(0, 60), other=st.characters())
def test_a_damaged_cursor_is_rejected(cut: int, other: str) -> None:
    whole = Cursor(Snapshot(900, (700, 701)), Snapshot(1000, (850,)), 123456, 1).encode()
    place = cut % len(whole)
    for damaged in (whole[:place], whole[:place] + other + whole[place + 1 :], whole + other):
        if damaged != whole:
            with pytest.raises(InvalidInputError, match="not a cursor of the event feed"):
                Cursor.decode(damaged)


@pytest.mark.parametrize("text", ["", "12", "Now", "AAAA", "é", "=" * 8, "x" * 1000, "MTIz\n"])
async def test_an_invalid_cursor_is_rejected(database: Database, text: str) -> None:
    with pytest.raises(InvalidInputError, match="not a cursor of the event feed"):
        await Events(database).read(text, limit=1)


async def test_a_page_has_room_for_something(database: Database) -> None:
    with pytest.raises(InvalidInputError, match="limit: must be at least 1, not 0"):
        await Events(database).read(None, limit=0)
