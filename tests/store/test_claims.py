"""Who gets which tasks, in which order, and what stands in the way."""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lineshaft.errors import NotFoundError, SupersededError
from lineshaft.model.priority import PriorityInputs, effective_priority
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.store.outcomes import Beat
from tests.store.world import World, decoded, ref


async def waiting(world: World) -> None:
    """Until a session of this database waits for a row; the test's time limit is the deadline."""
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    while not world.rows(query):  # noqa: ASYNC110 - the event is in the database
        await asyncio.sleep(0)


async def claimed_ids(world: World, limit: int = 10, **agent: Any) -> list[str]:
    return [task.id for task in await world.claim(await world.agent(**agent), limit)]


# Who may.


async def test_a_claim_hands_over_all_that_is_needed(world: World) -> None:
    """R-061, R-062, U11: epoch, lease, and what was asked."""
    agent = await world.agent(claim_ttl_sec=45, heartbeat_interval_sec=20)
    deadline = world.clock.now() + timedelta(days=1)
    task_id = await world.one("code", title="A title", spec={"a": [1]}, deadline=deadline, max_cost_usd=0.5)

    (task,) = await world.claim(agent, start=False)

    now = world.clock.now()
    assert (task.id, task.epoch, task.status, task.type, task.title) == (
        task_id,
        1,
        "CLAIMED",
        "code",
        "A title",
    )
    assert (decoded(task.spec), task.deadline, task.max_attempts) == ({"a": [1]}, deadline, 3)
    assert (task.claimed_at, task.lease_until, task.limit_at) == (now, now + timedelta(seconds=45), None)
    assert (task.reserved_usd, task.heartbeat_interval_sec, task.resume) == (Decimal("0.5"), 20.0, False)
    live = world.live(task_id)
    assert (live["status"], live["agent_id"], live["started_at"]) == ("CLAIMED", agent.id, None)
    assert world.kinds(task_id)[-1] == "task.claimed"
    assert world.agent_row(agent)["held"] == 1


async def test_claim_and_start_in_one(world: World) -> None:
    """R-070, U11: RUNNING with the heartbeat's lease, both transitions recorded."""
    agent = await world.agent(heartbeat_interval_sec=20)
    own = await world.one(heartbeat_interval_sec=7, max_duration_sec=600, priority=1)
    short = await world.one(max_duration_sec=10, priority=2)

    first, second = await world.claim(agent, 2)

    now = world.clock.now()
    assert (first.id, first.status, first.lease_until) == (own, "RUNNING", now + timedelta(seconds=21))
    assert first.limit_at == now + timedelta(seconds=600)
    # A lease never goes past the execution limit.
    assert (second.id, second.lease_until) == (short, now + timedelta(seconds=10))
    live = world.live(own)
    assert live["started_at"] == live["first_started_at"] == live["heartbeat_at"] == now
    assert world.kinds(own)[-2:] == ["task.claimed", "task.started"]


async def test_nothing_to_do(world: World) -> None:
    """R-060."""
    agent = await world.agent()
    assert await world.claim(agent) == []
    await world.one()
    await world.take(agent)
    assert await world.claim(agent) == []


async def test_an_unknown_agent_is_told(world: World) -> None:
    """R-058."""
    await world.one()
    with pytest.raises(NotFoundError, match="nobody"):
        await world.engine.claims.claim("nobody", 1)


async def test_a_superseded_incarnation_is_told(world: World) -> None:
    """R-058: the process that was replaced must stop, whether there is work or not."""
    old = await world.agent("a")
    new = await world.agent("a")

    assert (old.incarnation, new.incarnation) == (1, 2)
    with pytest.raises(SupersededError):
        await world.claim(old)
    task_id = await world.one()
    with pytest.raises(SupersededError):
        await world.claim(old)
    assert (await world.take(new)).id == task_id


@pytest.mark.parametrize("status", ["draining", "offline"])
async def test_an_agent_that_stops_gets_nothing(world: World, status: str) -> None:
    """R-058, R-080."""
    agent = await world.agent()
    await world.one()
    await world.engine.fleet.patch(agent.id, status=status)
    assert await world.claim(agent) == []

    await world.engine.fleet.patch(agent.id, status="active")
    assert len(await world.claim(agent)) == 1


