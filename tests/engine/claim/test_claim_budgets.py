"""Claims and money: no agent and no DAG spends what it hasn't got."""

from decimal import Decimal

import pytest

from lineshaft.model.tasks import NewTask
from tests.world import World


async def test_an_agent_can_not_spend_more_than_it_has(world: World) -> None:
    """R-057, R-231, R-234, F-27: reserved at the claim, over batches too; settled at the end."""
    agent = await world.agent(budget_usd=1)
    await world.submit(*[NewTask("code", max_cost_usd=0.4)] * 5)

    found = await world.claim(agent, 5)
    assert len(found) == 2
    assert await world.claim(agent, 5) == []
    assert world.agent_row(agent)["reserved_usd"] == Decimal("0.8")

    await world.complete(found[0], spent="0.1")
    row = world.agent_row(agent)
    assert (row["reserved_usd"], row["spent_usd"]) == (Decimal("0.4"), Decimal("0.1"))
    assert len(await world.claim(agent, 5)) == 1
    await world.release(found[1])
    assert world.agent_row(agent)["reserved_usd"] == Decimal("0.4")


async def test_what_is_too_dear_does_not_hold_up_what_is_not(world: World) -> None:
    """R-231, R-233: a cheaper task behind it goes; one without a maximum always fits."""
    agent = await world.agent(budget_usd=1)
    await world.one("expensive", priority=1, max_cost_usd=2)
    await world.one("free", priority=2)
    await world.one("cheap", priority=3, max_cost_usd=1)

    assert [task.type for task in await world.claim(agent, 10)] == ["free", "cheap"]


async def test_what_is_too_dear_does_not_hold_up_a_like_task_that_is_not(world: World) -> None:
    """R-231: costs between two powers of two share a lane, where a claim passes over what it can't afford."""
    agent = await world.agent(budget_usd=1.5)
    for n, cost in enumerate((2, 1.9, 1.4, 1.2, 1.1)):
        await world.one("code", priority=n, max_cost_usd=cost)
    await world.one("free", priority=10)

    claim = await world.claims(agent, 10)

    assert [(task.type, task.max_cost_usd) for task in claim.tasks] == [
        ("code", Decimal("1.4")),
        ("free", None),
    ]
    assert claim.leaves_some
    assert world.agent_row(agent)["reserved_usd"] == Decimal("1.4")
    assert await world.claim(agent, 10) == []


async def test_a_claim_passes_over_a_bounded_number_of_tasks_that_are_too_dear(world: World) -> None:
    """Of a hundred at the head of the lane; another agent can take them, and then the rest is seen."""
    poor, rich = await world.agent(budget_usd=1.5), await world.agent(budget_usd=1000)
    await world.submit(*[NewTask("code", max_cost_usd=2)] * 100)
    cheap = await world.one("code", max_cost_usd=1.2)
    other = await world.one("code", max_cost_usd=0.1, priority=60)

    assert [task.id for task in await world.claim(poor)] == [other]
    assert await world.claim(poor) == []
    await world.claim(rich)
    assert [task.id for task in await world.claim(poor)] == [cheap]


async def test_the_daily_budget_buys_what_it_can(world: World) -> None:
    agent = await world.agent()
    await world.engine.limits.patch({"daily_budget_usd": Decimal("1.5")})
    await world.submit(*(NewTask("code", max_cost_usd=cost) for cost in (2, 1.3, 1.2)))

    assert [task.max_cost_usd for task in await world.claim(agent, 10)] == [Decimal("1.3")]


async def test_an_overdrawn_agent_gets_nothing(world: World) -> None:
    """R-233: a cost without a maximum is booked; without money nothing is claimed, until topped up."""
    agent = await world.agent(budget_usd=1)
    await world.one()
    await world.complete(await world.take(agent), spent="1.5")
    await world.one()
    assert await world.claim(agent) == []

    await world.engine.fleet.patch(agent.id, add_budget_usd=0.5)
    assert await world.claim(agent) == []
    await world.engine.fleet.patch(agent.id, add_budget_usd=0.01)
    assert len(await world.claim(agent)) == 1


