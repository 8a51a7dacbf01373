"""Tasks that have nothing to do with any other, until something comes to depend on them."""

import asyncio

import psycopg

from lineshaft.engine.engine import Engine
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Completion
from tests.races.helpers import DONE, held, running, status, waiting
from tests.world import ref


async def test_a_completion_finds_the_dependent_it_waited_for(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """complete_fast doesn't look for dependents: adding one must close the fast path for the task."""
    one, two = engines
    (up,) = await one.submission.submit([NewTask("up")])
    (task,) = await running(one)
    with psycopg.connect(dsn, autocommit=True) as look:
        async with await psycopg.AsyncConnection.connect(dsn) as caller:
            (down,) = await two.submission.submit([NewTask("down", depends_on=[up.id])], connection=caller)
            completing = asyncio.ensure_future(one.work.complete([Completion(ref(task), DONE)]))
            await waiting(look, 1)
            await caller.commit()
        (moved,) = await completing
        assert moved.status is Status.COMPLETED
        assert status(look, down.id) == Status.READY


async def test_a_claim_takes_what_a_submission_depends_on(engines: tuple[Engine, Engine], dsn: str) -> None:
    """Only its end is held back; passed over it would wait for the next poll."""
    one, two = engines
    (up,) = await one.submission.submit([NewTask("up")])
    await one.submission.submit([NewTask("down", depends_on=[up.id])])
    async with await psycopg.AsyncConnection.connect(dsn) as caller:
        await two.submission.submit([NewTask("another", depends_on=[up.id])], connection=caller)
        assert [task.id for task in await running(one)] == [up.id]


async def test_the_first_dependent_wakes_who_passed_its_upstream_over(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """Marking a READY task hides it for a moment: its notification is sent again."""
    one, two = engines
    (up,) = await one.submission.submit([NewTask("up")])
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("LISTEN task_ready")
        async with await psycopg.AsyncConnection.connect(dsn) as caller:
            await two.submission.submit([NewTask("down", depends_on=[up.id])], connection=caller)
            assert await running(one) == []
            await caller.commit()
        notification = next(listener.notifies(timeout=60))
        assert notification.payload == "*"
        assert [task.id for task in await running(one)] == [up.id]


async def test_of_two_first_claims_of_a_dag_one_begins_it(engines: tuple[Engine, Engine], dsn: str) -> None:
    """Both claim on the fast path, both find the DAG pending, and both get their tasks."""
    one, two = engines
    dag = await one.submission.submit_dag("d", [NewTask("code", key=key) for key in "abcd"])
    with psycopg.connect(dsn, autocommit=True) as look:
        with held(dsn, "SELECT FROM lineshaft.dag WHERE id = %s FOR UPDATE", dag.id):
            first = asyncio.ensure_future(running(one, 2))
            await waiting(look, 1)
            second = asyncio.ensure_future(running(two, 2, "a2"))
            await waiting(look, 2)
        assert len({task.id for task in [*await first, *await second]}) == 4
        assert one.claims._fast_path.is_open("a1")
        assert two.claims._fast_path.is_open("a2")
        ((begun, state),) = look.execute(
            "SELECT count(*) FILTER (WHERE 'dag.running' = ANY (kinds)),"
            " (SELECT status::text FROM lineshaft.dag) FROM lineshaft.event WHERE task_id IS NULL"
        ).fetchall()
        assert (begun, state) == (1, "running")
