"""A person changes a task in the moment in which an agent takes it or ends it."""

import asyncio

import psycopg

from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidTransitionError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.changes import TaskChange
from lineshaft.types.work import Completion
from tests.races.helpers import DONE, LIVE_ROW, held, race, running, status, waiting
from tests.world import ref, release_claims


def asked_and_live(connection: psycopg.Connection, task_id: str) -> tuple[int, int]:
    row = connection.execute(
        "SELECT task.priority, live.priority"
        " FROM lineshaft.task JOIN lineshaft.task_live AS live USING (id) WHERE id = %s",
        [task_id],
    ).fetchone()
    assert row is not None
    return row[0], row[1]


async def test_a_change_that_waits_for_a_claim_holds_once_the_task_is_handed_back(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    one, two = engines
    dag = await one.submission.submit_dag(
        "d", [NewTask("code", key="x", max_cost_usd=1), NewTask("code", priority=30, max_cost_usd=1)]
    )
    x = dag.tasks["x"].id
    await one.edit.edit(x, TaskChange(priority=10))
    with (
        held(dsn, "SELECT FROM lineshaft.dag WHERE id = %s FOR UPDATE", dag.id) as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        # It has the task, and waits for the DAG's money.
        claiming = asyncio.ensure_future(one.claims.claim("a1", 1))
        await waiting(look, 1)
        (changed,) = await race(look, holder, two.edit.edit(x, TaskChange(priority=40)), already=1)
        claim = await claiming
        assert changed is None
        assert [task.id for task in claim.tasks] == [x]
        assert (status(look, x), asked_and_live(look, x)) == (Status.CLAIMED, (40, 40))

    await release_claims(one, [ref(claim.tasks[0])])
    first, second = await running(two, 2, "a2")
    assert (first.id != x, second.id) == (True, x)


async def test_a_claim_does_not_wait_for_a_change(engines: tuple[Engine, Engine], dsn: str) -> None:
    """It takes another task, and the changed one next."""
    one, two = engines
    (x,) = await one.submission.submit([NewTask("code", priority=1)])
    (y,) = await one.submission.submit([NewTask("code", priority=50)])
    with (
        held(dsn, "SELECT FROM lineshaft.task WHERE id = %s FOR UPDATE", x.id) as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        changing = asyncio.ensure_future(two.edit.edit(x.id, TaskChange(priority=90)))
        await waiting(look, 1)
        assert [task.id for task in await running(one, 5)] == [y.id]
        holder.rollback()
        await changing

    assert [task.id for task in await running(one, 5)] == [x.id]


async def test_change_against_complete(engines: tuple[Engine, Engine], dsn: str) -> None:
    """The completion wins in any case; the change came before it, or fails because it came too late."""
    one, two = engines
    for _ in range(4):
        await one.submission.submit([NewTask("code")])
        (task,) = await running(one)
        with held(dsn, LIVE_ROW, task.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
            completed, changed = await race(
                look,
                holder,
                one.work.complete([Completion(ref(task), DONE)]),
                two.edit.edit(task.id, TaskChange(priority=7)),
            )
            row = look.execute("SELECT priority FROM lineshaft.task WHERE id = %s", [task.id]).fetchone()
            kinds = look.execute("SELECT kind FROM lineshaft.events WHERE task_id = %s", [task.id]).fetchall()
            assert status(look, task.id) == Status.COMPLETED
        assert completed[0].status == Status.COMPLETED
        late = isinstance(changed, InvalidTransitionError)
        assert late or changed is None
        assert row == ((50,) if late else (7,))
        assert (("task.changed",) in kinds) == (not late)