async def test_a_dag_can_not_spend_more_than_its_ceiling(world: World) -> None:
    """R-057, R-232, R-234: parked out of sight, and back when money comes back."""
    agent = await world.agent()
    dag = await world.dag(*(NewTask("code", key=f"{n}", max_cost_usd=0.4) for n in range(4)), ceiling=1)
    other = await world.one(priority=60)

    found = await world.claim(agent, 10)

    assert [task.id for task in found] == [dag.tasks["0"].id, dag.tasks["1"].id, other]
    assert world.dag_row(dag.id)["reserved_usd"] == Decimal("0.8")
    waiting = [world.live(dag.tasks[key].id) for key in ("2", "3")]
    assert [row["status"] for row in waiting] == ["READY", "READY"]
    assert await world.claim(agent, 10) == []
    assert {world.live(dag.tasks[key].id)["parked"] for key in ("2", "3")} == {"dag_budget"}

    await world.complete(found[0], spent="0.1")
    row = world.dag_row(dag.id)
    assert (row["reserved_usd"], row["spent_usd"]) == (Decimal("0.4"), Decimal("0.1"))
    assert [task.id for task in await world.claim(agent, 10)] == [dag.tasks["2"].id]
    await world.release(found[1])
    assert len(await world.claim(agent, 10)) == 1


async def test_an_overdrawn_dag_gets_nothing(world: World) -> None:
    """R-232, R-233: not even tasks without a maximum, which have overdrawn it; until it is topped up."""
    agent = await world.agent()
    dag = await world.dag(*(NewTask("code", key=f"{n}") for n in range(3)), ceiling=1)
    await world.complete(await world.take(agent), spent="1.5")
    other = await world.one(priority=60)

    assert [task.id for task in await world.claim(agent, 10)] == [other]
    assert world.live(dag.tasks["1"].id)["parked"] == "dag_budget"
    assert [reason.code for reason in (await world.engine.read.why(dag.tasks["1"].id)).reasons] == [
        "dag_budget"
    ]
    await world.engine.budgets.add_dag_budget(dag.id, Decimal("0.5"))
    assert await world.claim(agent, 10) == []
    await world.engine.budgets.add_dag_budget(dag.id, Decimal("0.01"))
    assert len(await world.claim(agent, 10)) == 2


@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_money_for_a_later_task_is_not_held_up_by_an_earlier_one(world: World, limit: int) -> None:
    """R-232: each task is judged by its own cost, whatever the size of the batch."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("code", key="first", priority=1, max_cost_usd=4),
        NewTask("code", key="expensive", priority=2, max_cost_usd=4),
        NewTask("code", key="cheap", priority=3, max_cost_usd=1),
        NewTask("code", key="free", priority=4, max_cost_usd=0),
        ceiling=5,
    )
    seen: list[str] = []
    while found := await world.claim(agent, limit):
        seen += [task.id for task in found]

    # A task without costs waits for no money: a batch may claim it before it is clear what is left.
    paid = [name for name in seen if name != dag.tasks["free"].id]
    assert (len(seen), paid) == (3, [dag.tasks[key].id for key in ("first", "cheap")])
    assert world.live(dag.tasks["expensive"].id)["parked"] == "dag_budget"


async def test_a_cheap_task_comes_back_past_one_that_is_still_too_dear(world: World) -> None:
    """R-232: what never fits must not starve what does."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("code", key="first", priority=1, max_cost_usd=5),
        NewTask("code", key="expensive", priority=2, max_cost_usd=5),
        NewTask("code", key="cheap", priority=3, max_cost_usd=1),
        ceiling=5,
    )
    first = await world.take(agent)
    assert await world.claim(agent, 10) == []

    await world.complete(first, spent="4")

    assert [task.id for task in await world.claim(agent, 10)] == [dag.tasks["cheap"].id]


async def test_the_first_claim_starts_the_dag(world: World) -> None:
    """U7: running, once."""
    agent = await world.agent()
    dag = await world.dag(NewTask("code"), NewTask("code", max_cost_usd=1))
    assert world.dag_row(dag.id)["status"] == "pending"

    await world.claim(agent)
    await world.claim(agent)

    assert world.dag_row(dag.id)["status"] == "running"
    assert world.dag_kinds(dag.id) == ["dag.created", "dag.running"]
