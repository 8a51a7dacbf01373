"""The verdict on a DAG while what decides it moves in two places at once."""

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import ClaimedTask, Failure
from tests.races.helpers import held, race, running
from tests.world import ref

DAG_ROW = "SELECT FROM lineshaft.dag WHERE id = %s FOR UPDATE"


def dag_status(connection: psycopg.Connection, dag_id: str) -> str:
    row = connection.execute("SELECT status::text FROM lineshaft.dag WHERE id = %s", [dag_id]).fetchone()
    assert row is not None
    return str(row[0])


def bad(task: ClaimedTask) -> list[Failure]:
    return [Failure(ref(task), "bad", "auth_failure")]


async def test_the_last_task_here_and_the_last_hope_elsewhere_die_at_once(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """Neither sees the other's death as it decides; the second one must."""
    one, two = engines
    (upstream,) = await one.submission.submit([NewTask("elsewhere")])
    dag = await one.submission.submit_dag("d", [NewTask("here"), NewTask("w", depends_on=[upstream.id])])
    tasks = {task.type: task for task in await running(one, 2)}

    with held(dsn, DAG_ROW, dag.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        await race(
            look,
            holder,
            one.work.fail(bad(tasks["here"])),
            two.work.fail(bad(tasks["elsewhere"])),
        )
        assert dag_status(look, dag.id) == "failed"


@pytest.mark.parametrize("first", ["revival", "death"])
async def test_a_hope_elsewhere_is_revived_while_the_last_task_here_dies(
    engines: tuple[Engine, Engine], dsn: str, first: str
) -> None:
    one, two = engines
    (upstream,) = await one.submission.submit([NewTask("elsewhere")])
    dag = await one.submission.submit_dag("d", [NewTask("here"), NewTask("w", depends_on=[upstream.id])])
    tasks = {task.type: task for task in await running(one, 2)}
    await one.work.fail(bad(tasks["elsewhere"]))
    sides = [one.work.fail(bad(tasks["here"])), two.revive.retry(upstream.id)]

    with held(dsn, DAG_ROW, dag.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        await race(look, holder, *(sides if first == "death" else reversed(sides)))
        assert dag_status(look, dag.id) == "running"


async def test_dags_that_depend_on_each_other_fail_at_once(engines: tuple[Engine, Engine], dsn: str) -> None:
    """Each failure looks at both DAGs. They are locked in one order: no deadlock."""
    one, two = engines
    (x,) = await one.submission.submit([NewTask("x")])
    first = await one.submission.submit_dag("1", [NewTask("a", key="a"), NewTask("w", depends_on=[x.id])])
    second = await one.submission.submit_dag(
        "2", [NewTask("b", key="b"), NewTask("w", depends_on=[first.tasks["a"].id])]
    )
    await one.dependencies.add(
        next(found.id for key, found in first.tasks.items() if key != "a"), [second.tasks["b"].id]
    )
    tasks = {task.type: task for task in await running(one, 3)}

    with (
        held(dsn, "SELECT FROM lineshaft.dag FOR UPDATE") as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        results = await race(look, holder, one.work.fail(bad(tasks["a"])), two.work.fail(bad(tasks["b"])))
        assert not [result for result in results if isinstance(result, BaseException)]
        assert dag_status(look, first.id) == dag_status(look, second.id) == "failed"
        deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        assert look.execute(deadlocks).fetchone() == (0,)


async def test_two_first_claims_with_a_cost_start_their_dag_once(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """U7: each event once a transition. Both have seen a pending DAG when they come to its row."""
    one, two = engines
    dag = await one.submission.submit_dag("d", [NewTask("costly", max_cost_usd=1) for _ in range(2)])

    with held(dsn, DAG_ROW, dag.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        claims = await race(look, holder, one.claims.claim("a1", 1), two.claims.claim("a2", 1))
        kinds = "SELECT kind FROM lineshaft.events WHERE dag_id = %s AND kind LIKE 'dag.%%' ORDER BY seq, n"
        found = [row[0] for row in look.execute(kinds, [dag.id])]

    assert [len(claim.tasks) for claim in claims] == [1, 1]
    assert found == ["dag.created", "dag.running"]
