"""Agents and instances that are deleted, or forgotten because they were silent for long."""

from decimal import Decimal
from typing import Any

import pytest

from lineshaft.duties.janitor import Janitor
from lineshaft.duties.supervisor import all_duties
from lineshaft.engine.read.tally import Tally
from lineshaft.errors import (
    InvalidTransitionError,
    NotFoundError,
    SupersededError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from tests.engine.instance_helpers import beats, instances, read, replica
from tests.world import World


async def test_an_agent_with_a_live_instance_can_not_be_deleted(world: World) -> None:
    """R-083: the error names one of them."""
    one, two = await replica(world, "one"), await replica(world, "two")
    fleet = world.engine.fleet
    await fleet.leave("writer", two.incarnation)
    with pytest.raises(InvalidTransitionError, match="1 of its instances are alive, among them 'one'"):
        await fleet.delete("writer")
    assert await beats(world, one)
    with pytest.raises(NotFoundError):
        await fleet.delete("reader")


async def test_a_deleted_agent_keeps_its_budget_and_its_spend(world: World) -> None:
    """R-083: registering again goes on from there; what a silent process still held fails."""
    one = await replica(world, "one", budget_usd=3)
    await world.submit(*[NewTask("code", max_cost_usd=1)] * 2)
    done, held = await world.claim(one, 2)
    await world.complete(done, spent="1")
    world.age(seconds=91)
    fleet = world.engine.fleet

    await fleet.delete("writer")

    with pytest.raises(NotFoundError):
        await read(world)
    assert await fleet.read_all() == []
    with pytest.raises(NotFoundError):
        await fleet.delete("writer")
    with pytest.raises(NotFoundError):
        await fleet.patch("writer", budget_usd=100)
    assert world.status(held.id) == Status.RETRYING
    with pytest.raises(SupersededError):
        await world.claim(one)

    again = await replica(world, "one", budget_usd=100)

    assert again.incarnation == 2, "no incarnation is used twice"
    assert (again.budget_usd, again.spent_usd, again.reserved_usd) == (Decimal(3), Decimal(1), Decimal(0))
    assert len(again.warnings) == 1


def janitor(world: World, **settings: Any) -> Janitor:
    (duty,) = (d for d in all_duties(world.engine, Settings(**settings)) if isinstance(d, Janitor))
    return duty


async def test_the_janitor_deletes_instances_that_were_silent_for_a_day(world: World) -> None:
    """R-080: not those that hold a task, nor those that live."""
    silent, holding, living = [await replica(world, name) for name in ("silent", "holding", "living")]
    await world.one()
    await world.take(holding)
    world.age(hours=24)
    await janitor(world).run_once()
    assert len((await read(world)).instances) == 3
    world.age(seconds=1)
    assert await beats(world, living)

    counts = await janitor(world).run_once()

    assert counts["instances and agents deleted"] == 1
    assert list(instances(await read(world))) == ["living", "holding"]
    assert not await beats(world, silent)


async def test_the_janitor_forgets_agents_that_were_not_used_for_long(world: World) -> None:
    """R-083: unless there is a budget or spend, which must not be new when the id returns."""
    for name in ("unused", "budgeted", "spender", "living"):
        agent = await world.agent(name, budget_usd=1 if name == "budgeted" else None)
        await world.one(name)
        task = await world.take(agent, types=[name])
        await world.complete(task, spent="0.5" if name == "spender" else None)
    world.age(days=29)
    await janitor(world).run_once()
    assert len(await world.engine.fleet.read_all()) == 4
    world.age(days=1, seconds=1)
    await world.agent("living")

    await janitor(world).run_once()

    kept = {agent.id: len(agent.instances) for agent in await world.engine.fleet.read_all()}
    assert kept == {"budgeted": 0, "living": 1, "spender": 0}
    with pytest.raises(NotFoundError):
        await world.engine.fleet.read("unused")


async def test_agents_are_kept_for_as_long_as_the_setting_says(world: World) -> None:
    await replica(world, "one")
    world.age(days=3)
    await janitor(world, keep_agents_days=4).run_once()
    assert [agent.id for agent in await world.engine.fleet.read_all()] == ["writer"]

    await janitor(world, keep_agents_days=2).run_once()

    assert await world.engine.fleet.read_all() == []


async def test_metrics_have_no_labels_of_agents_that_are_gone(world: World) -> None:
    """R-083: what they counted is kept in sums without the label."""
    for name in ("writer", "living"):
        agent = await world.agent(name, models_available=("m",))
        await world.submit(NewTask(name), NewTask(name), NewTask(name))
        done, failed, _ = await world.claim(agent, 3, types=[name])
        await world.complete(done, spent="0.5")
        await world.fail(failed)
    world.age(minutes=5)
    await world.engine.maintenance.reap(10)
    await world.engine.fleet.mark_offline()
    tally = Tally(world.engine.database)
    await tally.count()
    before = await tally.totals()
    assert before.completed_by == {"writer": 1, "living": 1}
    assert set(before.heartbeats_missed) == {"writer", "living"}

    await world.engine.fleet.delete("writer")

    after = await tally.totals()
    assert after.completed_by == {"": 1, "living": 1}
    assert after.failed_by == {"": 2, "living": 2}
    assert after.heartbeats_missed == {"": 1, "living": 1}
    assert after.cost_usd == {
        ("writer", "", "m"): Decimal("0.5"),
        ("living", "living", "m"): Decimal("0.5"),
    }
    assert (after.completed, after.failed) == (before.completed, before.failed)
