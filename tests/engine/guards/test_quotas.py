"""Quotas: at most so many tasks of a key at once, or in a time; what has no room waits, and is woken."""

from typing import Any

import pytest

from lineshaft.duties.quota_keeper import QuotaKeeper
from lineshaft.operations.quotas import NewRate, SetQuota
from lineshaft.types import NewTask, Quota, Status
from tests.world import World


async def quota(
    world: World, match: str, max_running: int | None = None, *, name: str = "q", **fields: Any
) -> Quota:
    return await world.engine.quotas.set(SetQuota(name=name, match=match, max_running=max_running, **fields))


async def tick(world: World) -> None:
    """What the duty does each second."""
    await QuotaKeeper(world.engine.quotas).run_once()


def parked(world: World) -> list[str]:
    return [
        row["id"]
        for row in world.rows(
            "SELECT id FROM lineshaft.task_live WHERE parked = 'quota' ORDER BY rank, submission_no"
        )
    ]


async def test_only_so_many_tasks_of_a_key_are_held(world: World) -> None:
    await quota(world, "customer:*", 2)
    a = await world.submit(*(NewTask("code", quota_keys=["customer:a"]) for _ in range(4)))
    b = await world.submit(NewTask("code", quota_keys=["customer:b"]))
    agent = await world.agent()

    tasks = await world.claim(agent, 10)

    assert [task.id for task in tasks] == [*a[:2], *b]
    assert parked(world) == a[2:]
    await world.complete(tasks[1])
    (next_task,) = await world.claim(agent, 10)
    assert next_task.id == a[2]
    (shown,) = (await world.engine.quotas.page(limit=10, cursor=None)).items
    assert (shown.running, shown.waiting) == (3, 1)
    assert {(holder.task_id, holder.key) for holder in shown.holders} == {
        (a[0], "customer:a"),
        (b[0], "customer:b"),
        (a[2], "customer:a"),
    }


@pytest.mark.parametrize("match", ["type:code", "type:*", "agent:*"])
async def test_a_lane_without_room_is_closed(world: World, match: str) -> None:
    await quota(world, match, 2)
    ids = await world.submit(*(NewTask("code") for _ in range(4)))
    agent = await world.agent("worker")

    tasks = await world.claim(agent, 10)

    assert [task.id for task in tasks] == ids[:2]
    assert parked(world) == []
    assert await world.claim(agent, 10) == []
    await world.complete(tasks[0])
    assert [task.id for task in await world.claim(agent, 10)] == ids[2:3]


async def test_a_quota_of_another_type_changes_nothing(world: World) -> None:
    await quota(world, "type:other", 0)
    ids = await world.submit(*(NewTask("code") for _ in range(3)))

    assert [task.id for task in await world.claim(await world.agent(), 10)] == ids
    assert world.rows("SELECT * FROM lineshaft.slot") == []


async def test_a_tag_and_a_model_have_quotas(world: World) -> None:
    await quota(world, "tag:slow", 1, name="slow")
    await quota(world, "model:gpt", 1, name="gpt")
    slow = await world.submit(*(NewTask("code", tags=["slow"]) for _ in range(2)))
    await world.submit(*(NewTask("code", model_preferences=["gpt"]) for _ in range(2)))
    await world.submit(NewTask("code"))

    tasks = await world.claim(await world.agent(models_available=["other", "gpt"]), 10)

    assert len(tasks) == 3
    assert parked(world) == slow[1:]
    assert len(world.rows("SELECT * FROM lineshaft.slot")) == 2


async def test_all_keys_of_a_quota_may_share_a_limit(world: World) -> None:
    await quota(world, "customer:*", 2, each=False)
    ids = await world.submit(*(NewTask("code", quota_keys=[f"customer:{n}", "customer:x"]) for n in range(3)))
    agent = await world.agent()

    tasks = await world.claim(agent, 10)

    assert [task.id for task in tasks] == ids[:2]
    await world.complete(tasks[0])
    assert [task.id for task in await world.claim(agent, 10)] == ids[2:]


async def test_a_rate_admits_so_many_in_any_window(world: World) -> None:
    await quota(world, "customer:*", rate=NewRate(amount=3, unit="tasks", per_sec=60))
    ids = await world.submit(*(NewTask("code", quota_keys=["customer:a"]) for _ in range(7)))
    agent = await world.agent()

    assert [task.id for task in await world.claim(agent, 10)] == ids[:3]
    world.age(seconds=59)
    await tick(world)
    assert await world.claim(agent, 10) == []
    world.age(seconds=3)
    await tick(world)
    assert [task.id for task in await world.claim(agent, 10)] == ids[3:6]
    world.age(seconds=62)
    await tick(world)
    assert [task.id for task in await world.claim(agent, 10)] == ids[6:]


async def test_a_rate_of_a_type_closes_its_lanes(world: World) -> None:
    await quota(world, "type:code", rate=NewRate(amount=2, unit="tasks", per_sec=10))
    ids = await world.submit(*(NewTask("code") for _ in range(3)))
    agent = await world.agent()

    assert [task.id for task in await world.claim(agent, 10)] == ids[:2]
    assert await world.claim(agent, 10) == []
    world.age(seconds=11)
    assert [task.id for task in await world.claim(agent, 10)] == ids[2:]


@pytest.mark.parametrize("how", ["complete", "fail", "release", "cancel", "expire"])
async def test_however_a_claim_ends_its_slot_is_free(world: World, how: str) -> None:
    await quota(world, "customer:*", 1)
    first, second = await world.submit(
        *(NewTask("code", quota_keys=["customer:a"], max_attempts=1) for _ in range(2))
    )
    agent = await world.agent()
    (task,) = await world.claim(agent, 10)
    assert parked(world) == [second]

    if how == "complete":
        assert await world.complete(task) is Status.COMPLETED
    elif how == "fail":
        await world.fail(task)
    elif how == "release":
        await world.release(task, 100)
    elif how == "cancel":
        await world.engine.cancel.cancel(first, "not needed")
    else:
        world.age(hours=2)
        await world.engine.maintenance.reap(10)

    (task,) = await world.claim(agent, 10)
    assert task.id == second
    assert [row["task_id"] for row in world.rows("SELECT task_id FROM lineshaft.slot")] == [second]


@pytest.mark.parametrize(
    ("match", "concerned"),
    [
        ("type:a_b", ["a_b"]),
        ("type:a:*", ["a:x"]),
        ("type:50%", ["50%"]),
        ("type:*", ["a_b", "axb", "a:x", "50%", "50x"]),
    ],
)
async def test_a_pattern_matches_literally(world: World, match: str, concerned: list[str]) -> None:
    await quota(world, match, 0)
    types = ["a_b", "axb", "a:x", "50%", "50x"]
    await world.submit(*(NewTask(type_) for type_ in types))

    tasks = await world.claim(await world.agent(), 10)

    assert {task.type for task in tasks} == {*types} - {*concerned}


async def test_very_many_quotas_are_looked_up(world: World) -> None:
    for n in range(101):
        await quota(world, f"type:t{n}", 0, name=f"q{n}")
    assert world.row("SELECT quota_lanes FROM lineshaft.limits")["quota_lanes"] is None
    await world.submit(NewTask("t7"), NewTask("code"))
    agent = await world.agent()

    assert [task.type for task in await world.claim(agent)] == ["code"]
    assert await world.claim(agent) == []
