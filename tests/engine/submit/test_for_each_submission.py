"""Tasks with for_each, and inputs that are parts of outputs, as they are submitted."""

import pytest

from lineshaft.errors import CycleError, InvalidInputError
from lineshaft.model.parts import ForEach
from lineshaft.model.tasks import NewTask
from lineshaft.types import ForEachInfo
from lineshaft.types.assignments import assignments
from tests.world import World, ref, spawn_children

OVER = "must begin with the key of a task in the same DAG or spawn, got"


@pytest.mark.parametrize("over", ["scan", "scam.files", "task_01M7TWNSFCAKJMJF6SQXK6K6X2.files"])
async def test_the_list_is_of_a_task_in_the_same_call(world: World, over: str) -> None:
    """A task alone has none; a list that exists already needs no engine that waits for it."""
    task = NewTask("review", for_each=ForEach(over))

    with pytest.raises(InvalidInputError, match=OVER) as alone:
        await world.submit(task)
    assert alone.value.errors[0][0] == "for_each.over"
    with pytest.raises(InvalidInputError, match=OVER) as batch:
        await world.submit(NewTask("scan"), task)
    assert batch.value.errors[0][0] == "tasks[1].for_each.over"
    if over != "scan":
        with pytest.raises(InvalidInputError, match=OVER):
            await world.dag(NewTask("scan", key="scan"), task)
    assert world.rows("SELECT id FROM lineshaft.task") == []


async def test_many_alike_tasks_are_refused_too(world: World) -> None:
    """They take another way."""
    with pytest.raises(InvalidInputError, match=OVER):
        await world.submit(*[NewTask("review", for_each=ForEach("scan"))] * 100)


async def test_a_child_of_a_batch_has_no_list(world: World) -> None:
    """The children of a batch run one after the other."""
    with pytest.raises(InvalidInputError, match=OVER) as raised:
        await world.dag(
            NewTask("scan", key="scan"),
            NewTask("batch", children=[NewTask("review", for_each=ForEach("scan"))]),
        )
    assert raised.value.errors[0][0] == "tasks[1].children[0].for_each.over"


async def test_a_list_that_waits_for_its_own_task_is_a_cycle(world: World) -> None:
    with pytest.raises(CycleError, match="scan → review → scan"):
        await world.dag(
            NewTask("scan", key="scan", depends_on=["review"]),
            NewTask("review", key="review", for_each=ForEach("scan.files")),
        )


async def test_it_is_read_as_it_was_written(world: World) -> None:
    dag = await world.dag(
        NewTask("scan", key="scan"),
        NewTask("style", key="style"),
        NewTask(
            "review",
            key="review",
            for_each=ForEach("scan.files", max=7, concurrency=2),
            inputs={"rules": "style.rules.0", "all": ["style", "scan.files"]},
        ),
    )
    scan, style, review = (dag.tasks[key].id for key in ("scan", "style", "review"))

    (task,) = await world.engine.read.tasks_by_id([review])
    assert task.for_each == ForEachInfo("scan.files", max=7, concurrency=2)
    assert task.inputs == {"rules": f"{style}.rules.0", "all": [style, f"{scan}.files"]}
    assert sorted(task.depends_on) == sorted([scan, style])
    (agent,) = [await world.agent()]
    for _ in range(2):
        found = await world.take(agent, limit=1)
        await world.complete(
            found, {"files": ["a"], "rules": ["short"]} if found.type == "scan" else {"rules": ["x"]}
        )
    claim = await world.claims(agent, 10)
    (child,) = assignments(claim)
    assert child.inputs == {"rules": "x", "all": [{"rules": ["x"]}, ["a"]], "item": "a", "index": 0}
    (read,) = await world.engine.read.tasks_by_id([child.task.id])
    assert (read.item, read.index, read.for_each, "item" in read.inputs) == ("a", 0, None, False)


async def test_a_part_of_an_existing_task(world: World) -> None:
    first = await world.one("scan")
    await world.complete(await world.take(), {"files": ["a", "b"]})
    await world.one("look", inputs={"last": f"{first}.files.1", "none": f"{first}.files.2"})

    (found,) = assignments(await world.claims(await world.agent(), 1))

    # As with outputs that are too large, what can't be passed is missing, and the handler's error says so.
    assert found.inputs == {"last": "b"}


async def test_parts_in_what_is_spawned(world: World) -> None:
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    await spawn_children(
        world.engine,
        ref(parent),
        [NewTask("scan", key="scan"), NewTask("look", inputs={"first": "scan.files.0"})],
    )
    await world.complete(await world.take(agent), {"files": ["a"]})

    (found,) = assignments(await world.claims(agent, 1))

    assert found.inputs == {"first": "a"}
