"""Observers: a type that fails too often becomes an improvement task, once, with evidence."""

from typing import Any

import msgspec

from lineshaft.duties.observer import Observer
from lineshaft.types import TaskFilter
from lineshaft.types.sources import NewSource
from tests.engine.sources.helpers import outcomes, put
from tests.world import World

TEMPLATE = {
    "task": {
        "type": "refactor",
        "title": "${event.group} has a failure rate of ${event.failure_rate}",
        "spec": {"errors": "${event.errors}", "task_ids": "${event.task_ids}", "cost": "${event.cost_usd}"},
    }
}


def observer(**fields: Any) -> NewSource:
    given = {"name": "o", "kind": "observer", "template": TEMPLATE, "min_attempts": 10, **fields}
    return msgspec.convert(given, NewSource)


async def fail_and_complete(world: World, failures: int, successes: int, **fields: Any) -> list[str]:
    type_ = fields.get("type_", "code")
    ids = [await world.one(max_attempts=1, **fields) for _ in range(failures + successes)]
    await world.engine.breakers.reset(type_)
    # All at once: claims stop when the breaker opens.
    claimed = await world.claim(await world.agent(), limit=len(ids), types=[type_])
    for n, task in enumerate(claimed):
        if n < failures:
            await world.fail(task, f"token {n} expired after {n} s")
        else:
            await world.complete(task)
    return [task.id for task in claimed[:failures]]


async def run(world: World) -> dict[str, int]:
    return dict(await Observer(world.engine.observers).run_once())


async def test_a_type_with_forty_percent_failures_becomes_one_refactor_task(world: World) -> None:
    """R-225."""
    await put(world.engine, observer())
    failed = await fail_and_complete(world, 4, 5, type_="auth")
    assert await run(world) == {}, "nine attempts are too few"
    await fail_and_complete(world, 0, 1, type_="auth")
    await fail_and_complete(world, 3, 7, type_="billing")

    assert await run(world) == {"observations created": 1}
    assert await run(world) == {}, "the cooldown isn't over"

    (task,) = (await world.engine.read.tasks(TaskFilter(type=("refactor",)))).items
    assert (task.title, task.created_by) == ("auth has a failure rate of 0.4", "system:o")
    (group,) = task.spec["errors"]
    assert (group["pattern"], group["count"]) == ("token <n> expired after <n> s", 4)
    assert set(group["task_ids"]) == set(task.spec["task_ids"]) == set(failed)
    world.clock.advance(86_401)
    assert await run(world) == {}, "the failures are older than the window"
    await fail_and_complete(world, 10, 0, type_="auth")
    assert await run(world) == {"observations created": 1}


async def test_it_doesnt_observe_its_own_work(world: World) -> None:
    await put(world.engine, observer(cooldown_sec=60, min_attempts=3))
    await fail_and_complete(world, 10, 0, type_="auth")
    agent = await world.agent()
    for _ in range(6):
        await run(world)
        await world.engine.breakers.reset("refactor")
        for task in await world.claim(agent, types=["refactor"]):
            await world.fail(task, "no idea")
        world.clock.advance(61)

    assert set(await outcomes(world.engine, "o")) == {"created"}
    titles = {task.title for task in (await world.engine.read.tasks(TaskFilter(type=("refactor",)))).items}
    assert titles == {"auth has a failure rate of 1.0"}


async def test_groups_by_tag_model_and_agent(world: World) -> None:
    await put(world.engine, observer(group_by="tag:module:"))
    await put(world.engine, msgspec.structs.replace(observer(group_by="agent"), name="by-agent"))
    await fail_and_complete(world, 10, 0, tags=["module:auth", "other"])

    assert await run(world) == {"observations created": 2}

    made = (await world.engine.read.tasks(TaskFilter(type=("refactor",)))).items
    assert "module:auth has a failure rate of 1.0" in {task.title for task in made}
    assert {task.created_by for task in made} == {"system:o", "system:by-agent"}
