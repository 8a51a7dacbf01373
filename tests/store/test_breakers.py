"""Circuit breakers: what counts, what opens and closes them, and the one probe (R-180 to R-188)."""

from collections.abc import AsyncIterator
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.errors import InvalidInputError, NotClaimableError
from lineshaft.model.breaker import BreakerConfig, BreakerPolicy
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, RetrySpec
from lineshaft.store.claims import ClaimedTask
from lineshaft.store.engine import Engine
from lineshaft.store.fleet import AgentView
from lineshaft.store.outcomes import ClaimRef, Failure
from lineshaft.store.rules import Rules
from lineshaft.store.views import BreakerView
from tests.store.acting import ref
from tests.store.invariants import check_invariants
from tests.store.world import World, cost

#: Short, so that a test needs two failures to open one.
POLICY = BreakerPolicy(
    BreakerConfig(failure_threshold=2),
    MappingProxyType(
        {"tough": BreakerConfig(failure_threshold=4), "model:x": BreakerConfig(failure_threshold=2)}
    ),
)
AGAIN: dict[str, Any] = {"max_attempts": 100, "retry": RetrySpec(strategy="immediate")}


@pytest.fixture
async def world(dsn: str, connection: psycopg.Connection, clock: MovableClock) -> AsyncIterator[World]:
    async with Engine(dsn, clock=clock, max_connections=4, rules=Rules(POLICY)) as engine:
        yield World(engine, connection, clock)
    check_invariants(dsn)


async def fail(world: World, task: ClaimedTask, **details: Any) -> Status:
    (moved,) = await world.engine.lifecycle.fail([Failure(ref(task), "it broke", **details)])
    return moved.unwrap()


async def breaker(world: World, key: str = "code") -> BreakerView | None:
    found = (await world.engine.insights.breakers(limit=100)).items
    return next((item for item in found if item.key == key), None)


async def state(world: World, key: str = "code") -> tuple[str, int]:
    found = await breaker(world, key)
    return ("none", 0) if found is None else (found.state, found.failures)


def told(world: World) -> list[str]:
    return [
        row["kind"]
        for row in world.rows(
            "SELECT kind FROM lineshaft.events WHERE kind LIKE 'breaker%%' OR kind = 'alert' ORDER BY seq, n"
        )
    ]


async def opened(world: World, agent: AgentView, type_: str = "code", n: int = 2) -> None:
    for _ in range(n):
        await world.one(type_)
        await fail(world, await world.take(agent))
    assert (await state(world, type_))[0] == "open"


async def probing(world: World, agent: AgentView) -> ClaimedTask:
    """A breaker that was opened, and whose probe is out."""
    await opened(world, agent)
    await world.one()
    world.age(seconds=61)
    task = await world.take(agent)
    assert (await state(world))[0] == "half_open"
    return task


# Opening.


async def test_it_opens_at_the_threshold_with_an_alert(world: World) -> None:
    """R-185, F-6: at the threshold, not past it; and the task that was READY stays so (R-188)."""
    agent = await world.agent()
    tasks = [await world.one() for _ in range(3)]
    first, second = await world.claim(agent, 2)

    await fail(world, first)
    assert await state(world) == ("closed", 1)
    assert told(world) == []
    await fail(world, second)

    found = await breaker(world)
    assert found == BreakerView("code", "open", 2, world.clock.now(), world.clock.now(), None, None, False)
    assert told(world) == ["breaker.opened", "alert"]
    data = world.row("SELECT data FROM lineshaft.event WHERE 'alert' = ANY (kinds)")["data"]
    assert data == {"key": "code", "failures": 2, "message": "Circuit breaker OPEN for code"}
    assert await world.claim(agent) == []
    left = world.task(tasks[2])
    assert (left["status"], left["attempts"]) == ("READY", 0)


