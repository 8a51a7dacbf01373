"""A claim that meets another goes on to what is left: told that there is nothing, its agent would wait."""

from decimal import Decimal

import pytest

from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from tests.races.helpers import held
from tests.world import register

#: As another claim holds them, until it is committed.
CLAIMING = "SELECT FROM lineshaft.task_live WHERE id = ANY (%s) FOR NO KEY UPDATE"


@pytest.mark.parametrize("lock_key", [None, "doc:1"], ids=["plain", "weighed"])
async def test_the_best_lane_is_just_being_emptied(engine: Engine, dsn: str, lock_key: str | None) -> None:
    await register(engine)
    best, other = await engine.submission.submit(
        [NewTask("a", priority=0), NewTask("b", priority=50, lock_key=lock_key)]
    )
    with held(dsn, CLAIMING, [best.id]):
        assert await claimed(engine) == [other.id]


@pytest.mark.parametrize("lock_key", [None, "doc:1"], ids=["plain", "weighed"])
async def test_some_of_the_best_are_just_being_taken(engine: Engine, dsn: str, lock_key: str | None) -> None:
    await register(engine, max_concurrent_tasks=4)
    tasks = await engine.submission.submit(
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
        assert await claimed(engine, 3) == [tasks[1].id, tasks[3].id, tasks[4].id]
        assert await claimed(engine, 3) == [tasks[5].id]


async def test_what_is_just_being_taken_is_of_an_older_generation(engine: Engine, dsn: str) -> None:
    await register(engine)
    (old,) = await engine.submission.submit([NewTask("a")])
    with held(dsn, CLAIMING, [old.id]):
        assert await engine.maintenance.turn_generation(5)
        (new,) = await engine.submission.submit([NewTask("a")])
        assert await claimed(engine) == [new.id]


async def test_a_lane_that_is_taken_whole_leaves_nothing(engine: Engine, dsn: str) -> None:
    await register(engine, max_concurrent_tasks=4)
    tasks = await engine.submission.submit([NewTask("a"), NewTask("a")])
    with held(dsn, CLAIMING, [task.id for task in tasks]):
        assert await claimed(engine, 4) == []
    assert len(await claimed(engine, 4)) == 2


async def test_money_for_one_of_two(engine: Engine) -> None:
    """What the DAG can't pay any more makes room for the work of others at once."""
    await register(engine, max_concurrent_tasks=2)
    dag = await engine.submission.submit_dag(
        "d",
        [NewTask("a", key=key, priority=0, max_cost_usd=Decimal(1)) for key in ("one", "two")],
        budget_ceiling_usd=1,
    )
    (other,) = await engine.submission.submit([NewTask("b", priority=50)])
    assert await claimed(engine, 2) == [dag.tasks["one"].id, other.id]


async def claimed(engine: Engine, limit: int = 1) -> list[str]:
    return [task.id for task in (await engine.claims.claim("ann", 1, limit=limit, start=True)).tasks]
