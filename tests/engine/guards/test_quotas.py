"""Quotas: at most so many tasks of a key at once, or in a time; what has no room waits, and is woken."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from lineshaft.duties.quota_keeper import QuotaKeeper
from lineshaft.errors import QuotaFullError
from lineshaft.ids import new_id
from lineshaft.operations.quotas import NewRate, SetQuota
from lineshaft.types import NewTask, Quota, Status
from tests.examples import examples
from tests.world import World, ref, spawn_children


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


@pytest.mark.parametrize(
    ("match", "each"), [("type:code", True), ("tag:slow", True), ("customer:*", True), ("customer:*", False)]
)
async def test_a_quota_bounds_waiting_tasks(world: World, match: str, each: bool) -> None:
    """Submissions are refused before anything is written; those of other keys, and spawns, aren't."""
    await world.submit(NewTask("code", tags=["slow"], quota_keys=["customer:a"]))
    await quota(world, match, each=each, max_waiting=3)
    one = NewTask("code", tags=["slow"], quota_keys=["customer:a"])
    ids = await world.submit(one, one)
    for refused in (world.submit(one), world.dag(one), world.submit(*[one] * 60)):
        with pytest.raises(QuotaFullError, match=r"lets 3 tasks of '.*' wait: 3 wait"):
            await refused
    assert len(world.rows("SELECT id FROM lineshaft.task")) == 3
    await world.submit(NewTask("other"))
    agent = await world.agent()
    task = (await world.claim(agent))[0]
    await world.submit(one)
    assert len(await spawn_children(world.engine, ref(task), [one, one])) == 2
    assert len(ids) == 2
    with pytest.raises(QuotaFullError):
        await world.submit(one)
    await world.engine.quotas.delete("q")
    await world.submit(*[one] * 60)


async def test_a_repeated_submission_is_answered_although_the_queue_is_full(world: World) -> None:
    await quota(world, "type:code", max_waiting=1)
    (first,) = await world.submit(NewTask("code", idempotency_key="k"))
    assert await world.submit(NewTask("code", idempotency_key="k")) == [first]


async def test_a_parent_and_its_child_share_a_quota_of_one(world: World) -> None:
    await quota(world, "customer:*", 1)
    (parent,) = await world.submit(NewTask("code", quota_keys=["customer:a"]))
    agent = await world.agent()
    task = await world.take(agent)
    (child,) = await spawn_children(
        world.engine, ref(task), [NewTask("code", quota_keys=["customer:a"])], wait=True
    )
    waiting = await world.take(agent)
    assert waiting.id == child.id
    await world.complete(waiting)
    again = await world.take(agent)
    assert again.id == parent
    assert await world.complete(again) is Status.COMPLETED


async def test_a_change_applies_to_what_waits_and_what_runs(world: World) -> None:
    ids = await world.submit(*(NewTask("code", quota_keys=["customer:a"]) for _ in range(6)))
    agent = await world.agent()
    running = await world.claim(agent, 2)
    # Running tasks count, and continue.
    await quota(world, "customer:*", 1)
    assert await world.claim(agent, 10) == []
    await world.complete(running[0])
    assert await world.claim(agent, 10) == []
    await quota(world, "customer:*", 3)
    assert [task.id for task in await world.claim(agent, 10)] == ids[2:4]
    # Another pattern: what was parked for the old one isn't any more.
    await quota(world, "type:other", 0)
    assert [task.id for task in await world.claim(agent, 1)] == ids[4:5]
    await quota(world, "customer:*", 1)
    assert await world.claim(agent, 10) == []
    await world.engine.quotas.delete("q")
    assert [task.id for task in await world.claim(agent, 10)] == ids[5:]
    assert world.rows("SELECT * FROM lineshaft.slot") == []
    await tick(world)
    assert world.rows("SELECT * FROM lineshaft.quota_wake") == []


