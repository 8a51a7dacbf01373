"""What meets at a task whose list is just being expanded, or whose last children end."""

import asyncio

import psycopg

from lineshaft.engine.engine import Engine
from lineshaft.errors import DependentsRunningError
from lineshaft.model.parts import ForEach
from lineshaft.model.tasks import NewTask
from lineshaft.types import SubmittedDag
from lineshaft.types.work import ClaimedTask, Completion, Failure
from tests.races.helpers import LIVE_ROW, blocked_by, held, race, running, status
from tests.world import ref

ITEMS = b'["a", "b"]'


async def two_lists(engine: Engine) -> tuple[SubmittedDag, list[ClaimedTask]]:
    """A task that waits for its list and for another task, both of which run."""
    dag = await engine.submission.submit_dag(
        "a DAG",
        [
            NewTask("scan", key="scan"),
            NewTask("other", key="other"),
            NewTask("review", key="review", for_each=ForEach("scan"), depends_on=["other"]),
        ],
    )
    tasks = sorted(await running(engine, 5), key=lambda task: task.type, reverse=True)
    assert [task.type for task in tasks] == ["scan", "other"]
    return dag, tasks


def children(connection: psycopg.Connection, node: str) -> list[str]:
    return [
        str(row[0])
        for row in connection.execute(
            "SELECT status FROM lineshaft.tasks WHERE parent_id = %s ORDER BY id", [node]
        )
    ]


async def test_two_completions_that_make_it_ready_expand_it_once(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    dag, (scan, other) = await two_lists(one)
    node = dag.tasks["review"].id

    with held(dsn, LIVE_ROW, node) as holder:
        results = await race(
            connection,
            holder,
            one.work.complete([Completion(ref(scan), ITEMS)]),
            two.work.complete([Completion(ref(other), ITEMS)]),
        )

    assert [[moved.status for moved in result] for result in results] == [["COMPLETED"], ["COMPLETED"]]
    assert children(connection, node) == ["READY", "READY"]


async def test_the_last_two_children_end_it_once(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    dag, (scan, other) = await two_lists(one)
    await one.work.complete([Completion(ref(scan), ITEMS), Completion(ref(other))])
    first, second = await running(one, 5)
    node = dag.tasks["review"].id

    with held(dsn, LIVE_ROW, node) as holder:
        await race(
            connection,
            holder,
            one.work.complete([Completion(ref(first), b"1")]),
            two.work.complete([Completion(ref(second), b"2")]),
        )

    row = connection.execute("SELECT status, output FROM lineshaft.task_end WHERE id = %s", [node]).fetchone()
    assert row == ("COMPLETED", [1, 2])


async def test_one_child_dies_while_the_last_other_completes(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """Whichever comes first: the task is a dead letter, and what completed stays so."""
    one, two = engines
    dag, (scan, other) = await two_lists(one)
    await one.work.complete([Completion(ref(scan), ITEMS), Completion(ref(other))])
    first, second = await running(one, 5)
    node = dag.tasks["review"].id

    with held(dsn, LIVE_ROW, node) as holder:
        _, (died,) = await race(
            connection,
            holder,
            one.work.complete([Completion(ref(first), b"1")]),
            two.work.fail([Failure(ref(second), "no", category="auth_failure")]),
        )

    assert died.status == "DEAD_LETTERED"
    assert status(connection, node) == "DEAD_LETTERED"
    assert sorted(children(connection, node)) in (
        ["COMPLETED", "DEAD_LETTERED"],
        ["CANCELLED", "DEAD_LETTERED"],
    )


async def test_it_is_cancelled_while_its_list_comes(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """Whichever comes first: no child is left that could run."""
    one, two = engines
    dag, (scan, other) = await two_lists(one)
    await one.work.complete([Completion(ref(other))])
    node = dag.tasks["review"].id

    with held(dsn, LIVE_ROW, node) as holder:
        (completed,), _ = await race(
            connection,
            holder,
            one.work.complete([Completion(ref(scan), ITEMS)]),
            two.cancel.cancel(node, "no"),
        )

    assert completed.status == "COMPLETED"
    assert status(connection, node) == "CANCELLED"
    assert set(children(connection, node)) <= {"CANCELLED"}


async def test_its_list_is_made_again_while_its_last_child_completes(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """The rerun finds it completed, or refuses, because it has begun with the old list."""
    one, two = engines
    dag, (scan, other) = await two_lists(one)
    await one.work.complete([Completion(ref(scan), b'["a"]'), Completion(ref(other))])
    (child,) = await running(one, 5)
    node = dag.tasks["review"].id

    with held(dsn, LIVE_ROW, node) as holder:
        (completed,), rerun = await race(
            connection,
            holder,
            one.work.complete([Completion(ref(child), b"1")]),
            two.rerun.rerun(scan.id),
        )

    assert completed.status == "COMPLETED"
    assert isinstance(rerun, DependentsRunningError) or rerun == "READY"
    assert status(connection, node) == "COMPLETED"


async def test_two_promoters_find_the_same_list(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """A list that another call has made is there when its task is submitted: two promoters expand it once."""
    one, two = engines
    await one.submission.submit([NewTask("scan", idempotency_key="k")])
    (scan,) = await running(one)
    await one.work.complete([Completion(ref(scan), ITEMS)])
    dag = await one.submission.submit_dag(
        "a DAG",
        [
            NewTask("scan", key="scan", idempotency_key="k"),
            NewTask("review", key="review", for_each=ForEach("scan")),
        ],
    )
    node = dag.tasks["review"].id

    # It is taken by one of them; the other skips it.
    with held(dsn, "LOCK TABLE lineshaft.edge IN SHARE ROW EXCLUSIVE MODE") as holder:
        promoted = asyncio.ensure_future(one.maintenance.promote_due(10))
        await blocked_by(connection, holder)
        assert await two.maintenance.promote_due(10) == 0
        holder.rollback()
    assert await promoted == 1

    assert children(connection, node) == ["READY", "READY"]
