"""Dependencies added later, and the critical path."""

import pytest

from lineshaft.errors import (
    CycleError,
    DependencyNotFoundError,
    InvalidInputError,
    InvalidTransitionError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from tests.world import World, ref, spawn_children


async def test_a_dependency_added_later(world: World) -> None:
    """R-143, and the HTTP contract: READY becomes PENDING; a COMPLETED dependency blocks nothing."""
    agent = await world.agent()
    done = await world.one("done")
    await world.complete(await world.take(agent))
    a, b, task_id = await world.submit(NewTask("a"), NewTask("b"), NewTask("c"))
    add = world.engine.dependencies.add

    assert await add(task_id, [done]) is Status.READY
    assert await add(task_id, [a, a]) is Status.PENDING
    assert await add(task_id, [a, b, done]) is Status.PENDING

    assert world.task(task_id)["blocked_by"] == sorted([a, b])
    waits = ["task.changed", "task.changed", "task.waiting", "task.changed"]
    assert world.kinds(task_id)[-4:] == waits
    assert world.kinds(task_id).count("task.waiting") == 1
    for _ in range(2):
        await world.complete(await world.take(agent))
    assert (await world.take(agent)).id == task_id
    with pytest.raises(InvalidTransitionError, match="it is RUNNING"):
        await add(task_id, [a])


async def test_late_dependencies_that_are_refused(world: World) -> None:
    """R-010, R-143, F-40: unknown, cancelled, or closing a cycle, which is named."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("a", key="a"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
    )
    a, b, c = (found.id for found in dag.tasks.values())
    cancelled = await world.one("x")
    await world.engine.cancel.cancel(cancelled, "no")
    dead = await world.one("x", priority=0)
    await world.kill(agent, dead)
    add = world.engine.dependencies.add
    before = world.everything()

    with pytest.raises(CycleError) as caught:
        await add(a, [c])
    assert caught.value.cycle == (a, c, b, a)
    with pytest.raises(CycleError):
        await add(a, [a])
    with pytest.raises(DependencyNotFoundError, match="nope"):
        await add(a, ["nope"])
    with pytest.raises(InvalidInputError, match="was cancelled"):
        await add(a, [cancelled])
    for ended in (cancelled, dead):
        with pytest.raises(InvalidTransitionError, match="Can't add a dependency"):
            await add(ended, [a])

    assert world.everything() == before
    assert await add(a, [dead]) is Status.PENDING


async def test_the_critical_path_follows_the_graph(world: World) -> None:
    """R-148, R-163: with dependencies added, cancelled, revived, and with parents that wait."""
    agent = await world.agent()
    chain = await world.dag(
        NewTask("a", key="a"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
    )
    a, b, c = (found.id for found in chain.tasks.values())
    single = await world.one("single")
    plain = world.live(single)["rank"]

    def downstream(*ids: str) -> list[int]:
        return [world.live(task_id)["downstream"] for task_id in ids]

    assert downstream(a, b, c, single) == [2, 1, 0, 0]
    await world.engine.dependencies.add(a, [single])
    assert downstream(a, b, c, single) == [2, 1, 0, 3]
    assert world.live(single)["rank"] == pytest.approx(plain - 3)

    await world.engine.cancel.cancel(c, "no")
    assert downstream(a, b, single) == [1, 0, 2]
    await world.engine.revive.retry(c)
    assert downstream(a, b, c, single) == [2, 1, 0, 3]

    # A dead letter that is revived has as much below it as before.
    await world.kill(agent, single)
    await world.engine.revive.retry(single)
    assert downstream(single) == [3]

    parent = await world.take(agent)
    child, last = await spawn_children(
        world.engine,
        ref(parent),
        [NewTask("child", key="child"), NewTask("last", depends_on=["child"])],
        wait=True,
    )
    assert downstream(child.id, last.id) == [5, 4]