async def test_no_more_than_its_slots(world: World) -> None:
    """R-058, F-20: counted in the same transaction, given back with every exit."""
    agent = await world.agent(max_concurrent_tasks=3)
    await world.submit(*[NewTask("code")] * 10)

    first = await world.claim(agent, 2)
    second = await world.claim(agent, 10)
    assert (len(first), len(second)) == (2, 1)
    assert await world.claim(agent, 10) == []

    await world.complete(first[0])
    assert len(await world.claim(agent, 10)) == 1
    await world.engine.fleet.patch(agent.id, max_concurrent_tasks=1)
    assert await world.claim(agent, 10) == []
    await world.release(first[1])
    assert await world.claim(agent, 10) == []


async def test_capabilities(world: World) -> None:
    """R-052: all that a task requires, none required matches all."""
    free = await world.one(priority=1)
    python = await world.one(priority=2, required_capabilities=["python"])
    both = await world.one(priority=3, spec={"constraints": {"required_capabilities": ["web", "python"]}})

    assert await claimed_ids(world, 10, capabilities=("rust",)) == [free]
    assert await claimed_ids(world, 10, capabilities=("python", "x")) == [python]
    assert await claimed_ids(world, 10, capabilities=("x", "python", "web")) == [both]


async def test_types(world: World) -> None:
    """R-052: those the agent declares, and of them those that one claim asks for."""
    a = await world.one("a", priority=1)
    b = await world.one("b", priority=2)
    c = await world.one("c", priority=3)
    agent = await world.agent(types=("b", "c"))

    assert await world.claim(agent, 10, types=["a"]) == []
    assert [task.id for task in await world.claim(agent, 10, types=["a", "c"])] == [c]
    assert [task.id for task in await world.claim(agent, 10)] == [b]
    assert await claimed_ids(world, types=()) == []
    assert await claimed_ids(world) == [a]


async def test_the_first_preference_the_agent_has(world: World) -> None:
    """R-065: chosen by the task's order; without preferences by the agent's."""
    await world.one("both", priority=1, model_preferences=["x", "y"])
    await world.one("other", priority=2, model_preferences=["z"])
    await world.one("any", priority=3)
    agent = await world.agent(models_available=("y", "x"))

    found = await world.claim(agent, 10)

    assert [(task.type, task.model) for task in found] == [("both", "x"), ("any", "y")]
    # One that names no models has any; one that has none and is asked for none uses none.
    (other,) = await world.claim(await world.agent(), 10)
    assert (other.type, other.model) == ("other", "z")
    await world.one("none")
    assert (await world.take()).model is None


async def test_a_slowed_model_is_left_alone(world: World) -> None:
    """R-218: the next preference is used, else the task waits; `*` slows everyone; each ends by itself."""
    until = world.clock.now() + timedelta(seconds=30)
    world.connection.execute(
        "INSERT INTO lineshaft.slowdown (key, signalled_at, until) VALUES ('model:x', now(), %s)", [until]
    )
    await world.one("only x", priority=1, model_preferences=["x"])
    await world.one("x or y", priority=2, model_preferences=["x", "y"])
    await world.one("any", priority=3)
    agent = await world.agent(models_available=("x", "y"))

    (found,) = await world.claim(agent, 10)
    assert (found.type, found.model) == ("x or y", "y")

    world.connection.execute("UPDATE lineshaft.slowdown SET key = '*'")
    assert await world.claim(agent, 10) == []
    assert await claimed_ids(world) == []

    world.age(seconds=30)
    assert [(task.type, task.model) for task in await world.claim(agent, 10)] == [
        ("only x", "x"),
        ("any", "x"),
    ]


@pytest.mark.parametrize("state", ["open", "half_open"])
async def test_an_open_breaker_holds_back_its_type_or_model(world: World, state: str) -> None:
    """R-055, R-181, R-188, U12: tasks stay READY, others go on."""
    world.connection.execute(
        "INSERT INTO lineshaft.breaker (key, state, opened_at, half_open_at)"
        " SELECT key, %s, now(), now() FROM unnest(ARRAY['ops', 'model:x']) AS key",
        [state],
    )
    ops = await world.one("ops", priority=1)
    x = await world.one("code", priority=2, model_preferences=["x"])
    code = await world.one("code", priority=3, model_preferences=["x", "y"])
    agent = await world.agent(models_available=("x", "y"))

    found = await world.claim(agent, 10)

    assert [(task.id, task.model) for task in found] == [(code, "y")]
    assert world.statuses([ops, x]) == ["READY", "READY"]
    assert world.task(ops)["attempts"] == 0
    world.connection.execute("UPDATE lineshaft.breaker SET state = 'closed'")
    assert [task.id for task in await world.claim(agent, 10)] == [ops, x]


