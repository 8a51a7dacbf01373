"""How a claim ends other than by success or failure: paused for children, cancelled, handed back."""

import asyncio
from decimal import Decimal

import pytest

from lineshaft.errors import NotFoundError, StaleClaimError
from lineshaft.model.tasks import NewTask
from lineshaft.store.outcomes import ClaimRef
from lineshaft.store.parting import HandBack
from tests.store.acting import ref
from tests.store.world import World, cost

KIDS = [NewTask("kid"), NewTask("kid")]


async def test_a_spawn_that_is_repeated_answers_as_the_first_time_did(world: World) -> None:
    """The answer was lost on the way; the parent waits already."""
    await world.one("parent")
    parent = await world.take(types=["parent"])
    parting = world.engine.parting

    first = await parting.spawn(ref(parent), "k", KIDS, wait=True)
    again = await parting.spawn(ref(parent), "k", KIDS, wait=True)

    assert first == again
    assert first.paused
    assert world.status(parent.id) == "PENDING"
    assert len(world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s", parent.id)) == 2


async def test_of_two_spawns_at_once_one_makes_children(world: World) -> None:
    await world.one("parent")
    parent = await world.take(types=["parent"])

    both = await asyncio.gather(
        *(world.engine.parting.spawn(ref(parent), "k", KIDS, wait=False) for _ in range(2))
    )

    assert both[0] == both[1]
    assert len(world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s", parent.id)) == 2


async def test_children_that_have_ended_are_not_waited_for(world: World) -> None:
    await world.one("parent")
    agent = await world.agent()
    parent = await world.take(agent, types=["parent"])
    await world.engine.parting.spawn(ref(parent), "k", KIDS[:1], wait=False)
    await world.complete(await world.take(agent, types=["kid"]), {"n": 1})

    spawned = await world.engine.parting.spawn(ref(parent), "k", KIDS[:1], wait=True)

    assert (spawned.paused, [child.output for child in spawned.children]) == (False, [{"n": 1}])
    assert world.status(parent.id) == "RUNNING"


async def test_only_the_holder_cancels(world: World) -> None:
    task_id = await world.one()
    agent = await world.agent()
    task = await world.take(agent)
    stale = ClaimRef(task.id, task.epoch)
    await world.release(task)
    task = await world.take(agent)
    parting = world.engine.parting

    with pytest.raises(StaleClaimError):
        await parting.cancel_claimed(stale, "no", spent=cost("1"))
    with pytest.raises(NotFoundError):
        await parting.cancel_claimed(ClaimRef("task_nope", 1), "no", spent=cost("1"))
    assert world.status(task_id) == "RUNNING"

    await parting.cancel_claimed(ref(task), "enough", spent=cost("0.5"))
    await parting.cancel_claimed(ref(task), "enough", spent=cost("0.5"))

    end = world.end(task_id)
    assert (end["status"], end["reason"], end["cost_usd"]) == ("CANCELLED", "enough", Decimal("0.5"))


async def test_what_is_not_started_yet_is_cancelled_without_a_detour(world: World) -> None:
    await world.one()
    task = await world.take(start=False)

    await world.engine.parting.cancel_claimed(ref(task), "enough", spent=cost("0"))

    assert world.status(task.id) == "CANCELLED"
    assert "task.released" not in world.kinds(task.id)


async def test_hand_backs_of_different_delays(world: World) -> None:
    await world.submit(NewTask("a"), NewTask("b"))
    agent = await world.agent()
    one, two = await world.claim(agent, 2)

    moved = await world.engine.parting.hand_back(
        [HandBack(ref(one), 5.0, cost("0.25")), HandBack(ref(two), None, cost("0.5"))]
    )

    assert [answer.status for answer in moved] == ["PENDING", "READY"]
    assert world.waits(one.id) == 5
    assert [world.live(task.id)["cost_usd"] for task in (one, two)] == [Decimal("0.25"), Decimal("0.5")]
