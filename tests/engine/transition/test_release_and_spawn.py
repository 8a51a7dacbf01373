"""How a claim ends other than by success or failure: paused for children, cancelled, handed back."""

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal

import pytest

from lineshaft.errors import NotFoundError, StaleClaimError
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import ClaimRef, Failure, Release, Spent
from tests.world import World, cancel_claim, cost, record_step, ref, spawn_once

KIDS = [NewTask("kid"), NewTask("kid")]


async def test_a_spawn_that_is_repeated_answers_as_the_first_time_did(world: World) -> None:
    """The answer was lost on the way; the parent waits already."""
    await world.one("parent")
    parent = await world.take(types=["parent"])

    first = await spawn_once(world.engine, ref(parent), "k", KIDS, wait=True)
    again = await spawn_once(world.engine, ref(parent), "k", KIDS, wait=True)

    assert first == again
    assert first.paused
    assert world.status(parent.id) == "PENDING"
    assert len(world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s", parent.id)) == 2


async def test_of_two_spawns_at_once_one_makes_children(world: World) -> None:
    await world.one("parent")
    parent = await world.take(types=["parent"])

    both = await asyncio.gather(
        *(spawn_once(world.engine, ref(parent), "k", KIDS, wait=False) for _ in range(2))
    )

    assert both[0] == both[1]
    assert len(world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s", parent.id)) == 2


async def test_children_that_have_ended_are_not_waited_for(world: World) -> None:
    await world.one("parent")
    agent = await world.agent()
    parent = await world.take(agent, types=["parent"])
    await spawn_once(world.engine, ref(parent), "k", KIDS[:1], wait=False)
    await world.complete(await world.take(agent, types=["kid"]), {"n": 1})

    spawned = await spawn_once(world.engine, ref(parent), "k", KIDS[:1], wait=True)

    assert (spawned.paused, [child.output for child in spawned.children]) == (False, [{"n": 1}])
    assert world.status(parent.id) == "RUNNING"


async def test_only_the_holder_cancels(world: World) -> None:
    task_id = await world.one()
    agent = await world.agent()
    task = await world.take(agent)
    stale = ClaimRef(task.id, task.epoch)
    await world.release(task)
    task = await world.take(agent)

    with pytest.raises(StaleClaimError):
        await cancel_claim(world.engine, stale, "no", spent=cost("1"))
    with pytest.raises(NotFoundError):
        await cancel_claim(world.engine, ClaimRef("task_nope", 1), "no", spent=cost("1"))
    assert world.status(task_id) == "RUNNING"
    assert world.live(task_id)["attempt_cost_usd"] == 0

    await cancel_claim(world.engine, ref(task), "enough", spent=cost("0.5"))
    await cancel_claim(world.engine, ref(task), "enough", spent=cost("0.5"))

    end = world.end(task_id)
    # What the stale claim had spent counts too.
    assert (end["status"], end["reason"], end["cost_usd"]) == ("CANCELLED", "enough", Decimal("1.5"))


async def test_a_task_that_is_not_started_yet_is_cancelled_directly(world: World) -> None:
    await world.one()
    task = await world.take(start=False)

    await cancel_claim(world.engine, ref(task), "enough", spent=cost("0"))

    assert world.status(task.id) == "CANCELLED"
    assert "task.released" not in world.kinds(task.id)


USED = Spent(Decimal("0.25"), tokens_input=300, tokens_output=20)


async def _snooze(world: World, claim: ClaimRef) -> None:
    await world.engine.work.release([Release(claim, 5.0, USED)])


async def _pause(world: World, claim: ClaimRef) -> None:
    await spawn_once(world.engine, claim, "k", KIDS, wait=True, spent=USED)


async def _limit(world: World, claim: ClaimRef) -> None:
    await world.engine.work.fail([Failure(claim, "429", spent=USED)])


async def _cancel(world: World, claim: ClaimRef) -> None:
    await cancel_claim(world.engine, claim, "enough", spent=USED)


@pytest.mark.parametrize("part", [_snooze, _pause, _limit, _cancel])
async def test_what_the_attempt_used_is_recorded(
    world: World, part: Callable[[World, ClaimRef], Awaitable[None]]
) -> None:
    """However it parts: with the attempt, and with what all attempts used."""
    await world.one()
    task = await world.take()

    await part(world, ref(task))

    used = {"cost_usd": Decimal("0.25"), "tokens_input": 300, "tokens_output": 20}
    (attempt,) = world.attempts(task.id)
    ended = world.status(task.id) == "CANCELLED"
    total = world.end(task.id) if ended else world.live(task.id)
    assert [{name: row[name] for name in used} for row in (attempt, total)] == [used, used]


async def test_what_heartbeats_said_was_spent_stays_spent(world: World) -> None:
    """A report that says less is older, or forgets something."""
    await world.one()
    agent = await world.agent()
    task = await world.take(agent)
    await world.heartbeat(agent.id, agent.incarnation, [ref(task)], spent=cost("0.75"))

    await world.engine.work.release([Release(ref(task), None, cost("0.5"))])

    assert world.live(task.id)["cost_usd"] == Decimal("0.75")


async def test_hand_backs_of_different_delays(world: World) -> None:
    await world.submit(NewTask("a"), NewTask("b"))
    agent = await world.agent()
    one, two = await world.claim(agent, 2)

    moved = await world.engine.work.release(
        [Release(ref(one), 5.0, cost("0.25")), Release(ref(two), None, cost("0.5"))]
    )

    assert [answer.status for answer in moved] == ["PENDING", "READY"]
    assert world.waits(one.id) == 5
    assert [world.live(task.id)["cost_usd"] for task in (one, two)] == [Decimal("0.25"), Decimal("0.5")]


async def test_a_claim_that_has_failed_already_is_over(world: World) -> None:
    """The reaper was faster, and there was no claim since: the epoch is still the same."""
    await world.one()
    task = await world.take()
    world.age(hours=1)
    await world.engine.maintenance.reap(10)

    with pytest.raises(StaleClaimError, match=r"it is RETRYING with epoch 1\. The claim ended"):
        await spawn_once(world.engine, ref(task), "k", KIDS, wait=False)
    with pytest.raises(StaleClaimError, match=r"it is RETRYING with epoch 1\. The claim ended"):
        await record_step(world.engine, ref(task), "s", b"1")
