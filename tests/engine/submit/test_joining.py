"""Tasks that join an existing DAG at submission, by its id or by their parent."""

from decimal import Decimal
from typing import Any

import pytest

from lineshaft.errors import InvalidInputError, InvalidTransitionError
from lineshaft.model.tasks import NewTask
from tests.world import World


async def test_a_task_with_a_parent_joins_the_parents_dag(world: World) -> None:
    """R-012."""
    agent = await world.agent()
    dag = await world.dag(NewTask("parent", key="p"))
    parent = dag.tasks["p"].id

    child = await world.one("child", parent_id=parent)

    assert world.task(child)["dag_id"] == dag.id
    assert world.dag_row(dag.id)["total"] == 2
    await world.complete(await world.take(agent, types=["parent"]))
    assert world.dag_row(dag.id)["status"] == "running"
    await world.complete(await world.take(agent))
    assert world.dag_row(dag.id)["status"] == "completed"
    assert world.dag_kinds(dag.id) == ["dag.created", "dag.running", "dag.completed"]


async def test_a_standalone_tasks_dag_gets_its_row_when_another_task_joins(world: World) -> None:
    """R-012: with what the task has reserved and spent so far, and its creator."""
    agent = await world.agent()
    await world.one("lone", max_cost_usd=1, created_by="human:ann")
    lone = await world.take(agent)
    dag_id = world.task(lone.id)["dag_id"]

    child = await world.one("child", dag_id=dag_id)

    row = world.dag_row(dag_id)
    assert (row["status"], row["total"], row["reserved_usd"]) == ("running", 2, 1)
    assert (row["created_by"], row["title"]) == ("human:ann", "lone")
    await world.complete(lone, spent="0.5")
    await world.complete(await world.take(agent))
    row = world.dag_row(dag_id)
    assert (row["status"], row["spent_usd"], row["reserved_usd"]) == ("completed", Decimal("0.5"), 0)
    assert world.task(child)["parent_id"] is None


async def test_parent_and_dag_must_agree(world: World) -> None:
    """R-012."""
    one, two = await world.submit(NewTask("one"), NewTask("two"))
    dag_of_one = world.task(one)["dag_id"]
    before = world.everything()

    with pytest.raises(InvalidInputError, match="dag_id"):
        await world.one(parent_id=two, dag_id=dag_of_one)
    with pytest.raises(InvalidInputError, match="dag_id"):
        await world.one(dag_id="dag_nope")

    assert world.everything() == before
    child = await world.one(parent_id=one, dag_id=dag_of_one)
    assert world.task(child)["dag_id"] == dag_of_one


@pytest.mark.parametrize("real", [True, False], ids=["real DAG", "virtual DAG"])
@pytest.mark.parametrize("end", ["completed", "cancelled"])
async def test_a_dag_that_has_ended_takes_no_tasks(world: World, real: bool, end: str) -> None:
    """R-012."""
    if real:
        dag_id = (await world.dag(NewTask("x"))).id
        (member,) = (row["id"] for row in world.rows("SELECT id FROM lineshaft.task"))
    else:
        member = await world.one("x")
        dag_id = world.task(member)["dag_id"]
    if end == "completed":
        await world.finish_all()
    else:
        await world.engine.cancel.cancel(member, "no")
    before = world.everything()

    for fields in ({"dag_id": dag_id}, {"parent_id": member}):
        with pytest.raises(InvalidTransitionError, match=end):
            await world.one("late", **fields)

    assert world.everything() == before


@pytest.mark.parametrize("real", [True, False], ids=["real DAG", "virtual DAG"])
async def test_a_failed_dag_runs_again_when_the_task_is_claimed(world: World, real: bool) -> None:
    """R-012: and a revived dead letter counts in it."""
    agent = await world.agent()
    if real:
        await world.dag(NewTask("bad"))
    else:
        await world.one("bad")
    dead = await world.kill(agent)
    dag_id = world.task(dead)["dag_id"]

    await world.one("rescue", dag_id=dag_id)

    row = world.dag_row(dag_id)
    assert (row["status"], row["total"], row["dead_lettered"]) == ("failed", 2, 1)
    rescue = await world.take(agent)
    assert world.dag_row(dag_id)["status"] == "running"
    await world.complete(rescue)
    assert world.dag_row(dag_id)["status"] == "failed"
    await world.engine.revive.retry(dead)
    await world.complete(await world.take(agent))
    assert world.dag_row(dag_id)["status"] == "completed"


async def test_a_task_that_joins_counts_against_the_ceiling(world: World) -> None:
    """R-012, R-232."""
    agent = await world.agent()
    dag = await world.dag(NewTask("x", max_cost_usd=1), ceiling=1.5)
    await world.take(agent)

    late = await world.one("late", dag_id=dag.id, max_cost_usd=1)

    assert await world.claim(agent) == []
    assert world.live(late)["parked"] == "dag_budget"


async def test_a_batch_that_joins_brings_its_children(world: World) -> None:
    dag = await world.dag(NewTask("x"))

    batch = await world.one(
        "batch", dag_id=dag.id, children=[NewTask("a"), NewTask("b", children=[NewTask("c")])]
    )

    rows = world.rows("SELECT DISTINCT dag_id FROM lineshaft.task")
    assert rows == [{"dag_id": dag.id}]
    assert world.dag_row(dag.id)["total"] == 5
    await world.finish_all()
    assert world.status(batch) == "COMPLETED"
    assert world.dag_row(dag.id)["status"] == "completed"


async def test_a_duplicate_joins_nothing(world: World) -> None:
    """Also when the DAG has ended in the meantime: it is a repeated call."""
    lone = await world.one("lone")
    dag_id = world.task(lone)["dag_id"]
    child = await world.one("child", parent_id=lone, idempotency_key="k")
    await world.finish_all()
    before = world.everything()

    (again,) = await world.engine.submission.submit([NewTask("child", parent_id=lone, idempotency_key="k")])

    assert (again.id, again.duplicate) == (child, True)
    assert world.everything() == before
    assert world.dag_row(dag_id)["total"] == 2


async def test_many_tasks_join_at_once(world: World) -> None:
    """Also by COPY, with dependencies on each other's upstream."""
    lone = await world.one("lone")
    dag_id = world.task(lone)["dag_id"]

    await world.submit(*(NewTask("x", dag_id=dag_id, depends_on=[lone], spec={"n": n}) for n in range(60)))

    assert world.dag_row(dag_id)["total"] == 61
    await world.finish_all()
    assert world.dag_row(dag_id)["status"] == "completed"


@pytest.mark.parametrize("field", ["dag_id", "parent_id"])
async def test_children_and_tasks_of_a_new_dag_have_their_place(world: World, field: str) -> None:
    """A place that the call would ignore is refused."""
    lone = await world.one("lone")
    found: dict[str, Any] = {"parent_id": lone, "dag_id": world.task(lone)["dag_id"]}
    placed = NewTask("x").with_options(**{field: found[field]})
    before = world.everything()

    with pytest.raises(InvalidInputError, match=rf"tasks\[0\]\.{field}"):
        await world.dag(placed)
    with pytest.raises(InvalidInputError, match=rf"children\[0\]\.{field}"):
        await world.one("batch", children=[placed])

    assert world.everything() == before
