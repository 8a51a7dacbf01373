"""Claims: which agent gets a task, what prevents it, and what comes with the task."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.errors import NotFoundError, SupersededError
from lineshaft.model.tasks import NewTask
from tests.world import World, decoded, record_step, ref, save_checkpoint, spawn_children


async def claimed_ids(world: World, limit: int = 10, **agent: Any) -> list[str]:
    return [task.id for task in await world.claim(await world.agent(**agent), limit)]


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
    assert (decoded(bytes(task.spec)), task.deadline, task.max_attempts) == ({"a": [1]}, deadline, 3)
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
    """R-218: the next preference, else the task waits; `*` slows everyone; each ends automatically."""
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


# What earlier attempts left behind.


async def test_a_task_that_was_started_before_comes_with_what_was_left(world: World) -> None:
    """R-145, R-211: steps, checkpoint, children and the last error."""
    agent = await world.agent()
    await world.one("parent")
    first = await world.take(agent)
    await record_step(world.engine, ref(first), "search", b'{"found": 1}')
    assert await record_step(world.engine, ref(first), "search", b'"again"') == b'{"found": 1}'
    await save_checkpoint(world.engine, ref(first), b'"here"')
    await world.fail(first, "out of memory")
    await world.engine.revive.retry(first.id)
    second = await world.take(agent)
    await save_checkpoint(world.engine, ref(second), b'"there"')
    (child,) = await spawn_children(world.engine, ref(second), [NewTask("child")], wait=True)
    await world.complete(await world.take(agent), [1])

    found = await world.claims(agent)

    (third,) = found.tasks
    assert (first.resume, second.resume, third.resume) == (False, True, True)
    assert third.epoch == 3
    left = found.resumed[third.id]
    steps = decoded(left.steps)
    (spawned,) = [name for name in steps if name.startswith("spawn:2.")]
    assert steps == {"search": {"found": 1}, spawned: steps[spawned]}
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
    refs = [f"task:{source}:output", f"task:{empty}:output"]
    await world.one("reader", spec={"context_refs": refs})

    found = await world.claims(agent)

    assert {name: decoded(value) for name, value in found.inputs.items()} == {source: {"n": 1}, empty: None}
