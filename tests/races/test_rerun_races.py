"""Reruns that meet other changes of the same tasks."""

import asyncio

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.errors import DependentsRunningError, InvalidTransitionError, NotFoundError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Completion
from tests.races.helpers import DAG_ROW, DONE, LIVE_ROW, held, race, running, status, waiting
from tests.world import ref

END_ROW = "SELECT FROM lineshaft.task_end WHERE id = %s FOR UPDATE"


async def completed(engine: Engine, type_: str = "code") -> str:
    (task,) = await engine.submission.submit([NewTask(type_)])
    (claimed,) = await running(engine)
    await engine.work.complete([Completion(ref(claimed), DONE)])
    return task.id


async def test_two_reruns_one_run(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    task_id = await completed(one)

    with held(dsn, END_ROW, task_id) as holder:
        results = await race(connection, holder, one.rerun.rerun(task_id), two.rerun.rerun(task_id))

    assert sorted(map(type, results), key=str) == sorted([InvalidTransitionError, Status], key=str)
    assert status(connection, task_id) == "READY"
    row = connection.execute("SELECT count(*) FROM lineshaft.attempt").fetchone()
    assert row == (1,)


@pytest.mark.parametrize("downstream", [False, True])
async def test_a_rerun_and_the_completion_of_a_dependent(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, *, downstream: bool
) -> None:
    """Whichever comes first: the dependent is running, or it has ended."""
    one, two = engines
    first = await completed(one)
    (below,) = await one.submission.submit([NewTask("below", depends_on=[first])])
    (task,) = await running(one)

    with held(dsn, LIVE_ROW, below.id) as holder:
        rerun, complete = await race(
            connection,
            holder,
            one.rerun.rerun(first, downstream=downstream),
            two.work.complete([Completion(ref(task), DONE)]),
        )

    if isinstance(rerun, DependentsRunningError):
        assert (status(connection, first), status(connection, below.id)) == ("COMPLETED", "COMPLETED")
    else:
        assert rerun is Status.READY
        assert status(connection, below.id) == ("PENDING" if downstream else "COMPLETED")
    assert complete[0].status is Status.COMPLETED


async def test_a_rerun_and_a_new_dependent(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """The new task sees the old output, or waits; it is never READY without an input."""
    one, two = engines
    first = await completed(one)

    with held(dsn, END_ROW, first) as holder:
        rerun, submitted = await race(
            connection,
            holder,
            one.rerun.rerun(first),
            two.submission.submit([NewTask("below", depends_on=[first])]),
        )

    assert rerun is Status.READY
    assert status(connection, submitted[0].id) == "PENDING"


async def test_a_rerun_and_the_claim_of_a_dependent(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """The claim has the row of the task: the rerun waits for it, and finds a running dependent."""
    one, two = engines
    tasks = [NewTask("a", key="a"), NewTask("b", key="b", depends_on=["a"], max_cost_usd=1)]
    dag = await one.submission.submit_dag("a DAG", tasks, budget_ceiling_usd=10)
    (task,) = await running(one)
    await one.work.complete([Completion(ref(task), DONE)])

    with held(dsn, DAG_ROW, dag.id) as holder:
        claim = asyncio.ensure_future(running(two))
        await waiting(connection, 1)
        (rerun,) = await race(connection, holder, one.rerun.rerun(dag.tasks["a"].id), already=1)

    assert [claimed.id for claimed in await claim] == [dag.tasks["b"].id]
    assert isinstance(rerun, DependentsRunningError)
    assert status(connection, dag.tasks["a"].id) == "COMPLETED"


async def test_a_rerun_and_retention(engines: tuple[Engine, Engine], dsn: str, clock: MovableClock) -> None:
    """What the janitor deletes first is not found; it passes over what is being rerun."""
    one, two = engines
    first = await completed(one)
    clock.advance(86_400)
    with held(dsn, END_ROW, first):
        assert await two.maintenance.delete_finished(60, 10) == 0
    assert await two.maintenance.delete_finished(60, 10) == 1
    with pytest.raises(NotFoundError):
        await one.rerun.rerun(first)


async def test_a_rerun_and_a_retry_of_a_dependent(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """A dependent that comes back meanwhile waits for the new output, whichever comes first."""
    one, two = engines
    first = await completed(one)
    (below,) = await one.submission.submit([NewTask("below", depends_on=[first])])
    await one.cancel.cancel(below.id, "no")

    with held(dsn, END_ROW, first) as holder:
        rerun, retried = await race(connection, holder, one.rerun.rerun(first), two.revive.retry(below.id))

    assert rerun is Status.READY
    assert retried in {Status.READY, Status.PENDING}
    assert status(connection, below.id) == "PENDING"
