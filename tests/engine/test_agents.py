"""The status of agents: set by hand, reported by their processes, or judged by the age of heartbeats."""

import pytest

from lineshaft.types import AgentInfo
from lineshaft.types.work import Presence
from tests.world import World


async def status(world: World, agent: AgentInfo) -> str:
    return (await world.engine.fleet.read(agent.id)).status


async def beat(world: World, agent: AgentInfo) -> str:
    """A heartbeat, and the status that it returns."""
    instance = Presence(agent.id, agent.incarnation)
    answers = await world.engine.work.heartbeat([instance], [])
    return answers.agents[instance]


@pytest.mark.parametrize("given", ["draining", "offline"])
async def test_a_status_set_by_hand_stays_until_it_is_changed_by_hand(world: World, given: str) -> None:
    """R-058: whatever the process does, and also when it starts again."""
    agent = await world.agent("a")
    task_id = await world.one()
    fleet = world.engine.fleet
    await fleet.patch("a", status=given)

    assert await beat(world, agent) == given
    assert (await fleet.present("a", agent.incarnation)).status == given
    assert await world.claim(agent) == []
    world.age(minutes=5)
    await fleet.mark_offline()
    assert await beat(world, agent) == given
    again = await world.agent("a")
    assert again.status == await status(world, again) == given
    assert await world.claim(again) == []
    await fleet.patch("a", max_concurrent_tasks=2)
    assert await status(world, again) == given
    [reason] = (await world.engine.read.why(task_id)).reasons
    assert f"a ({given})" in reason.detail

    assert (await fleet.patch("a", status="active")).status == "active"
    assert await beat(world, again) == "active"
    assert (await world.take(again)).id == task_id


@pytest.mark.parametrize("interval", [30, 100])
async def test_liveness_is_the_age_of_the_heartbeat(world: World, interval: float) -> None:
    """R-080: three intervals, at least 90 s; whether or not a duty has run."""
    agent = await world.agent("a", heartbeat_interval_sec=interval)
    task_id = await world.one()
    world.age(seconds=3 * interval)
    assert await status(world, agent) == "active"
    assert (await world.engine.read.why(task_id)).runnable
    world.age(seconds=1)

    assert await status(world, agent) == "offline"
    assert [
        a.id for a in (await world.engine.fleet.page(status=["active"], limit=9, cursor=None)).items
    ] == []
    why = await world.engine.read.why(task_id)
    assert not why.runnable
    assert "Capable, but not active: a (offline)" in why.reasons[0].detail

    assert await beat(world, agent) == "active"
    assert await status(world, agent) == "active"
    assert (await world.engine.read.why(task_id)).runnable


async def test_a_silent_agent_is_active_again_when_it_claims(world: World) -> None:
    """R-080: asking for work is a sign of life too."""
    agent = await world.agent("a")
    for _ in range(2):
        await world.one()
        world.age(minutes=5)
        assert await world.engine.fleet.mark_offline() == ["a"]
        assert await world.engine.fleet.mark_offline() == []

        await world.complete(await world.take(agent))

        assert await status(world, agent) == "active"
    world.age(minutes=5)
    await world.engine.fleet.present("a", agent.incarnation)
    assert await status(world, agent) == "active"


async def test_an_agent_that_left_is_offline_until_it_registers_again(world: World) -> None:
    """R-081: a heartbeat on its way doesn't bring it back, nor does a person."""
    agent = await world.agent("a")
    await world.one()
    await world.engine.fleet.leave("a", agent.incarnation)

    assert await beat(world, agent) == "offline"
    assert await world.claim(agent) == []
    await world.engine.fleet.patch("a", status="active")
    assert await status(world, agent) == "offline"

    assert (await world.agent("a")).status == "active"


async def test_a_process_that_drains_can_be_activated_by_hand(world: World) -> None:
    agent = await world.agent("a")
    await world.engine.fleet.drain("a", agent.incarnation)
    assert await beat(world, agent) == "draining"

    assert (await world.engine.fleet.patch("a", status="active")).status == "active"


async def test_an_agent_set_offline_is_not_reported_as_lost(world: World) -> None:
    agent = await world.agent("a")
    await world.engine.fleet.patch("a", status="offline")
    world.age(minutes=5)

    assert await world.engine.fleet.mark_offline() == []
    assert await status(world, agent) == "offline"
