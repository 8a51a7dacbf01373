"""R-144, U7: the DAG of a standalone task tells its story once, though it has no events of its own."""

from typing import Any

import pytest

from lineshaft.engine.feed.events import Events
from lineshaft.engine.feed.outbox import Outbox
from lineshaft.model.notices import NoticeKind
from lineshaft.model.tasks import NewTask
from lineshaft.types import Event
from tests.world import World, ref, spawn_children


async def read(world: World, *, limit: int = 500, events: Events | None = None, **wanted: Any) -> list[Event]:
    """All events, page by page."""
    events = events or Events(world.engine.database)
    found: list[Event] = []
    place = None
    while True:
        page = await events.read(place, limit=limit, **wanted)
        found += page.items
        place = page.next_cursor
        if page.caught_up:
            return found


def story(world: World, dag_id: str) -> list[str]:
    """The kinds of its events; those with `single` have a star."""
    query = (
        "SELECT kind || CASE WHEN data ->> 'single' = 'true' THEN '*' ELSE '' END AS kind"
        " FROM lineshaft.events WHERE dag_id = %s AND kind LIKE 'dag.%%' ORDER BY seq, n"
    )
    return [row["kind"] for row in world.rows(query, dag_id)]


async def test_the_dag_of_a_lone_task_is_created_runs_and_completes_after_its_task(world: World) -> None:
    """R-144, R-245."""
    task_id = await world.one()
    agent = await world.agent()
    await world.release(await world.take(agent))
    await world.complete(await world.take(agent))
    dag_id = world.task(task_id)["dag_id"]

    events = await read(world, dag_id=dag_id)

    assert [event.kind for event in events] == [
        *("task.created", "task.ready", "dag.created"),
        *("task.claimed", "task.started", "dag.running", "task.released", "task.ready"),
        *("task.claimed", "task.started", "task.validating", "task.completed", "dag.completed"),
    ]
    of_dag = [event for event in events if event.kind.startswith("dag.")]
    assert {(event.dag_id, event.task_id, event.epoch) for event in of_dag} == {(dag_id, None, None)}
    assert [event.data for event in of_dag] == [{"single": True}] * 3
    assert [event.agent_id for event in of_dag] == [None, agent.id, None]
    in_view = world.kinds(dag_id, column="dag_id")
    assert in_view == [event.kind for event in events]
    assert not [kind for kind in world.kinds(task_id) if kind.startswith("dag.")], "a task's own history"


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 500])
async def test_filters_and_cursors_find_each_event_of_a_lone_tasks_dag_once(
    world: World, limit: int, wide: bool
) -> None:
    own, other = await world.submit(NewTask("code", id="own"), NewTask("code"))
    real = await world.dag(NewTask("later", key="a"))
    agent = await world.agent(types=["code"])
    for task in await world.claim(agent, 2):
        await world.complete(task)
    dags = {name: world.task(name)["dag_id"] for name in (own, other)}
    events = Events(world.engine.database, most_recent=1 if wide else 2_000, span=3)

    completed = await read(world, limit=limit, events=events, kinds=["dag.completed"])
    created = await read(world, limit=limit, events=events, kinds=["task.created", "dag.created"])
    of_one = await read(world, limit=limit, events=events, dag_id=dags[own], kinds=["dag.running"])
    whole = await read(world, limit=limit, events=events)

    assert sorted(event.dag_id or "" for event in completed) == sorted(dags.values())
    assert [event.dag_id for event in of_one] == [dags[own]]
    assert {event.dag_id for event in created if event.kind == "dag.created"} == {*dags.values(), real.id}
    assert len(created) == 6
    assert [event.data for event in created if event.dag_id == real.id] == [None, None]
    assert len({event.cursor for event in whole}) == len(whole)
    assert await read(world, events=events, task_id=own, kinds=["dag.completed"]) == []
    # Any event's own cursor continues behind it.
    place = next(number for number, event in enumerate(whole) if event.kind == "dag.running")
    rest = await Events(world.engine.database).read(whole[place].cursor, limit=500)
    assert [e.kind for e in rest.items[:2]] == [e.kind for e in whole[place + 1 : place + 3]]


async def test_a_lone_task_that_dies_fails_its_dag_and_revived_it_runs_again(world: World) -> None:
    task_id = await world.one()
    agent = await world.agent()
    dag_id = world.task(task_id)["dag_id"]
    await world.fail(await world.take(agent), category="auth_failure")
    await world.engine.revive.retry(task_id)
    assert (await world.engine.read.dag(dag_id)).status == "running"
    await world.complete(await world.take(agent))

    assert story(world, dag_id) == [
        "dag.created*",
        "dag.running*",
        "dag.failed*",
        "dag.running*",
        "dag.completed*",
    ]


async def test_a_lone_task_that_is_revived_before_its_first_claim_runs_once(world: World) -> None:
    task_id = await world.one()
    dag_id = world.task(task_id)["dag_id"]
    await world.engine.cancel.cancel(task_id, "not now")
    await world.engine.revive.retry(task_id)
    assert (await world.engine.read.dag(dag_id)).status == "pending"
    await world.complete(await world.take())

    assert story(world, dag_id) == ["dag.created*", "dag.cancelled*", "dag.running*", "dag.completed*"]


@pytest.mark.parametrize(
    "grows", ["spawns", "is joined", "is joined when dead", "is joined before its claim"]
)
async def test_a_lone_tasks_dag_that_grows_tells_its_story_once(world: World, grows: str) -> None:
    task_id = await world.one()
    agent = await world.agent()
    dag_id = world.task(task_id)["dag_id"]
    expected = ["dag.created*", "dag.running*", "dag.changed", "dag.completed"]
    if grows == "is joined before its claim":
        await world.one("joins", dag_id=dag_id)
        expected = ["dag.created*", "dag.changed", "dag.running", "dag.completed"]
    task = await world.take(agent, types=["code"])
    if grows == "spawns":
        await spawn_children(world.engine, ref(task), [NewTask("child")])
    elif grows == "is joined":
        await world.one("joins", dag_id=dag_id)
    elif grows == "is joined when dead":
        await world.fail(task, category="auth_failure")
        await world.one("joins", dag_id=dag_id)
        await world.engine.revive.retry(task_id)
        task = await world.take(agent, types=["code"])
        expected = [*expected[:2], "dag.failed*", "dag.changed", "dag.running", "dag.completed"]
    await world.complete(task)
    await world.complete(await world.take(agent))

    assert story(world, dag_id) == expected
    kinds = [event.kind for event in await read(world, dag_id=dag_id) if event.kind.startswith("dag.")]
    assert kinds == [kind.rstrip("*") for kind in expected], "also those from before it had a row"


async def test_notifications_leave_out_the_dags_of_lone_tasks_unless_they_are_asked_for(world: World) -> None:
    outbox = Outbox(world.engine.database)
    everything = frozenset(NoticeKind)
    usual = everything - {NoticeKind.SINGLE_DAG_FAILED}
    for name, kinds in (("usual", usual), ("all", everything)):
        await outbox.collect(name, kinds)
    task_id = await world.one()
    await world.fail(await world.take(), category="auth_failure")

    assert (await outbox.collect("usual", usual)).noted == 1, "the dead letter"
    assert (await outbox.collect("all", everything)).noted == 2
    query = "SELECT kind, body ->> 'dag_id' AS dag_id FROM lineshaft.notification WHERE destination = 'all'"
    noted = {row["kind"]: row["dag_id"] for row in world.rows(query)}
    assert noted["single_dag_failed"] == world.task(task_id)["dag_id"]
