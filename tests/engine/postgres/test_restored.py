"""A dump that was restored in another cluster, whose transactions have smaller ids."""

import subprocess
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.embedded import EmbeddedServer
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.events import Cursor, Events, Snapshot
from lineshaft.engine.feed.partitions import Partitions
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.metrics import MetricsReader
from lineshaft.engine.postgres import describe, migrate
from lineshaft.errors import CursorExpiredError
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Completion, Spent
from tests.conftest import NewDatabase
from tests.invariants import check_invariants
from tests.world import Actions, World, ref

AHEAD = 1_000_000


async def complete_one(world: World) -> None:
    agent = await world.agent("a")
    await world.engine.submission.submit([NewTask("t")])
    claimed = (await world.engine.claims.claim("a", agent.incarnation, limit=1, start=True)).tasks
    await world.engine.work.complete([Completion(ref(task)) for task in claimed])


async def all_kinds(events: Events, after: str | None = None) -> tuple[list[str], str]:
    kinds: list[str] = []
    while True:
        page = await events.read(after, limit=100)
        kinds += [event.kind for event in page.items]
        after = page.next_cursor
        if page.caught_up:
            return kinds, after


async def completed(world: World) -> int:
    totals = (await MetricsReader(world.engine.database, world.engine.read, world.engine.fleet).read()).totals
    return int(sum(totals.completed.values()))


def as_from_elsewhere(connection: psycopg.Connection) -> None:
    """What the tables hold after the restore: ids of a cluster that was further."""
    for table, column in (("event", "xid"), ("event_horizon", "xid"), ("generation", "opened_by")):
        connection.execute(
            f"UPDATE lineshaft.{table} SET {column} = ({column}::text::bigint + {AHEAD})::text::xid8"
            f" WHERE {column} <> '9223372036854775807'"
        )
    connection.execute(
        "UPDATE lineshaft.tally_place SET since = format('%1$s:%1$s:',"
        f" pg_snapshot_xmax(since)::text::bigint + {AHEAD})::pg_snapshot"
    )


async def test_events_metrics_and_generations_go_on(
    world: World, dsn: str, connection: psycopg.Connection
) -> None:
    events = Events(world.engine.database)
    await complete_one(world)
    assert await completed(world) == 1
    before, _ = await all_kinds(events)
    as_from_elsewhere(connection)

    migrate.up(dsn)

    again, place = await all_kinds(events)
    assert again == before
    await complete_one(world)
    new, _ = await all_kinds(events, place)
    assert new.count("task.completed") == 1
    assert await completed(world) == 2
    opened_here = "SELECT max(opened_by::text::numeric) <= pg_current_xact_id()::text::numeric"
    assert connection.execute(f"{opened_here} FROM lineshaft.generation").fetchone() == (True,)


async def test_what_wasnt_counted_before_the_dump_is_counted_after_it(
    world: World, dsn: str, connection: psycopg.Connection
) -> None:
    await complete_one(world)
    assert await completed(world) == 1
    await complete_one(world)
    as_from_elsewhere(connection)

    migrate.up(dsn)

    await complete_one(world)
    assert await completed(world) == 3


async def test_readers_start_again(world: World, dsn: str, connection: psycopg.Connection) -> None:
    """Their cursors have no meaning here: they expire, and destinations of notifications start from now."""
    events = Events(world.engine.database)
    await complete_one(world)
    (now,) = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone() or ("",)
    old = Cursor(Snapshot(int(now) + AHEAD)).encode()
    connection.execute(
        "INSERT INTO lineshaft.destination (name, cursor, read_at) VALUES ('ops', %s, now())", [old]
    )
    as_from_elsewhere(connection)

    migrate.up(dsn)

    with pytest.raises(CursorExpiredError):
        await events.read(old, limit=1)
    assert connection.execute("SELECT count(*) FROM lineshaft.destination").fetchone() == (0,)


async def test_at_home_nothing_is_touched(world: World, dsn: str, connection: psycopg.Connection) -> None:
    await complete_one(world)
    rows = "SELECT seq, xid::text FROM lineshaft.event ORDER BY seq"
    before = connection.execute(rows).fetchall()

    migrate.up(dsn)

    assert connection.execute(rows).fetchall() == before


