"""What a claim spent is booked once, also if the report comes after its end."""

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.checks.verdict import CandidateOutput, Verdict
from lineshaft.errors import StaleClaimError
from lineshaft.model.retry import SystemReason
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types import AgentInfo
from lineshaft.types.work import (
    ClaimedTask,
    Completion,
    Failure,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Release,
    Spent,
)
from tests.engine.guards.spending_helpers import AT_ONCE, expire, late_heartbeat, report, spent_today, tokens
from tests.world import World, cancel_claim, cost, ref, without_gates

# Stale claims.


async def _lost(world: World, agent: AgentInfo, spent: str = "0.5") -> ClaimedTask:
    task = await world.take(agent)
    await report(world, agent, task, spent)
    await expire(world, agent, task)
    return task


Late = Callable[[World, AgentInfo, ClaimedTask, Spent], Awaitable[Any]]


def _stale(error: Exception | None) -> None:
    assert isinstance(error, StaleClaimError), error


async def _late_complete(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.complete([Completion(ref(task), b"1", spent=spent)]))[0].error)


async def _late_fail(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.fail([Failure(ref(task), "x", spent=spent)]))[0].error)


async def _late_release(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.release([Release(ref(task), spent=spent)]))[0].error)


async def _late_cancel(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    with pytest.raises(StaleClaimError):
        await cancel_claim(world.engine, ref(task), "no", spent=spent)


async def _late_step(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.record_steps([NewStep(ref(task), "a", b"1", spent=spent)]))[0].error)


async def _late_checkpoint(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.save_checkpoints([NewCheckpoint(ref(task), b"1", spent)]))[0].error)


