"""Ending well: outputs, costs, dependents, and who is too late for it."""

from decimal import Decimal

import pytest

from lineshaft.errors import (
    InvalidTransitionError,
    NotFoundError,
    StaleClaimError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types.work import ClaimRef, Completion, Failure, Release, Spent
from tests.world import (
    World,
    cost,
    only,
    record_step,
    ref,
    release_claims,
    save_checkpoint,
    spawn_children,
    without_gates,
)

ZERO = Decimal(0)


async def test_completion_records_the_outcome(world: World) -> None:
    """R-090, R-099, R-032, R-024, R-022: end row, events, money, slot."""
    agent = await world.agent(budget_usd=1)
    task_id = await world.one(max_cost_usd=0.5, model_preferences=["x"])
    task = await world.take(agent)
    world.age(seconds=10)
    item = Completion(
        ref(task),
        output=b'{"a": 1}',
        artifacts=b'["x"]',
        decision_report=b'{"why": "so"}',
        spent=Spent(Decimal("0.25"), 100, 20),
    )

    assert only(await world.engine.work.complete([item])).unwrap() is Status.COMPLETED

    end = world.end(task_id)
    assert (end["output"], end["artifacts"], end["decision_report"]) == ({"a": 1}, ["x"], {"why": "so"})
    assert (end["cost_usd"], end["tokens_input"], end["tokens_output"]) == (Decimal("0.25"), 100, 20)
    assert (end["agent_id"], end["model"], end["epoch"], end["attempts"]) == (agent.id, "x", 1, 0)
    assert end["ended_at"] == world.clock.now()
    assert world.kinds(task_id)[-2:] == ["task.validating", "task.completed"]
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"], row["spent_usd"]) == (0, ZERO, Decimal("0.25"))


async def test_completion_unblocks_dependents(world: World) -> None:
    """R-092, R-054, F-22: those for which it was the last one, and only if they still wait."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("a", key="a"),
        NewTask("b", key="b"),
        NewTask("c", key="c", depends_on=["a"]),
        NewTask("d", key="d", depends_on=["a", "b"]),
        NewTask("e", key="e", depends_on=["a"]),
    )
    ids = {key: found.id for key, found in dag.tasks.items()}
    await world.engine.cancel.cancel(ids["e"], "no")
    a = await world.take(agent, types=["a"])
    world.age(minutes=1)

    await world.complete(a)

    assert world.statuses([ids[key] for key in "bcde"]) == ["READY", "READY", "PENDING", "CANCELLED"]
    assert world.live(ids["c"])["ready_at"] == world.clock.now()
    assert world.kinds(ids["c"])[-1] == "task.ready"
    assert world.task(ids["d"])["blocked_by"] == [ids["b"]]


async def test_many_complete_in_one_call(world: World) -> None:
    """R-246: a whole DAG layer at once, each answered, the DAG and its dependents moved once."""
    agent = await world.agent()
    dag = await world.dag(
        *(NewTask("code", key=f"{n}") for n in range(20)),
        NewTask("last", key="last", depends_on=[f"{n}" for n in range(20)]),
    )
    tasks = await world.claim(agent, 20)

    moved = await world.engine.work.complete([world.completion(task, task.id) for task in tasks])

    assert [answer.status for answer in moved] == [Status.COMPLETED] * 20
    assert [answer.id for answer in moved] == [task.id for task in tasks]
    assert world.status(dag.tasks["last"].id) == "READY"
    await world.complete(await world.take(agent))
    assert world.dag_row(dag.id)["status"] == "completed"


async def test_too_dear_a_completion_is_a_dead_letter(world: World) -> None:
    """R-235: over `max_cost_usd`, not retried; what was spent is booked. Exactly the maximum is allowed."""
    agent = await world.agent(budget_usd=1)
    dag = await world.dag(NewTask("code", max_cost_usd=0.1), NewTask("code", max_cost_usd=0.1))
    over, exact = await world.claim(agent, 2)

    assert await world.complete(over, {"a": 1}, spent="0.100001") is Status.DEAD_LETTERED
    assert await world.complete(exact, {"a": 1}, spent="0.1") is Status.COMPLETED

    end = world.end(over.id)
    assert (end["category"], end["attempts"], end["output"]) == ("budget_exceeded", 1, None)
    assert world.agent_row(agent)["spent_usd"] == world.dag_row(dag.id)["spent_usd"] == Decimal("0.200001")
    assert world.kinds(over.id)[-2:] == ["task.failed", "task.dead_lettered"]
    assert await world.complete(over, {"a": 1}, spent="0.100001") is Status.DEAD_LETTERED


async def test_costs_that_heartbeats_told_count_too(world: World) -> None:
    """R-235, R-024: an agent that doesn't say what it cost is taken at its heartbeats' word."""
    agent = await world.agent()
    await world.one(max_cost_usd=0.1)
    task = await world.take(agent)
    await world.heartbeat(agent.id, 1, [ref(task)], spent=cost("0.2"))

    assert await world.complete(task) is Status.DEAD_LETTERED
    assert world.end(task.id)["cost_usd"] == Decimal("0.2")


@pytest.mark.parametrize(
    "output",
    [
        OutputContract(validation="regex", validation_schema="^a"),
        OutputContract(require_decision_report=True),
    ],
    ids=["gate", "report"],
)
async def test_an_output_that_must_be_checked_is_handed_in(world: World, output: OutputContract) -> None:
    """R-032, R-093, R-095: VALIDATING, with the output safe beside it; asking again doesn't let it pass."""
    complete = without_gates(world.engine).complete
    agent = await world.agent()
    await world.one(output=output, max_cost_usd=1)
    task = await world.take(agent)

    for _ in range(2):
        (moved,) = await complete([world.completion(task, "abc", "0.3")])
        assert moved.status is Status.VALIDATING

    live = world.live(task.id)
    assert (live["status"], live["agent_id"], live["attempt_cost_usd"]) == (
        "VALIDATING",
        agent.id,
        Decimal("0.3"),
    )
    (attempt,) = world.attempts(task.id)
    assert (attempt["outcome"], attempt["number"], attempt["cost_usd"]) == ("validating", 1, Decimal("0.3"))
    assert attempt["output"] == {"data": "abc", "artifacts": None, "decision_report": None}
    assert world.kinds(task.id).count("task.validating") == 1
    assert world.kinds(task.id)[-1] == "task.validating"


async def test_a_checked_output_that_is_too_dear_is_refused_at_once(world: World) -> None:
    """R-235: no gate needs to look at it."""
    agent = await world.agent()
    await world.one(output=OutputContract(validation="human"), max_cost_usd=1)

    assert await world.complete(await world.take(agent), "abc", spent="1.3") is Status.DEAD_LETTERED


async def test_a_failed_check_is_a_failed_attempt(world: World) -> None:
    """R-033, R-098: the attempt that was being validated is the one that failed."""
    agent = await world.agent()
    await world.one(output=OutputContract(validation="regex", validation_schema="^a"), max_attempts=1)
    task = await world.take(agent)
    await without_gates(world.engine).complete([world.completion(task, "xyz", "0.3")])

    moved = await world.fail(task, "does not match", category="validation", spent=cost("0.3"))

    assert moved is Status.DEAD_LETTERED
    (attempt,) = world.attempts(task.id)
    assert (attempt["outcome"], attempt["category"]) == ("failed", "invalid_output")
    assert attempt["output"]["data"] == "xyz"
    assert world.end(task.id)["cost_usd"] == Decimal("0.3")


async def test_the_winning_call_again_answers_the_same(world: World) -> None:
    """R-100: its first answer was lost on the way."""
    agent = await world.agent()
    await world.submit(*[NewTask("code")] * 5)
    done, dead, retried, released, snoozed = await world.claim(agent, 5)
    before = [
        await world.complete(done, 1, spent="0.5"),
        await world.fail(dead, category="auth_failure"),
        await world.fail(retried),
        await world.release(released),
        await world.release(snoozed, 60),
    ]
    assert before == ["COMPLETED", "DEAD_LETTERED", "RETRYING", "READY", "PENDING"]
    state = world.everything()

    again = [
        await world.complete(done, 1, spent="0.5"),
        await world.fail(dead, category="auth_failure"),
        await world.fail(retried),
        await world.release(released),
        await world.release(snoozed, 60),
    ]

    assert again == before
    assert world.everything() == state


async def test_a_claim_named_twice_in_one_call_counts_once(world: World) -> None:
    """F-20: slots and money are given back once."""
    agent = await world.agent(budget_usd=10)
    await world.submit(*[NewTask("code", max_cost_usd=1)] * 4)
    one, two, three, four = await world.claim(agent, 4)
    work = world.engine.work

    done = await work.complete([world.completion(one), world.completion(one)])
    failed = await work.fail([Failure(ref(two), "x"), Failure(ref(two), "x")])
    released = await work.release([Release(ref(three)), Release(ref(three))])

    assert [answer.status for answer in done] == ["COMPLETED"] * 2
    assert [answer.status for answer in failed] == ["RETRYING"] * 2
    assert [answer.status for answer in released] == ["READY"] * 2
    assert world.live(two.id)["attempts"] == 1
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"]) == (1, 1)
    assert world.status(four.id) == "RUNNING"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("how", ["complete", "fail", "release"])
async def test_an_old_claim_and_a_new_one_of_a_task_in_one_call(world: World, how: str, order: int) -> None:
    """An agent lost a task while the database was away, claimed it again, and completes both claims."""
    agent = await world.agent()
    await world.one()
    old = await world.take(agent)
    await world.release(old)
    new = await world.take(agent)
    claims = [old, new][::order]
    engine = world.engine

    match how:
        case "complete":
            given = [world.completion(task, task.epoch, f"0.0{task.epoch}") for task in claims]
            answers = await engine.work.complete(given)
        case "fail":
            answers = await engine.work.fail([Failure(ref(task), "x") for task in claims])
        case _:
            answers = await release_claims(engine, [ref(task) for task in claims])

    stale, moved = answers[::order]
    assert isinstance(stale.error, StaleClaimError)
    assert moved.error is None
    if how == "complete":
        # The stale claim changes nothing, but its money is spent.
        assert (await engine.read.task(new.id)).cost_usd == Decimal("0.03")


@pytest.mark.parametrize(
    "how", ["reassigned", "retrying", "released", "snoozed", "cancelled", "dead", "waiting"]
)
async def test_a_stale_holder_changes_nothing(world: World, how: str) -> None:
    """R-100, R-175, F-30: refused, and its output is kept for inspection."""
    agent, other = await world.agent(), await world.agent()
    await world.one()
    stale = await world.take(agent)
    match how:
        case "reassigned":
            await world.release(stale)
            await world.take(other)
        case "retrying":
            await world.fail(stale)
        case "released":
            await world.release(stale)
        case "snoozed":
            await world.release(stale, 5)
        case "cancelled":
            await world.engine.cancel.cancel(stale.id, "no")
        case "dead":
            await world.fail(stale, category="auth_failure")
        case _:
            await spawn_children(world.engine, ref(stale), [NewTask("child")], wait=True)
    before = world.everything()

    moved = only(await world.engine.work.complete([world.completion(stale, {"late": True})]))

    assert isinstance(moved.error, StaleClaimError)
    assert world.everything() == before
    late = world.row("SELECT * FROM lineshaft.events WHERE kind = 'task.late_result'")
    assert (late["task_id"], late["epoch"], late["data"]) == (stale.id, 1, {"output": {"late": True}})
    with pytest.raises(StaleClaimError):
        await record_step(world.engine, ref(stale), "s", b"1")
    with pytest.raises(StaleClaimError):
        await save_checkpoint(world.engine, ref(stale), b"1")
    with pytest.raises((StaleClaimError, InvalidTransitionError)):
        await spawn_children(world.engine, ref(stale), [NewTask("child")])
    assert world.everything() == before


async def test_what_was_never_started_can_not_complete(world: World) -> None:
    """R-039, and the HTTP contract: 409 invalid_transition."""
    agent = await world.agent()
    await world.one()
    (task,) = await world.claim(agent, start=False)

    with pytest.raises(InvalidTransitionError):
        await world.complete(task)


async def test_a_task_that_does_not_exist(world: World) -> None:
    """R-039, F-15."""
    gone = ClaimRef("task_nope", 1)
    work, engine = world.engine.work, world.engine
    for moved in (
        await work.start([gone]),
        await work.complete([Completion(gone)]),
        await work.fail([Failure(gone, "x")]),
        await work.release([Release(gone)]),
    ):
        assert isinstance(only(moved).error, NotFoundError)
    with pytest.raises(NotFoundError):
        await engine.cancel.cancel("task_nope", "no")
    with pytest.raises(NotFoundError):
        await engine.revive.retry("task_nope")
    with pytest.raises(NotFoundError):
        await spawn_children(world.engine, gone, [NewTask("x")])
    with pytest.raises(NotFoundError):
        await engine.dependencies.add("task_nope", [])
