"""Schedules: each tick fires once, in time, after outages, and when clocks are wrong."""

import asyncio
import re
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.duties.scheduler import Scheduler
from lineshaft.engine.engine import Engine
from lineshaft.errors import UnavailableError
from lineshaft.types.sources import SourceFields
from tests.engine.sources.helpers import column, outcomes, put, schedule
from tests.proxy import proxied
from tests.world import World

MINUTE, DAY = 60.0, 86_400.0


def ticks(world: World) -> list[str]:
    return column(world, "SELECT spec->>'tick' FROM lineshaft.task ORDER BY spec->>'tick'")


async def run(world: World) -> dict[str, int]:
    return dict(await Scheduler(world.engine.schedules).run_once())


async def test_each_tick_fires_once(world: World) -> None:
    await put(world.engine, schedule())

    assert await run(world) == {}
    for _ in range(3):
        world.clock.advance(MINUTE)
        assert await run(world) == {"ticks created": 1}
        assert await run(world) == {}

    assert ticks(world) == ["2026-02-08T09:01:00Z", "2026-02-08T09:02:00Z", "2026-02-08T09:03:00Z"]
    source = await world.engine.sources.get("s")
    assert str(source.next_at) == "2026-02-08 09:04:00+00:00"
    assert await world.engine.sources.lag() == 0
    world.clock.advance(90)
    assert await world.engine.sources.lag() == 30


async def test_two_servers_fire_each_tick_once(world: World, dsn: str) -> None:
    """R-222."""
    for n in range(20):
        await put(world.engine, schedule(f"s{n}"))
    world.clock.advance(MINUTE)

    async with Engine(dsn, clock=world.clock) as other:
        await asyncio.gather(
            *(Scheduler(engine.schedules).run_once() for engine in (world.engine, other) * 2)
        )

    assert len(ticks(world)) == 20


async def test_a_schedule_that_another_server_works_on_is_skipped(world: World, dsn: str) -> None:
    """Two connections: the other server's lock is held, and this one neither waits nor fires."""
    await put(world.engine, schedule("held"))
    await put(world.engine, schedule("free"))
    world.clock.advance(MINUTE)
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM lineshaft.source WHERE name = 'held' FOR NO KEY UPDATE")
        assert await run(world) == {"ticks created": 1}
        assert await outcomes(world.engine, "held") == []
        other.rollback()

    assert await run(world) == {"ticks created": 1}
    assert await outcomes(world.engine, "held") == ["created"]


@pytest.mark.parametrize(
    ("catch_up", "after", "found", "first"),
    [
        ("one", 5 * MINUTE, ["created"], "2026-02-08T09:05:00Z"),
        ("all", 5 * MINUTE, ["created"] * 5, "2026-02-08T09:01:00Z"),
        # The last tick is in time.
        ("skip", 5 * MINUTE, ["skipped", "created"], "2026-02-08T09:05:00Z"),
    ],
)
async def test_missed_ticks(world: World, catch_up: str, after: float, found: list[str], first: str) -> None:
    await put(world.engine, schedule(catch_up=catch_up))
    world.clock.advance(after)

    await run(world)

    assert await outcomes(world.engine) == found
    assert ticks(world)[0] == first
    assert str((await world.engine.sources.get("s")).next_at) == "2026-02-08 09:06:00+00:00"


async def test_a_single_tick_that_is_an_hour_late_was_missed(world: World) -> None:
    for catch_up in ("skip", "one"):
        await put(world.engine, schedule(catch_up, cron="0 10 * * *", catch_up=catch_up))
    world.clock.advance(2 * 3600)

    await run(world)

    assert await outcomes(world.engine, "skip") == ["skipped"]
    assert await outcomes(world.engine, "one") == ["created"]
    (firing,) = (await world.engine.sources.firings("skip")).items
    assert firing.error == "1 ticks from 2026-02-08T10:00:00Z on were missed (catch_up: skip)"


@pytest.mark.slow("a thousand ticks")
async def test_at_most_a_thousand_ticks_are_made_up_for(world: World) -> None:
    await put(world.engine, schedule(catch_up="all", template={"task": {"type": "t"}}))
    world.clock.advance(1_100 * MINUTE)

    counts = await run(world)

    assert counts == {"ticks created": 1_000, "ticks skipped": 1}
    (skipped,) = column(world, "SELECT error FROM lineshaft.firing WHERE outcome = 'skipped'")
    assert skipped == "100 ticks from 2026-02-08T09:01:00Z on were missed (catch_up: all)"
    assert await run(world) == {}


@pytest.mark.slow("a day of ticks")
async def test_a_clock_that_jumps_a_day_ahead_and_back_fires_nothing_twice(dsn: str) -> None:
    now = datetime(2026, 2, 8, 9, tzinfo=UTC)
    async with Engine(dsn, clock=MovableClock(now)) as engine:
        await put(engine, schedule(cron="0 * * * *"))

    async def at(instant: datetime) -> list[str]:
        async with Engine(dsn, clock=MovableClock(instant)) as engine:
            await Scheduler(engine.schedules).run_once()
            return await outcomes(engine)

    assert await at(now + timedelta(hours=1)) == ["created"]
    assert await at(now + timedelta(hours=25)) == ["created"] * 2, "one for the whole day"
    # The clock is set right: ticks of that day have been made up for.
    assert await at(now + timedelta(hours=2)) == ["created"] * 2
    assert await at(now + timedelta(hours=25)) == ["created"] * 2
    assert await at(now + timedelta(hours=26)) == ["created"] * 3

    async with Engine(dsn, clock=MovableClock(now + timedelta(hours=24, minutes=30))) as engine:
        # Enabling it again while the clock is behind finds the tick of hour 25, which has fired.
        await engine.sources.patch("s", SourceFields(enabled=False))
        await engine.sources.patch("s", SourceFields(enabled=True))
    assert await at(now + timedelta(hours=25)) == ["created"] * 3 + ["duplicate"]