async def _late_spawn(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    _stale((await world.engine.work.spawn([NewSpawn(ref(task), [NewTask("c")], spent=spent)]))[0].error)


LATE = (
    late_heartbeat,
    _late_complete,
    _late_fail,
    _late_release,
    _late_cancel,
    _late_step,
    _late_checkpoint,
    _late_spawn,
)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("max_attempts", [1, 5])
async def test_what_a_stale_claim_reports_is_booked_once(world: World, late: Late, max_attempts: int) -> None:
    """R-024: the difference to what it had reported, whether its task waits, runs or has ended."""
    agent = await world.agent(budget_usd=10)
    task_id = (
        (await world.dag(NewTask("code", key="a", max_attempts=max_attempts), NewTask("x"))).tasks["a"].id
    )
    task = await _lost(world, agent)
    assert task.id == task_id

    for _ in range(2):
        await late(world, agent, task, Spent(Decimal("0.8"), 10, 3))

    assert tokens(world.task(task_id)) == (Decimal("0.8"), 10, 3)
    (attempt,) = world.attempts(task_id)
    assert tokens(attempt) == (Decimal("0.8"), 10, 3)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("0.8")
    assert world.dag_row(world.task(task_id)["dag_id"])["spent_usd"] == Decimal("0.8")
    if max_attempts == 1:
        (letter,) = (await world.engine.dead_letters.find()).items
        assert letter.total_cost_usd == Decimal("0.8")


@pytest.mark.parametrize("late", [late_heartbeat, _late_fail, _late_release])
async def test_what_is_reported_after_the_completion_is_booked_once(world: World, late: Late) -> None:
    agent = await world.agent()
    task_id = await world.one(retry=AT_ONCE)
    await world.fail(await world.take(agent), spent=cost("2"))
    await world.engine.maintenance.promote_due(10)
    task = await world.take(agent)
    await world.complete(task, spent="0.5")

    for _ in range(2):
        await late(world, agent, task, Spent(Decimal("0.8"), 10, 3))

    assert tokens(world.task(task_id)) == (Decimal("2.8"), 10, 3)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("2.8")


async def test_two_lost_claims_of_one_task_report_in_one_heartbeat(world: World) -> None:
    """Two agents of one process lost it, one after the other."""
    agent = await world.agent()
    task_id = await world.one(retry=AT_ONCE, max_attempts=9)
    lost = []
    for _ in range(2):
        lost.append(await _lost(world, agent, "0.1"))
        await world.engine.maintenance.promote_due(10)
    claims = [ref(task) for task in lost]

    await world.heartbeat(agent.id, agent.incarnation, claims, spent=Spent(Decimal("1.1"), 5))

    assert tokens(world.task(task_id)) == (Decimal("2.2"), 10, 0)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("2.2")


async def test_a_crash_costs_a_share_of_the_reservation(world: World) -> None:
    """The larger of it and of what was reported; what the lost process reports later is the difference."""
    await world.engine.limits.patch({"crash_cost_fraction": 0.5})
    agent = await world.agent(budget_usd=10)
    await world.submit(*(NewTask("code", max_cost_usd=2, retry=AT_ONCE) for _ in range(2)))
    little, much = await world.claim(agent, 2)
    await report(world, agent, little, "0.3")
    await report(world, agent, much, "1.3")
    await expire(world, agent, little)

    assert [world.task(task.id)["cost_usd"] for task in (little, much)] == [1, Decimal("1.3")]
    assert {row["error"] for row in world.attempts(little.id)} == {SystemReason.HEARTBEAT_TIMEOUT.value}
    await _late_fail(world, agent, little, cost("1.25"))
    assert world.task(little.id)["cost_usd"] == Decimal("1.25")
    assert world.agent_row(agent)["spent_usd"] == Decimal("2.55")


async def _checked_late_heartbeat(world: World, agent: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    await world.heartbeat(agent.id, agent.incarnation, [ref(task)], spent=spent)


async def _checked_late_release(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    (moved,) = await world.engine.work.release([Release(ref(task), spent=spent)])
    assert moved.error is not None


async def _checked_late_completion(world: World, _: AgentInfo, task: ClaimedTask, spent: Spent) -> None:
    await world.engine.work.complete([Completion(ref(task), output=b"null", spent=spent)])


@pytest.mark.parametrize("late", [_checked_late_heartbeat, _checked_late_release, _checked_late_completion])
@pytest.mark.parametrize("passed", [True, False])
async def test_what_is_reported_while_an_output_is_checked_is_booked_once(
    world: World, late: Late, passed: bool
) -> None:
    """R-024: beside what its gates cost, before and after the verdict."""

    async def judged(_: Any, __: CandidateOutput) -> bool:
        raise AssertionError("the test is the validator")

    world.engine.checks.register("judged", judged)
    agent = await world.agent(budget_usd=10)
    task_id = await world.one(output=OutputContract(validation="judged"), max_attempts=1)
    task = await world.take(agent)
    assert await world.complete(task, spent="0.5") is Status.VALIDATING
    (output,) = await world.engine.gates.take(limit=1, lease_sec=60)

    await world.engine.gates.postpone(output, "away", delay_sec=0, cost_usd=Decimal(3))
    for _ in range(2):
        await late(world, agent, task, Spent(Decimal("0.8"), 10, 3))
    assert tokens(world.task(task_id)) == (Decimal("3.8"), 10, 3)
    (output,) = await world.engine.gates.take(limit=1, lease_sec=60)
    await world.engine.gates.settle(output, Verdict(passed=passed, cost_usd=Decimal(1)))
    for _ in range(2):
        await late(world, agent, task, Spent(Decimal("0.9"), 10, 3))

    assert tokens(world.task(task_id)) == (Decimal("4.9"), 10, 3)
    (attempt,) = world.attempts(task_id)
    assert tokens(attempt) == (Decimal("4.9"), 10, 3)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("4.9")


async def _cancel_checked(world: World, task: ClaimedTask, spent: Spent) -> None:
    await cancel_claim(world.engine, ref(task), "no", spent=spent)


async def _fail_checked(world: World, task: ClaimedTask, spent: Spent) -> None:
    (moved,) = await world.engine.work.fail([Failure(ref(task), "x", spent=spent)])
    assert moved.unwrap() is Status.DEAD_LETTERED


@pytest.mark.parametrize("end", [_cancel_checked, _fail_checked])
@pytest.mark.parametrize("reported", [None, "0.7"])
async def test_an_attempt_that_ends_while_its_output_is_checked_is_booked_once(
    world: World, end: Callable[[World, ClaimedTask, Spent], Awaitable[None]], reported: str | None
) -> None:
    """R-024: the process died before it checked the output; its cost was settled when it was handed in."""
    agent = await world.agent(budget_usd=10)
    output = OutputContract(validation="regex", validation_schema="1")
    task_id = await world.one(output=output, max_attempts=1)
    task = await world.take(agent)
    await report(world, agent, task, Spent(Decimal("0.2"), 4))
    await without_gates(world.engine).complete([Completion(ref(task), b"1", spent=cost("0.5"))])
    assert world.status(task_id) == "VALIDATING"
    if reported is not None:
        await world.heartbeat(agent.id, 1, [ref(task)], spent=cost(reported))

    await end(world, task, Spent(Decimal("0.8"), 10, 3))

    assert tokens(world.task(task_id)) == (Decimal("0.8"), 10, 3)
    (attempt,) = world.attempts(task_id)
    assert tokens(attempt) == (Decimal("0.8"), 10, 3)
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("0.8")
    if end is _fail_checked:
        (letter,) = (await world.engine.dead_letters.find()).items
        assert letter.total_cost_usd == Decimal("0.8")


async def test_a_process_that_is_lost_while_its_output_is_checked_costs_what_it_said(world: World) -> None:
    """R-024: a crash costs a share of the reservation only where the cost isn't known."""
    await world.engine.limits.patch({"crash_cost_fraction": 0.5})
    agent = await world.agent(budget_usd=10)
    task_id = await world.one(
        output=OutputContract(validation="regex", validation_schema="1"), max_cost_usd=4, max_attempts=1
    )
    task = await world.take(agent)
    done = Completion(ref(task), output=b"1", spent=cost("0.5"))
    await without_gates(world.engine).complete([done])
    assert world.status(task_id) == "VALIDATING"

    await expire(world, agent, task)

    (attempt,) = world.attempts(task_id)
    assert world.task(task_id)["cost_usd"] == attempt["cost_usd"] == Decimal("0.5")
    assert world.agent_row(agent)["spent_usd"] == await spent_today(world) == Decimal("0.5")
