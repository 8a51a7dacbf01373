"""What a claim reports beyond its ceiling is disputed: it counts nowhere until a person accepts it."""

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo, CostCorrection, Disputed
from lineshaft.types.work import (
    Cancellation,
    ClaimedTask,
    ClaimRef,
    Completion,
    Failure,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Release,
    Spent,
)
from tests.engine.guards.spending_helpers import AT_ONCE, expire, late_heartbeat, report
from tests.engine.guards.test_late_spending import LATE
from tests.invariants import check_invariants
from tests.world import World, cost, ref

MILLION = Spent(Decimal(1_000_000), 10, 3)


def booked(world: World) -> set[Decimal]:
    """What all tasks, agents, DAGs and days have cost: one figure, if every task is in a DAG."""
    row = world.row(
        "SELECT (SELECT sum(cost_usd) FROM lineshaft.tasks) AS tasks,"
        " (SELECT sum(spent_usd) FROM lineshaft.agent) AS agents,"
        " (SELECT sum(spent_usd) FROM lineshaft.dag) AS dags,"
        " (SELECT sum(spent_usd) FROM lineshaft.spend) AS days"
    )
    return {figure or Decimal(0) for figure in row.values()}


async def disputed(world: World, task_id: str) -> Decimal:
    return (await world.engine.read.task(task_id)).disputed_usd


def alerts(world: World, task_id: str) -> int:
    return world.kinds(task_id).count("alert")


async def taken(world: World, agent: AgentInfo, **fields: Any) -> ClaimedTask:
    """A running task in a DAG of its own."""
    await world.dag(
        NewTask("code", key="a", retry=AT_ONCE, **fields), NewTask("x", key="b", depends_on=["a"])
    )
    return await world.take(agent)


async def give_up(world: World, task: ClaimedTask) -> None:
    if not (await world.engine.read.task(task.id)).status.ended:
        await world.engine.cancel.cancel(task.id, "over")


Report = Callable[[World, ClaimedTask], Awaitable[Any]]


REPORTS: dict[str, Report] = {
    "complete": lambda world, task: world.engine.work.complete([Completion(ref(task), b"1", spent=MILLION)]),
    "complete and claim": lambda world, task: world.engine.work.complete_and_claim(
        Completion(ref(task), b"1", spent=MILLION)
    ),
    "fail": lambda world, task: world.engine.work.fail([Failure(ref(task), "x", spent=MILLION)]),
    "release": lambda world, task: world.engine.work.release([Release(ref(task), spent=MILLION)]),
    "cancel": lambda world, task: world.engine.work.cancel([Cancellation(ref(task), "no", spent=MILLION)]),
    "step": lambda world, task: world.engine.work.record_steps(
        [NewStep(ref(task), "a", b"1", spent=MILLION)]
    ),
    "checkpoint": lambda world, task: world.engine.work.save_checkpoints(
        [NewCheckpoint(ref(task), b"1", MILLION)]
    ),
    "subtasks": lambda world, task: world.engine.work.spawn(
        [NewSpawn(ref(task), [NewTask("child", required_capabilities=["none"])], spent=MILLION)]
    ),
    "heartbeat": lambda world, task: world.heartbeat("ann", 1, [ref(task)], spent=MILLION),
}


async def test_every_report_of_a_claim_counts_up_to_its_ceiling(world: World) -> None:
    agent = await world.agent("ann")
    for n, (name, tell) in enumerate(REPORTS.items(), start=1):
        task = await taken(world, agent)

        await tell(world, task)
        # The call is repeated, and what it reports is reported again in another way.
        await tell(world, task)
        await world.heartbeat("ann", 1, [ref(task)], spent=MILLION)

        assert booked(world) == {Decimal(10 * n)}, name
        assert await disputed(world, task.id) == Decimal(999_990), name
        assert world.task(task.id)["cost_usd"] == 10, name
        assert alerts(world, task.id) == 1, name
        await give_up(world, task)
        check_invariants(world.connection)
    attention = await world.engine.read.attention()
    costs = await world.engine.read.costs()
    assert attention.disputed_tasks == len(REPORTS)
    assert costs.disputed_usd == Decimal(999_990) * len(REPORTS)
    assert costs.today.spent_usd == 10 * len(REPORTS)
    assert {(each.agent_id, each.cost_usd, each.disputed_usd) for each in costs.disputed} == {
        ("ann", Decimal(10), Decimal(999_990))
    }


