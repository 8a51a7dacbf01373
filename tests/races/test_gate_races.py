"""Gates: people, validators, cancellations and the reaper, all at the same output at the same moment."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import psycopg
import pytest

from lineshaft.checks.verdict import CandidateOutput, Verdict, rejected
from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.transition.complete import Completions
from lineshaft.errors import InvalidTransitionError, LineshaftError, StaleClaimError
from lineshaft.model.tasks import Gate, NewTask, OutputContract
from lineshaft.types import ApprovalDecision, NewAgent
from lineshaft.types.work import Cancellation, ClaimedTask, Completion, Failure, Moved
from tests.gate_verdicts import gated_attempts
from tests.races.helpers import LIVE_ROW, held, race, running, status, waiting
from tests.world import only, ref, without_gates

YES = ApprovalDecision(approve=True, reviewer="ann")
NO = ApprovalDecision(approve=False, reviewer="bob", note="no")
PASSED = Verdict(passed=True)


async def slow(_: Any, __: CandidateOutput) -> bool:
    return True


async def handed_in(
    engine: Engine, *gates: Gate, complete: Completions | None = None, **fields: Any
) -> ClaimedTask:
    output = OutputContract(validation=gates)
    await engine.submission.submit([NewTask("code", output=output, **fields)])
    (task,) = await running(engine)
    await (complete or engine.work).complete([Completion(ref(task), b'"x"')])
    return task


async def against(dsn: str, task_id: str, *sides: Awaitable[Any]) -> list[Any]:
    with held(dsn, LIVE_ROW, task_id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        return await race(look, holder, *sides)


def kinds(connection: psycopg.Connection, task_id: str) -> list[str]:
    query = "SELECT kind FROM lineshaft.events WHERE task_id = %s ORDER BY seq, n"
    return [kind for (kind,) in connection.execute(query, [task_id]).fetchall()]


ENDS = {"task.completed", "task.failed", "task.cancelled"}


def ends(connection: psycopg.Connection, task_id: str) -> list[str]:
    return [kind for kind in kinds(connection, task_id) if kind in ENDS]


@pytest.mark.parametrize("order", ["approve first", "cancel first"])
async def test_approving_against_cancelling(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, order: str
) -> None:
    """One of them wins, and the other gets an error."""
    one, two = engines
    task = await handed_in(one, Gate("human"))
    sides = [one.approvals.decide(task.id, YES), two.cancel.cancel(task.id, "no")]

    found = await against(dsn, task.id, *(sides if order == "approve first" else sides[::-1]))

    assert [isinstance(answer, LineshaftError) for answer in found].count(True) == 1
    assert len(ends(connection, task.id)) == 1
    assert status(connection, task.id) in {"COMPLETED", "CANCELLED"}


async def test_two_people_decide_at_once(engines: tuple[Engine, Engine], dsn: str) -> None:
    """The second one gets an error that asks it to look again."""
    one, two = engines
    task = await handed_in(one, Gate("human"), Gate("human"), max_attempts=1)

    found = await against(dsn, task.id, one.approvals.decide(task.id, YES), two.approvals.decide(task.id, NO))

    refusals = [answer for answer in found if isinstance(answer, InvalidTransitionError)]
    assert len(refusals) == 1
    assert "look at it again" in str(refusals[0])
    verdicts = (await gated_attempts(one, task.id))[0].verdicts
    assert len(verdicts) == 1


async def test_two_people_answer_one_task(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    (submitted,) = await one.submission.submit([NewTask("errand", required_capabilities=["human"])])
    answers = [
        ApprovalDecision(approve=True, reviewer=name, data=b'"%s"' % name.encode()) for name in ("ann", "bob")
    ]

    found = await against(
        dsn,
        submitted.id,
        one.approvals.decide(submitted.id, answers[0]),
        two.approvals.decide(submitted.id, answers[1]),
    )

    assert [isinstance(answer, InvalidTransitionError) for answer in found].count(True) == 1
    assert ends(connection, submitted.id) == ["task.completed"]


async def test_a_person_answers_what_an_agent_claims(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """Either of them has it, never both."""
    one, two = engines
    await one.fleet.register(NewAgent(id="person", capabilities=("human",), max_concurrent_tasks=100))
    for _ in range(20):
        (submitted,) = await one.submission.submit([NewTask("errand", required_capabilities=["human"])])

        claim, answer = await asyncio.gather(
            two.claims.claim("person", 1, start=True),
            one.approvals.decide(submitted.id, ApprovalDecision(approve=True, reviewer="ann", data=b"1")),
            return_exceptions=True,
        )

        assert not isinstance(claim, BaseException)
        assert bool(claim.tasks) is isinstance(answer, InvalidTransitionError)
        assert status(connection, submitted.id) == ("RUNNING" if claim.tasks else "COMPLETED")


@pytest.mark.parametrize("second", [PASSED, rejected("ugly")])
async def test_two_verdicts_on_one_output(
    engines: tuple[Engine, Engine],
    dsn: str,
    connection: psycopg.Connection,
    clock: MovableClock,
    second: Verdict,
) -> None:
    """A validator that was given up for dead, and the one that took over: the first to come counts."""
    one, two = engines
    for engine in engines:
        engine.checks.register("slow", slow)
    task = await handed_in(one, Gate("slow"), max_attempts=1)
    (early,) = await one.gates.take(limit=1, lease_sec=60)
    clock.advance(61)
    (late,) = await two.gates.take(limit=1, lease_sec=60)

    found = await against(dsn, task.id, one.gates.settle(early, PASSED), two.gates.settle(late, second))

    assert all(isinstance(moved, Moved) for moved in found)
    assert len(ends(connection, task.id)) == 1
    assert len((await gated_attempts(one, task.id))[0].verdicts) == 1
    # Both get its current state.
    assert {moved.status for moved in found if moved.status} == {status(connection, task.id)}


async def test_two_validators_never_get_the_same_output(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    for engine in engines:
        engine.checks.register("slow", slow)
    output = OutputContract(validation=(Gate("slow"),))
    await one.submission.submit([NewTask("code", output=output)] * 60)
    tasks = await running(one, 60)
    await one.work.complete([Completion(ref(task), b"1") for task in tasks])

    taken = await asyncio.gather(*(e.gates.take(limit=7, lease_sec=60) for _ in range(6) for e in (one, two)))

    ids = [found.id for batch in taken for found in batch]
    assert len(ids) == len(set(ids)) == 60


@pytest.mark.parametrize("first", ["check", "reaper"])
async def test_refusing_against_reaping(
    engines: tuple[Engine, Engine],
    dsn: str,
    connection: psycopg.Connection,
    clock: MovableClock,
    first: str,
) -> None:
    """R-072: the process that should look is slow, and the lease runs out: one failure, not two."""
    one, two = engines
    task = await handed_in(one, Gate("regex", "never"), complete=without_gates(one))
    clock.advance(1_000)

    with (
        held(dsn, "SELECT FROM lineshaft.attempt WHERE task_id = %s FOR UPDATE", task.id) as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        # The first one has the task's row and waits for the attempt's.
        if first == "check":
            checking = asyncio.ensure_future(one.gates.check([ref(task)]))
            await waiting(look, 1)
            assert await two.maintenance.reap(10) == {}, "the reaper leaves alone what is locked"
            holder.rollback()
            moved = (await checking)[task.id]
        else:
            reaping = asyncio.ensure_future(two.maintenance.reap(10))
            await waiting(look, 1)
            checking = asyncio.ensure_future(one.gates.check([ref(task)]))
            await waiting(look, 2)
            holder.rollback()
            assert await reaping == {"heartbeat_timeout": 1}
            moved = (await checking)[task.id]
    assert (moved.status == "RETRYING") is (first == "check")
    assert isinstance(moved.error, StaleClaimError) is (first == "reaper")
    await two.maintenance.reap(10)

    assert ends(connection, task.id) == ["task.failed"]
    assert connection.execute("SELECT attempts FROM lineshaft.task_live").fetchone() == (1,)
    assert status(connection, task.id) == "RETRYING"


@pytest.mark.parametrize("way", ["fail", "cancel"])
async def test_a_verdict_against_the_agents_own_failure(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, way: str
) -> None:
    """What was handed in can't be taken back, whoever is first."""
    one, two = engines
    for engine in engines:
        engine.checks.register("slow", slow)
    task = await handed_in(one, Gate("slow"))
    (output,) = await one.gates.take(limit=1, lease_sec=60)

    withdraw = (
        two.work.fail([Failure(ref(task), "sorry")])
        if way == "fail"
        else two.work.cancel([Cancellation(ref(task), "no")])
    )

    _, (refused,) = await against(dsn, task.id, one.gates.settle(output, PASSED), withdraw)

    assert refused.error is not None
    assert ends(connection, task.id) == ["task.completed"]


