"""Turns of generations while tasks are submitted and agents look."""

import asyncio

import psycopg

from lineshaft.engine.postgres import catalog
from lineshaft.model.tasks import NewTask
from tests.races.helpers import claimed, held, waiting
from tests.world import World

SQL = catalog.load("lineshaft.engine.maintenance")


async def test_a_bulk_submission_is_held_up_while_its_generation_is_left(
    world: World, dsn: str, connection: psycopg.Connection
) -> None:
    """It has read the number, and written nothing yet: the generation must not be closed before it."""
    await world.agent("ann", max_concurrent_tasks=100)
    await world.engine.submission.submit([NewTask("a")])
    assert len(await claimed(world.engine)) == 1
    with held(dsn, "LOCK TABLE lineshaft.task IN SHARE MODE") as holder:
        submitting = asyncio.ensure_future(
            world.engine.submission.submit([NewTask("a", spec={"n": n}) for n in range(2_000)])
        )
        await waiting(connection, 1)
        for _ in range(4):
            assert await world.engine.maintenance.turn_generation(5_000)
            await world.engine.maintenance.close_generations(5_000)
        holder.rollback()
        await submitting
    assert len(await claimed(world.engine, 5)) == 5


async def test_a_task_of_a_generation_that_is_just_being_opened(world: World, dsn: str) -> None:
    """The number counts at once, the transaction that raised it is open still."""
    await world.agent("ann")
    with psycopg.connect(dsn) as turning:
        turning.execute(SQL["announce_generation"])
        turning.commit()
        turning.execute(SQL["open_generation"])
        (task,) = await world.engine.submission.submit([NewTask("a")])
        assert await claimed(world.engine) == [task.id]


async def test_a_turn_that_is_interrupted_in_its_middle_is_finished_by_the_next(
    world: World, connection: psycopg.Connection
) -> None:
    await world.agent("ann", max_concurrent_tasks=10)
    (old,) = await world.engine.submission.submit([NewTask("a")])
    connection.execute(SQL["announce_generation"])
    assert await world.engine.maintenance.turn_generation(5)
    with connection.transaction(force_rollback=True):
        connection.execute(SQL["announce_generation"])
    connection.execute(SQL["announce_generation"])
    # Its number is raised; that it is dated gets lost.
    connection.execute(SQL["open_generation"])
    (new,) = await world.engine.submission.submit([NewTask("a")])
    assert sorted(await claimed(world.engine, 5)) == sorted([old.id, new.id])
    # Transactions of other tests, on the same server, may hold it up for a moment.
    while await world.engine.maintenance.close_generations(100):
        pass


async def test_a_turn_of_generations_notifies_agents(world: World, dsn: str) -> None:
    """Claims pass over it while it is moved: who waits must look again."""
    await world.agent("ann")
    await world.engine.submission.submit([NewTask("a") for _ in range(3)])
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("LISTEN task_ready")
        assert await world.engine.maintenance.turn_generation(50)
        assert next(listener.notifies(timeout=60)).payload == "1"
        listener.execute("UPDATE lineshaft.task_live SET generation = 1")
        await world.engine.maintenance.close_generations(50)
        await world.engine.maintenance.sweep_generations(50)
        assert next(listener.notifies(timeout=60)).payload == "1"
