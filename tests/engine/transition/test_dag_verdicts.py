"""U7: whether a DAG is completed, failed or cancelled, also where DAGs wait for each other."""

import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo
from tests.world import World, ref, spawn_children


async def test_a_dag_completes_once(world: World) -> None:
    """R-144, U7, R-141: with the last of its tasks, cancelled ones counted."""
    agent = await world.agent()
    dag = await world.dag(*(NewTask("code", key=key) for key in "abc"))
    await world.engine.cancel.cancel(dag.tasks["a"].id, "no")
    b, c = await world.claim(agent, 2)

    await world.complete(b)
    assert world.dag_row(dag.id)["status"] == "running"
    await world.complete(c)
    await world.complete(c)

    row = world.dag_row(dag.id)
    assert (row["status"], row["completed"], row["cancelled"]) == ("completed", 2, 1)
    assert row["ended_at"] == world.clock.now()
    assert world.dag_kinds(dag.id) == ["dag.created", "dag.running", "dag.completed"]


async def test_dependents_of_a_dead_letter_wait(world: World) -> None:
    """U6, U7, F-16, F-23: the DAG fails once nothing else can run, and lives again with a retry."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("bad", key="bad"),
        NewTask("good", key="good"),
        NewTask("last", key="last", depends_on=["bad", "good"]),
    )
    ids = {key: found.id for key, found in dag.tasks.items()}
    await world.fail(await world.take(agent, types=["bad"]), category="auth_failure")
    assert world.status(ids["last"]) == "PENDING"
    assert world.dag_row(dag.id)["status"] == "running"

    await world.complete(await world.take(agent, types=["good"]))
    row = world.dag_row(dag.id)
    assert (row["status"], row["dead_lettered"]) == ("failed", 1)
    assert row["ended_at"] == world.clock.now()

    await world.engine.revive.retry(ids["bad"])
    row = world.dag_row(dag.id)
    assert (row["status"], row["dead_lettered"], row["ended_at"]) == ("running", 0, None)
    await world.complete(await world.take(agent))
    await world.complete(await world.take(agent))

    assert world.dag_row(dag.id)["status"] == "completed"
    assert world.dag_kinds(dag.id) == [
        "dag.created",
        "dag.running",
        "dag.failed",
        "dag.running",
        "dag.completed",
    ]


async def test_a_dag_of_dead_letters_and_cancelled_tasks_has_failed(world: World) -> None:
    """U7: cancelled only if all were."""
    agent = await world.agent()
    dag = await world.dag(NewTask("code", key="a"), NewTask("code", key="b"))
    dead = await world.kill(agent)
    (left,) = {found.id for found in dag.tasks.values()} - {dead}
    await world.engine.cancel.cancel(left, "no")
    assert world.dag_row(dag.id)["status"] == "failed"

    other = await world.dag(NewTask("code", key="a"), NewTask("code", key="b"))
    for found in other.tasks.values():
        await world.engine.cancel.cancel(found.id, "no")

    assert world.dag_row(other.id)["status"] == "cancelled"
    assert world.dag_kinds(other.id) == ["dag.created", "dag.cancelled"]


async def test_a_task_of_another_dag_may_still_save_this_one(world: World) -> None:
    """U7, F-39: failed only when nothing can run, here or upstream elsewhere."""
    agent = await world.agent()
    elsewhere = await world.one("elsewhere")
    dag = await world.dag(
        NewTask("bad", key="bad"), NewTask("waits", key="waits", depends_on=[elsewhere]), NewTask("good")
    )
    await world.fail(await world.take(agent, types=["bad"]), category="auth_failure")
    await world.complete(await world.take(agent, types=["good"]))
    assert world.dag_row(dag.id)["status"] == "running"

    await world.complete(await world.take(agent, types=["elsewhere"]))
    await world.complete(await world.take(agent, types=["waits"]))

    assert world.dag_row(dag.id)["status"] == "failed"


async def dag_with_a_dead_letter(world: World, agent: AgentInfo, upstream: str) -> tuple[str, str]:
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

    await world.engine.revive.retry(upstream)
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

    await world.engine.revive.retry(root)
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

    await world.engine.cancel.cancel(upstream, "no", cascade=False)

    assert (world.status(waits), world.dag_row(dag_id)["status"]) == ("PENDING", "failed")
    await world.engine.revive.retry(upstream)
    assert world.dag_row(dag_id)["status"] == "running"


async def test_a_cascade_that_reaches_into_another_dag_ends_it(world: World) -> None:
    agent = await world.agent()
    upstream = await world.one("elsewhere")
    dag_id, waits = await dag_with_a_dead_letter(world, agent, upstream)

    await world.engine.cancel.cancel(upstream, "no")

    assert (world.status(waits), world.dag_row(dag_id)["status"]) == ("CANCELLED", "failed")


@pytest.mark.parametrize("place", ["here", "elsewhere"])
async def test_the_last_hope_is_made_to_wait_for_a_dead_letter(world: World, place: str) -> None:
    agent = await world.agent()
    dag = await world.dag(NewTask("here", key="here"), NewTask("hope", key="hope"))
    dead = {"here": dag.tasks["here"].id, "elsewhere": await world.one("elsewhere")}
    for type_ in dead:
        await world.fail(await world.take(agent, types=[type_]), category="auth_failure")
    assert world.dag_row(dag.id)["status"] == "running"

    await world.engine.dependencies.add(dag.tasks["hope"].id, [dead[place]])

    assert world.dag_row(dag.id)["status"] == "failed"
    await world.engine.revive.retry(dead[place])
    assert world.dag_row(dag.id)["status"] == "running"


async def family(world: World, agent: AgentInfo, *, on_failure: str | None = None) -> tuple[str, str, str]:
    """A parent that waits for its child, which is a dead letter: their DAG, the parent, the child."""
    await world.one("parent")
    parent = await world.take(agent, types=["parent"])
    tasks = [NewTask("child", on_failure=on_failure)]
    (child,) = await spawn_children(world.engine, ref(parent), tasks, wait=True)
    await world.fail(await world.take(agent, types=["child"]), category="auth_failure")
    return world.task(child.id)["dag_id"], parent.id, child.id


async def test_a_dead_child_whose_parent_completes_does_not_fail_the_dag(world: World) -> None:
    """U7: it counts as cancelled and stays a dead letter; retrying it reopens the DAG."""
    agent = await world.agent()
    dag_id, parent, child = await family(world, agent)
    assert world.dag_row(dag_id)["status"] == "running"

    await world.complete(await world.take(agent))

    assert world.statuses([parent, child]) == ["COMPLETED", "DEAD_LETTERED"]
    assert world.dag_row(dag_id)["status"] == "completed"
    await world.engine.revive.retry(child)
    assert world.dag_row(dag_id)["status"] == "running"
    await world.complete(await world.take(agent))
    assert world.dag_row(dag_id)["status"] == "completed"
    assert world.dag_kinds(dag_id)[-3:] == ["dag.completed", "dag.running", "dag.completed"]


async def test_a_child_that_dies_after_its_parent_completed_does_not_fail_the_dag(world: World) -> None:
    """U7: fire and forget."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    (child,) = await spawn_children(world.engine, ref(parent), [NewTask("child")])
    await world.complete(parent)

    await world.kill(agent, child.id)

    assert world.dag_row(world.task(child.id)["dag_id"])["status"] == "completed"


