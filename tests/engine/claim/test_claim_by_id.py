"""R-063: an agent may claim a task by its id, and gets the reason if it can't."""

import asyncio

import pytest

from lineshaft.errors import (
    AlreadyClaimedError,
    BudgetExceededError,
    CapabilityMismatchError,
    InvalidTransitionError,
    LineshaftError,
    NotClaimableError,
    NotFoundError,
    SupersededError,
)
from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo
from lineshaft.types.work import ClaimedTask
from tests.world import World


async def claim(world: World, agent: AgentInfo, task_id: str, *, start: bool = False) -> ClaimedTask:
    (task,) = (await world.engine.claims.claim_task(agent.id, agent.incarnation, task_id, start=start)).tasks
    return task


async def refused(world: World, agent: AgentInfo, task_id: str) -> LineshaftError:
    with pytest.raises(LineshaftError) as caught:
        await claim(world, agent, task_id)
    return caught.value


@pytest.mark.parametrize("start", [False, True])
async def test_a_task_far_behind_in_the_queue(world: World, start: bool) -> None:
    agent = await world.agent(budget_usd=5)
    better = await world.one(priority=1)
    wanted = await world.one("review", priority=99, max_cost_usd=2, spec={"n": 1})

    task = await claim(world, agent, wanted, start=start)

    assert (task.id, task.status, bytes(task.spec)) == (
        wanted,
        "RUNNING" if start else "CLAIMED",
        b'{"n": 1}',
    )
    assert world.live(wanted)["reserved_usd"] == 2
    assert world.status(better) == "READY"
    assert world.kinds(wanted)[-1] == ("task.started" if start else "task.claimed")


async def test_who_has_it_already(world: World) -> None:
    task = await world.take(await world.agent("first", max_concurrent_tasks=1)) if await world.one() else None
    assert task is not None
    error = await refused(world, await world.agent("second"), task.id)
    assert isinstance(error, AlreadyClaimedError)
    assert "RUNNING" in str(error)


async def test_what_is_not_ready(world: World) -> None:
    agent = await world.agent()
    dag = await world.dag(NewTask("code", key="a"), NewTask("code", key="b", depends_on=["a"]))
    error = await refused(world, agent, dag.tasks["b"].id)
    assert isinstance(error, InvalidTransitionError)
    assert dag.tasks["a"].id in str(error), "what it waits for"
    await world.complete(await world.take(agent))
    assert isinstance(await refused(world, agent, dag.tasks["a"].id), InvalidTransitionError)


async def test_what_does_not_exist(world: World) -> None:
    assert isinstance(await refused(world, await world.agent(), "task_nowhere"), NotFoundError)


async def test_what_the_agent_is_not_made_for(world: World) -> None:
    task_id = await world.one(required_capabilities=["gpu"])
    error = await refused(world, await world.agent(capabilities=["cpu"]), task_id)
    assert isinstance(error, CapabilityMismatchError)
    assert "gpu" in str(error)


async def test_what_nobody_can_pay(world: World) -> None:
    """R-231, R-232: the agent's money, and the DAG's."""
    task_id = await world.one(max_cost_usd=2)
    assert isinstance(await refused(world, await world.agent(budget_usd=1), task_id), BudgetExceededError)
    dag = await world.dag(NewTask("code", key="a", max_cost_usd=2), ceiling=1)
    error = await refused(world, await world.agent(), dag.tasks["a"].id)
    assert isinstance(error, BudgetExceededError)
    assert "2 USD" in str(error)


async def test_what_is_held_back(world: World) -> None:
    """Each reason by its code, as in `why`."""
    agent = await world.agent()
    await world.one(lock_key="doc:1", priority=1)
    holder = await world.take(agent)
    waits = await world.one(lock_key="doc:1")
    error = await refused(world, agent, waits)
    assert isinstance(error, NotClaimableError)
    assert [code for code, _ in error.reasons] == ["lock_held"]
    await world.engine.pauses.pause("review")
    paused = await world.one("review")
    error = await refused(world, agent, paused)
    assert isinstance(error, NotClaimableError)
    assert [code for code, _ in error.reasons] == ["paused"]
    await world.complete(holder)
    assert (await claim(world, agent, waits)).id == waits, "parked in the meantime, and free again"


async def test_no_slot_left_or_not_active(world: World) -> None:
    agent = await world.agent(max_concurrent_tasks=1)
    first, second = await world.submit(NewTask("code"), NewTask("code"))
    await claim(world, agent, first)
    error = await refused(world, agent, second)
    assert isinstance(error, NotClaimableError)
    assert [code for code, _ in error.reasons] == ["agents_full"]
    await world.engine.fleet.patch(agent.id, status="draining")
    assert isinstance(await refused(world, agent, second), NotClaimableError)


async def test_a_superseded_agent_is_told_so(world: World) -> None:
    task_id = await world.one()
    old = await world.agent("a")
    await world.agent("a")
    assert isinstance(await refused(world, old, task_id), SupersededError)


async def test_of_two_that_want_one_task_one_gets_it(world: World) -> None:
    agents = [await world.agent(), await world.agent()]
    for _ in range(10):
        task_id = await world.one()
        found = await asyncio.gather(
            *(claim(world, agent, task_id) for agent in agents), return_exceptions=True
        )
        won = [each for each in found if isinstance(each, ClaimedTask)]
        lost = [each for each in found if isinstance(each, AlreadyClaimedError)]
        assert (len(won), len(lost)) == (1, 1)
