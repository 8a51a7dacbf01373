"""`max_total_cost_usd`: what all attempts at a task may cost binds each of them."""

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.model.type_defaults import TypeDefaults
from lineshaft.types.changes import TaskChange
from lineshaft.types.work import ClaimedTask
from tests.engine.guards.spending_helpers import AT_ONCE, report
from tests.world import World, cost, ref, spawn_children


async def alone(world: World, task: ClaimedTask, spent: str) -> Status:
    return await world.complete(task, "x", spent)


async def with_others(world: World, task: ClaimedTask, spent: str) -> Status:
    agent = await world.agent()
    await world.submit(NewTask("other"), NewTask("other"))
    others = await world.claim(agent, 2, types=["other"])
    items = [world.completion(task, "x", spent), *(world.completion(other) for other in others)]
    return (await world.engine.work.complete(items))[0].unwrap()


async def with_the_next_claim(world: World, task: ClaimedTask, spent: str) -> Status:
    moved, _ = await world.engine.work.complete_and_claim(world.completion(task, "x", spent))
    return moved.unwrap()


Way = Callable[[World, ClaimedTask, str], Awaitable[Status]]


@pytest.mark.parametrize("complete", [alone, with_others, with_the_next_claim])
async def test_a_completion_over_the_total_is_refused(world: World, complete: Way) -> None:
    """R-238: exactly the limit is within it; in a DAG, with a lock, and after earlier attempts too."""
    agent = await world.agent(max_concurrent_tasks=9)

    async def taken(**fields: Any) -> ClaimedTask:
        await world.one(max_total_cost_usd=1, max_attempts=9, retry=AT_ONCE, **fields)
        return await world.take(agent)

    async def refused(task: ClaimedTask, spent: str, total: str) -> None:
        assert await complete(world, task, spent) is Status.DEAD_LETTERED
        assert await complete(world, task, spent) is Status.DEAD_LETTERED, "repeated"
        end = world.end(task.id)
        assert (end["category"], end["cost_usd"], end["output"]) == ("budget_exceeded", Decimal(total), None)
        assert end["reason"] == (
            f"cost {Decimal(total):.6f} USD in all, more than max_total_cost_usd 1.000000"
        )

    await refused(await taken(), "3", "3")
    await refused(await taken(lock_key="doc:1"), "1.000001", "1.000001")
    await world.dag(NewTask("code", key="a", max_total_cost_usd=1), NewTask("code", depends_on=["a"]))
    await refused(await world.take(agent), "3", "3")
    assert await complete(world, await taken(), "1") is Status.COMPLETED

    for spent, status in (("0.400001", Status.DEAD_LETTERED), ("0.4", Status.COMPLETED)):
        first = await taken()
        await world.fail(first, spent=cost("0.6"))
        await world.engine.maintenance.promote_due(10)
        assert await complete(world, await world.take(agent), spent) is status
    assert world.agent_row(agent)["reserved_usd"] == 0


async def test_a_claim_reserves_no_more_than_what_is_left_of_the_total(world: World) -> None:
    """R-233: the rest of the total, or max_cost_usd, if that is less; the default is for other tasks."""
    await world.engine.limits.patch({"default_max_cost_usd": 5})
    agent = await world.agent(budget_usd=100, max_concurrent_tasks=9)

    async def reserved(task_id: str) -> Decimal:
        task = await world.take(agent)
        assert task.id == task_id
        amount: Decimal = world.live(task_id)["reserved_usd"]
        assert world.agent_row(agent)["reserved_usd"] == amount
        await world.fail(task, spent=cost("0.4"))
        await world.engine.maintenance.promote_due(10)
        return amount

    open_ended = await world.one(max_total_cost_usd=1, max_attempts=9, retry=AT_ONCE)
    assert [await reserved(open_ended) for _ in range(3)] == [Decimal(1), Decimal("0.6"), Decimal("0.2")]
    assert world.status(open_ended) == "DEAD_LETTERED"
    both = await world.one(max_cost_usd=0.5, max_total_cost_usd=1, max_attempts=9, retry=AT_ONCE)
    assert [await reserved(both) for _ in range(3)] == [Decimal("0.5"), Decimal("0.5"), Decimal("0.2")]


