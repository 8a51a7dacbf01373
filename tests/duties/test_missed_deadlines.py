"""F-34: a deadline that passes before its task has ended is reported once."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.duties.promoter import Promoter
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from tests.world import complete, kill, register, submit, take


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
    task_id = await submit(engine, "late", deadline=clock.now() + timedelta(seconds=30), **fields)
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
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    agent = await register(engine)
    up = await submit(engine, "up")
    task_id = await late(engine, clock, depends_on=[up])

    await complete(engine, await take(engine, agent))

    assert await reported(engine, connection) == [task_id]


async def test_missed_when_its_critical_path_changes(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    task_id = await late(engine, clock)
    down = await submit(engine, "down")

    await engine.operations.add_dependencies(down, [task_id])

    assert await reported(engine, connection) == [task_id]


async def test_missed_when_it_is_revived(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """It passed while the task was a dead letter."""
    agent = await register(engine)
    task_id = await submit(engine, deadline=clock.now() + timedelta(seconds=30))
    await kill(engine, agent)
    clock.advance(31)
    assert await reported(engine, connection) == []

    await engine.operations.retry(task_id)

    assert await reported(engine, connection) == [task_id]


async def test_a_deadline_reported_before_the_dead_letter_is_not_reported_again(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    agent = await register(engine)
    task_id = await late(engine, clock)
    assert await reported(engine, connection) == [task_id]
    await kill(engine, agent)

    await engine.operations.retry(task_id)

    assert await reported(engine, connection) == [task_id]