def dump_and_restore(server: EmbeddedServer, source: str, target: str, file: Path) -> None:
    programs = server.binaries.program
    subprocess.run([programs("pg_dump"), "--format=custom", "--file", file, source], check=True)
    subprocess.run([programs("pg_restore"), "--exit-on-error", "--dbname", target, file], check=True)


@pytest.mark.slow("dumps and restores a database")
async def test_a_restored_dump_has_the_expected_schema(
    postgres: EmbeddedServer, new_database: NewDatabase, empty_dsn: str, tmp_path: Path
) -> None:
    """PostgreSQL reads a dump's conditions with fewer parentheses than it has written."""
    migrate.up(empty_dsn)
    async with Engine(empty_dsn) as engine:
        await engine.submission.submit([NewTask("t")])
        await Partitions(engine.database).ensure_partitions(40)
    with new_database("template0") as restored:
        dump_and_restore(postgres, empty_dsn, restored, tmp_path / "dump")

        assert describe.drift(restored) == ""
        migrate.check_ready(restored)
        with psycopg.connect(restored, autocommit=True) as connection:
            connection.execute("ALTER TABLE lineshaft.task DROP CONSTRAINT possible_task")
            connection.execute(
                "ALTER TABLE lineshaft.task ADD CONSTRAINT possible_task"
                " CHECK (priority >= 0 AND (priority <= 100 OR max_attempts > 0))"
            )
        assert "CONSTRAINT possible_task" in describe.drift(restored)


@pytest.mark.slow("dumps and restores a database")
async def test_a_restored_dump_keeps_limits_spend_and_reservations(
    postgres: EmbeddedServer, new_database: NewDatabase, empty_dsn: str, clock: MovableClock, tmp_path: Path
) -> None:
    """R-230, R-237: and what running attempts have reported, which their agents settle there."""
    migrate.up(empty_dsn)
    rules = Rules(limits={"daily_budget_usd": Decimal(10), "velocity_usd": Decimal(7)})
    async with Engine(empty_dsn, clock=clock, rules=rules, server="one:8001") as engine:
        actions = Actions(engine)
        agent = await actions.agent("a", budget_usd=9)
        await actions.dag(NewTask("t", max_cost_usd=3), NewTask("t", max_cost_usd=3), ceiling=8)
        first, second = await actions.claim(agent, 2)
        await actions.complete(first, spent="1.25")
        await actions.heartbeat("a", 1, [ref(second)], spent=Spent(Decimal("3.5"), 12))
        before = await engine.limits.read()
        money = await engine.fleet.read("a")
    with new_database("template0") as restored:
        dump_and_restore(postgres, empty_dsn, restored, tmp_path / "dump")
        # The same setting is not news there either.
        async with Engine(restored, clock=clock, rules=rules, server="one:8001") as engine:
            assert await engine.limits.read() == before
            assert (before.spent_today_usd, before.reserved_usd) == (Decimal("1.75"), Decimal(3))
            found = await engine.fleet.read("a")
            assert (found.spent_usd, found.reserved_usd) == (money.spent_usd, money.reserved_usd)
            await Actions(engine).release(second)
            after = await engine.limits.read()
            assert (after.spent_today_usd, after.reserved_usd) == (Decimal("4.75"), Decimal(0))
        with psycopg.connect(restored) as connection:
            changes = "SELECT count(*) FROM lineshaft.events WHERE kind = 'limits.changed'"
            assert connection.execute(changes).fetchone() == (1,)
        check_invariants(restored)


@pytest.mark.parametrize(
    ("text", "flat"),
    [
        ("(((a) AND (b)) AND (c))", "((a) AND (b) AND (c))"),
        ("((a) AND ((b) AND ((c) AND (d))))", "((a) AND (b) AND (c) AND (d))"),
        ("(((a) OR (b)) OR ((c) AND (d)))", "((a) OR (b) OR ((c) AND (d)))"),
        ("((NOT ((a) AND (b))) AND (c))", "((NOT ((a) AND (b))) AND (c))"),
        ("(f(((a) AND (b)), 'it''s (x AND (y') AND (c))", "(f(((a) AND (b)), 'it''s (x AND (y') AND (c))"),
        ("(((a) AND (b)) AND (c)) AND (d)", "(a) AND (b) AND (c) AND (d)"),
    ],
)
def test_parentheses_that_mean_nothing_are_left_out(text: str, flat: str) -> None:
    assert describe.flattened(text) == flat
