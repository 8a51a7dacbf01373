"""U7 across DAGs: what ends badly or is revived in one is felt in all that wait for it."""

import pytest

from lineshaft.model.tasks import NewTask
from lineshaft.store.fleet import AgentView
from tests.store.world import World


async def dag_with_a_dead_letter(world: World, agent: AgentView, upstream: str) -> tuple[str, str]:
    """A DAG that one dead letter has not failed yet, because a task may still run once `upstream` is done."""
    dag = await world.dag(NewTask("bad", key="bad"), NewTask("waits", key="waits", depends_on=[upstream]))
    await world.fail(await world.take(agent, types=["bad"]), category="auth_failure")
    assert world.dag_row(dag.id)["status"] == "running"
    return dag.id, dag.tasks["waits"].id


async def test_an_upstream_elsewhere_that_dies_fails_the_dag_and_revived_it_runs_again(world: World) -> None:
    agent = await world.agent()
    upstream = await world.one("elsewhere")
    dag_id, waits = await dag_with_a_dead_letter(world, agent, upstream)

    await world.fail(await world.take(agent), category="auth_failure")
    assert world.dag_row(dag_id)["status"] == "failed"
    assert world.status(waits) == "PENDING"

    await world.engine.operations.retry(upstream)
    assert world.dag_row(dag_id)["status"] == "running"
    await world.complete(await world.take(agent))
    await world.complete(await world.take(agent))

    assert world.dag_row(dag_id)["status"] == "failed"
    assert world.dag_kinds(dag_id) == [
        "dag.created",
        "dag.running",
        "dag.failed",
        "dag.running",
        "dag.failed",
    ]


async def test_it_is_felt_through_tasks_in_between(world: World) -> None:
    """A live upstream that waits for a dead one can't run either."""
    agent = await world.agent()
    root = await world.one("root")
    between = await world.one("between", depends_on=[root])
    dag_id, _ = await dag_with_a_dead_letter(world, agent, between)

    await world.fail(await world.take(agent, types=["root"]), category="auth_failure")
    assert world.dag_row(dag_id)["status"] == "failed"

    await world.engine.operations.retry(root)
    assert world.dag_row(dag_id)["status"] == "running"


async def test_one_that_can_never_run_saves_nothing(world: World) -> None:
    """It waits for a live task elsewhere, but also for the dead one here."""
    agent = await world.agent()
    upstream = await world.one("elsewhere")
    dag = await world.dag(NewTask("bad", key="bad"), NewTask("waits", depends_on=["bad", upstream]))

    await world.fail(await world.take(agent, types=["bad"]), category="auth_failure")

    assert world.dag_row(dag.id)["status"] == "failed"


async def test_an_upstream_elsewhere_that_is_cancelled_alone_fails_the_dag(world: World) -> None:
    """Without the cascade what waits for it goes on waiting, for nothing."""
    agent = await world.agent()
    upstream = await world.one("elsewhere")
    dag_id, waits = await dag_with_a_dead_letter(world, agent, upstream)

    await world.engine.operations.cancel(upstream, "no", cascade=False)

    assert (world.status(waits), world.dag_row(dag_id)["status"]) == ("PENDING", "failed")
    await world.engine.operations.retry(upstream)
    assert world.dag_row(dag_id)["status"] == "running"


async def test_a_cascade_that_reaches_into_another_dag_ends_it(world: World) -> None:
    agent = await world.agent()
    upstream = await world.one("elsewhere")
    dag_id, waits = await dag_with_a_dead_letter(world, agent, upstream)

    await world.engine.operations.cancel(upstream, "no")

    assert (world.status(waits), world.dag_row(dag_id)["status"]) == ("CANCELLED", "failed")


@pytest.mark.parametrize("place", ["here", "elsewhere"])
async def test_the_last_hope_is_made_to_wait_for_a_dead_letter(world: World, place: str) -> None:
    agent = await world.agent()
    dag = await world.dag(NewTask("here", key="here"), NewTask("hope", key="hope"))
    dead = {"here": dag.tasks["here"].id, "elsewhere": await world.one("elsewhere")}
    for type_ in dead:
        await world.fail(await world.take(agent, types=[type_]), category="auth_failure")
    assert world.dag_row(dag.id)["status"] == "running"

    await world.engine.operations.add_dependencies(dag.tasks["hope"].id, [dead[place]])

    assert world.dag_row(dag.id)["status"] == "failed"
    await world.engine.operations.retry(dead[place])
    assert world.dag_row(dag.id)["status"] == "running"
