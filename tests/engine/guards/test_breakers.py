"""Circuit breakers: what counts, what opens them, and people who do (R-180 to R-188)."""

from datetime import timedelta

import pytest

from lineshaft.engine.guards.rules import Rules
from lineshaft.errors import InvalidInputError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import Breaker
from lineshaft.types.work import ClaimRef, Failure
from tests.engine.guards.breaker_helpers import AGAIN, POLICY, breaker, event_kinds, opened, probing, state
from tests.world import World, cost, ref


@pytest.fixture
def rules() -> Rules:
    return Rules(POLICY)


async def test_it_opens_at_the_threshold_with_an_alert(world: World) -> None:
    """R-185, F-6: at the threshold, not past it; and the task that was READY stays so (R-188)."""
    agent = await world.agent()
    tasks = [await world.one() for _ in range(3)]
    first, second = await world.claim(agent, 2)

    await world.fail(first)
    assert await state(world) == ("closed", 1)
    assert event_kinds(world) == []
    await world.fail(second)

    found = await breaker(world)
    now = world.clock.now()
    probe_at = now + timedelta(seconds=60)
    assert found == Breaker("code", "open", 2, now, now, None, None, forced=False, probe_at=probe_at)
    assert event_kinds(world) == ["breaker.opened", "alert"]
    data = world.row("SELECT data FROM lineshaft.event WHERE 'alert' = ANY (kinds)")["data"]
    assert data == {"key": "code", "failures": 2, "message": "Circuit breaker OPEN for code"}
    assert await world.claim(agent) == []
    left = world.task(tasks[2])
    assert (left["status"], left["attempts"]) == ("READY", 0)


async def test_many_failures_of_one_call_count_each(world: World) -> None:
    agent = await world.agent()
    await world.submit(*(NewTask("tough") for _ in range(4)))
    tasks = await world.claim(agent, 4)

    await world.engine.work.fail([Failure(ref(task), "it broke") for task in tasks])

    assert await state(world, "tough") == ("open", 4)
    assert event_kinds(world) == ["breaker.opened", "alert"]


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

    await world.fail(await world.take(agent), category=category)

    assert await state(world) == (("closed", 1) if counts else ("none", 0))


async def test_every_attempt_counts_not_only_the_last(world: World) -> None:
    """F-4: handle_failure counted dead letters only."""
    agent = await world.agent()
    await world.one(**AGAIN)
    for _ in range(2):
        await world.fail(await world.take(agent))
        await world.engine.maintenance.promote_due(10)

    assert await state(world) == ("open", 2)


async def test_what_costs_too_much_is_not_the_fault_of_its_type(world: World) -> None:
    """F-4, R-235: also when it is only found out at the end."""
    agent = await world.agent()
    await world.submit(NewTask("code", max_cost_usd=1), NewTask("code", max_cost_usd=1))
    first, second = await world.claim(agent, 2)

    assert await world.complete(first, spent="2") is Status.DEAD_LETTERED
    assert await world.fail(second, spent=cost("2")) is Status.DEAD_LETTERED

    assert await state(world) == ("none", 0)
    assert [world.end(task.id)["category"] for task in (first, second)] == ["budget_exceeded"] * 2
    assert "it broke" in world.end(second.id)["reason"]


async def test_a_silent_agent_counts(world: World) -> None:
    agent = await world.agent()
    await world.one()
    await world.take(agent)
    world.age(seconds=91)
    await world.engine.maintenance.reap(10)

    assert await state(world) == ("closed", 1)


async def test_any_success_starts_the_count_again(world: World) -> None:
    """F-3: failures in a row are counted."""
    agent = await world.agent()
    for _ in range(3):
        await world.submit(NewTask("code"), NewTask("code"))
        first, second = await world.claim(agent, 2)
        await world.fail(first)
        await world.complete(second)
        assert await state(world) == ("closed", 0)

    assert event_kinds(world) == []