async def test_a_failed_rendering_moves_on_to_the_next_tick(world: World) -> None:
    await put(world.engine, schedule(template={"task": {"type": "${event.missing}"}}))

    for _ in range(2):
        world.clock.advance(MINUTE)
        assert await run(world) == {"ticks failed": 1}
        assert await run(world) == {}

    assert await outcomes(world.engine) == ["failed", "failed"]
    assert (await world.engine.sources.get("s")).is_enabled


async def test_a_paused_schedule_doesnt_fire_and_doesnt_catch_up(world: World) -> None:
    await put(world.engine, schedule(catch_up="all"))
    await world.engine.sources.patch("s", SourceFields(enabled=False))
    world.clock.advance(10 * MINUTE)
    assert await run(world) == {}
    await world.engine.sources.patch("s", SourceFields(enabled=True))
    assert await run(world) == {}
    world.clock.advance(MINUTE)

    assert await run(world) == {"ticks created": 1}


async def test_jitter_delays_a_tick_but_not_its_name(world: World) -> None:
    made = await put(world.engine, schedule(jitter_sec=50.0))
    delay = ((made.next_at or made.created_at) - made.created_at).total_seconds() - MINUTE
    assert 0 < delay < 50

    world.clock.advance(MINUTE + delay - 0.001)
    assert await run(world) == {}
    world.clock.advance(0.002)
    assert await run(world) == {"ticks created": 1}
    assert ticks(world) == ["2026-02-08T09:01:00Z"]


async def test_the_oldest_run_makes_room_for_a_tick(world: World) -> None:
    await put(world.engine, schedule(max_open=1, overlap="cancel_oldest"))
    await put(world.engine, schedule("kept", max_open=1))
    for _ in range(3):
        world.clock.advance(MINUTE)
        await run(world)

    assert await outcomes(world.engine) == ["created"] * 3
    assert await outcomes(world.engine, "kept") == ["created", "skipped", "skipped"]
    assert (await world.engine.sources.get("s")).open_tasks == 1


async def test_a_schedule_that_cant_be_computed_doesnt_stop_the_others(world: World) -> None:
    await put(world.engine, schedule("broken"))
    await put(world.engine, schedule("fine"))
    world.connection.execute(
        "UPDATE lineshaft.source SET definition = definition || "
        """'{"timezone": "Gone/Zone", "every_sec": null, "cron": "@daily"}' WHERE name = 'broken'"""
    )
    world.clock.advance(MINUTE)

    assert await run(world) == {"ticks created": 1}

    assert await outcomes(world.engine, "broken") == ["failed"]
    assert await outcomes(world.engine, "fine") == ["created"]
    world.clock.advance(MINUTE)
    assert await run(world) == {"ticks created": 1}, "the broken one is tried again in an hour"


async def test_a_tick_costs_the_same_with_ten_thousand_idle_schedules(world: World) -> None:
    """By the index of due schedules: the number of pages that one tick reads doesn't grow."""
    await put(world.engine, schedule("due"))
    world.clock.advance(MINUTE)
    before = _buffers(world)
    world.connection.execute(
        """INSERT INTO lineshaft.source
            (created_at, updated_at, next_tick, next_at, name, kind, origin, definition)
        SELECT now(), now(), later.at, later.at, 'idle' || n, kind, origin, definition
        FROM lineshaft.source, generate_series(1, 10000) AS n,
            LATERAL (SELECT '2027-01-01'::timestamptz + n * interval '1 s' AS at) AS later
        WHERE name = 'due'"""
    )
    plan, after = _plan(world), _buffers(world)

    assert "Index Scan using source_due" in plan
    assert after <= before + 3
    assert await run(world) == {"ticks created": 1}


def _explain(world: World) -> list[str]:
    from lineshaft.engine.sources import schedules  # noqa: PLC0415

    world.connection.execute("SET enable_seqscan = off")
    rows = world.connection.execute(
        f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) {schedules._SQL['lock_due']}".encode(),
        {"now": world.clock.now()},
    ).fetchall()
    return [line for (line,) in rows]


def _plan(world: World) -> str:
    return "\n".join(_explain(world))


def _buffers(world: World) -> int:
    """Pages, whether they were in memory or not."""
    line = next(line for line in _explain(world) if "Buffers: shared" in line)
    return sum(int(pages) for pages in re.findall(r"(?:hit|read)=(\d+)", line))


async def test_a_database_that_is_away_is_reported_as_such(dsn: str) -> None:
    """A group of errors would be logged as a fault of the scheduler, with a traceback each second."""
    async with proxied(dsn) as (through, proxy), Engine(through) as engine:
        proxy.cut()
        with pytest.raises(UnavailableError):
            await Scheduler(engine.schedules).run_once()