async def test_paused_types(world: World) -> None:
    """The HTTP contract: nothing is claimed while paused."""
    a = await world.one("a", priority=1)
    b = await world.one("b", priority=2)
    world.connection.execute("INSERT INTO lineshaft.pause (type, since) VALUES ('a', now())")
    assert await claimed_ids(world) == [b]
    world.connection.execute("INSERT INTO lineshaft.pause (type, since) VALUES ('*', now())")
    await world.one("b")
    assert await claimed_ids(world) == []
    world.connection.execute("DELETE FROM lineshaft.pause")
    assert (await claimed_ids(world))[0] == a


async def test_only_what_is_ready(world: World) -> None:
    """R-054, R-056, F-8: not what waits for a task, a time or a retry."""
    agent = await world.agent()
    upstream = await world.one("up")
    await world.one(depends_on=[upstream])
    await world.one(run_at=world.clock.now() + timedelta(seconds=1))
    task = await world.take(agent)
    assert task.id == upstream
    assert await world.claim(agent, 10) == []
    await world.fail(task)
    assert await world.claim(agent, 10) == []


# Money.


async def test_an_agent_can_not_spend_more_than_it_has(world: World) -> None:
    """R-057, R-231, R-234, F-27: reserved at the claim, over batches too; settled at the end."""
    agent = await world.agent(budget_usd=1)
    await world.submit(*[NewTask("code", max_cost_usd=0.4)] * 5)

    found = await world.claim(agent, 5)
    assert len(found) == 2
    assert await world.claim(agent, 5) == []
    assert world.agent_row(agent)["reserved_usd"] == Decimal("0.8")

    await world.complete(found[0], spent="0.1")
    row = world.agent_row(agent)
    assert (row["reserved_usd"], row["spent_usd"]) == (Decimal("0.4"), Decimal("0.1"))
    assert len(await world.claim(agent, 5)) == 1
    await world.release(found[1])
    assert world.agent_row(agent)["reserved_usd"] == Decimal("0.4")


async def test_what_is_too_dear_does_not_hold_up_what_is_not(world: World) -> None:
    """R-231, R-233: a cheaper task behind it goes; one without a maximum always fits."""
    agent = await world.agent(budget_usd=1)
    await world.one("dear", priority=1, max_cost_usd=2)
    await world.one("free", priority=2)
    await world.one("cheap", priority=3, max_cost_usd=1)

    assert [task.type for task in await world.claim(agent, 10)] == ["free", "cheap"]


async def test_an_overdrawn_agent_gets_nothing(world: World) -> None:
    """R-233: a cost without a maximum is booked; below zero not even free tasks fit, until topped up."""
    agent = await world.agent(budget_usd=1)
    await world.one()
    await world.complete(await world.take(agent), spent="1.5")
    await world.one()
    assert await world.claim(agent) == []

    await world.engine.fleet.patch(agent.id, add_budget_usd=0.5)
    assert len(await world.claim(agent)) == 1


async def test_a_dag_can_not_spend_more_than_its_ceiling(world: World) -> None:
    """R-057, R-232, R-234: parked out of sight, and back when money comes back."""
    agent = await world.agent()
    dag = await world.dag(*(NewTask("code", key=f"{n}", max_cost_usd=0.4) for n in range(4)), ceiling=1)
    other = await world.one(priority=60)

    found = await world.claim(agent, 10)

    assert [task.id for task in found] == [dag.tasks["0"].id, dag.tasks["1"].id, other]
    assert world.dag_row(dag.id)["reserved_usd"] == Decimal("0.8")
    waiting = [world.live(dag.tasks[key].id) for key in ("2", "3")]
    assert [row["status"] for row in waiting] == ["READY", "READY"]
    assert await world.claim(agent, 10) == []
    assert {world.live(dag.tasks[key].id)["parked"] for key in ("2", "3")} == {"dag_budget"}

    await world.complete(found[0], spent="0.1")
    row = world.dag_row(dag.id)
    assert (row["reserved_usd"], row["spent_usd"]) == (Decimal("0.4"), Decimal("0.1"))
    assert [task.id for task in await world.claim(agent, 10)] == [dag.tasks["2"].id]
    await world.release(found[1])
    assert len(await world.claim(agent, 10)) == 1