async def test_many_failures_of_one_call_count_each(world: World) -> None:
    agent = await world.agent()
    await world.submit(*(NewTask("tough") for _ in range(4)))
    tasks = await world.claim(agent, 4)

    await world.engine.lifecycle.fail([Failure(ref(task), "it broke") for task in tasks])

    assert await state(world, "tough") == ("open", 4)
    assert told(world) == ["breaker.opened", "alert"]


@pytest.mark.parametrize(
    ("category", "counts"),
    [
        ("crash", True),
        ("timeout", True),
        ("invalid_output", True),
        ("auth_failure", True),
        ("my own", True),
        ("rate_limit", False),
        ("budget_exceeded", False),
        ("cancelled", False),
        ("dependency", False),
    ],
)
async def test_what_counts(world: World, category: str, counts: bool) -> None:
    """F-4: each failed attempt, except those for which the type is not to blame."""
    agent = await world.agent(models_available=("m",))
    await world.one(**AGAIN)

    await fail(world, await world.take(agent), category=category)

    assert await state(world) == (("closed", 1) if counts else ("none", 0))


async def test_every_attempt_counts_not_only_the_last(world: World) -> None:
    """F-4: handle_failure counted dead letters only."""
    agent = await world.agent()
    await world.one(**AGAIN)
    for _ in range(2):
        await fail(world, await world.take(agent))
        await world.engine.upkeep.promote_due(10)

    assert await state(world) == ("open", 2)


async def test_what_costs_too_much_is_not_the_fault_of_its_type(world: World) -> None:
    """F-4, R-235: also when it is only found out at the end."""
    agent = await world.agent()
    await world.submit(NewTask("code", max_cost_usd=1), NewTask("code", max_cost_usd=1))
    first, second = await world.claim(agent, 2)

    assert await world.complete(first, spent="2") is Status.DEAD_LETTERED
    assert await fail(world, second, spent=cost("2")) is Status.DEAD_LETTERED

    assert await state(world) == ("none", 0)
    assert [world.end(task.id)["category"] for task in (first, second)] == ["budget_exceeded"] * 2
    assert "it broke" in world.end(second.id)["reason"]


async def test_a_silent_agent_counts(world: World) -> None:
    agent = await world.agent()
    await world.one()
    await world.take(agent)
    world.age(seconds=91)
    await world.engine.upkeep.reap(10)

    assert await state(world) == ("closed", 1)


async def test_any_success_starts_the_count_again(world: World) -> None:
    """F-3: failures in a row are counted."""
    agent = await world.agent()
    for _ in range(3):
        await world.submit(NewTask("code"), NewTask("code"))
        first, second = await world.claim(agent, 2)
        await fail(world, first)
        await world.complete(second)
        assert await state(world) == ("closed", 0)

    assert told(world) == []


async def test_a_success_writes_only_what_there_is_to_reset(world: World) -> None:
    agent = await world.agent()
    await opened(world, agent, "other")
    await world.submit(*(NewTask("code") for _ in range(3)))
    first, second, third = await world.claim(agent, 3)
    await fail(world, first)
    version = "SELECT key, xmin::text, ctid::text FROM lineshaft.breaker ORDER BY key"
    before = world.rows(version)

    await world.complete(second)
    after = world.rows(version)
    await world.complete(third)

    assert [row["key"] for row, was in zip(after, before, strict=True) if row != was] == ["code"]
    assert world.rows(version) == after


async def test_failures_are_forgotten_after_the_cool_down(world: World) -> None:
    """R-186: more than 300 s after the last one; looking at them changes nothing."""
    agent = await world.agent()
    await world.submit(*(NewTask("code", **AGAIN) for _ in range(3)))
    first, second, third = await world.claim(agent, 3)
    await fail(world, first)

    world.age(seconds=301)
    assert await state(world) == ("closed", 1)
    await world.engine.lifecycle.heartbeat(agent.id, agent.incarnation)
    await fail(world, second)
    assert await state(world) == ("closed", 1)
    world.age(seconds=300)
    await fail(world, third)

    assert await state(world) == ("open", 2)