@pytest.mark.parametrize("first", ["complete", "fail"])
async def test_handing_in_against_failing(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, first: str
) -> None:
    """The first one counts: an output that waits for a person stays, a failed attempt hands nothing in."""
    one, two = engines
    await one.submission.submit([NewTask("code", output=OutputContract(validation=(Gate("human"),)))])
    (task,) = await running(one)
    completing, failing = (
        one.work.complete([Completion(ref(task), b'"x"')]),
        two.work.fail([Failure(ref(task), "sorry")]),
    )

    with held(dsn, LIVE_ROW, task.id) as holder:
        sides: list[asyncio.Future[list[Moved]]] = []
        for number, side in enumerate(
            (completing, failing) if first == "complete" else (failing, completing)
        ):
            sides.append(asyncio.ensure_future(side))
            await waiting(connection, number + 1)
        holder.rollback()
        moved, refused = [only(await side) for side in sides]

    if first == "complete":
        assert isinstance(refused.error, InvalidTransitionError)
        assert (moved.status, status(connection, task.id)) == ("VALIDATING", "VALIDATING")
    else:
        assert isinstance(refused.error, StaleClaimError)
        assert (moved.status, status(connection, task.id)) == ("RETRYING", "RETRYING")


async def test_one_completion_sent_twice_at_once(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """R-100: both are answered alike, and the checks count once."""
    one, two = engines
    await one.submission.submit([NewTask("code", output=OutputContract(validation=(Gate("regex", "x"),)))])
    (task,) = await running(one)
    item = Completion(ref(task), b'"x"')

    found = await against(dsn, task.id, one.work.complete([item]), two.work.complete([item]))

    assert [moved.status for (moved,) in found] == ["COMPLETED", "COMPLETED"]
    assert kinds(connection, task.id).count("task.validating") == 1
    assert ends(connection, task.id) == ["task.completed"]


async def test_gates_and_neighbours_in_a_dag(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """Approvals of a whole layer while others complete and cancel: no deadlock, and the DAG ends."""
    one, two = engines
    human = OutputContract(validation=(Gate("human"),))
    layer = [NewTask("code", key=f"{n}", output=human if n % 2 else None) for n in range(20)]
    dag = await one.submission.submit_dag(
        "d", [*layer, NewTask("last", key="z", depends_on=[f"{n}" for n in range(20)])]
    )
    tasks = {task.id: task for task in await running(one, 20)}
    gated = [dag.tasks[f"{n}"].id for n in range(1, 20, 2)]
    await one.work.complete([Completion(ref(tasks[name]), b"1") for name in gated])
    plain = [task for name, task in tasks.items() if name not in gated]

    await asyncio.gather(
        *(two.approvals.decide(name, YES) for name in gated),
        *(one.work.complete([Completion(ref(task), b"1")]) for task in plain),
    )

    assert status(connection, dag.tasks["z"].id) == "READY"