@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_money_for_a_later_task_is_not_held_up_by_an_earlier_one(world: World, limit: int) -> None:
    """R-232: each task is judged by its own cost, whatever the size of the batch."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("code", key="first", priority=1, max_cost_usd=4),
        NewTask("code", key="dear", priority=2, max_cost_usd=4),
        NewTask("code", key="cheap", priority=3, max_cost_usd=1),
        NewTask("code", key="free", priority=4),
        ceiling=5,
    )
    seen: list[str] = []
    while found := await world.claim(agent, limit):
        seen += [task.id for task in found]

    assert seen == [dag.tasks[key].id for key in ("first", "cheap", "free")]
    assert world.live(dag.tasks["dear"].id)["parked"] == "dag_budget"


async def test_a_cheap_task_comes_back_past_one_that_is_still_too_dear(world: World) -> None:
    """R-232: what never fits must not starve what does."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("code", key="first", priority=1, max_cost_usd=5),
        NewTask("code", key="dear", priority=2, max_cost_usd=5),
        NewTask("code", key="cheap", priority=3, max_cost_usd=1),
        ceiling=5,
    )
    first = await world.take(agent)
    assert await world.claim(agent, 10) == []

    await world.complete(first, spent="4")

    assert [task.id for task in await world.claim(agent, 10)] == [dag.tasks["cheap"].id]


async def test_the_first_claim_starts_the_dag(world: World) -> None:
    """U7: running, once."""
    agent = await world.agent()
    dag = await world.dag(NewTask("code"), NewTask("code", max_cost_usd=1))
    assert world.dag_row(dag.id)["status"] == "pending"

    await world.claim(agent)
    await world.claim(agent)

    assert world.dag_row(dag.id)["status"] == "running"
    assert world.dag_kinds(dag.id) == ["dag.created", "dag.running"]


# Document locks.


async def test_one_holder_a_document(world: World) -> None:
    """R-059, R-200..R-205, R-208, U9: the others wait READY, keep their place, and nobody else waits."""
    agent = await world.agent()
    ids = await world.submit(
        *(NewTask("edit", lock_key="doc:1", priority=n) for n in range(3)),
        NewTask("edit", lock_key="doc:2", priority=10),
        NewTask("edit", priority=11),
    )

    found = await world.claim(agent, 10)

    assert [task.id for task in found] == [ids[0], ids[3], ids[4]]
    assert world.statuses(ids[1:3]) == ["READY", "READY"]
    assert [world.live(task_id)["parked"] for task_id in ids[1:3]] == ["lock", "lock"]
    lock = world.lock("doc:1")
    assert lock is not None
    assert (lock["holder_task_id"], lock["agent_id"]) == (ids[0], agent.id)
    assert lock["expires_at"] == world.clock.now() + timedelta(minutes=10)
    assert await world.claim(agent, 10) == []

    await world.complete(found[0])
    assert [task.id for task in await world.claim(agent, 10)] == [ids[1]]


@pytest.mark.parametrize(
    "way", ["complete", "fail", "dead", "release", "snooze", "cancel", "restart", "spawn"]
)
async def test_every_exit_releases_the_lock(world: World, way: str) -> None:
    """R-206: and the next one gets it, with a higher fencing number."""
    agent = await world.agent("a")
    first = await world.one(lock_key="doc:1", priority=1)
    second = await world.one(lock_key="doc:1", priority=2, required_capabilities=["second"])
    task = await world.take(agent)
    assert task.id == first
    token = (world.lock("doc:1") or {})["token"]
    other = await world.agent(capabilities=("second",), types=("code",))
    assert await world.claim(other) == []
    assert world.live(second)["parked"] == "lock"

    match way:
        case "complete":
            await world.complete(task)
        case "fail":
            await world.fail(task)
        case "dead":
            await world.fail(task, category="auth_failure")
        case "release":
            await world.release(task)
            await world.engine.operations.cancel(first, "only the second is of interest")
        case "snooze":
            await world.release(task, 60)
        case "cancel":
            await world.engine.operations.cancel(first, "no")
        case "restart":
            await world.agent("a")
        case _:
            await world.engine.operations.spawn(ref(task), [NewTask("child")], wait=True)

    assert world.lock("doc:1") is None
    assert [found.id for found in await world.claim(other)] == [second]
    assert (world.lock("doc:1") or {})["token"] > token