async def test_failures_while_it_is_open_dont_prolong_the_pause(world: World) -> None:
    """F-5: tasks that were under way."""
    agent = await world.agent()
    await world.submit(*(NewTask("code") for _ in range(5)))
    tasks = await world.claim(agent, 4)
    for task in tasks[:2]:
        await fail(world, task)
    since = world.clock.now()
    world.age(seconds=59)

    await fail(world, tasks[2])
    await world.complete(tasks[3])

    found = await breaker(world)
    assert found is not None
    assert (found.state, found.failures, found.opened_at) == ("open", 3, since)
    world.age(seconds=2)
    await world.take(agent)
    assert (await state(world))[0] == "half_open"


# The probe.


async def test_the_pause_must_be_over(world: World) -> None:
    """R-183: after more than 60 s, strictly."""
    agent = await world.agent()
    await opened(world, agent)
    await world.one()
    world.age(seconds=60)
    assert await world.claim(agent) == []

    world.age(seconds=0.000001)

    assert len(await world.claim(agent)) == 1


async def test_one_probe_is_handed_out(world: World) -> None:
    """R-181, R-180: halfOpenAt and the probe are recorded; nothing else of the type is to be had."""
    agent, other = await world.agent(), await world.agent()
    await opened(world, agent)
    await world.submit(*(NewTask("code") for _ in range(3)))
    world.age(seconds=61)

    (probe,) = await world.claim(agent, 3)

    found = await breaker(world)
    assert found is not None
    assert (found.state, found.probe_task_id, found.half_open_at) == (
        "half_open",
        probe.id,
        world.clock.now(),
    )
    assert told(world)[-1] == "breaker.half_open"
    assert await world.claim(other, 3) == []


async def test_looking_hands_out_nothing(world: World) -> None:
    """F-1: a breaker that is only looked at, or that nobody can probe, stays as it is."""
    agent = await world.agent()
    await opened(world, agent)
    task_id = await world.one(required_capabilities=["rust"])
    world.age(seconds=61)

    await world.engine.insights.breakers()
    assert not (await world.engine.insights.why(task_id)).runnable
    assert await world.claim(agent) == []
    assert (await state(world))[0] == "open"

    able = await world.agent(capabilities=("rust",))
    assert [task.id for task in await world.claim(able)] == [task_id]


async def test_success_closes_it_and_work_goes_on(world: World) -> None:
    """R-184."""
    agent = await world.agent()
    probe = await probing(world, agent)
    await world.submit(NewTask("code"), NewTask("code"))

    await world.complete(probe)

    found = await breaker(world)
    assert found is not None
    assert (found.state, found.failures, found.opened_at, found.half_open_at) == ("closed", 0, None, None)
    assert told(world)[-1] == "breaker.closed"
    assert len(await world.claim(agent, 2)) == 2


@pytest.mark.parametrize("how", ["fails", "falls silent", "is never started", "restarts"])
async def test_a_failed_probe_opens_it_again(world: World, how: str) -> None:
    """R-184, F-2: a crash is a failure, however it is noticed."""
    agent = await world.agent("ann")
    await opened(world, agent)
    await world.one(**AGAIN)
    world.age(seconds=61)
    probe = await world.take(agent, start=how != "is never started")
    if how == "fails":
        await fail(world, probe)
    elif how == "restarts":
        await world.agent("ann")
    else:
        world.age(seconds=91)
        await world.engine.upkeep.reap(10)

    found = await breaker(world)
    assert found is not None
    assert (found.state, found.probe_task_id, found.opened_at) == ("open", None, world.clock.now())
    assert told(world)[-2:] == ["breaker.opened", "alert"]
    world.age(seconds=61)
    await world.engine.upkeep.promote_due(10)
    assert len(await world.claim(await world.agent())) == 1


