"""Outputs that wait for gates which run elsewhere: they hold nothing, and a validator may die."""

from decimal import Decimal
from typing import Any

import pytest

from lineshaft.checks.verdict import CandidateOutput, Verdict, rejected
from lineshaft.errors import InvalidTransitionError
from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, NewTask, RetrySpec
from lineshaft.types import ApprovalDecision
from lineshaft.types.work import Cancellation, Failure, Moved, Release
from tests.engine.review.gate_helpers import ZERO, gates, hand_in, slow, taken
from tests.gate_verdicts import gated_attempts
from tests.world import World, cost, only, ref, without_gates


async def test_a_gate_that_runs_elsewhere_holds_nothing(world: World) -> None:
    """R-072: no slot, no lock, no lease, no reservation; what the attempt cost is booked."""
    world.engine.checks.register("slow", slow)
    agent = await world.agent(budget_usd=5, max_concurrent_tasks=1)
    contract = gates(Gate("regex", "."), Gate("slow"))
    dag = await world.dag(
        NewTask("code", output=contract, max_cost_usd=1, lock_key="doc:1"),
        NewTask("next", lock_key="doc:1", max_cost_usd=1),
        ceiling=1.5,
    )
    task = await world.take(agent)

    assert await hand_in(world, task, "x", cost_usd=Decimal("0.25"), tokens_input=7) is Status.VALIDATING

    live = world.live(task.id)
    assert (live["agent_id"], live["lease_until"], live["limit_at"], live["reserved_usd"]) == (
        None,
        None,
        None,
        ZERO,
    )
    assert (live["cost_usd"], live["attempt_cost_usd"], live["tokens_input"]) == (Decimal("0.25"), ZERO, 7)
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"], row["spent_usd"]) == (0, ZERO, Decimal("0.25"))
    row = world.dag_row(dag.id)
    assert (row["reserved_usd"], row["spent_usd"]) == (ZERO, Decimal("0.25"))
    assert (await world.take(agent)).type == "next", "the slot, the lock and the DAG's money are free"
    world.age(days=30)
    assert await world.engine.maintenance.reap(10) == {"heartbeat_timeout": 1}, "only the other one"
    assert world.status(task.id) == "VALIDATING"


async def test_a_verdict_moves_it_on(world: World) -> None:
    """R-090: to the next gates, those that answer at once included, and to COMPLETED."""
    world.engine.checks.register("slow", slow)
    agent = await world.agent()
    contract = gates(Gate("slow", 1), Gate("regex", "."), Gate("slow", 2), Gate("regex", "a"))
    dag = await world.dag(NewTask("a", key="a", output=contract), NewTask("b", key="b", depends_on=["a"]))
    task = await world.take(agent)
    await hand_in(world, task, "abc", cost_usd=Decimal("0.5"), tokens_input=9)
    passed = Verdict(passed=True)

    first = await taken(world)
    assert (first.gate_no, first.gate, first.gate_runs) == (0, "slow", 1)
    assert (await world.engine.gates.settle(first, passed)).status is Status.VALIDATING
    second = await taken(world)
    assert second.gate_no == 2
    assert (await world.engine.gates.settle(second, passed)).status is Status.COMPLETED

    end = world.end(task.id)
    assert (end["output"], end["agent_id"], end["cost_usd"], end["tokens_input"]) == (
        "abc",
        agent.id,
        Decimal("0.5"),
        9,
    )
    assert world.status(dag.tasks["b"].id) == "READY"
    (attempt,) = await gated_attempts(world.engine, task.id)
    assert [(v.gate, v.method, v.passed) for v in attempt.verdicts] == [
        (0, "slow", True),
        (1, "regex", True),
        (2, "slow", True),
        (3, "regex", True),
    ]
    assert world.dag_row(dag.id)["spent_usd"] == Decimal("0.5")


async def test_a_refusal_elsewhere_is_a_failed_attempt_too(world: World) -> None:
    """R-098; F-26: and one of the agent whose output it was."""
    world.engine.checks.register("slow", slow)
    one, two = await world.agent("ann"), await world.agent("bob")
    task_id = await world.one(
        output=gates(Gate("slow")), max_attempts=9, retry=RetrySpec(strategy="immediate")
    )
    moved = None
    for agent in (one, one, two):
        await hand_in(world, await world.take(agent), "x", cost_usd=Decimal("0.1"), tokens_input=2)
        moved = await world.engine.gates.settle(await taken(world), rejected("ugly", "slow"))
        await world.engine.maintenance.promote_due(10)

    assert moved is not None
    assert moved.status is Status.DEAD_LETTERED, "two agents, three attempts: a poison pill"
    end = world.end(task_id)
    assert (end["reason"], end["category"]) == ("slow: ugly; slow", "invalid_output")
    assert (end["cost_usd"], end["tokens_input"]) == (Decimal("0.3"), 6)
    assert [a["agent_id"] for a in world.attempts(task_id)] == ["ann", "ann", "bob"]
    assert [a["cost_usd"] for a in world.attempts(task_id)] == [Decimal("0.1")] * 3
    assert world.row("SELECT poison_pill FROM lineshaft.dead_letter")["poison_pill"]


