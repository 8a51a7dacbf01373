"""Tasks with several document locks, or with locks that readers share: all or none, and writers alone."""

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from lineshaft.errors import InvalidInputError, NotFoundError, StaleClaimError
from lineshaft.model.admission import LockKey
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types.waits import NewSuspension
from lineshaft.types.work import ClaimedTask
from tests.races.helpers import LIVE_ROW, held, waiting
from tests.world import World, ref, spawn_children


def reading(*keys: str) -> list[LockKey]:
    return [LockKey(key, shared=True) for key in keys]


def holders(world: World) -> dict[str, set[str]]:
    """By key; readers are listed each."""
    found: dict[str, set[str]] = {}
    for row in world.rows(
        "SELECT key, holder_task_id FROM lineshaft.lock WHERE NOT holder_task_id LIKE 'shared:%%'"
        " UNION ALL SELECT key, holder_task_id FROM lineshaft.lock_share"
    ):
        found.setdefault(row["key"], set()).add(row["holder_task_id"])
    return found


async def types(world: World, agent: Any, limit: int = 10) -> list[str]:
    return [task.type for task in await world.claim(agent, limit)]


async def test_all_or_none(world: World) -> None:
    """A task that can't have one of its locks takes none, and keeps none from others."""
    agent = await world.agent()
    first = await world.one("first", lock_keys=["b"])
    await world.take(agent)
    both = await world.one("both", lock_keys=["b", "a"])
    assert await world.claim(agent, 10) == []
    assert holders(world) == {"b": {first}}
    assert (world.live(both)["parked"], world.live(both)["lock_key"]) == ("lock", "b")

    other = await world.one("other", lock_keys=["a"])
    (task,) = await world.claim(agent, 10)

    assert task.id == other
    assert holders(world) == {"b": {first}, "a": {other}}


async def test_the_locks_of_a_task_have_one_token(world: World) -> None:
    """It grows with each claim, and a repeated claim has all keys again."""
    agent = await world.agent()
    await world.one(lock_keys=["b", *reading("a")])
    task = await world.take(agent)
    assert (task.lock_key, task.lock_keys) == (None, ("a", "b"))
    before = world.live(task.id)["lock_token"]
    assert (world.lock("b") or {})["token"] == before
    await world.release(task)
    assert holders(world) == {}

    task = await world.take(agent)

    assert world.live(task.id)["lock_token"] > before
    assert holders(world) == {"a": {task.id}, "b": {task.id}}


async def test_keys_in_opposite_order(world: World) -> None:
    """One after the other, whichever is first."""
    agent = await world.agent()
    await world.submit(NewTask("t", lock_keys=["a", "b"]), NewTask("t", lock_keys=["b", "a"]))
    (one,) = await world.claim(agent, 10)
    await world.complete(one)
    (two,) = await world.claim(agent, 10)
    assert two.id != one.id
    await world.complete(two)
    assert holders(world) == {}


async def test_readers_run_together(world: World) -> None:
    agent = await world.agent()
    ids = await world.submit(*[NewTask("read", lock_keys=reading("a", "b"))] * 3)
    found = await world.claim(agent, 2) + await world.claim(agent, 10)
    assert {task.id for task in found} == set(ids)
    assert holders(world) == {"a": set(ids), "b": set(ids)}


async def test_a_writer_waits_for_all_readers(world: World) -> None:
    """And readers that come later wait behind it."""
    agent = await world.agent()
    one, two = [
        await world.take(agent) for _ in await world.submit(*[NewTask("r", lock_keys=reading("a"))] * 2)
    ]
    writer = await world.one("w", lock_key="a")
    assert await world.claim(agent, 10) == []
    late = await world.one("r", lock_keys=reading("a"), priority=1)
    assert await world.claim(agent, 10) == []

    await world.complete(one)
    assert await world.claim(agent, 10) == []
    await world.complete(two)
    got = (await world.claim(agent, 10))[0]
    assert got.id in {writer, late}
    assert await world.claim(agent, 10) == []
    await world.complete(got)
    (last,) = await world.claim(agent, 10)
    assert {got.id, last.id} == {writer, late}