@pytest.mark.parametrize("how", ["cancelled", "released", "snoozed", "rate limited", "waits", "too dear"])
async def test_a_probe_that_tells_nothing_frees_its_place(world: World, how: str) -> None:
    """F-2: the breaker stays half-open, and the next claim takes another."""
    agent = await world.agent(models_available=("m",))
    await opened(world, agent)
    await world.one(max_cost_usd=1, priority=1)
    world.age(seconds=61)
    probe = await world.take(agent)
    second = await world.one()
    lifecycle = world.engine.lifecycle
    match how:
        case "cancelled":
            await world.engine.operations.cancel(probe.id, "no")
        case "released":
            await world.release(probe)
            await world.engine.operations.cancel(probe.id, "no")
        case "snoozed":
            await world.release(probe, delay_sec=1000)
        case "rate limited":
            await lifecycle.fail([Failure(ref(probe), "429", retry_after_sec=0)])
        case "waits":
            await world.engine.operations.spawn(ref(probe), [NewTask("child")], wait=True)
        case _:
            await world.complete(probe, spent="2")

    found = await breaker(world)
    assert found is not None
    assert (found.state, found.probe_task_id) == ("half_open", None)
    (again,) = await world.claim(agent, 5, types=["code"])
    assert again.id == second
    await world.complete(again)
    assert (await state(world))[0] == "closed"


async def test_a_probe_is_not_starved_by_other_work(world: World) -> None:
    """An agent that always finds enough to do tries all the same."""
    agent = await world.agent()
    await opened(world, agent)
    await world.submit(*(NewTask("busy", priority=0) for _ in range(10)), NewTask("code"))
    world.age(seconds=61)

    found = [task.type for _ in range(3) for task in await world.claim(agent)]

    assert found.count("code") == 1


async def test_two_breakers_are_probed_side_by_side(world: World) -> None:
    agent = await world.agent()
    for type_ in ("a", "b"):
        await opened(world, agent, type_)
        await world.submit(NewTask(type_), NewTask(type_))
    world.age(seconds=61)

    assert sorted(task.type for task in await world.claim(agent, 10)) == ["a", "b"]


async def test_a_probe_may_want_a_lock(world: World) -> None:
    agent = await world.agent()
    await opened(world, agent)
    await world.one("other", lock_key="doc")
    await world.take(agent)
    await world.one(lock_key="doc", priority=1)
    free = await world.one()
    world.age(seconds=61)

    assert [task.id for task in await world.claim(agent)] == [free]


async def test_a_named_task_may_be_the_probe(world: World) -> None:
    """R-063: claimed by its id, as any other."""
    agent = await world.agent()
    await opened(world, agent)
    first, second = await world.submit(NewTask("code"), NewTask("code"))
    with pytest.raises(NotClaimableError, match="probe"):
        await world.engine.claims.claim_task(agent.id, agent.incarnation, second)
    world.age(seconds=61)

    claim = await world.engine.claims.claim_task(agent.id, agent.incarnation, second, start=True)

    assert [task.id for task in claim.tasks] == [second]
    with pytest.raises(NotClaimableError, match=f"task {second} is its probe"):
        await world.engine.claims.claim_task(agent.id, agent.incarnation, first)


async def test_a_probe_that_is_gone_is_noticed(world: World) -> None:
    """F-1: whatever happened, a half-open breaker is not stuck for ever."""
    agent = await world.agent()
    probe = await probing(world, agent)
    await world.release(probe)
    world.connection.execute("UPDATE lineshaft.breaker SET probe_task_id = %s", [probe.id])
    assert await world.claim(agent) == []

    assert await world.engine.breakers.free_lost_probes() == 1

    assert [task.id for task in await world.claim(agent)] == [probe.id]
    assert await world.engine.breakers.free_lost_probes() == 0


# Models.


async def test_a_model_has_a_breaker_if_it_is_configured(world: World) -> None:
    """U12: any key, such as model:x; tasks that may use another model go on with that."""
    agent = await world.agent(models_available=("x", "y"))
    for type_ in ("a", "b"):
        await world.one(type_, model_preferences=["x"])
        await fail(world, await world.take(agent))
    await world.submit(NewTask("c", model_preferences=["x"]), NewTask("d", model_preferences=["x", "y"]))

    assert await state(world, "model:x") == ("open", 2)
    assert [(task.type, task.model) for task in await world.claim(agent, 5)] == [("d", "y")]
    world.age(seconds=61)
    (probe,) = await world.claim(agent, 5)
    assert (probe.type, probe.model) == ("c", "x")
    await world.complete(probe)
    assert await state(world, "model:x") == ("closed", 0)


