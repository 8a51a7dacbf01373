"""F-34: a deadline that passes before its task has ended is reported once."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.duties.promoter import Promoter
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from tests.world import Actions, World


async def reported(engine: Engine, connection: psycopg.Connection) -> list[str]:
    """The tasks with a missed deadline after two runs of the promoter."""
    for _ in range(2):
        await Promoter(engine.maintenance).run_once()
    return [
        row[0]
        for row in connection.execute(
            "SELECT task_id FROM lineshaft.events WHERE kind = 'task.deadline_missed' ORDER BY seq"
        )
    ]


async def late(engine: Engine, clock: MovableClock, **fields: Any) -> str:
    """A task whose deadline has passed since the promoter's last run."""
    task_id = await Actions(engine).one("late", deadline=clock.now() + timedelta(seconds=30), **fields)
    await Promoter(engine.maintenance).run_once()
    clock.advance(31)
    return task_id


@pytest.mark.parametrize("others", [0, 60], ids=["by INSERT", "by COPY"])
async def test_missed_before_the_submission(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock, others: int
) -> None:
    past = clock.now() - timedelta(minutes=1)
    first, *_ = await engine.submission.submit([NewTask("code", deadline=past), *[NewTask("code")] * others])

    assert await reported(engine, connection) == [first.id]


async def test_missed_when_its_last_dependency_is_completed(
    world: World, connection: psycopg.Connection, clock: MovableClock
) -> None:
    agent = await world.agent("ann")
    up = await world.one("up")
    task_id = await late(world.engine, clock, depends_on=[up])

    await world.complete(await world.take(agent))

    assert await reported(world.engine, connection) == [task_id]


async def test_missed_when_its_critical_path_changes(
    world: World, connection: psycopg.Connection, clock: MovableClock
) -> None:
    task_id = await late(world.engine, clock)
    down = await world.one("down")

    await world.engine.dependencies.add(down, [task_id])

    assert await reported(world.engine, connection) == [task_id]


async def test_missed_when_it_is_revived(
    world: World, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """It passed while the task was a dead letter."""
    agent = await world.agent("ann")
    task_id = await world.one(deadline=clock.now() + timedelta(seconds=30))
    await world.kill(agent)
    clock.advance(31)
    assert await reported(world.engine, connection) == []

    await world.engine.revive.retry(task_id)

    assert await reported(world.engine, connection) == [task_id]


async def test_a_deadline_reported_before_the_dead_letter_is_not_reported_again(
    world: World, connection: psycopg.Connection, clock: MovableClock
) -> None:
    agent = await world.agent("ann")
    task_id = await late(world.engine, clock)
    assert await reported(world.engine, connection) == [task_id]
    await world.kill(agent)

    await world.engine.revive.retry(task_id)

    assert await reported(world.engine, connection) == [task_id]
