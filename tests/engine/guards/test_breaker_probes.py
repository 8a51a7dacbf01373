"""The one probe of a breaker, of a type or of a model, and what becomes of it (R-181 to R-184)."""

import pytest

from lineshaft.engine.guards.rules import Rules
from lineshaft.errors import NotClaimableError
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Failure, Release
from tests.engine.guards.breaker_helpers import AGAIN, POLICY, breaker, event_kinds, opened, probing, state
from tests.engine.review.test_dead_letters import decision
from tests.world import World, ref, spawn_children


@pytest.fixture
def rules() -> Rules:
    return Rules(POLICY)


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
    """R-181, R-180: halfOpenAt and the probe are recorded; no other task of the type is claimable."""
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
    assert event_kinds(world)[-1] == "breaker.half_open"
    assert await world.claim(other, 3) == []


async def test_looking_hands_out_nothing(world: World) -> None:
    """F-1: a breaker that is only read, or that no agent can probe, stays as it is."""
    agent = await world.agent()
    await opened(world, agent)
    task_id = await world.one(required_capabilities=["rust"])
    world.age(seconds=61)

    await world.engine.read.breakers()
    assert not (await world.engine.read.why(task_id)).runnable
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
    assert event_kinds(world)[-1] == "breaker.closed"
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
        await world.fail(probe)
    elif how == "restarts":
        await world.agent("ann")
    else:
        world.age(seconds=91)
        await world.engine.maintenance.reap(10)

    found = await breaker(world)
    assert found is not None
    assert (found.state, found.probe_task_id, found.opened_at) == ("open", None, world.clock.now())
    assert event_kinds(world)[-2:] == ["breaker.opened", "alert"]
    world.age(seconds=61)
    await world.engine.maintenance.promote_due(10)
    assert len(await world.claim(await world.agent())) == 1


@pytest.mark.parametrize(
    "how", ["cancelled", "released", "snoozed", "rate limited", "waits", "too expensive"]
)
async def test_a_probe_that_tells_nothing_frees_its_place(world: World, how: str) -> None:
    """F-2: the breaker stays half-open, and the next claim takes another."""
    agent = await world.agent(models_available=("m",))
    await opened(world, agent)
    await world.one(max_cost_usd=1, priority=1)
    world.age(seconds=61)
    probe = await world.take(agent)
    second = await world.one()
    match how:
        case "cancelled":
            await world.engine.cancel.cancel(probe.id, "no")
        case "released":
            await world.release(probe)
            await world.engine.cancel.cancel(probe.id, "no")
        case "snoozed":
            await world.release(probe, delay_sec=1000)
        case "rate limited":
            await world.engine.work.fail([Failure(ref(probe), "429", retry_after_sec=0)])
        case "waits":
            await spawn_children(world.engine, ref(probe), [NewTask("child")], wait=True)
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
    """F-1: whatever happens, a half-open breaker is not stuck forever."""
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
        await world.one(type_, model_preferences=["x"], max_attempts=1)
        await world.fail(await world.take(agent))
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
    await world.fail(await world.take(agent))

    assert await breaker(world, "model:y") is None


async def test_one_task_probes_its_type_and_its_model(world: World) -> None:
    """Each would wait for the other forever."""
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


async def test_what_a_person_has_changed_is_the_probe(world: World) -> None:
    """Its siblings would fail as before, and the breaker would open again."""
    agent, rust = await world.agent(), await world.agent(capabilities=["rust"])
    broken = await world.one(max_attempts=1, required_capabilities=["rust"])
    await world.fail(await world.take(rust), category="auth_failure")
    await opened(world, agent, n=1)
    siblings = [await world.one(priority=0) for _ in range(2)]
    await world.engine.dead_letters.resolve(broken, decision("modify_and_retry", spec={"fixed": True}))
    world.age(seconds=61)

    (probe,) = await world.claim(agent, 3)
    assert probe.id in siblings, "this agent can't take the one that was changed"
    await world.engine.work.release([Release(ref(probe))])

    (probe,) = await world.claim(rust, 3)
    assert probe.id == broken