async def test_a_heartbeat_renews_the_lock(world: World) -> None:
    """R-207, F-43."""
    agent = await world.agent(heartbeat_interval_sec=200)
    await world.one(lock_key="doc:1", max_duration_sec=10_000)
    task = await world.take(agent)
    world.age(minutes=9)

    await world.engine.lifecycle.heartbeat(agent.id, agent.incarnation, [Beat(ref(task))])

    assert (world.lock("doc:1") or {})["expires_at"] == world.clock.now() + timedelta(minutes=10)


async def test_an_expired_lock_is_taken_over(world: World) -> None:
    """R-202, F-43: after ten minutes without a sign of life; the old holder can't release it."""
    old, new = await world.agent(), await world.agent()
    await world.submit(*[NewTask("edit", lock_key="lost:1", max_duration_sec=10_000)] * 2)
    first = await world.take(old)
    token = (world.lock("lost:1") or {})["token"]
    world.age(minutes=10)
    assert await world.claim(new) == []

    world.age(seconds=1)
    await world.engine.upkeep.expire_locks()
    second = await world.take(new)

    lock = world.lock("lost:1") or {}
    assert (lock["holder_task_id"], lock["agent_id"]) == (second.id, new.id)
    assert lock["token"] > token
    await world.complete(first)
    assert (world.lock("lost:1") or {})["holder_task_id"] == second.id


async def test_a_lock_lasts_as_long_as_the_lease(world: World) -> None:
    """F-43: who need not give a sign of life for an hour doesn't lose the document after ten minutes."""
    agent = await world.agent()
    await world.submit(
        *[NewTask("edit", lock_key="doc:1", heartbeat_interval_sec=1_800, max_duration_sec=10_000)] * 2
    )
    task = await world.take(agent)
    world.age(minutes=89)
    assert await world.claim(agent) == []

    await world.engine.lifecycle.heartbeat(agent.id, agent.incarnation, [Beat(ref(task))])
    world.age(minutes=89)

    await world.engine.upkeep.expire_locks()
    assert await world.claim(agent) == []


async def test_a_batch_owns_its_documents_lock(world: World) -> None:
    """R-196, F-47: nothing comes between its children, not even while one waits for a retry."""
    agent = await world.agent()
    batch = await world.one("batch", lock_key="doc:1", children=[NewTask("one"), NewTask("two")])
    outsider = await world.one("outsider", lock_key="doc:1", priority=0)
    inside = await world.agent(types=("one", "two"))
    one = await world.take(inside)
    token = (world.lock("doc:1") or {})["token"]
    assert (world.lock("doc:1") or {})["holder_task_id"] == batch

    # The outsider is more urgent and looked at first, by claims that see only it and by those that see all.
    assert await world.claim(await world.agent(types=("outsider",))) == []
    await world.fail(one)
    world.age(hours=1)
    assert await world.claim(agent, 10) == []
    assert (world.lock("doc:1") or {})["holder_task_id"] == batch
    assert await world.engine.operations.retry(one.id) is Status.READY
    (again,) = await world.claim(agent, 10)
    assert again.id == one.id
    assert (world.lock("doc:1") or {})["token"] > token
    await world.complete(again)
    (two,) = await world.claim(agent, 10)
    assert two.type == "two"
    await world.complete(two)

    assert world.status(batch) == "COMPLETED"
    assert [task.id for task in await world.claim(agent, 10)] == [outsider]