async def test_the_better_of_writer_and_reader_is_first(world: World) -> None:
    """Once the lock is free, order decides, in one claim."""
    agent = await world.agent()
    await world.one("first", lock_key="a")
    first = await world.take(agent)
    await world.submit(
        NewTask("late", lock_keys=reading("a"), priority=3),
        NewTask("w", lock_key="a", priority=2),
        NewTask("early", lock_keys=reading("a"), priority=1),
        NewTask("early", lock_keys=reading("a"), priority=1),
    )
    assert await world.claim(agent, 10) == []
    await world.complete(first)
    found = await world.claim(agent, 10)
    assert [task.type for task in found] == ["early", "early"]
    for task in found:
        await world.complete(task)
    (writer,) = await world.claim(agent, 10)
    assert writer.type == "w"
    await world.complete(writer)
    assert await types(world, agent) == ["late"]


async def test_many_readers_that_waited_start_together(world: World) -> None:
    agent = await world.agent(max_concurrent_tasks=500)
    await world.one("first", lock_key="a")
    first = await world.take(agent)
    ids = await world.submit(*[NewTask("r", lock_keys=reading("a"))] * 250)
    assert await world.claim(agent, 10) == []
    assert len(world.rows("SELECT FROM lineshaft.task_live WHERE parked = 'lock'")) == len(ids)
    await world.complete(first)
    assert {task.id for task in await world.claim(agent, 400)} == set(ids)


async def test_a_writer_that_waits_for_another_lock_keeps_no_reader_out(world: World) -> None:
    """It waits for one lock at a time: readers don't starve behind a task that couldn't run anyway."""
    agent = await world.agent()
    await world.one("holder", lock_key="a")
    holder = await world.take(agent)
    await world.one("reader", lock_keys=reading("b"))
    reader = await world.take(agent)
    writer = await world.one("writer", lock_keys=["a", "b"])
    assert await world.claim(agent, 10) == []
    assert world.live(writer)["lock_key"] == "a"
    await world.one("reader", lock_keys=reading("b"))
    second = await world.take(agent)

    # Now it waits for the readers.
    await world.complete(holder)
    assert await world.claim(agent, 10) == []
    assert world.live(writer)["lock_key"] == "b"
    third = await world.one("reader", lock_keys=reading("b"))
    assert await world.claim(agent, 10) == []

    # The first lock is taken again, so that it waits for that one, and the reader behind it goes on.
    await world.one("holder", lock_key="a")
    holder = await world.take(agent)
    await world.complete(reader)
    await world.complete(second)
    (after,) = await world.claim(agent, 10)
    assert after.id == third
    assert world.live(writer)["lock_key"] == "a"
    await world.complete(after)
    await world.complete(holder)
    assert (await world.take(agent)).id == writer


@pytest.mark.parametrize("way", ["cancel", "depend", "expire"])
async def test_a_writer_that_waits_no_longer_lets_readers_in(world: World, way: str) -> None:
    agent = await world.agent()
    upstream = await world.one("upstream", priority=99, required_capabilities=["nobody"])
    await world.one("r", lock_keys=reading("a"))
    await world.take(agent)
    deadline = world.clock.now() + timedelta(seconds=5)
    writer = await world.one("w", lock_keys=["a", "z"], deadline=deadline, expire_at_deadline=True)
    assert await world.claim(agent, 10) == []
    late = await world.one("r", lock_keys=reading("a"))
    assert await world.claim(agent, 10) == []

    if way == "cancel":
        await world.engine.cancel.cancel(writer, "no")
    elif way == "depend":
        await world.engine.dependencies.add(writer, [upstream])
    else:
        world.age(seconds=6)
        await world.engine.maintenance.expire_tasks(10)

    assert [task.id for task in await world.claim(agent, 10)] == [late]


@pytest.mark.parametrize(
    "way", ["complete", "batch", "fail", "dead", "release", "cancel", "kill", "restart", "spawn", "suspend"]
)
async def test_every_exit_releases_all_locks(world: World, way: str) -> None:
    agent = await world.agent("a")
    first = await world.one(lock_keys=["a", "c", *reading("b")], priority=1)
    second = await world.one(lock_keys=["b", "c"], priority=2, required_capabilities=["second"])
    task = await world.take(agent)
    assert task.id == first
    other = await world.agent(capabilities=("second",), types=("code",))
    assert await world.claim(other) == []

    match way:
        case "complete":
            await world.complete(task)
        case "batch":
            plain = await world.one("plain", priority=0)
            await world.complete(await world.take(agent))
            assert world.status(plain) == "COMPLETED"
            await world.complete(task)
        case "fail":
            await world.fail(task)
        case "dead":
            await world.fail(task, category="auth_failure")
        case "release":
            await world.release(task, 60)
        case "cancel":
            await world.engine.cancel.cancel(first, "no")
        case "kill":
            world.age(minutes=2)
            await world.engine.maintenance.reap(10)
        case "restart":
            await world.agent("a")
        case "suspend":
            await world.engine.waits.suspend([NewSuspension(ref(task), "nap", timeout_sec=60)])
        case _:
            await spawn_children(world.engine, ref(task), [NewTask("child")], wait=True)

    assert holders(world) == {}
    assert [found.id for found in await world.claim(other)] == [second]