async def test_a_success_writes_only_what_there_is_to_reset(world: World) -> None:
    agent = await world.agent()
    await opened(world, agent, "other")
    await world.submit(*(NewTask("code") for _ in range(3)))
    first, second, third = await world.claim(agent, 3)
    await world.fail(first)
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
    await world.fail(first)

    world.age(seconds=301)
    assert await state(world) == ("closed", 1)
    await world.heartbeat(agent.id, agent.incarnation)
    await world.fail(second)
    assert await state(world) == ("closed", 1)
    world.age(seconds=300)
    await world.fail(third)

    assert await state(world) == ("open", 2)


async def test_failures_while_it_is_open_dont_prolong_the_pause(world: World) -> None:
    """F-5: tasks that were under way."""
    agent = await world.agent()
    await world.submit(*(NewTask("code") for _ in range(5)))
    tasks = await world.claim(agent, 4)
    for task in tasks[:2]:
        await world.fail(task)
    since = world.clock.now()
    world.age(seconds=59)

    await world.fail(tasks[2])
    await world.complete(tasks[3])

    found = await breaker(world)
    assert found is not None
    assert (found.state, found.failures, found.opened_at) == ("open", 3, since)
    world.age(seconds=2)
    await world.take(agent)
    assert (await state(world))[0] == "half_open"


# By hand.


async def test_a_forced_breaker_stays_open_until_reset(world: World) -> None:
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
    assert event_kinds(world) == ["breaker.opened", "alert", "breaker.closed"]
    assert len(await world.claim(agent)) == 1


async def test_a_reset_ends_the_wait_for_a_probe(world: World) -> None:
    agent = await world.agent()
    probe = await probing(world, agent)
    await world.one()
    await world.engine.breakers.reset("code")

    assert len(await world.claim(agent)) == 1
    await world.fail(probe)
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
        return " ".join(reason.detail for reason in (await world.engine.read.why(task_id)).reasons)

    at = (world.clock.now() + timedelta(seconds=60)).isoformat().replace("+00:00", "Z")
    assert f"after 2 failures. The first claim after {at} gets one task as a probe" in await why(first)
    world.age(seconds=61)
    assert (await world.engine.read.why(second)).runnable, "as the probe"
    probe = await world.take(agent)
    assert f"task {probe.id} is its probe and decides whether it closes" in await why(second)


async def test_the_agent_of_a_superseded_claim_gets_an_error(world: World) -> None:
    """A stale failure changes nothing, not even a count."""
    agent = await world.agent()
    await world.one(**AGAIN)
    task = await world.take(agent)
    await world.release(task)
    await world.engine.work.fail([Failure(ClaimRef(task.id, task.epoch), "late")])

    assert await breaker(world) is None


async def test_a_lost_process_counts_once_for_each_type(world: World) -> None:
    """F-4: by its restart, or by its leases; each task has used an attempt."""
    agent = await world.agent("a")
    tasks = await world.submit(*(NewTask(type_) for type_ in ("code", "other") for _ in range(4)))
    assert len(await world.claim(agent, 8)) == 8

    await world.agent("a")

    assert await state(world, "code") == await state(world, "other") == ("closed", 1)
    assert [world.task(task)["attempts"] for task in tasks] == [1] * 8
    # The next incarnation is another process.
    await world.engine.maintenance.promote_due(10)
    world.age(seconds=60)
    await world.engine.maintenance.promote_due(10)
    again = await world.agent("a")
    assert await state(world, "code") == ("closed", 1), "an incarnation that held nothing"
    assert len(await world.claim(again, 8)) == 8
    world.age(seconds=200)
    for _ in range(8):
        await world.engine.maintenance.reap(1)
    assert await state(world, "code") == await state(world, "other") == ("open", 2)


async def test_losses_that_an_agent_reports_count_each(world: World) -> None:
    """A category is an agent's word; only Lineshaft knows that a process was lost."""
    agent = await world.agent()
    await world.submit(NewTask("code"), NewTask("code"))

    for task in await world.claim(agent, 2):
        await world.fail(task, category="heartbeat_timeout")

    assert await state(world) == ("open", 2)
