"""Several tasks of one batch end at once, or make more while it dies."""

import asyncio
from decimal import Decimal

import psycopg

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimedTask, Completion, Failure, Spent
from tests.races.helpers import DAG_ROW, DONE, held, running, status, waiting
from tests.world import ref, spawn_children


async def two_of_a_batch(engine: Engine) -> tuple[ClaimedTask, ClaimedTask]:
    """A child in its last attempt, and what the one before it spawned without waiting for it; both run."""
    children = [NewTask("first"), NewTask("last chance", max_attempts=1)]
    await engine.submission.submit([NewTask("batch", children=children)])
    (first,) = await running(engine)
    await spawn_children(engine, ref(first), [NewTask("stray")])
    await engine.work.complete([Completion(ref(first), DONE)])
    child, stray = sorted(await running(engine, 5), key=lambda task: task.type)
    return child, stray


async def test_two_of_a_batch_fail_in_one_call(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """R-193: the one that dies takes the other along, which is not tried again; what it cost is booked."""
    one, _ = engines
    child, stray = await two_of_a_batch(one)
    spent = Spent(Decimal("0.25"), 3, 4)

    moved = await one.work.fail([Failure(ref(stray), "bad", spent=spent), Failure(ref(child), "bad")])

    assert [each.status for each in moved] == [Status.CANCELLED, Status.DEAD_LETTERED]
    assert [status(connection, task.id) for task in (stray, child)] == [each.status for each in moved]
    row = connection.execute(
        "SELECT attempt.outcome, attempt.cost_usd, ended.cost_usd, ended.tokens_input, ended.tokens_output"
        " FROM lineshaft.attempt JOIN lineshaft.task_end AS ended ON ended.id = attempt.task_id"
        " WHERE attempt.task_id = %s",
        [stray.id],
    ).fetchone()
    assert row == ("cancelled", Decimal("0.25"), Decimal("0.25"), 3, 4)


async def test_an_agent_comes_back_that_held_two_of_a_batch(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    one, _ = engines
    child, stray = await two_of_a_batch(one)

    await one.fleet.register(NewAgent(id="a1", max_concurrent_tasks=100))

    assert status(connection, child.id) == Status.DEAD_LETTERED
    assert status(connection, stray.id) == Status.CANCELLED


async def test_the_leases_of_two_of_a_batch_run_out_together(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, clock: MovableClock
) -> None:
    one, _ = engines
    child, stray = await two_of_a_batch(one)
    clock.advance(1_000)

    await one.maintenance.reap(100)

    assert status(connection, child.id) == Status.DEAD_LETTERED
    assert status(connection, stray.id) == Status.CANCELLED


async def nested_batches(engine: Engine) -> dict[str, ClaimedTask]:
    """Of an outer batch: what runs in its inner one, in the task before that, and below that task."""
    inner = NewTask("inner", children=[NewTask("in it", max_attempts=1)])
    children = [NewTask("first"), inner]
    await engine.submission.submit([NewTask("outer", children=children)])
    (first,) = await running(engine)
    await spawn_children(engine, ref(first), [NewTask("stray", max_attempts=1)])
    await engine.work.complete([Completion(ref(first), DONE)])
    found = await running(engine, 5)
    (stray,) = (task for task in found if task.type == "stray")
    await spawn_children(engine, ref(stray), [NewTask("below", max_attempts=1)])
    return {task.type: task for task in [*found, *await running(engine)]}


async def test_the_tasks_of_nested_batches_fail_in_one_call(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """The parent of a task that died fails with the batch around both, though it isn't a batch."""
    one, _ = engines
    tasks = await nested_batches(one)
    failures = [Failure(ref(tasks[name]), "bad") for name in ("below", "in it")]

    moved = await one.work.fail(failures)

    assert {each.status for each in moved} == {Status.DEAD_LETTERED}
    assert status(connection, tasks["stray"].id) == Status.CANCELLED


async def test_children_of_an_outer_and_of_its_inner_batch_fail_in_one_call(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """The inner batch dies by its own child; it isn't cancelled as its sibling's sibling besides."""
    one, _ = engines
    inner = NewTask("inner", children=[NewTask("in it", max_attempts=1)])
    (outer,) = await one.submission.submit([NewTask("outer", children=[inner])])
    await one.submission.submit([NewTask("beside it", parent_id=outer.id, max_attempts=1)])
    tasks = await running(one, 5)

    moved = await one.work.fail([Failure(ref(task), "bad") for task in tasks])

    assert [each.status for each in moved] == [Status.DEAD_LETTERED] * 2
    rows = connection.execute("SELECT id FROM lineshaft.task WHERE is_batch").fetchall()
    assert [status(connection, name) for (name,) in rows] == [Status.DEAD_LETTERED] * 2


async def test_a_task_spawned_while_its_batch_dies_goes_down_with_it(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    one, two = engines
    child, stray = await two_of_a_batch(one)
    assert child.dag_id is not None
    with held(dsn, DAG_ROW, child.dag_id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        # It holds its parent, and waits for the DAG to be counted.
        spawning = asyncio.ensure_future(spawn_children(two, ref(stray), [NewTask("new")]))
        await waiting(look, 1)
        failing = asyncio.ensure_future(one.work.fail([Failure(ref(child), "no", "auth_failure")]))
        await waiting(look, 2)
        holder.rollback()
        (new,) = await spawning
        await failing
        assert status(look, stray.id) == Status.CANCELLED
        assert status(look, new.id) == Status.CANCELLED