@pytest.mark.parametrize("passes", [True, False])
async def test_what_a_gate_costs_is_booked(world: World, passes: bool) -> None:
    """R-097, R-230: on the task, its DAG, and the agent whose output was judged; the verdict is recorded."""
    world.engine.checks.register("slow", slow)
    agent = await world.agent(budget_usd=5)
    dag = await world.dag(NewTask("code", output=gates(Gate("slow")), max_attempts=1), NewTask("other"))
    task = await world.take(agent, types=["code"])
    await hand_in(world, task, "x", cost_usd=Decimal("0.25"))
    output = await taken(world)
    await world.engine.gates.postpone(output, "mumbled", delay_sec=0, cost_usd=Decimal("0.01"))

    await world.engine.gates.settle(
        await taken(world), Verdict(passes, ("meh",), 0.5, Decimal("0.0200004"), "gpt-x")
    )

    total = Decimal("0.28")
    assert world.end(task.id)["cost_usd"] == total
    assert (world.agent_row(agent)["spent_usd"], world.dag_row(dag.id)["spent_usd"]) == (total, total)
    assert world.attempts(task.id)[0]["cost_usd"] == total
    (attempt,) = await gated_attempts(world.engine, task.id)
    (verdict,) = attempt.verdicts
    assert (verdict.score, verdict.model, verdict.reasons) == (0.5, "gpt-x", ["meh"])
    assert verdict.cost_usd == 0.0200004


async def test_what_gates_cost_counts_against_the_total_limit(world: World) -> None:
    """R-238."""
    world.engine.checks.register("slow", slow)
    agent = await world.agent()
    await world.one(output=gates(Gate("slow")), max_total_cost_usd=1, max_attempts=9)
    task = await world.take(agent)
    await hand_in(world, task, "x", cost_usd=Decimal("0.6"))

    await world.engine.gates.settle(await taken(world), Verdict(False, ("no",), cost_usd=Decimal("0.4")))

    assert world.status(task.id) == "DEAD_LETTERED"


async def test_an_unknown_gate_waits_for_a_server_that_can_run_it(world: World) -> None:
    """Registered in the process that submitted and in a validator somewhere, not in this one."""
    world.engine.checks.register("theirs", slow)
    agent = await world.agent()
    await world.one(output=gates(Gate("theirs")))
    del world.engine.checks._methods["theirs"]
    task = await world.take(agent)

    assert await hand_in(world, task, "x") is Status.VALIDATING

    assert await world.engine.gates.take(limit=5, lease_sec=60) == []
    world.engine.checks.register("theirs", slow)
    assert (await taken(world)).id == task.id


async def test_a_check_of_ones_own_that_breaks_is_left_to_a_validator(world: World) -> None:
    def breaks(_: Any, __: CandidateOutput) -> bool:
        raise RuntimeError("oops")

    world.engine.checks.register("mine", breaks)
    agent = await world.agent()
    await world.one(output=gates(Gate("mine")))

    assert await hand_in(world, await world.take(agent), "x") is Status.VALIDATING

    assert (await taken(world)).gate == "mine"


# Leases of validators.


async def test_what_one_validator_has_no_other_gets_until_its_lease_is_over(world: World) -> None:
    """A validator that dies is replaced, and the attempt doesn't fail."""
    world.engine.checks.register("slow", slow)
    agent = await world.agent()
    task_id = await world.one(output=gates(Gate("slow")))
    await hand_in(world, await world.take(agent), "x")
    gate_keeping = world.engine.gates

    first = await taken(world, lease_sec=60)
    assert await gate_keeping.take(limit=5, lease_sec=60) == []
    world.age(seconds=59)
    assert await gate_keeping.renew([first], lease_sec=60) == {task_id}
    world.age(seconds=59)
    assert await gate_keeping.take(limit=5, lease_sec=60) == []
    world.age(seconds=2)
    second = await taken(world, lease_sec=60)

    assert (first.gate_runs, second.gate_runs) == (1, 2)
    assert await gate_keeping.renew([first], lease_sec=60) == set()
    assert not await gate_keeping.postpone(first, "too late", delay_sec=1)
    assert world.live(task_id)["attempts"] == 0
    # It is the same output, so the first verdict counts.
    assert (await gate_keeping.settle(first, Verdict(passed=True))).status is Status.COMPLETED
    assert (await gate_keeping.settle(second, rejected("no"))).status is Status.COMPLETED
    assert world.kinds(task_id).count("task.completed") == 1


