"""Lanes: what they group, how many there may be, and how unused ones disappear."""

from decimal import Decimal

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.submit.lanes import CACHED_SEC, Lanes
from lineshaft.errors import RateLimitedError
from lineshaft.model.priority import Lane, cost_from
from lineshaft.model.tasks import NewTask
from tests.world import World


def lane_ids(connection: psycopg.Connection) -> set[int]:
    return {row[0] for row in connection.execute("SELECT id FROM lineshaft.lane").fetchall()}


async def remove_unused(world: World) -> int:
    """All steps; other tests' transactions on the same server may hold up the last one for a moment."""
    deleted = await world.engine.maintenance.remove_lanes()
    world.clock.advance(7_200)
    deleted += await world.engine.maintenance.remove_lanes()
    waiting = "SELECT FROM lineshaft.lane WHERE retired_by IS NOT NULL"
    while world.connection.execute(waiting).fetchone() is not None:
        deleted += await world.engine.maintenance.remove_lanes()
    return deleted


@given(st.decimals(min_value=0, max_value=Decimal("99999999.999999"), places=6))
def test_a_lane_has_costs_from_a_power_of_two_to_the_next(cost: Decimal) -> None:
    start = cost_from(cost)
    assert start is not None
    assert start <= cost
    assert cost < 2 * start or cost == start == 0
    assert start.as_tuple().exponent == -6
    assert int(start.scaleb(6)).bit_count() <= 1


async def test_different_costs_and_boosts_make_few_lanes(world: World) -> None:
    """50,000 different limits are at most 48 lanes; they don't slow claims down."""
    tasks = [
        NewTask("code", max_cost_usd=Decimal(n * n * n).scaleb(-6), priority_boost_per_minute=n / 1e6)
        for n in range(1, 2_001)
    ]
    await world.submit(*tasks)

    row = world.connection.execute("SELECT count(*) FROM lineshaft.lane").fetchone()
    assert row is not None
    assert 30 <= row[0] <= 48
    assert len({cost_from(Decimal(n).scaleb(-6)) for n in range(50_000)}) <= 17


async def test_a_task_shows_the_boost_that_was_sent_and_ages_by_a_hundredth(world: World) -> None:
    fine = await world.one(priority_boost_per_minute=0.126)
    many = await world.submit(*[NewTask("code", priority_boost_per_minute=0.126)] * 60)
    few = await world.submit(*[NewTask("code", priority_boost_per_minute=0.126)] * 2)

    assert (await world.engine.read.task(fine)).priority_boost_per_minute == 0.126
    ranks = {world.live(task_id)["rank"] for task_id in (fine, *many, *few)}
    assert len(ranks) == 1
    assert len(lane_ids(world.connection)) == 1


async def test_a_submission_that_needs_one_lane_too_many_is_refused(
    world: World, connection: psycopg.Connection
) -> None:
    """Whichever way it is written; existing lanes are not affected, and nothing is left behind."""
    agent = await world.agent()
    async with Engine(world.engine.database.dsn, clock=world.clock, rules=Rules(max_lanes=3)) as engine:
        await engine.submission.submit([NewTask(f"type-{n}") for n in range(3)])
        before = lane_ids(connection)
        for tasks in (
            [NewTask("more")],
            [NewTask("more")] * 60,
            [NewTask("more", spec={"n": n}) for n in range(3)],
        ):
            with pytest.raises(RateLimitedError, match=r"LINESHAFT_MAX_LANES.*Nothing was changed"):
                await engine.submission.submit(tasks)
        with pytest.raises(RateLimitedError):
            await engine.submission.submit_dag("a DAG", [NewTask("more"), NewTask("type-1")])
        async with await psycopg.AsyncConnection.connect(world.engine.database.dsn) as caller:
            with pytest.raises(RateLimitedError):
                await engine.submission.submit([NewTask("more")], connection=caller)
            await engine.submission.submit([NewTask("type-0")], connection=caller)
        assert lane_ids(connection) == before

        (claimed,) = (await engine.claims.claim(agent.id, agent.incarnation, types=["type-1"])).tasks
        assert claimed.type == "type-1"
        await engine.submission.submit([NewTask("more")])
        with pytest.raises(RateLimitedError):
            await engine.submission.submit([NewTask("even-more")])


@pytest.mark.slow("thousands of lanes")
async def test_lanes_of_tasks_that_wait_are_bounded_too(world: World) -> None:
    """They could all become READY at once."""
    later = world.clock.now().replace(year=2099)
    async with Engine(world.engine.database.dsn, clock=world.clock, rules=Rules(max_lanes=3)) as engine:
        for n in range(15):
            await engine.submission.submit([NewTask(f"type-{n}", run_at=later)])
        with pytest.raises(RateLimitedError):
            await engine.submission.submit([NewTask("more", run_at=later)])


async def test_existing_tasks_find_a_lane_even_if_there_are_too_many(world: World) -> None:
    """A failure that moves a task to its fallback models is never refused."""
    await world.one("code")
    async with world.engine.database.connection() as connection:
        with pytest.raises(RateLimitedError):
            await Lanes(1).find(connection, [Lane("code", (), ("b",))], for_new_tasks=True)
        assert len(await Lanes(1).find(connection, [Lane("code", (), ("b",))])) == 1


async def test_unused_lanes_are_deleted_and_used_ones_stay(
    world: World, connection: psycopg.Connection
) -> None:
    kept = await world.one("kept")
    agent = await world.agent()
    await world.one("done")
    (task,) = await world.claim(agent, types=["done"])
    await world.complete(task)
    waiting = await world.one("later", run_at=world.clock.now().replace(year=2099))

    assert await remove_unused(world) == 1

    used = {world.live(task_id)["lane_id"] for task_id in (kept, waiting)}
    assert lane_ids(connection) == used


async def test_a_lane_that_is_looked_up_again_is_not_deleted(world: World) -> None:
    agent = await world.agent()
    await world.one("x")
    await world.complete(await world.take(agent))
    await world.engine.maintenance.remove_lanes()
    world.clock.advance(7_200)
    await world.engine.maintenance.remove_lanes()

    async with Engine(world.engine.database.dsn, clock=world.clock) as another:
        await another.submission.submit([NewTask("x")])

    assert world.connection.execute("SELECT retired_at, retired_by FROM lineshaft.lane").fetchall() == [
        (None, None)
    ]
    assert await remove_unused(world) == 0


async def test_a_cached_lane_is_looked_up_again_after_some_minutes(world: World) -> None:
    now = 0.0
    lanes = Lanes(clock=lambda: now)
    lane = Lane("x")
    async with world.engine.database.connection() as connection:
        lanes.remember(await lanes.find(connection, [lane]))
        assert lanes.known([lane]) is not None
        now = CACHED_SEC / 2
        # What comes from the cache doesn't become newer.
        lanes.remember(await lanes.find(connection, [lane]))
    now = CACHED_SEC
    assert lanes.known([lane]) is None


async def test_a_lane_that_was_retired_in_another_cluster_is_deleted(
    world: World, connection: psycopg.Connection
) -> None:
    """A dump has the transaction ids of the cluster that it is from."""
    connection.execute(
        "INSERT INTO lineshaft.lane"
        " (type, required_capabilities, models, boost_per_minute, retired_at, retired_by)"
        " VALUES ('x', '{}', '{}', 0, %s, '900000000000')",
        [world.clock.now()],
    )
    assert await remove_unused(world) == 1