@pytest.mark.parametrize("limit", [1, 10])
async def test_a_batchs_next_child_is_never_kept_waiting_by_a_rival(world: World, limit: int) -> None:
    """R-196: whoever looks first, and whichever is better."""
    agent = await world.agent()
    await world.one("batch", lock_key="doc:1", children=[NewTask("one"), NewTask("two"), NewTask("three")])
    await world.complete(await world.take(agent, types=["one"]))
    outsiders = await world.submit(*[NewTask("outsider", lock_key="doc:1", priority=0)] * 3)
    assert await world.claim(agent, limit, types=["outsider"]) == []

    (two,) = await world.claim(agent, limit)
    assert two.type == "two"
    await world.complete(two)
    late = await world.one("outsider", lock_key="doc:1", priority=0)
    (three,) = await world.claim(agent, limit)
    assert three.type == "three"
    await world.complete(three)

    assert [task.id for task in await world.claim(agent, 10)] == [outsiders[0]]
    assert world.status(late) == "READY"


async def test_a_batch_of_several_documents_holds_only_its_own(world: World) -> None:
    """R-196, R-206: a child with another document locks that one for itself, and gives it back."""
    agent = await world.agent()
    batch = await world.one(
        "batch",
        lock_key="doc:1",
        children=[
            NewTask("other", lock_key="doc:2"),
            NewTask("inner", lock_key="doc:2", children=[NewTask("deep", lock_key="doc:1"), NewTask("deep")]),
        ],
    )
    free = await world.one("batch", children=[NewTask("single", lock_key="doc:3"), NewTask("last")])

    other, single = await world.claim(agent, 10)
    assert (world.lock("doc:2") or {})["holder_task_id"] == other.id
    assert (world.lock("doc:3") or {})["holder_task_id"] == single.id
    await world.complete(other)
    await world.complete(single)
    assert world.lock("doc:2") is world.lock("doc:3") is None
    deep, _last = await world.claim(agent, 10)
    assert (world.lock("doc:1") or {})["holder_task_id"] == batch
    await world.complete(_last)
    assert world.status(free) == "COMPLETED"
    await world.complete(deep)
    await world.complete(await world.take(agent))

    assert world.status(batch) == "COMPLETED"
    assert world.lock("doc:1") is world.lock("doc:2") is None


async def test_a_task_that_its_dag_can_not_afford_takes_no_lock(world: World) -> None:
    """R-057, R-206: otherwise its document would be locked by a task that nobody works on."""
    agent = await world.agent()
    dag = await world.dag(NewTask("edit", key="a", lock_key="doc:1", max_cost_usd=2), ceiling=1)
    other = await world.one("edit", lock_key="doc:1", priority=90)

    assert [task.id for task in await world.claim(agent, 10)] == [other]
    assert world.live(dag.tasks["a"].id)["parked"] == "dag_budget"


async def test_a_lock_got_for_nothing_is_given_back(dsn: str, world: World) -> None:
    """R-206: if another claim was quicker with the DAG's last money, the document must not stay locked."""
    agent = await world.agent()
    dag = await world.dag(NewTask("edit", key="a", lock_key="doc:1", max_cost_usd=1), ceiling=1)
    with psycopg.connect(dsn) as quicker:
        quicker.execute("UPDATE lineshaft.dag SET spent_usd = 0.5")
        claim = asyncio.create_task(world.claim(agent))
        await waiting(world)
    assert await claim == []

    assert world.lock("doc:1") is None
    assert world.live(dag.tasks["a"].id)["parked"] == "dag_budget"
    world.connection.execute("UPDATE lineshaft.dag SET spent_usd = 0")


async def test_a_ready_head_that_goes_away_leaves_its_place_to_the_next(world: World) -> None:
    """R-204: the lock is free, so whoever waits for it must be seen again."""
    agent = await world.agent()
    ids = await world.submit(*(NewTask("edit", lock_key="doc:1", priority=n) for n in range(4)))
    upstream = await world.one("upstream", priority=99)
    await world.complete((await world.claim(agent, 10))[0])
    assert [world.live(task_id)["parked"] for task_id in ids[1:]] == [None, "lock", "lock"]

    await world.engine.operations.add_dependencies(ids[1], [upstream])
    assert [task.id for task in await world.claim(agent, 10)] == [ids[2]]


