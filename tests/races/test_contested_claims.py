"""A claim that meets another goes on to the remaining tasks: with an empty result its agent would wait."""

from decimal import Decimal

import pytest

from lineshaft.model.tasks import NewTask
from tests.races.helpers import claimed, held
from tests.world import World

#: As another claim holds them, until it is committed.
CLAIMING = "SELECT FROM lineshaft.task_live WHERE id = ANY (%s) FOR NO KEY UPDATE"


@pytest.mark.parametrize("lock_key", [None, "doc:1"], ids=["plain", "weighed"])
async def test_the_best_lane_is_just_being_emptied(world: World, dsn: str, lock_key: str | None) -> None:
    """R-051, F-31."""
    await world.agent("ann")
    best, other = await world.engine.submission.submit(
        [NewTask("a", priority=0), NewTask("b", priority=50, lock_key=lock_key)]
    )
    with held(dsn, CLAIMING, [best.id]):
        assert await claimed(world.engine) == [other.id]


@pytest.mark.parametrize("lock_key", [None, "doc:1"], ids=["plain", "weighed"])
async def test_some_of_the_best_are_just_being_taken(world: World, dsn: str, lock_key: str | None) -> None:
    await world.agent("ann", max_concurrent_tasks=4)
    tasks = await world.engine.submission.submit(
        [
            NewTask("a", priority=0),
            NewTask("b", priority=10),
            NewTask("a", priority=20),
            NewTask("b", priority=30, lock_key=lock_key),
            NewTask("c", priority=40),
            NewTask("b", priority=50),
        ]
    )
    with held(dsn, CLAIMING, [tasks[0].id, tasks[2].id]):
        assert await claimed(world.engine, 3) == [tasks[1].id, tasks[3].id, tasks[4].id]
        assert await claimed(world.engine, 3) == [tasks[5].id]


async def test_what_is_just_being_taken_is_of_an_older_generation(world: World, dsn: str) -> None:
    await world.agent("ann")
    (old,) = await world.engine.submission.submit([NewTask("a")])
    with held(dsn, CLAIMING, [old.id]):
        assert await world.engine.maintenance.turn_generation(5)
        (new,) = await world.engine.submission.submit([NewTask("a")])
        assert await claimed(world.engine) == [new.id]


async def test_a_lane_that_is_taken_whole_leaves_nothing(world: World, dsn: str) -> None:
    await world.agent("ann", max_concurrent_tasks=4)
    tasks = await world.engine.submission.submit([NewTask("a"), NewTask("a")])
    with held(dsn, CLAIMING, [task.id for task in tasks]):
        assert await claimed(world.engine, 4) == []
    assert len(await claimed(world.engine, 4)) == 2


async def test_money_for_one_of_two(world: World) -> None:
    """What the DAG can't pay any more makes room for the work of others at once."""
    await world.agent("ann", max_concurrent_tasks=2)
    dag = await world.engine.submission.submit_dag(
        "d",
        [NewTask("a", key=key, priority=0, max_cost_usd=Decimal(1)) for key in ("one", "two")],
        budget_ceiling_usd=1,
    )
    (other,) = await world.engine.submission.submit([NewTask("b", priority=50)])
    assert await claimed(world.engine, 2) == [dag.tasks["one"].id, other.id]