async def test_models_without_configuration_are_not_counted(world: World) -> None:
    agent = await world.agent(models_available=("y",))
    await world.one(model_preferences=["y"])
    await fail(world, await world.take(agent))

    assert await breaker(world, "model:y") is None


async def test_one_task_probes_its_type_and_its_model(world: World) -> None:
    """Each would wait for the other for ever."""
    agent = await world.agent(models_available=("x",))
    await opened(world, agent)
    assert (await state(world, "model:x"))[0] == "open"
    await world.one(model_preferences=["x"])
    world.age(seconds=61)

    probe = await world.take(agent)

    found = [await breaker(world, key) for key in ("code", "model:x")]
    assert [item and item.probe_task_id for item in found] == [probe.id] * 2
    await world.complete(probe)
    assert [await state(world, key) for key in ("code", "model:x")] == [("closed", 0)] * 2


# By hand.


async def test_opened_by_hand_it_stays_open_until_reset(world: World) -> None:
    """R-187."""
    agent = await world.agent()
    await world.submit(NewTask("code"), NewTask("code"))
    running = await world.take(agent)

    await world.engine.breakers.open("code")
    await world.engine.breakers.open("code")
    await world.complete(running)
    world.age(days=1)

    found = await breaker(world)
    assert found is not None
    assert (found.state, found.forced) == ("open", True)
    assert await world.claim(agent) == []
    await world.engine.breakers.reset("code")
    await world.engine.breakers.reset("code")
    assert told(world) == ["breaker.opened", "alert", "breaker.closed"]
    assert len(await world.claim(agent)) == 1


async def test_a_reset_ends_the_wait_for_a_probe(world: World) -> None:
    agent = await world.agent()
    probe = await probing(world, agent)
    await world.one()
    await world.engine.breakers.reset("code")

    assert len(await world.claim(agent)) == 1
    await fail(world, probe)
    assert await state(world) == ("closed", 1), "it is a task as any other now"


async def test_resetting_what_never_failed_makes_no_breaker(world: World) -> None:
    await world.engine.breakers.reset("code")

    assert await breaker(world) is None


@pytest.mark.parametrize("key", ["", "a\0b", "x" * 501])
async def test_keys_that_can_be_none(world: World, key: str) -> None:
    with pytest.raises(InvalidInputError, match="must be a task type"):
        await world.engine.breakers.open(key)

    assert world.rows("SELECT FROM lineshaft.breaker") == []


# Telling.


async def test_why_tells_about_probes(world: World) -> None:
    agent = await world.agent()
    await opened(world, agent)
    first, second = await world.submit(NewTask("code"), NewTask("code"))

    async def why(task_id: str) -> str:
        return " ".join(reason.detail for reason in (await world.engine.insights.why(task_id)).reasons)

    at = (world.clock.now() + timedelta(seconds=60)).isoformat().replace("+00:00", "Z")
    assert f"after 2 failures. The first claim after {at} gets one task as a probe" in await why(first)
    world.age(seconds=61)
    assert (await world.engine.insights.why(second)).runnable, "as the probe"
    probe = await world.take(agent)
    assert f"task {probe.id} is its probe and decides whether it closes" in await why(second)


async def test_the_agent_of_a_claim_that_was_superseded_is_told(world: World) -> None:
    """A stale failure changes nothing, not even a count."""
    agent = await world.agent()
    await world.one(**AGAIN)
    task = await world.take(agent)
    await world.release(task)
    await world.engine.lifecycle.fail([Failure(ClaimRef(task.id, task.epoch), "late")])

    assert await breaker(world) is None
