"""The metrics: each event is counted once, in transactions that stay short; agents are those of today."""

import psycopg
from psycopg.conninfo import make_conninfo

from lineshaft.clock import MovableClock
from lineshaft.duties.offline_detector import OfflineDetector
from lineshaft.duties.supervisor import all_duties
from lineshaft.engine.engine import Engine
from lineshaft.engine.metrics import MetricsReader
from lineshaft.engine.read.tally import Tally
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from lineshaft.types import NewAgent
from lineshaft.types.work import Completion
from tests.duties.test_duties import claimed
from tests.world import ref


def die(connection: psycopg.Connection, times: int = 1) -> None:
    """Some tasks do, in one statement: the simplest thing that is counted."""
    connection.execute(
        "INSERT INTO lineshaft.event (at, kinds, task_id)"
        " SELECT now(), '{task.dead_lettered}', 'task' FROM generate_series(1, %s)",
        [times],
    )


async def counted(tally: Tally, slices: int | None = 1) -> int:
    await tally.count(slices)
    return (await tally.totals()).dead_lettered


async def test_a_long_history_is_counted_in_slices(engine: Engine, connection: psycopg.Connection) -> None:
    """No scrape for a year: one statement over all events would time out every time."""
    tally = Tally(engine.database, most=2)
    for _ in range(5):
        die(connection)

    assert [await counted(tally) for _ in range(4)] == [2, 4, 5, 5]


async def test_a_large_transaction_is_counted_whole(engine: Engine, connection: psycopg.Connection) -> None:
    tally = Tally(engine.database, most=2)
    die(connection, 7)
    die(connection)

    assert [await counted(tally) for _ in range(2)] == [7, 8]


async def test_a_commit_between_two_slices_is_counted_once(
    engine: Engine, connection: psycopg.Connection, dsn: str
) -> None:
    tally = Tally(engine.database, most=2)
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second, psycopg.connect(dsn) as third:
        for late in (first, second, third):
            die(connection)
            die(late, 10)
            die(connection)
        assert await counted(tally) == 2
        # The place is past the first, and before the others.
        first.commit()
        assert await counted(tally) == 14
        second.commit()
        third.rollback()
        assert await counted(tally, slices=None) == 26

    assert await counted(tally) == 26


async def test_events_are_counted_before_they_are_deleted(
    engine: Engine, clock: MovableClock, connection: psycopg.Connection
) -> None:
    (task,) = await claimed(engine, NewTask("code"))
    await engine.work.complete([Completion(ref(task))])
    clock.advance(86_400 * 100)
    (janitor,) = (duty for duty in all_duties(engine, Settings(keep_events_days=1)) if duty.name == "janitor")

    await janitor.run_once()

    found = await MetricsReader(engine.database, engine.read, engine.fleet).read()
    assert connection.execute("SELECT count(*) FROM lineshaft.event").fetchone() == (0,)
    assert found.totals.completed == {"code": 1}


async def test_agents_of_long_ago_are_left_out(engine: Engine, clock: MovableClock) -> None:
    """Those without an id of their own are new ones at each start: there would be ever more."""
    await engine.fleet.register(NewAgent(id="gone"))
    clock.advance(86_400 * 2)
    await engine.fleet.register(NewAgent(id="gone today"))
    clock.advance(3_600)
    await OfflineDetector(engine.fleet).run_once()
    await engine.fleet.register(NewAgent(id="here"))

    found = await MetricsReader(engine.database, engine.read, engine.fleet).read()

    assert [(agent.id, agent.status) for agent in found.agents] == [
        ("gone today", "offline"),
        ("here", "active"),
    ]


async def test_figures_are_read_where_nothing_can_be_written_and_say_how_old_they_are(
    engine: Engine, clock: MovableClock, dsn: str
) -> None:
    """On a standby, or with a full disk, monitoring must not go dark."""
    first, second = await claimed(engine, NewTask("code"), NewTask("code"))
    await engine.work.complete([Completion(ref(first))])
    await Tally(engine.database).count()
    await engine.work.complete([Completion(ref(second))])
    clock.advance(300)
    read_only = make_conninfo(dsn, options="-c default_transaction_read_only=on")

    async with Engine(read_only, clock=clock) as standby:
        found = await MetricsReader(standby.database, standby.read, standby.fleet).read()
        costs = await standby.read.costs()
        throughput = await standby.read.throughput()

    assert found.totals.completed == {"code": 1}
    ages = (found.totals_age_sec, costs.figures_age_sec, throughput.figures_age_sec)
    assert all(300 <= age < 360 for age in ages), ages
    complete = await engine.read.costs()
    assert complete.figures_age_sec == 0