async def test_ten_thousand_tasks_on_one_document_hide_nothing(world: World) -> None:
    """R-204, R-246: a claim finds the one free task behind them all, and gets quick again."""
    agent = await world.agent()
    holder = await world.one("edit", lock_key="doc:1", priority=0)
    await world.take(agent)
    await world.submit(*[NewTask("edit", lock_key="doc:1", priority=1)] * 10_000)
    free = await world.one("edit", priority=99)

    assert [task.id for task in await world.claim(agent)] == [free]
    left = world.row(
        "SELECT count(*) AS n FROM lineshaft.task_live WHERE status = 'READY' AND parked IS NULL"
    )
    assert left["n"] == 0
    assert world.status(holder) == "RUNNING"


# What earlier attempts left behind.


async def test_a_task_that_was_started_before_comes_with_what_was_left(world: World) -> None:
    """R-145, R-211: steps, checkpoint, children and the last error."""
    agent = await world.agent()
    lifecycle = world.engine.lifecycle
    await world.one("parent")
    first = await world.take(agent)
    await lifecycle.save_step(ref(first), "search", b'{"found": 1}')
    assert await lifecycle.save_step(ref(first), "search", b'"again"') == b'{"found": 1}'
    await lifecycle.save_checkpoint(ref(first), b'"here"')
    await world.fail(first, "out of memory")
    await world.engine.operations.retry(first.id)
    second = await world.take(agent)
    await lifecycle.save_checkpoint(ref(second), b'"there"')
    (child,) = await world.engine.operations.spawn(ref(second), [NewTask("child")], wait=True)
    await world.complete(await world.take(agent), [1])

    found = await world.claims(agent)

    (third,) = found.tasks
    assert (first.resume, second.resume, third.resume) == (False, True, True)
    assert third.epoch == 3
    left = found.resumed[third.id]
    assert decoded(left.steps) == {"search": {"found": 1}}
    assert decoded(left.checkpoint) == "there"
    assert decoded(left.last_error) == {"category": "crash", "error": "out of memory"}
    assert decoded(left.children) == {child.id: {"status": "COMPLETED", "output": [1]}}


async def test_a_claim_that_was_never_started_is_no_resumption(world: World) -> None:
    """R-081: the contract says `resume` is true once the task has been started before."""
    agent = await world.agent()
    await world.one()
    (task,) = await world.claim(agent, start=False)
    await world.release(task)

    assert (await world.take(agent)).resume is False


async def test_references_are_resolved(world: World) -> None:
    """R-008: outputs of other tasks by id; of a source without output, nothing."""
    agent = await world.agent()
    source = await world.one("source")
    await world.complete(await world.take(agent), {"n": 1})
    empty = await world.one("empty")
    await world.complete(await world.take(agent))
    refs = [f"task:{source}:output", f"task:{empty}:output", "artifact:logo"]
    await world.one("reader", spec={"context_refs": refs})

    found = await world.claims(agent)

    assert {name: decoded(value) for name, value in found.inputs.items()} == {source: {"n": 1}, empty: None}


# The order.


@dataclass(frozen=True)
class Ask:
    type: str
    priority: int
    boost: float
    #: Tasks that wait for it, one behind the other.
    chain: int
    deadline_minutes: int | None

    def tasks(self, number: int, now: datetime) -> list[NewTask]:
        names = [f"{number}.{step}" for step in range(self.chain + 1)]
        deadline = None
        if self.deadline_minutes is not None:
            deadline = now + timedelta(minutes=self.deadline_minutes)
        head = NewTask(
            self.type,
            key=names[0],
            priority=self.priority,
            priority_boost_per_minute=self.boost,
            deadline=deadline,
        )
        below = [NewTask("below", key=name, depends_on=[before]) for before, name in pairwise(names)]
        return [head, *below]


def asks(deadlines: st.SearchStrategy[int | None]) -> st.SearchStrategy[list[tuple[int, list[Ask]]]]:
    ask = st.builds(
        Ask,
        type=st.sampled_from(["a", "b", "c"]),
        priority=st.integers(0, 100) | st.sampled_from([40, 50]),
        boost=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
        chain=st.sampled_from([0, 0, 0, 1, 3, 12]),
        deadline_minutes=deadlines,
    )
    return st.lists(
        st.tuples(st.integers(1, 6), st.lists(ask, min_size=4, max_size=14)), min_size=2, max_size=4
    )


