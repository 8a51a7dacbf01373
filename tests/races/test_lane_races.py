"""Removal of lanes against processes and transactions that still use them."""

import asyncio

import psycopg

from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres import catalog
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.model.priority import Lane
from lineshaft.model.tasks import NewTask
from tests.races.helpers import blocked_by
from tests.world import World

SQL = catalog.load("lineshaft.engine.lane_removal")


async def leave_a_lane(world: World) -> int:
    """A lane without tasks, whose number the engine has cached."""
    await world.one("x")
    await world.complete(await world.take())
    row = world.connection.execute("SELECT id FROM lineshaft.lane").fetchone()
    assert row is not None
    return int(row[0])


async def retire(world: World) -> None:
    await world.engine.maintenance.remove_lanes()
    world.clock.advance(7_200)
    await world.engine.maintenance.remove_lanes()


def _x() -> list[Lane]:
    return [Lane("x", (), (), 0.1)]


def lanes(world: World) -> list[int]:
    return [
        row[0] for row in world.connection.execute("SELECT id FROM lineshaft.lane ORDER BY id").fetchall()
    ]


async def test_a_callers_transaction_that_used_a_cached_lane_keeps_it(world: World) -> None:
    """It is open for hours, and commits when everything else is over."""
    lane = await leave_a_lane(world)
    async with await psycopg.AsyncConnection.connect(world.engine.database.dsn) as caller:
        await world.engine.submission.submit([NewTask("x")], connection=caller)
        await retire(world)
        for _ in range(3):
            assert await world.engine.maintenance.remove_lanes() == 0
        assert lanes(world) == [lane]
        await caller.commit()
    # Now its task keeps the lane.
    assert await world.engine.maintenance.remove_lanes() == 0
    assert (await world.take()).type == "x"


async def test_a_look_up_in_an_open_transaction_keeps_the_lane(world: World) -> None:
    """It has read the number and written nothing yet."""
    await leave_a_lane(world)
    async with await psycopg.AsyncConnection.connect(world.engine.database.dsn) as caller:
        found = await Lanes().find(caller, _x())
        await retire(world)
        assert await world.engine.maintenance.remove_lanes() == 0
        assert lanes(world) == [known.id for known in found.values()]


async def test_a_look_up_that_waits_for_the_deletion_creates_the_lane_again(world: World) -> None:
    lane = await leave_a_lane(world)
    await retire(world)
    async with Engine(world.engine.database.dsn, clock=world.clock) as another:
        with psycopg.connect(world.engine.database.dsn) as deleting:
            while deleting.execute(SQL["delete_lanes"]).fetchone() is None:
                deleting.rollback()
            submitting = asyncio.ensure_future(another.submission.submit([NewTask("x")]))
            await blocked_by(world.connection, deleting)
            deleting.commit()
        await submitting
    (created,) = lanes(world)
    assert created != lane
    assert (await world.take()).type == "x"


async def test_a_deletion_passes_over_a_lane_that_is_being_looked_up(world: World) -> None:
    lane = await leave_a_lane(world)
    await retire(world)
    async with Engine(world.engine.database.dsn, clock=world.clock) as another:
        async with another.database.connection() as connection, connection.transaction():
            await Lanes().find(connection, _x())
            assert await world.engine.maintenance.remove_lanes() == 0
        assert await world.engine.maintenance.remove_lanes() == 0
        assert lanes(world) == [lane]
        await another.submission.submit([NewTask("x")])
    assert (await world.take()).type == "x"
