"""Where a reader of events starts: the last ones, or a time; and what an event is about."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from lineshaft.engine.feed.event_query import EventQuery
from lineshaft.engine.feed.events import Events
from lineshaft.engine.postgres.database import Database
from lineshaft.errors import InvalidInputError
from lineshaft.model.tasks import NewTask
from tests.world import World

START = datetime(2026, 2, 8, 9, tzinfo=UTC)


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    async with Database(dsn, max_connections=2) as opened:
        yield opened


def fill(connection: psycopg.Connection, count: int) -> None:
    """One event each second; every hundredth is rare. Some numbers are unused."""
    connection.execute(
        "INSERT INTO lineshaft.event (at, kinds, task_id)"
        " SELECT %s + n * interval '1 second', ARRAY[CASE WHEN n %% 100 = 0 THEN 'rare' ELSE 'usual' END],"
        " 't' || n"
        " FROM generate_series(0, %s - 1) AS n",
        (START, count),
    )
    connection.execute("SELECT nextval('lineshaft.event_seq_seq') FROM generate_series(1, 50)")


def query(database: Database, **wanted: object) -> EventQuery:
    # Small windows, so that there are several.
    return EventQuery(Events(database, most_recent=20, span=40), 500, **wanted)  # type: ignore[arg-type]


async def test_the_last_events_and_what_follows(database: Database, connection: psycopg.Connection) -> None:
    fill(connection, 1_000)

    page = await query(database).after("last:3")

    assert [event.task_id for event in page.items] == ["t997", "t998", "t999"]
    assert page.caught_up
    connection.execute("INSERT INTO lineshaft.event (kinds, task_id) VALUES (ARRAY['usual'], 'next')")
    following = await query(database).after(page.next_cursor)
    assert [event.task_id for event in following.items] == ["next"]


async def test_the_last_events_of_a_filter(database: Database, connection: psycopg.Connection) -> None:
    fill(connection, 1_000)

    rare = await query(database, kinds=("rare",)).after("last:4")
    own = await query(database, task_id="t5").after("last:4")
    all_ = await query(database, kinds=("rare",)).after("last:400")

    assert [event.task_id for event in rare.items] == ["t600", "t700", "t800", "t900"]
    assert [event.task_id for event in own.items] == ["t5"]
    assert len(all_.items) == 10
    assert (await query(database, kinds=("none",)).after("last:4")).items == []


async def test_events_since_a_time(database: Database, connection: psycopg.Connection) -> None:
    fill(connection, 1_000)
    since = START + timedelta(seconds=700)

    page = await query(database).after(f"since:{since.isoformat()}")

    times = [event.at for event in page.items]
    assert {event.task_id for event in page.items} >= {f"t{n}" for n in range(700, 1_000)}
    assert since - timedelta(minutes=3) < times[0] <= since
    early = await query(database).after("since:2000-01-01T00:00:00")
    assert [event.task_id for event in early.items[:2]] == ["t0", "t1"]
    assert (await query(database).after("since:2099-01-01T00:00:00Z")).caught_up


@pytest.mark.parametrize("place", ["last:", "last:0", "last:-1", "last:9999999999", "since:soon", "since:"])
async def test_an_invalid_place_is_refused(database: Database, place: str) -> None:
    with pytest.raises(InvalidInputError, match="must be a cursor, now, last:N or since:TIME"):
        await query(database).after(place)


async def test_events_name_type_and_title(world: World) -> None:
    await world.one("code", title="Implement it")
    await world.dag(NewTask("test"), NewTask("deploy"))

    page = await EventQuery(Events(world.engine.database), 100).after(None)

    about = [(event.kind, event.type, event.title) for event in page.items]
    assert ("task.created", "code", "Implement it") in about
    assert ("dag.created", None, "Implement it") in about, "of the standalone task"
    assert ("task.created", "test", "test") in about
    assert [event.title for event in page.items if event.kind == "dag.created"][1:] == ["a DAG"]