async def test_a_zombie_can_not_write(world: World) -> None:
    """Its claim lost one of three locks: neither output nor heartbeat counts, and the rest ends with it."""
    agent, other = await world.agent(), await world.agent()
    task_id = await world.one(lock_keys=["lost:1", "lost:2", *reading("lost:3")], max_duration_sec=10_000)
    task = await world.take(agent)
    await world.engine.locks.release("lost:2")
    assert set(holders(world)) == {"lost:1", "lost:3"}

    assert await world.heartbeat(agent.id, agent.incarnation, [ref(task)]) == {task_id: "lost"}
    with pytest.raises(StaleClaimError, match="all its document locks, 'lost:1', 'lost:2', 'lost:3'"):
        await world.complete(task, {"n": 1})

    world.age(minutes=2)
    await world.engine.maintenance.reap(10)
    assert holders(world) == {}
    world.age(minutes=2)
    again = await world.take(other)
    assert again.id == task_id
    with pytest.raises(StaleClaimError):
        await world.complete(task)
    await world.complete(again)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("key", ["lost:1", "lost:2"])
async def test_a_lock_is_taken_away_while_its_holder_completes(
    world: World, dsn: str, key: str, gated: bool
) -> None:
    """The completion began before the release, but ends after it."""
    output = OutputContract(validation="json-schema", validation_schema={}) if gated else OutputContract()
    await world.one(lock_keys=["lost:1", *reading("lost:2")], output=output)
    task = await world.take()
    with held(dsn, LIVE_ROW, task.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        completing = asyncio.ensure_future(world.complete(task))
        await waiting(look, 1)
        await world.engine.locks.release(key)
        holder.rollback()
        with pytest.raises(StaleClaimError, match=key):
            await completing
    assert world.status(task.id) == "RUNNING"


async def test_release_by_an_operator(world: World) -> None:
    """Of one reader, or of all; the next waiter gets the lock."""
    agent = await world.agent()
    ids = await world.submit(*[NewTask("r", lock_keys=reading("lost:1"))] * 3)
    await world.claim(agent, 10)
    writer = await world.one("w", lock_key="lost:1")
    assert await world.claim(agent, 10) == []

    await world.engine.locks.release("lost:1", holder=ids[0])
    assert holders(world) == {"lost:1": set(ids[1:])}
    with pytest.raises(NotFoundError):
        await world.engine.locks.release("lost:1", holder=ids[0])
    assert await world.claim(agent, 10) == []
    await world.engine.locks.release("lost:1")

    assert [task.id for task in await world.claim(agent, 10)] == [writer]
    expired = world.rows("SELECT task_id FROM lineshaft.event WHERE kinds = '{lock.expired}' ORDER BY seq")
    assert {row["task_id"] for row in expired} == set(ids)
    with pytest.raises(NotFoundError):
        await world.engine.locks.release("nothing")


async def test_a_heartbeat_renews_all(world: World) -> None:
    agent = await world.agent(heartbeat_interval_sec=200)
    await world.one(lock_keys=["a", "b", *reading("c")], max_duration_sec=10_000)
    task = await world.take(agent)
    world.age(minutes=9)

    await world.heartbeat(agent.id, agent.incarnation, [ref(task)])

    ends = world.clock.now() + timedelta(minutes=10)
    locks = (await world.engine.read.locks()).items
    assert [(lock.key, lock.holder_task_id, lock.shared, lock.expires_at) for lock in locks] == [
        ("a", task.id, False, ends),
        ("b", task.id, False, ends),
        ("c", task.id, True, ends),
    ]


async def test_expired_locks_are_taken_over(world: World) -> None:
    """Those of a silent holder whose lease is longer than its locks; a reader that lives keeps the lock."""
    old, new = await world.agent(), await world.agent()
    keys = ["lost:1", *reading("lost:2")]
    first = await world.one(lock_keys=keys, max_duration_sec=10_000)
    await world.take(old)
    await world.one("r", lock_keys=reading("lost:2"), max_duration_sec=10_000)
    reader = await world.take(new)
    await world.submit(NewTask("w1", lock_key="lost:1"), NewTask("w2", lock_key="lost:2"))
    world.age(minutes=9)
    await world.heartbeat(new.id, new.incarnation, [ref(reader)])
    world.age(minutes=1, seconds=1)
    assert await world.engine.maintenance.expire_locks() == 2

    assert holders(world) == {"lost:2": {reader.id}}
    assert await types(world, new) == ["w1"]
    assert first not in {row["holder_task_id"] for row in world.rows("SELECT * FROM lineshaft.lock")}
    await world.complete(reader)
    assert await types(world, new) == ["w2"]


async def test_a_batch_holds_all_its_locks(world: World) -> None:
    """Also those that only some of its tasks need, and nothing comes between them."""
    agent = await world.agent()
    batch = await world.one(
        "batch",
        lock_keys=["a", *reading("b")],
        children=[NewTask("both"), NewTask("one", lock_key="a"), NewTask("more", lock_keys=["a", "c"])],
    )
    rivals = await world.submit(NewTask("rival", lock_key="a", priority=0), NewTask("rival", lock_key="b"))
    both = await world.take(agent, types=["both"])
    assert holders(world) == {"a": {batch}, "b": {batch}}
    assert await world.claim(agent, 10) == []
    await world.complete(both)
    (one,) = await world.claim(agent, 10)
    assert one.type == "one"
    assert holders(world) == {"a": {batch}, "b": {batch}}
    await world.complete(one)
    (more,) = await world.claim(agent, 10)
    assert more.type == "more"
    assert holders(world) == {"a": {batch}, "b": {batch}, "c": {more.id}}
    await world.fail(more)
    assert holders(world) == {"a": {batch}, "b": {batch}}
    assert await world.claim(agent, 10) == []
    world.age(hours=1)
    (more,) = await world.claim(agent, 10)
    await world.complete(more)

    assert world.status(batch) == "COMPLETED"
    assert {task.id for task in await world.claim(agent, 10)} == set(rivals)


async def test_batches_share_a_lock(world: World) -> None:
    agent = await world.agent()
    batches = [
        await world.one("batch", lock_keys=reading("a"), children=[NewTask("x"), NewTask("y")])
        for _ in range(2)
    ]
    found = await world.claim(agent, 10)
    assert [task.type for task in found] == ["x", "x"]
    writer = await world.one("w", lock_key="a", priority=0)
    assert await world.claim(agent, 10) == []
    # A writer that waits keeps other readers out, but not the next children of those that have the lock.
    for task in found:
        await world.complete(task)
    found = await world.claim(agent, 10)
    assert [task.type for task in found] == ["y", "y"]
    for task in found:
        await world.complete(task)
    assert [world.status(batch) for batch in batches] == ["COMPLETED"] * 2
    assert [task.id for task in await world.claim(agent, 10)] == [writer]


async def test_nested_batches_with_different_locks(world: World) -> None:
    """Each lock is held by the outermost batch that needs it."""
    agent = await world.agent()
    inner = NewTask("inner", lock_key="b", children=[NewTask("deep", lock_keys=["a", "b"]), NewTask("last")])
    outer = await world.one("outer", lock_key="a", children=[NewTask("first"), inner])
    await world.complete(await world.take(agent))
    (deep,) = await world.claim(agent, 10)
    (inner_id,) = [row["id"] for row in world.rows("SELECT id FROM lineshaft.task WHERE type = 'inner'")]
    assert holders(world) == {"a": {outer}, "b": {inner_id}}
    await world.complete(deep)
    (last,) = await world.claim(agent, 10)
    await world.complete(last)
    assert world.status(outer) == "COMPLETED"
    assert holders(world) == {}


async def test_a_step_of_a_batch_waits_for_a_task_that_needs_its_locks(world: World) -> None:
    agent = await world.agent()
    await world.one("batch", lock_keys=["a", "b"], children=[NewTask("step"), NewTask("step")])
    step = await world.take(agent)
    await spawn_children(world.engine, ref(step), [NewTask("page", lock_keys=["b", "a"])], wait=True)
    (page,) = await world.claim(agent, 10)
    assert page.type == "page"
    await world.complete(page)
    (again,) = await world.claim(agent, 10)
    assert again.id == step.id


async def test_a_child_can_not_have_alone_what_its_batch_shares(world: World) -> None:
    with pytest.raises(InvalidInputError, match="'a' alone, which its batch shares"):
        await world.one("batch", lock_keys=reading("a"), children=[NewTask("x", lock_key="a")])


async def test_locks_got_for_nothing_are_given_back(dsn: str, world: World) -> None:
    """Another claim was quicker with the DAG's last money."""
    agent = await world.agent()
    await world.dag(NewTask("edit", lock_keys=["a", *reading("b")], max_cost_usd=1), ceiling=1)
    with psycopg.connect(dsn) as quicker, psycopg.connect(dsn, autocommit=True) as look:
        quicker.execute("UPDATE lineshaft.dag SET spent_usd = 0.5")
        claim = asyncio.create_task(world.claim(agent))
        await waiting(look, 1)
    assert await claim == []

    assert holders(world) == {}
    world.connection.execute("UPDATE lineshaft.dag SET spent_usd = 0")
    world.connection.execute("UPDATE lineshaft.task_live SET parked = NULL")


async def test_a_claim_that_dies_leaves_nothing(dsn: str, world: World) -> None:
    """Its session ends while it waits for its second lock."""
    agent = await world.agent()
    await world.one(lock_keys=["a", "b"])
    with psycopg.connect(dsn) as other, psycopg.connect(dsn, autocommit=True) as look:
        other.execute(
            "INSERT INTO lineshaft.lock (key, holder_task_id, acquired_at, expires_at)"
            " VALUES ('b', 'x', now(), now())"
        )
        claim: asyncio.Task[list[ClaimedTask]] = asyncio.create_task(world.claim(agent))
        await waiting(look, 1)
        look.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        other.rollback()
        await asyncio.wait([claim])
        if claim.exception() is None:
            for task in claim.result():
                await world.release(task)
    assert holders(world) == {}
    assert world.rows("SELECT * FROM lineshaft.lock") == []


async def test_why_names_the_lock_and_its_holders(world: World) -> None:
    agent = await world.agent()
    a = await world.one("x", lock_key="a")
    await world.take(agent)
    both = await world.one("x", lock_keys=["b", "a"])
    why = await world.engine.read.why(both)
    assert not why.runnable
    assert f"Lock 'a' is held by task {a} with agent {agent.id}" in why.reasons[0].detail
    readers = await world.submit(*[NewTask("r", lock_keys=reading("c"))] * 2)
    await world.claim(agent, 10)
    writer = await world.one("w", lock_key="c")
    late = await world.one("r", lock_keys=reading("c"))
    assert (await world.engine.read.why(late)).runnable
    (detail,) = [reason.detail for reason in (await world.engine.read.why(writer)).reasons]
    assert detail.startswith("Lock 'c' is shared by tasks ")
    assert all(name in detail for name in readers)
    assert await world.claim(agent, 10, types=["w"]) == []
    (detail,) = [reason.detail for reason in (await world.engine.read.why(late)).reasons]
    assert f"and task {writer} waits to have it alone" in detail


async def test_locks_are_listed_by_holder_and_page(world: World) -> None:
    agent = await world.agent()
    await world.submit(
        NewTask("r", lock_keys=[*reading("a"), "b"]),
        NewTask("r", lock_keys=reading("a")),
        NewTask("r", lock_key="c"),
    )
    await world.claim(agent, 10)
    listed, cursor = [], None
    while True:
        page = await world.engine.read.locks(limit=1, cursor=cursor)
        listed += [(lock.key, lock.shared) for lock in page.items]
        if (cursor := page.next_cursor) is None:
            break
    assert listed == [("a", True), ("a", True), ("b", False), ("c", False)]


@pytest.mark.slow("ten thousand tasks")
async def test_ten_thousand_tasks_with_several_locks_hide_nothing(world: World) -> None:
    agent = await world.agent()
    await world.one("edit", lock_key="b", priority=0)
    await world.take(agent)
    await world.submit(*[NewTask("edit", lock_keys=["b", "c"], priority=1)] * 10_000)
    free = await world.one("edit", priority=99)
    assert [task.id for task in await world.claim(agent)] == [free]