async def test_every_late_report_counts_up_to_the_ceiling(world: World) -> None:
    """R-024: the claim has ended, as a failed attempt or with its task."""
    agent = await world.agent("ann")
    count = 0
    for late in LATE:
        for attempts in (1, 5):
            task = await taken(world, agent, max_attempts=attempts)
            await report(world, agent, task, "0.3")
            await expire(world, agent, task)
            count += 1

            for _ in range(2):
                await late(world, agent, task, MILLION)

            assert booked(world) == {Decimal(10 * count)}, late
            assert await disputed(world, task.id) == Decimal(999_990), late
            assert alerts(world, task.id) == 1
            await give_up(world, task)
            await world.engine.breakers.reset("code")
    task = await taken(world, agent)
    await world.complete(task, spent="0.3")
    await late_heartbeat(world, agent, task, MILLION)
    assert booked(world) == {Decimal(10 * (count + 1))}
    check_invariants(world.connection)


async def test_the_ceiling_is_ten_times_the_greatest_limit(world: World) -> None:
    agent = await world.agent("ann")
    await world.engine.limits.patch({"default_max_cost_usd": 2})
    ceilings = {}
    for limit in (None, "0.5", "2.5"):
        task = await taken(world, agent, max_cost_usd=None if limit is None else Decimal(limit))
        await report(world, agent, task, "500")
        ceilings[limit] = world.task(task.id)["cost_usd"]
        assert await disputed(world, task.id) == 500 - ceilings[limit]
        # A ceiling stays, so that nothing counts and is disputed at once.
        await world.engine.limits.patch({"default_max_cost_usd": 20})
        await report(world, agent, task, "600")
        assert (world.task(task.id)["cost_usd"], await disputed(world, task.id)) == (
            ceilings[limit],
            600 - ceilings[limit],
        )
        await world.engine.limits.patch({"default_max_cost_usd": 2})
        await give_up(world, task)
    assert ceilings == {None: 20, "0.5": 20, "2.5": 25}


async def test_one_report_of_a_batch_is_disputed_and_the_others_count(world: World) -> None:
    agent = await world.agent("ann")
    tasks = [await taken(world, agent) for _ in range(3)]
    spent = [cost("1"), MILLION, cost("10")]

    await world.engine.work.complete(
        [Completion(ref(task), b"1", spent=used) for task, used in zip(tasks, spent, strict=True)]
    )

    assert [world.task(task.id)["cost_usd"] for task in tasks] == [1, 10, 10]
    assert [await disputed(world, task.id) for task in tasks] == [0, 999_990, 0]
    assert booked(world) == {Decimal(21)}


async def test_a_report_of_a_claim_that_never_was_disputes_nothing(world: World) -> None:
    await world.agent("ann")
    task_id = await world.one()
    for epoch in (1, 2):
        claim = ClaimRef(task_id, epoch)
        await world.engine.work.fail([Failure(claim, "x", spent=MILLION)])
    assert await disputed(world, task_id) == 0
    assert world.rows("SELECT * FROM lineshaft.cost_dispute") == []


async def test_a_task_with_a_disputed_cost_outlives_retention_until_a_person_decides(world: World) -> None:
    agent = await world.agent("ann")
    (task_id,) = await world.submit(NewTask("code"))
    await world.complete(await world.take(agent), spent="1000000")
    world.age(days=90)
    assert await world.engine.maintenance.delete_finished(3600, 10) == 0

    await world.engine.corrections.correct(task_id, CostCorrection(disputed=Disputed.REFUSE, reason="a typo"))

    assert await world.engine.maintenance.delete_finished(3600, 10) == 1
    for table in ("cost_dispute", "cost_correction"):
        assert world.rows(f"SELECT * FROM lineshaft.{table}") == []


@pytest.mark.parametrize("decision", list(Disputed))
async def test_a_person_accepts_or_refuses_what_is_disputed(world: World, decision: Disputed) -> None:
    agent = await world.agent("ann")
    task = await taken(world, agent)
    await report(world, agent, task, "110")

    for _ in range(2):
        await world.engine.corrections.correct(task.id, CostCorrection(disputed=decision, reason="as billed"))

    counted = 110 if decision is Disputed.ACCEPT else 10
    assert booked(world) == {Decimal(counted)}
    assert await disputed(world, task.id) == 0
    assert world.kinds(task.id).count("cost.corrected") == 1
    # The claim goes on: what it reports again is decided, and what is new is disputed again.
    assert alerts(world, task.id) == 1
    await report(world, agent, task, "110")
    assert (await disputed(world, task.id), alerts(world, task.id)) == (Decimal(0), 1)
    await report(world, agent, task, "150")
    assert (await disputed(world, task.id), alerts(world, task.id)) == (Decimal(40), 2)
    await world.complete(task, spent="150")
    assert booked(world) == {Decimal(counted)}
    check_invariants(world.connection)