#: Groups are submitted a multiple of this apart. A prime number of seconds: no two tasks of different ages
#: then come to the same value but for the last bit of a sum.
GAP_SEC = 7_919
FEW = settings(
    max_examples=8,
    deadline=None,
    # Shrinking would go on for minutes: every try fills a database.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


async def submit_groups(world: World, groups: list[tuple[int, list[Ask]]]) -> dict[str, PriorityInputs]:
    """In order of submission."""
    for table in ("task", "task_live", "edge", "dag", "event", "agent"):
        world.connection.execute(f"DELETE FROM lineshaft.{table}".encode())
    found: dict[str, PriorityInputs] = {}
    for gaps, group in groups:
        world.age(seconds=gaps * GAP_SEC)
        now = world.clock.now()
        dag = await world.dag(*(task for n, ask in enumerate(group) for task in ask.tasks(n, now)))
        for number, ask in enumerate(group):
            deadline = ask.tasks(number, now)[0].deadline
            found[dag.tasks[f"{number}.0"].id] = PriorityInputs(
                priority=ask.priority,
                boost_per_minute=ask.boost,
                ready_at=now,
                deadline=deadline,
                downstream_length=ask.chain,
            )
    return found


async def drain(world: World, batch: int, total: int) -> list[str]:
    agent = await world.agent(max_concurrent_tasks=1_000)
    claimed: list[str] = []
    while found := await world.claim(agent, batch):
        claimed += [task.id for task in found]
        assert len(found) == batch or len(claimed) == total
    return claimed


@pytest.mark.parametrize("batch", [1, 3, 10])
@FEW
@given(groups=asks(st.none()), waits=st.sampled_from([0, GAP_SEC]))
async def test_the_order_of_claims_is_that_of_the_formula(
    world: World, batch: int, groups: list[tuple[int, list[Ask]]], waits: int
) -> None:
    """R-053, R-160, R-163, R-164, U1: lanes and ranks give exactly 004's order, first come first served."""
    inputs = await submit_groups(world, groups)
    world.age(seconds=waits)
    now = world.clock.now()

    claimed = await drain(world, batch, len(inputs))

    # A stable sort keeps the order of submission among equals.
    assert claimed == sorted(inputs, key=lambda name: effective_priority(inputs[name], now))


@pytest.mark.parametrize("batch", [1, 3, 10])
@FEW
@given(groups=asks(st.none() | st.integers(-60, 2_000)), waits=st.integers(0, 5 * 3_600))
async def test_with_deadlines_the_order_is_exact_to_half_a_point(
    world: World, batch: int, groups: list[tuple[int, list[Ask]]], waits: int
) -> None:
    """R-160, R-162: the boost moves by itself; tasks are re-keyed before it is off by more than 0.5."""
    inputs = await submit_groups(world, groups)
    world.age(seconds=waits)
    now = world.clock.now()
    await world.engine.upkeep.rekey_deadlines(10_000)

    claimed = await drain(world, batch, len(inputs))

    assert sorted(claimed) == sorted(inputs)
    values = [effective_priority(inputs[name], now) for name in claimed]
    worst = float("-inf")
    for value in values:
        assert value >= worst - 0.5 - 1e-6
        worst = max(worst, value)


async def test_first_come_first_served_across_lanes(world: World) -> None:
    """U1: equal priority means order of submission, also between types that age alike or not at all."""
    agent = await world.agent()
    ids = await world.submit(
        *(NewTask(f"type {n % 7}", priority_boost_per_minute=(n % 3) * 0.1) for n in range(30))
    )

    seen = []
    for limit in (1, 2, 3, 5, 8, 13):
        seen += [task.id for task in await world.claim(agent, limit)]

    assert seen == ids[: len(seen)]


async def test_a_task_keeps_its_age_through_failures(world: World) -> None:
    """R-164: age counts since it was first READY."""
    agent = await world.agent()
    old = await world.one(priority=60, priority_boost_per_minute=1)
    task = await world.take(agent)
    world.age(minutes=30)
    await world.fail(task)
    await world.engine.operations.retry(old)
    young = await world.one(priority=31, priority_boost_per_minute=1)

    assert [found.id for found in await world.claim(agent, 2)] == [old, young]
