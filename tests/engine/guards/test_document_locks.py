"""R-200…R-209: one holder per document, whichever task is claimed, ends or expires."""

import asyncio
from datetime import timedelta

import psycopg
import pytest

from lineshaft.errors import StaleClaimError
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Completion
from tests.world import World, ref, spawn_children


async def waiting(world: World) -> None:
    """Until a session of this database waits for a row; the test's time limit is the deadline."""
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    while not world.rows(query):  # noqa: ASYNC110 - the event is in the database
        await asyncio.sleep(0)


async def test_one_holder_a_document(world: World) -> None:
    """R-059, R-200..R-205, R-208, U9: the others wait READY and keep their place; no other task waits."""
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
            await world.engine.cancel.cancel(first, "only the second is of interest")
        case "snooze":
            await world.release(task, 60)
        case "cancel":
            await world.engine.cancel.cancel(first, "no")
        case "restart":
            await world.agent("a")
        case _:
            await spawn_children(world.engine, ref(task), [NewTask("child")], wait=True)

    assert world.lock("doc:1") is None
    assert [found.id for found in await world.claim(other)] == [second]
    assert (world.lock("doc:1") or {})["token"] > token


async def test_a_heartbeat_renews_the_lock(world: World) -> None:
    """R-207, F-43."""
    agent = await world.agent(heartbeat_interval_sec=200)
    await world.one(lock_key="doc:1", max_duration_sec=10_000)
    task = await world.take(agent)
    world.age(minutes=9)

    await world.heartbeat(agent.id, agent.incarnation, [ref(task)])

    assert (world.lock("doc:1") or {})["expires_at"] == world.clock.now() + timedelta(minutes=10)


async def test_an_expired_lock_is_taken_over(world: World) -> None:
    """R-202, F-43: after ten minutes without a sign of life; the old holder can't release it or complete."""
    old, new = await world.agent(), await world.agent()
    await world.submit(*[NewTask("edit", lock_key="lost:1", max_duration_sec=10_000)] * 2)
    first = await world.take(old)
    token = (world.lock("lost:1") or {})["token"]
    world.age(minutes=10)
    assert await world.claim(new) == []

    world.age(seconds=1)
    await world.engine.maintenance.expire_locks()
    second = await world.take(new)

    lock = world.lock("lost:1") or {}
    assert (lock["holder_task_id"], lock["agent_id"]) == (second.id, new.id)
    assert lock["token"] > token
    with pytest.raises(StaleClaimError, match="lost:1"):
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

    await world.heartbeat(agent.id, agent.incarnation, [ref(task)])
    world.age(minutes=89)

    await world.engine.maintenance.expire_locks()
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
    outside = await world.agent(types=("outsider",))
    assert await world.claim(outside) == []
    await world.fail(one)
    assert await world.claim(agent, 10) == []
    world.age(hours=1)
    assert await world.claim(outside, 10) == []
    assert (world.lock("doc:1") or {})["holder_task_id"] == batch
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
    """R-196: whichever claims first, and whichever has the better rank."""
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
    """R-057, R-206: otherwise its document would be locked by a task that is not running."""
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
    # Unspent money is returned, and its waiters are released: tables must be consistent.
    world.connection.execute("UPDATE lineshaft.dag SET spent_usd = 0")
    world.connection.execute("UPDATE lineshaft.task_live SET parked = NULL")


async def test_a_ready_head_that_goes_away_leaves_its_place_to_the_next(world: World) -> None:
    """R-204: the lock is free, so its waiters must be claimable again."""
    agent = await world.agent()
    ids = await world.submit(*(NewTask("edit", lock_key="doc:1", priority=n) for n in range(4)))
    upstream = await world.one("upstream", priority=99)
    await world.complete((await world.claim(agent, 10))[0])
    assert [world.live(task_id)["parked"] for task_id in ids[1:]] == [None, "lock", "lock"]

    await world.engine.dependencies.add(ids[1], [upstream])
    assert [task.id for task in await world.claim(agent, 10)] == [ids[2]]


@pytest.mark.slow("ten thousand tasks")
async def test_ten_thousand_tasks_on_one_document_hide_nothing(world: World) -> None:
    """R-204, R-246, F-44: a claim finds the one free task behind them all, and gets quick again."""
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


async def test_a_step_of_a_batch_waits_for_one_that_needs_its_document(world: World) -> None:
    """The batch's lock is free in the meantime, and is taken again when the step continues."""
    await world.agent("ann", max_concurrent_tasks=10)
    steps = [NewTask("step", lock_key="doc"), NewTask("step", lock_key="doc")]
    await world.engine.submission.submit([NewTask("batch", lock_key="doc", children=steps)])
    (step,) = (await world.engine.claims.claim("ann", 1, limit=5, start=True)).tasks

    (made,) = await spawn_children(world.engine, ref(step), [NewTask("page", lock_key="doc")], wait=True)

    (page,) = (await world.engine.claims.claim("ann", 1, limit=5, start=True)).tasks
    assert page.id == made.id
    await world.engine.work.complete([Completion(ref(page))])
    (again,) = (await world.engine.claims.claim("ann", 1, limit=5, start=True)).tasks
    assert again.id == step.id
    await world.engine.work.complete([Completion(ref(again))])
    (second,) = (await world.engine.claims.claim("ann", 1, limit=5, start=True)).tasks
    assert second.type == "step"
