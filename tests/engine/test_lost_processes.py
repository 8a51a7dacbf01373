"""A process that is lost counts once, however many tasks it held."""

import pytest

from lineshaft.engine.guards.rules import Rules
from lineshaft.errors import (
    StaleClaimError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from tests.engine.guards.breaker_helpers import AGAIN, POLICY, state
from tests.engine.instance_helpers import replica
from tests.world import World, ref


@pytest.fixture
def rules() -> Rules:
    """Breakers that open after two failures."""
    return Rules(POLICY)


async def test_a_lost_instance_counts_once_for_the_breaker_of_each_type(world: World) -> None:
    """F-4: a process that is killed with eight tasks must not stop the type for everyone."""
    lost = await replica(world, "lost", max_concurrent_tasks=20)
    await world.submit(*[NewTask("code", **AGAIN)] * 8, *[NewTask("text", **AGAIN)] * 3)
    assert len(await world.claim(lost, 20)) == 11

    await replica(world, "lost")

    assert await state(world) == ("closed", 1)
    assert await state(world, "text") == ("closed", 1)


@pytest.mark.parametrize("how", ["heartbeat_timeout", "claim_expired"])
async def test_a_lost_instance_counts_once_however_its_leases_expire(world: World, how: str) -> None:
    """F-4: also when the reaper needs several rounds; two lost processes are two."""
    started = how == "heartbeat_timeout"
    lost = await replica(world, "lost", max_concurrent_tasks=20)
    await world.submit(*[NewTask("code", **AGAIN)] * 8)
    assert len(await world.claim(lost, 4, start=started)) == 4
    world.age(seconds=91)
    for _ in range(4):
        assert await world.engine.maintenance.reap(1) == {how: 1}
    assert await state(world) == ("closed", 1)

    other = await replica(world, "other")
    assert len(await world.claim(other, 1)) == 1
    await replica(world, "other")

    assert await state(world) == ("open", 2)


async def test_a_lost_instance_uses_an_attempt_of_each_task(world: World) -> None:
    """R-083: a task may be what killed it."""
    ids = await world.submit(*[NewTask("code", **AGAIN | {"max_attempts": 2})] * 2)
    for _ in range(2):
        agent = await replica(world, "pod")
        assert len(await world.claim(agent, 5)) == 2
        await replica(world, "pod")
        await world.engine.maintenance.promote_due(10)
        await world.engine.breakers.reset("code")

    assert world.statuses(ids) == [Status.DEAD_LETTERED] * 2
    letter = await world.engine.dead_letters.get(ids[0])
    assert [(entry.agent, entry.instance, entry.error) for entry in letter.failure_history] == [
        ("writer", "pod", "agent_restarted")
    ] * 2


async def test_a_poison_pill_is_a_task_that_fails_with_several_instances(world: World) -> None:
    """R-136: replicas of one agent are as good as agents; three failures of one process prove nothing."""
    task_id = await world.one(**AGAIN)
    other_id = await world.one("other", **AGAIN)
    replicas = [await replica(world, name) for name in ("one", "two")]
    for n in range(3):
        for type_, agent in (("code", replicas[n % 2]), ("other", replicas[0])):
            task = await world.take(agent, types=[type_])
            await world.fail(task)
            await world.engine.breakers.reset(type_)
        await world.engine.maintenance.promote_due(10)

    assert world.statuses([task_id, other_id]) == [Status.DEAD_LETTERED, Status.READY]
    letter = await world.engine.dead_letters.get(task_id)
    assert letter.poison_pill
    assert [entry.instance for entry in letter.failure_history] == ["one", "two", "one"]


async def test_a_task_names_the_instance_that_holds_it(world: World) -> None:
    """R-083: in its claim and in its attempts; an ended claim's token is stale for every call."""
    agent = await replica(world, "pod-0")
    task_id = await world.one()
    task = await world.take(agent)
    claim = (await world.engine.read.task(task_id)).claim
    assert claim is not None
    assert claim.instance == "pod-0"
    (attempt,) = await world.engine.read.attempts(task_id)
    assert attempt.instance == "pod-0"

    await replica(world, "pod-0")

    for call in (world.complete, world.fail, world.release):
        with pytest.raises(StaleClaimError):
            await call(task)
    answers = await world.heartbeat("writer", 2, [ref(task)])
    assert answers == {task_id: "lost"}