async def test_tasks_with_a_total_share_a_budget(world: World) -> None:
    """R-230: four times 0.10 of 0.10 are not spent at once, of an agent, a DAG or a day."""
    tasks = [NewTask("code", max_total_cost_usd=0.1) for _ in range(4)]
    poor = await world.agent(budget_usd="0.1", max_concurrent_tasks=9)
    await world.submit(*tasks)
    assert len(await world.claim(poor, 4)) == 1

    rich = await world.agent(max_concurrent_tasks=9)
    await world.dag(*(NewTask("of a dag", max_total_cost_usd=0.1) for _ in range(4)), ceiling=0.2)
    assert len(await world.claim(rich, 4, types=["of a dag"])) == 2

    await world.engine.limits.patch({"daily_budget_usd": Decimal("0.3")})
    assert len(await world.claim(rich, 4, types=["code"])) == 3


async def test_an_agent_that_can_pay_for_the_rest_is_given_the_task(world: World) -> None:
    """Of 1 USD 0.9 are spent, however the attempt ended: an agent that has 0.3 can pay for another one."""
    rich, poor = await world.agent(), await world.agent(budget_usd="0.3")

    async def fail(task: ClaimedTask) -> None:
        await world.fail(task)

    async def wait_for_a_rate_limit(task: ClaimedTask) -> None:
        await world.fail(task, "429 too many requests", retry_after_sec=0)

    async def wait_for_children(task: ClaimedTask) -> None:
        await spawn_children(world.engine, ref(task), [NewTask("child")], wait=True)
        await world.complete(await world.take(rich, types=["child"]))

    async def release(task: ClaimedTask) -> None:
        await world.release(task)

    async def revive(task: ClaimedTask) -> None:
        await world.fail(task, category="auth_failure")
        await world.engine.revive.retry(task.id)

    for end in (fail, wait_for_a_rate_limit, wait_for_children, release, revive):
        await world.one("other", max_total_cost_usd=1)
        task_id = await world.one(max_total_cost_usd=1, max_attempts=9, retry=AT_ONCE)
        task = await world.take(rich, types=["code"])
        await report(world, rich, task, "0.9")
        await end(task)
        world.clock.advance(60)
        await world.engine.maintenance.promote_due(10)

        (again,) = await world.claim(poor, 2)

        assert again.id == task_id, end.__name__
        assert world.live(task_id)["reserved_usd"] == Decimal("0.1")
        await world.engine.cancel.cancel(task_id, "seen")


async def test_another_total_changes_what_a_claim_reserves(world: World) -> None:
    """Also of a task that was submitted without one."""
    agent = await world.agent(budget_usd=1)
    task_id = await world.one(max_cost_usd=3)
    assert await world.claim(agent) == []

    await world.engine.edit.edit(task_id, TaskChange(max_total_cost_usd=Decimal("0.7")))

    await world.take(agent)
    assert world.live(task_id)["reserved_usd"] == Decimal("0.7")


async def test_the_limit_of_a_type_and_a_total_bind_together(world: World) -> None:
    """Submitted before the type had a limit: the smaller of both is reserved, by who has no more."""
    task_id = await world.one("pay", max_total_cost_usd=0.1)
    defaults = {"pay": TypeDefaults(max_cost_usd=5)}
    agent = await world.agent("a", types=("pay",), budget_usd="0.1", task_defaults=defaults)

    await world.take(agent)

    assert (await world.engine.read.task(task_id)).max_cost_usd == 5
    assert world.live(task_id)["reserved_usd"] == Decimal("0.1")
