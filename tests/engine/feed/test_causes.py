"""R-245, R-144, U7: causes come before effects, and every event of a task names its DAG."""

from lineshaft.engine.feed.events import Events
from lineshaft.model.tasks import NewTask
from tests.world import World


async def test_the_events_of_a_dag_are_in_the_order_of_cause_and_effect(world: World) -> None:
    """R-245, R-144: a DAG runs because a task was claimed, and is complete because the last one is."""
    dag = await world.dag(NewTask("one", key="one"), NewTask("two", depends_on=["one"]))
    agent = await world.agent()
    for _ in range(2):
        await world.complete(await world.take(agent))

    kinds = world.kinds(dag.id, column="dag_id")
    assert kinds.index("task.claimed") < kinds.index("dag.running")
    assert kinds[-2:] == ["task.completed", "dag.completed"]
    assert world.dag_kinds(dag.id) == ["dag.created", "dag.running", "dag.completed"]


async def test_every_event_of_a_lone_task_names_its_dag(world: World) -> None:
    """R-245: in the feed and in the view; also if the task has an id of the caller's."""
    ids = await world.submit(NewTask("code"), NewTask("code", id="own"))
    agent = await world.agent()
    for task in await world.claim(agent, 2):
        await world.complete(task)
    dags = {task_id: (await world.engine.read.task(task_id)).dag_id for task_id in ids}

    events = (await Events(world.engine.database).read(None, limit=100)).items

    of_tasks = [event for event in events if event.task_id is not None]
    assert {event.kind for event in of_tasks} >= {"task.created", "task.claimed", "task.completed"}
    assert {(event.task_id, event.dag_id) for event in of_tasks} == set(dags.items())
    rows = world.rows("SELECT task_id, dag_id FROM lineshaft.events WHERE task_id IS NOT NULL")
    assert {(row["task_id"], row["dag_id"]) for row in rows} == set(dags.items())