async def test_tasks_of_a_full_type_are_not_parked(world: World) -> None:
    await quota(world, "type:code", 1)
    await world.submit(*(NewTask("code") for _ in range(3_000)))
    agent = await world.agent()
    assert len(await world.claim(agent, 10)) == 1
    assert await world.claim(agent, 10) == []
    assert parked(world) == []


async def test_many_tasks_of_a_full_key_are_parked_together(world: World) -> None:
    await quota(world, "customer:*", 1)
    await world.submit(*(NewTask("code", quota_keys=["customer:a"]) for _ in range(3_000)))
    (last,) = await world.submit(NewTask("code", quota_keys=["customer:b"]))
    agent = await world.agent()
    first, second = await world.claim(agent, 2)
    assert second.id == last
    assert len(parked(world)) == 2_999
    await world.complete(first)
    # The best one of its lane, and no other.
    assert len(parked(world)) == 2_998


async def test_a_unit_of_a_rate_is_used_only_by_a_task_that_is_claimed(world: World) -> None:
    """A task that lacks a document lock, or money, has used none."""
    await quota(world, "customer:*", rate=NewRate(amount=1, unit="tasks", per_sec=60))
    agent = await world.agent()
    await world.submit(NewTask("code", lock_key="doc"))
    await world.take(agent)
    await world.submit(NewTask("code", lock_key="doc", quota_keys=["customer:a"]))
    await world.dag(NewTask("code", max_cost_usd=2, quota_keys=["customer:a"]), ceiling=1)
    assert await world.claim(agent, 10) == []
    (last,) = await world.submit(NewTask("code", quota_keys=["customer:a"]))
    assert [task.id for task in await world.claim(agent, 10)] == [last]


async def test_why_names_the_quota(world: World) -> None:
    await quota(world, "customer:*", 1)
    await quota(world, "tag:slow", rate=NewRate(amount=1, unit="tasks", per_sec=60), name="slow")
    first, second, third = await world.submit(
        NewTask("code", quota_keys=["customer:a"]),
        NewTask("code", quota_keys=["customer:a"]),
        NewTask("code", tags=["slow"]),
    )
    (fourth,) = await world.submit(NewTask("code", tags=["slow"]))
    await world.claim(await world.agent(), 10)

    (reason,) = (await world.engine.read.why(second)).reasons
    assert (
        reason.code,
        reason.quota,
        reason.key,
        reason.limit,
        reason.used,
        reason.holders,
        reason.free_at,
    ) == (
        "quota",
        "q",
        "customer:a",
        1,
        1,
        [first],
        UNSET,
    )
    assert f"1 of 1 are held, by {first}" in reason.detail
    (reason,) = (await world.engine.read.why(fourth)).reasons
    assert (reason.quota, reason.key, reason.limit, reason.used, reason.holders) == (
        "slow",
        "tag:slow",
        1,
        1,
        [],
    )
    assert reason.free_at == world.clock.now() + timedelta(seconds=61)
    assert world.status(third) == "RUNNING"


@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    amount=st.integers(1, 4),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 4)), min_size=1, max_size=12),
)
async def test_no_window_of_a_rate_has_more(
    world: World, amount: int, steps: list[tuple[float, int]]
) -> None:
    # Each example has a key and a type of its own.
    name = new_id("example")
    rate = NewRate(amount=amount, unit="tasks", per_sec=60)
    await quota(world, f"customer:{name}", name=name, rate=rate)
    await world.submit(*(NewTask(name, quota_keys=[f"customer:{name}"]) for _ in range(50)))
    agent = await world.agent("worker", max_concurrent_tasks=10_000)
    claimed = []
    for seconds, limit in steps:
        world.age(seconds=seconds)
        await tick(world)
        claimed += [world.clock.now() for _ in await world.claim(agent, limit, types=[name])]
    assert claimed
    for end in claimed:
        assert sum(end - timedelta(seconds=60) < at <= end for at in claimed) <= amount
