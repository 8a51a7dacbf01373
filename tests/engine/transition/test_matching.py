"""Cancelling and retrying by filter."""

import pytest

from lineshaft.engine.transition import matching
from lineshaft.errors import InvalidInputError
from lineshaft.model.tasks import NewTask
from lineshaft.types import TaskFilter
from tests.world import World


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_CHUNK", 2)


async def test_all_matching_tasks_are_cancelled_with_their_dependents(world: World) -> None:
    """In several transactions; ended tasks and others are left alone."""
    wanted = await world.submit(*(NewTask("crawl", tags=["old"]) for _ in range(5)))
    below = await world.one("report", depends_on=[wanted[0]])
    other = await world.one("crawl")
    done = await world.one("done", tags=["old"])
    await world.complete(await world.take(types=["done"]))

    rehearsed = await world.engine.matching.cancel(TaskFilter(tag=["old"]), "outdated", dry_run=True)
    assert world.statuses([*wanted, other]) == ["READY"] * 6
    found = await world.engine.matching.cancel(TaskFilter(tag=["old"]), "outdated")

    assert set(rehearsed.ids) == set(found.ids) == set(wanted)
    assert (rehearsed.count, found.count) == (5, 5)
    assert world.statuses([*wanted, below, other, done]) == [*["CANCELLED"] * 6, "READY", "COMPLETED"]
    assert {world.end(name)["reason"] for name in wanted} == {"outdated"}


async def test_matching_tasks_that_depend_on_each_other_are_all_reported(world: World) -> None:
    dag = await world.dag(
        NewTask("x", key="a"),
        NewTask("x", key="b", depends_on=["a"]),
        NewTask("x", key="c", depends_on=["b"]),
    )

    found = await world.engine.matching.cancel(TaskFilter(dag_id=[dag.id]), "no")

    assert set(found.ids) == {task.id for task in dag.tasks.values()}


async def test_all_matching_tasks_are_retried(world: World) -> None:
    """Dead letters, cancelled tasks, waiting retries; one that can't be retried doesn't stop the others."""
    agent = await world.agent()
    dead = [await world.one("x"), await world.one("x")]
    for name in dead:
        await world.kill(agent, name)
    waiting = await world.one("x")
    await world.fail(await world.take(agent))
    keyed = await world.one("x", idempotency_key="k")
    await world.engine.cancel.cancel(keyed, "no")
    await world.one("other", idempotency_key="k")

    rehearsed = await world.engine.matching.retry(TaskFilter(type=["x"]), dry_run=True)
    assert set(rehearsed.ids) == {*dead, waiting, keyed}
    found = await world.engine.matching.retry(TaskFilter(type=["x"]))

    assert set(found.ids) == {*dead, waiting}
    assert world.statuses([*dead, waiting, keyed]) == ["READY", "READY", "READY", "CANCELLED"]


async def test_only_statuses_that_were_asked_for(world: World) -> None:
    agent = await world.agent()
    dead = await world.one("x")
    await world.kill(agent, dead)
    cancelled = await world.one("x")
    await world.engine.cancel.cancel(cancelled, "no")

    found = await world.engine.matching.retry(TaskFilter(type=["x"], status=["dead_lettered", "COMPLETED"]))

    assert found.ids == [dead]
    assert (await world.engine.matching.cancel(TaskFilter(status=["CANCELLED"]), "no")).count == 0


@pytest.mark.parametrize("empty", [TaskFilter(), TaskFilter(status=[], type="")])
async def test_an_empty_filter_is_refused(world: World, empty: TaskFilter) -> None:
    task_id = await world.one()

    with pytest.raises(InvalidInputError, match="filter"):
        await world.engine.matching.cancel(empty, "no")

    assert world.status(task_id) == "READY"