async def test_a_dead_child_whose_parent_dies_too_fails_the_dag(world: World) -> None:
    """U7."""
    agent = await world.agent()
    dag_id, *_ = await family(world, agent)

    await world.fail(await world.take(agent), category="auth_failure")

    assert world.dag_row(dag_id)["status"] == "failed"


@pytest.mark.parametrize(("on_failure", "verdict"), [("ignore", "cancelled"), ("block", "failed")])
async def test_a_child_may_be_spawned_to_be_ignored(world: World, on_failure: str, verdict: str) -> None:
    """U7: whatever becomes of its parent."""
    agent = await world.agent()
    dag_id, parent, child = await family(world, agent, on_failure=on_failure)

    await world.engine.cancel.cancel(parent, "no")

    assert world.statuses([parent, child]) == ["CANCELLED", "DEAD_LETTERED"]
    assert world.dag_row(dag_id)["status"] == verdict


async def test_a_task_that_waits_for_an_ignored_dead_letter_still_fails_the_dag(world: World) -> None:
    """U7: it can never run."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    tasks = [NewTask("child", key="a", on_failure="ignore"), NewTask("after", depends_on=["a"])]
    await spawn_children(world.engine, ref(parent), tasks)
    await world.complete(parent)

    await world.kill(agent)

    assert world.dag_row(world.task(parent.id)["dag_id"])["status"] == "failed"


@pytest.mark.parametrize(
    "task",
    [
        NewTask("x", on_failure="ignore"),
        NewTask("x", on_failure="retry"),
        NewTask("batch", children=[NewTask("x", on_failure="ignore")]),
    ],
)
async def test_only_subtasks_can_be_ignored(world: World, task: NewTask) -> None:
    with pytest.raises(InvalidInputError, match="on_failure"):
        await world.submit(task)
