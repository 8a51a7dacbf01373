"""What a task comes to wait for dies, is revived, completes, or comes to wait for it, in the same moment."""

import asyncio
from collections.abc import Awaitable

import psycopg

from lineshaft.engine.engine import Engine
from lineshaft.errors import CycleError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Completion, Failure
from tests.races.helpers import (
    DAG_ROW,
    DONE,
    INSTANCE_ROW,
    LIVE_ROW,
    blocked_by,
    held,
    passes_or_waits,
    running,
    status,
    waiting,
)
from tests.world import ref, spawn_children, spawn_once


async def revive_and_complete(engine: Engine, task_id: str) -> None:
    await complete_next(engine, after=engine.revive.retry(task_id))


async def complete_next(engine: Engine, *, after: Awaitable[Status]) -> None:
    await after
    (task,) = (await engine.claims.claim("a2", 1, types=["up"], start=True)).tasks
    await engine.work.complete([Completion(ref(task), DONE)])


async def test_a_task_is_revived_while_its_upstream_is_revived_and_completes(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """The upstream was dead when the revival looked: it must not come back and end before the commit."""
    one, two = engines
    (up,) = await one.submission.submit([NewTask("up")])
    tasks = [NewTask("down", key="down", depends_on=[up.id]), NewTask("other", key="other")]
    dag = await one.submission.submit_dag("d", tasks)
    down = dag.tasks["down"].id
    await one.cancel.cancel(up.id, "for now")
    with held(dsn, DAG_ROW, dag.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        # It knows what it waits for, and waits for its DAG to be counted.
        reviving = asyncio.ensure_future(one.revive.retry(down))
        await waiting(look, 1)
        completing = asyncio.ensure_future(revive_and_complete(two, up.id))
        await passes_or_waits(look, completing, 2)
        holder.rollback()
        await asyncio.gather(reviving, completing)
        assert status(look, up.id) == Status.COMPLETED
        assert status(look, down) == Status.READY


async def test_a_dependent_is_submitted_while_its_upstream_dies_is_revived_and_completes(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """A submitter that waited for a task to end holds the dead one as it would have held the live one."""
    one, two = engines
    (up,) = await one.submission.submit([NewTask("up")])
    (task,) = await running(one)
    failure = Failure(ref(task), "no access", "auth_failure")
    with psycopg.connect(dsn, autocommit=True) as look:
        async with await psycopg.AsyncConnection.connect(dsn) as caller:
            with held(dsn, INSTANCE_ROW) as holder:
                failing = asyncio.ensure_future(one.work.fail([failure]))
                await waiting(look, 1)
                dependent = NewTask("down", depends_on=[up.id])
                submitting = asyncio.ensure_future(two.submission.submit([dependent], connection=caller))
                await waiting(look, 2)
                holder.rollback()
                await failing
                (down,) = await submitting
            completing = asyncio.ensure_future(revive_and_complete(one, up.id))
            await passes_or_waits(look, completing, 1)
            await caller.commit()
            await completing
        assert status(look, up.id) == Status.COMPLETED
        assert status(look, down.id) == Status.READY


async def test_a_parent_comes_to_wait_for_a_child_while_that_is_revived_and_completes(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """One that was cancelled is not waited for, and can't come back before that is settled."""
    one, two = engines
    await one.submission.submit([NewTask("parent")])
    (parent,) = await running(one)
    made = [NewTask("open"), NewTask("up")]
    open_child, child = (await spawn_once(one, ref(parent), "k", made, wait=False)).children
    await one.cancel.cancel(child.id, "for now")
    with (
        held(dsn, LIVE_ROW, open_child.id) as first,
        held(dsn, INSTANCE_ROW) as second,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        # It has found one child cancelled, and waits for the other.
        pausing = asyncio.ensure_future(spawn_once(one, ref(parent), "k", made, wait=True))
        await blocked_by(look, first)
        reviving = asyncio.ensure_future(two.revive.retry(child.id))
        await passes_or_waits(look, reviving, 2)
        first.rollback()
        await blocked_by(look, second)
        completing = asyncio.ensure_future(complete_next(two, after=reviving))
        await passes_or_waits(look, completing, 2)
        second.rollback()
        await asyncio.gather(pausing, completing)
        assert status(look, child.id) == Status.COMPLETED
        assert [task.id for task in await running(two, 5, "a2")] == [open_child.id]


async def test_a_wait_for_children_and_a_new_dependency_close_a_cycle(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """The parent is to wait for new → middle → last, and last at the same moment for what waits for it."""
    one, two = engines
    (first,) = await one.submission.submit([NewTask("parent")])
    (parent,) = await running(one)
    (after,) = await one.submission.submit([NewTask("after", depends_on=[first.id])])
    (last,) = await one.submission.submit([NewTask("last")])
    (middle,) = await one.submission.submit([NewTask("middle", depends_on=[last.id])])
    with held(dsn, INSTANCE_ROW) as holder, psycopg.connect(dsn, autocommit=True) as look:
        # Its edges are written, and it waits for its agent to be let go.
        new = NewTask("new", depends_on=[middle.id])
        spawning = asyncio.ensure_future(spawn_children(one, ref(parent), [new], wait=True))
        await waiting(look, 1)
        adding = asyncio.ensure_future(two.dependencies.add(last.id, [after.id]))
        await passes_or_waits(look, adding, 2)
        holder.rollback()
        spawned, added = await asyncio.gather(spawning, adding, return_exceptions=True)
        assert isinstance(spawned, list)
        assert isinstance(added, CycleError)
        assert status(look, last.id) == Status.READY
