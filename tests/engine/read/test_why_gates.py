"""Why a task with an output has not ended, and what waits for a person."""

from typing import Any

import pytest

from lineshaft.checks.verdict import CandidateOutput
from lineshaft.errors import CapabilityMismatchError
from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, NewTask, OutputContract
from tests.world import World, without_gates


async def slow(_: Any, __: CandidateOutput) -> bool:
    return True


async def reason(world: World, task_id: str) -> tuple[str, str]:
    """The one there is."""
    why = await world.engine.read.why(task_id)
    assert not why.runnable
    (found,) = why.reasons
    return found.code.value, found.detail


async def at_gates(world: World, *methods: str) -> str:
    contract = OutputContract(validation=tuple(Gate(method) for method in methods))
    task_id = await world.one(output=contract)
    assert await world.complete(await world.take()) is Status.VALIDATING
    return task_id


async def test_an_output_that_a_validator_has_to_check(world: World) -> None:
    world.engine.checks.register("slow", slow)
    task_id = await at_gates(world, "slow", "human")

    code, detail = await reason(world, task_id)

    assert code == "waiting_gate"
    assert "gate 1 of 2, 'slow', since" in detail
    assert "No validator has started" in detail


async def test_a_gate_that_comes_to_no_verdict(world: World) -> None:
    """Why not, and when it is tried again."""
    world.engine.checks.register("slow", slow)
    task_id = await at_gates(world, "slow")
    (output,) = await world.engine.gates.take(limit=1, lease_sec=60)
    assert "have started 1 times; without" in (await reason(world, task_id))[1]

    await world.engine.gates.postpone(output, "the judge\nis away.", delay_sec=5)

    code, detail = await reason(world, task_id)
    assert code == "waiting_gate"
    assert "(last time: the judge is away)" in detail
    world.age(seconds=6)
    assert "which is past: a validator continues" in (await reason(world, task_id))[1]


async def test_an_output_that_waits_for_a_person(world: World) -> None:
    task_id = await at_gates(world, "human")

    code, detail = await reason(world, task_id)

    assert code == "waiting_approval"
    assert "gate 1 of 1, 'human', since" in detail
    assert "Approve or reject it" in detail


async def test_a_process_that_died_while_it_looked(world: World) -> None:
    """Its agent still holds the task; its lease brings it back."""
    task_id = await world.one(output=OutputContract(validation="regex", validation_schema="x"))
    task = await world.take()
    await without_gates(world.engine).complete([world.completion(task, "x")])

    assert await reason(world, task_id) == (
        "waiting_gate",
        "Its output was just submitted and is being checked.",
    )


async def test_a_task_that_only_a_person_can_do(world: World) -> None:
    """No agent has to be registered for it; a capable one changes the answer."""
    task_id = await world.one(required_capabilities=["human"])
    ann = await world.agent()

    code, detail = await reason(world, task_id)

    assert code == "waiting_approval"
    assert "needs the capability 'human'" in detail
    with pytest.raises(CapabilityMismatchError, match="Waits for a person"):
        await world.engine.claims.claim_task(ann.id, ann.incarnation, task_id)
    await world.agent(capabilities=["human"])
    assert (await world.engine.read.why(task_id)).runnable


async def test_what_waits_for_it_says_so(world: World) -> None:
    dag = await world.dag(
        NewTask("a", key="a", output=OutputContract(validation="human")),
        NewTask("b", key="b", depends_on=["a"]),
    )
    await world.complete(await world.take())

    code, detail = await reason(world, dag.tasks["b"].id)

    assert code == "blocked_by_dependency"
    assert "(VALIDATING)" in detail