async def test_a_verdict_for_a_gate_that_is_behind_changes_nothing(world: World) -> None:
    world.engine.checks.register("slow", slow)
    agent = await world.agent()
    await world.one(output=gates(Gate("slow"), Gate("slow")))
    task = await world.take(agent)
    await hand_in(world, task, "x")
    output = await taken(world)
    await world.engine.gates.settle(output, Verdict(passed=True))
    before = world.everything()

    assert (await world.engine.gates.settle(output, rejected("no"))).status is Status.VALIDATING

    assert world.everything() == before


async def test_only_people_and_gates_change_what_was_handed_in(world: World) -> None:
    """R-093: its holder can't take it back, alone or in a batch; what it reports as spent is booked."""
    world.engine.checks.register("slow", slow)
    agent = await world.agent(budget_usd=10)
    ids = await world.submit(
        NewTask("human", output=gates(Gate("human"))), NewTask("slow", output=gates(Gate("slow")))
    )
    tasks = [await world.take(agent, types=[type_]) for type_ in ("human", "slow")]
    for task in tasks:
        assert await hand_in(world, task, "x", cost_usd=Decimal("0.5")) is Status.VALIDATING
    before = [(world.live(name), await gated_attempts(world.engine, name)) for name in ids]
    work, refs = world.engine.work, [ref(task) for task in tasks]
    await world.one("other")
    running = ref(await world.take(agent, types=["other"]))

    refused: list[Moved] = []
    for claim in refs:
        refused += await work.fail([Failure(claim, "sorry")])
        refused += await work.fail([Failure(claim, "429", "rate_limit")])
        refused += await work.release([Release(claim)])
        refused += await work.release([Release(claim, 60)])
        refused += await work.cancel([Cancellation(claim, "no")])
    refused += await work.release([Release(claim) for claim in refs])
    refused += await work.cancel([Cancellation(claim, "no") for claim in refs])
    *batch, failed = await work.fail([Failure(claim, "sorry") for claim in (*refs, running)])
    assert failed.status is Status.RETRYING, "the batch fails what is held"
    for moved in (*refused, *batch):
        assert isinstance(moved.error, InvalidTransitionError)
        assert "handed in" in str(moved.error)
    assert [(world.live(name), await gated_attempts(world.engine, name)) for name in ids] == before

    for more in ("0.7", "0.7", "0.6"):
        await work.fail([Failure(claim, "sorry", spent=cost(more)) for claim in refs])
        await work.cancel([Cancellation(claim, "no", spent=cost(more)) for claim in refs])
    assert [world.task(name)["cost_usd"] for name in ids] == [Decimal("0.7")] * 2
    assert world.agent_row(agent)["spent_usd"] == Decimal("1.4")

    await world.engine.approvals.decide(ids[0], ApprovalDecision(approve=True, reviewer="ann"))
    await world.engine.gates.settle(await taken(world), Verdict(passed=True))
    assert world.statuses(ids) == ["COMPLETED"] * 2
    assert [world.task(name)["output"] for name in ids] == ["x"] * 2


async def test_an_agent_that_checks_its_own_output_may_still_fail(world: World) -> None:
    """R-072: until an output waits elsewhere, its agent holds the task."""
    agent = await world.agent()
    await world.one(output=gates(Gate("regex", "x")))
    task = await world.take(agent)
    await without_gates(world.engine).complete([world.completion(task, "x")])
    assert world.live(task.id)["agent_id"] == agent.id

    failed = only(await world.engine.work.fail([Failure(ref(task), "the check broke")]))

    assert failed.status is Status.RETRYING


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_a_verdict_after_the_end_changes_nothing(world: World, end: str) -> None:
    world.engine.checks.register("slow", slow)
    agent = await world.agent()
    await world.one(output=gates(Gate("slow")), max_attempts=1)
    task = await world.take(agent)
    await hand_in(world, task, "x", cost_usd=Decimal("0.5"), tokens_input=4)
    output = await taken(world)
    if end == "cancelled":
        await world.engine.cancel.cancel(task.id, "no")
    else:
        await world.engine.gates.settle(output, rejected("no"))
    before = world.everything()

    moved = await world.engine.gates.settle(output, Verdict(passed=True, cost_usd=Decimal(1)))

    assert moved.status is not Status.COMPLETED
    assert world.everything() == before
    ended = world.end(task.id)
    assert (ended["cost_usd"], ended["tokens_input"]) == (Decimal("0.5"), 4)
    (attempt,) = world.attempts(task.id)
    assert (attempt["outcome"], attempt["cost_usd"], attempt["tokens_input"]) == (end, Decimal("0.5"), 4)
