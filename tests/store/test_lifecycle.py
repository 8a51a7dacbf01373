"""From the claim to the end: who may move a task, where it goes, and what moves with it."""

from decimal import Decimal
from itertools import pairwise

import pytest

from lineshaft.errors import (
    AlreadyExistsError,
    CycleError,
    DependencyNotFoundError,
    InvalidInputError,
    InvalidTransitionError,
    NotFoundError,
    StaleClaimError,
    SupersededError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract, RetrySpec
from lineshaft.store.changes import Spent
from lineshaft.store.outcomes import Beat, ClaimRef, Completion, Failure
from tests.store.world import World, cost, decoded, only, ref

ZERO = Decimal(0)


# Start and heartbeat.


async def test_start(world: World) -> None:
    """R-070, F-18: RUNNING with a lease of three heartbeats, within the execution limit."""
    agent = await world.agent(heartbeat_interval_sec=20)
    await world.one(max_duration_sec=300)
    (task,) = await world.claim(agent, start=False)
    world.age(seconds=30)

    assert only(await world.engine.lifecycle.start([ref(task)])).unwrap() is Status.RUNNING

    live = world.live(task.id)
    now = world.clock.now()
    assert live["status"] == "RUNNING"
    assert live["started_at"] == live["first_started_at"] == live["heartbeat_at"] == now
    assert (live["lease_until"] - now).total_seconds() == 60
    assert (live["limit_at"] - now).total_seconds() == 300
    assert world.kinds(task.id)[-1] == "task.started"
    again = only(await world.engine.lifecycle.start([ref(task)]))
    assert again.unwrap() is Status.RUNNING
    assert world.kinds(task.id).count("task.started") == 1


async def test_a_batch_of_claims_is_answered_one_by_one(world: World) -> None:
    """R-100: one that is stale doesn't spoil the others."""
    agent = await world.agent()
    await world.submit(*[NewTask("code")] * 2)
    one, two = await world.claim(agent, 2, start=False)
    claims = [ref(one), ClaimRef(two.id, 7), ClaimRef("nope", 1)]

    moved = await world.engine.lifecycle.start(claims)

    assert [answer.id for answer in moved] == [one.id, two.id, "nope"]
    assert moved[0].status is Status.RUNNING
    assert isinstance(moved[1].error, StaleClaimError)
    assert isinstance(moved[2].error, NotFoundError)


async def test_a_heartbeat_renews_the_lease_within_the_limit(world: World) -> None:
    """R-071, R-028, R-074: progress is kept beside it."""
    agent = await world.agent(heartbeat_interval_sec=20)
    await world.one(max_duration_sec=100)
    task = await world.take(agent)
    beat = world.engine.lifecycle.heartbeat
    world.age(seconds=30)

    answer = await beat(agent.id, agent.incarnation, [Beat(ref(task), progress=b'{"percent": 50}')])

    live = world.live(task.id)
    assert answer == {task.id: "continue"}
    assert live["progress"] == {"percent": 50}
    assert (live["lease_until"] - world.clock.now()).total_seconds() == 60
    assert world.kinds(task.id)[-1] == "task.progress"
    world.age(seconds=30)
    await beat(agent.id, agent.incarnation, [Beat(ref(task))])
    live = world.live(task.id)
    assert live["lease_until"] == live["limit_at"]
    assert live["progress"] == {"percent": 50}
    assert world.agent_row(agent)["last_heartbeat"] == world.clock.now()


async def test_what_a_task_has_cost_only_grows(world: World) -> None:
    """R-024, R-234: a heartbeat that comes late takes no money back; the end settles what was said last."""
    agent = await world.agent()
    await world.one()
    task = await world.take(agent)
    for amount in ("0.2", "0.5", "0.3"):
        await world.engine.lifecycle.heartbeat(agent.id, 1, [Beat(ref(task), spent=cost(amount))])

    assert world.live(task.id)["attempt_cost_usd"] == Decimal("0.5")
    await world.complete(task)
    assert world.end(task.id)["cost_usd"] == world.agent_row(agent)["spent_usd"] == Decimal("0.5")


async def test_a_heartbeat_tells_what_became_of_the_claim(world: World) -> None:
    """R-071, R-175: go on, stop because it was cancelled, or stop because it is another's."""
    agent, other = await world.agent(), await world.agent()
    ids = await world.submit(*(NewTask("code", priority=n) for n in range(5)))
    running, cancelled, lost, done = await world.claim(agent, 4)
    (unstarted,) = await world.claim(agent, start=False)
    await world.engine.operations.cancel(cancelled.id, "no")
    await world.release(lost)
    await world.take(other)
    await world.complete(done)

    answers = await world.engine.lifecycle.heartbeat(
        agent.id, 1, [Beat(ref(task)) for task in (running, cancelled, lost, done, unstarted)]
    )

    expected = ("continue", "cancel", "lost", "lost", "continue")
    assert answers == dict(zip(ids, expected, strict=True))
    # Only the start ends the wait for a start.
    assert world.live(unstarted.id)["lease_until"] == unstarted.lease_until
    foreign = await world.engine.lifecycle.heartbeat(other.id, 1, [Beat(ref(running))])
    assert foreign == {running.id: "lost"}


async def test_a_superseded_agent_can_not_heartbeat(world: World) -> None:
    """R-071; and one that was thought dead is active again with its next sign of life (R-080)."""
    old = await world.agent("a")
    new = await world.agent("a")
    with pytest.raises(SupersededError):
        await world.engine.lifecycle.heartbeat(old.id, old.incarnation)
    world.age(minutes=5)
    assert await world.engine.fleet.mark_offline() == ["a"]
    assert world.agent_row(new)["status"] == "offline"

    assert await world.engine.lifecycle.heartbeat(new.id, new.incarnation) == {}

    assert world.agent_row(new)["status"] == "active"


# Complete.


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

    assert only(await world.engine.lifecycle.complete([item])).unwrap() is Status.COMPLETED

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
    await world.engine.operations.cancel(ids["e"], "no")
    a = await world.take(agent, types=["a"])
    world.age(minutes=1)

    await world.complete(a)

    assert world.statuses([ids[key] for key in "bcde"]) == ["READY", "READY", "PENDING", "CANCELLED"]
    assert world.live(ids["c"])["ready_at"] == world.clock.now()
    assert world.kinds(ids["c"])[-1] == "task.ready"
    assert world.task(ids["d"])["blocked_by"] == [ids["b"]]


async def test_a_dag_completes_once(world: World) -> None:
    """R-144, U7: with the last of its tasks, cancelled ones counted."""
    agent = await world.agent()
    dag = await world.dag(*(NewTask("code", key=key) for key in "abc"))
    await world.engine.operations.cancel(dag.tasks["a"].id, "no")
    b, c = await world.claim(agent, 2)

    await world.complete(b)
    assert world.dag_row(dag.id)["status"] == "running"
    await world.complete(c)
    await world.complete(c)

    row = world.dag_row(dag.id)
    assert (row["status"], row["completed"], row["cancelled"]) == ("completed", 2, 1)
    assert row["ended_at"] == world.clock.now()
    assert world.dag_kinds(dag.id) == ["dag.created", "dag.running", "dag.completed"]


async def test_many_complete_in_one_call(world: World) -> None:
    """R-246: a whole DAG layer at once, each answered, the DAG and its dependents moved once."""
    agent = await world.agent()
    dag = await world.dag(
        *(NewTask("code", key=f"{n}") for n in range(20)),
        NewTask("last", key="last", depends_on=[f"{n}" for n in range(20)]),
    )
    tasks = await world.claim(agent, 20)

    moved = await world.engine.lifecycle.complete([world.completion(task, task.id) for task in tasks])

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
    await world.engine.lifecycle.heartbeat(agent.id, 1, [Beat(ref(task), spent=cost("0.2"))])

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
    agent = await world.agent()
    await world.one(output=output, max_cost_usd=1)
    task = await world.take(agent)

    assert await world.complete(task, "abc", spent="0.3") is Status.VALIDATING
    assert await world.complete(task, "abc", spent="0.3") is Status.VALIDATING

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
    await world.complete(task, "xyz", spent="0.3")

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
    agent = await world.agent()
    await world.submit(*[NewTask("code", max_cost_usd=1)] * 4)
    one, two, three, four = await world.claim(agent, 4)
    lifecycle = world.engine.lifecycle

    done = await lifecycle.complete([world.completion(one), world.completion(one)])
    failed = await lifecycle.fail([Failure(ref(two), "x"), Failure(ref(two), "x")])
    released = await lifecycle.release([ref(three), ref(three)])

    assert [answer.status for answer in done] == ["COMPLETED"] * 2
    assert [answer.status for answer in failed] == ["RETRYING"] * 2
    assert [answer.status for answer in released] == ["READY"] * 2
    assert world.live(two.id)["attempts"] == 1
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"]) == (1, 1)
    assert world.status(four.id) == "RUNNING"


@pytest.mark.parametrize(
    "how", ["reassigned", "retrying", "released", "snoozed", "cancelled", "dead", "waiting"]
)
async def test_a_stale_holder_changes_nothing(world: World, how: str) -> None:
    """R-100, R-175, F-30: told so, and what it wanted to hand in is kept for inspection."""
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
            await world.engine.operations.cancel(stale.id, "no")
        case "dead":
            await world.fail(stale, category="auth_failure")
        case _:
            await world.engine.operations.spawn(ref(stale), [NewTask("child")], wait=True)
    before = world.everything()

    moved = only(await world.engine.lifecycle.complete([world.completion(stale, {"late": True})]))

    assert isinstance(moved.error, StaleClaimError)
    assert world.everything() == before
    late = world.row("SELECT * FROM lineshaft.events WHERE kind = 'task.late_result'")
    assert (late["task_id"], late["epoch"], late["data"]) == (stale.id, 1, {"output": {"late": True}})
    with pytest.raises(StaleClaimError):
        await world.engine.lifecycle.save_step(ref(stale), "s", b"1")
    with pytest.raises(StaleClaimError):
        await world.engine.lifecycle.save_checkpoint(ref(stale), b"1")
    with pytest.raises((StaleClaimError, InvalidTransitionError)):
        await world.engine.operations.spawn(ref(stale), [NewTask("child")])
    assert world.everything() == before


async def test_what_was_never_started_can_not_complete(world: World) -> None:
    """R-039, and the HTTP contract: 409 invalid_transition."""
    agent = await world.agent()
    await world.one()
    (task,) = await world.claim(agent, start=False)

    with pytest.raises(InvalidTransitionError):
        await world.complete(task)


async def test_a_task_that_does_not_exist(world: World) -> None:
    """R-039."""
    gone = ClaimRef("task_nope", 1)
    lifecycle, operations = world.engine.lifecycle, world.engine.operations
    for moved in (
        await lifecycle.start([gone]),
        await lifecycle.complete([Completion(gone)]),
        await lifecycle.fail([Failure(gone, "x")]),
        await lifecycle.release([gone]),
    ):
        assert isinstance(only(moved).error, NotFoundError)
    with pytest.raises(NotFoundError):
        await operations.cancel("task_nope", "no")
    with pytest.raises(NotFoundError):
        await operations.retry("task_nope")
    with pytest.raises(NotFoundError):
        await operations.spawn(gone, [NewTask("x")])
    with pytest.raises(NotFoundError):
        await operations.add_dependencies("task_nope", [])


# Fail.


@pytest.mark.parametrize(
    ("preset", "uniform", "delays"),
    [
        ("factory", 0.5, [10, 20]),
        ("factory", 0.0, [5, 10]),
        ("factory", 0.999, [14.99, 29.98]),
        ("loki", 0.0, [60, 120]),
        ("officeplane", 0.0, [5, 25, 125]),
    ],
)
async def test_delays_by_preset(world: World, preset: str, uniform: float, delays: list[float]) -> None:
    """R-112, R-113, R-114, U2, U3, F-7: from the immutable base; then the dead letters."""
    agent = await world.agent()
    task_id = await world.one(preset=preset, output=OutputContract(require_decision_report=False))
    seen = []

    for _ in delays:
        task = await world.take(agent)
        assert await world.fail(task, uniform=lambda: uniform) is Status.RETRYING
        seen.append(round(world.waits(task_id), 6))
        assert await world.engine.operations.retry(task_id) is Status.READY
    last = await world.fail(await world.take(agent))

    assert seen == delays
    assert last is Status.DEAD_LETTERED
    assert world.end(task_id)["attempts"] == len(delays) + 1


async def test_a_failed_attempt_is_recorded(world: World) -> None:
    """R-110, R-120, R-121, R-027, R-024, U11: history, money, and nothing left in the agent's hands."""
    agent = await world.agent(budget_usd=10)
    dag = await world.dag(NewTask("code", key="a", max_cost_usd=1, model_preferences=["x"]))
    task = await world.take(agent)
    world.age(seconds=12)

    spent = Spent(Decimal("0.3"), 10, 5)
    assert await world.fail(task, "segfault", spent=spent) is Status.RETRYING

    (attempt,) = world.attempts(task.id)
    assert (attempt["epoch"], attempt["number"], attempt["outcome"]) == (1, 1, "failed")
    assert (attempt["agent_id"], attempt["model"], attempt["error"]) == (agent.id, "x", "segfault")
    assert (attempt["category"], attempt["cost_usd"], attempt["tokens_input"]) == (
        "crash",
        Decimal("0.3"),
        10,
    )
    assert (attempt["ended_at"] - attempt["started_at"]).total_seconds() == 12
    live = world.live(task.id)
    held = ("agent_id", "model", "claimed_at", "started_at", "heartbeat_at", "lease_until", "limit_at")
    assert [live[name] for name in held] == [None] * len(held)
    assert (live["attempts"], live["last_category"], live["cost_usd"]) == (1, "crash", Decimal("0.3"))
    assert live["tokens_output"] == 5
    assert world.kinds(task.id)[-2:] == ["task.failed", "task.retry_scheduled"]
    assert world.dag_row(dag.id)["spent_usd"] == world.agent_row(agent)["spent_usd"] == Decimal("0.3")


async def test_costs_add_up_over_attempts(world: World) -> None:
    """R-024, R-130: 0.12 + 0.31 + 0.08 = 0.51."""
    agent = await world.agent()
    task_id = await world.one()
    for amount in ("0.12", "0.31", "0.08"):
        await world.fail(await world.take(agent), spent=cost(amount))
        if world.status(task_id) == "RETRYING":
            await world.engine.operations.retry(task_id)

    letter = world.row("SELECT * FROM lineshaft.dead_letter")
    assert (letter["task_id"], letter["total_cost_usd"]) == (task_id, Decimal("0.51"))
    assert (letter["reviewed"], letter["resolution"], letter["epoch"]) == (False, None, 3)
    assert world.end(task_id)["cost_usd"] == Decimal("0.51")


async def test_a_rate_limit_uses_no_attempt(world: World) -> None:
    """U13, R-212, R-216: told by text or category; the provider's wait, in bounds, else doubled from 60 s."""
    agent = await world.agent()
    task_id = await world.one()
    waits = []
    for error, details in (
        ("HTTP 429 Too Many Requests", {}),
        ("slow down", {"category": "rate_limit"}),
        ("rate limit", {"retry_after_sec": 7}),
        ("rate limit", {"retry_after_sec": -7}),
        ("rate limit", {"retry_after_sec": 1e9}),
        ("429, Retry-After: 33", {}),
    ):
        task = await world.take(agent)
        assert await world.fail(task, error, uniform=lambda: 0.0, **details) is Status.RETRYING
        waits.append(world.waits(task_id))
        await world.engine.operations.retry(task_id)

    assert waits == [60, 120, 7, 0, 3_600, 33]
    live = world.live(task_id)
    assert (live["attempts"], live["rate_limits"]) == (0, 6)
    assert {attempt["outcome"] for attempt in world.attempts(task_id)} == {"rate_limited"}
    assert "task.rate_limited" in world.kinds(task_id)
    assert "task.failed" not in world.kinds(task_id)


@pytest.mark.parametrize(
    ("error", "end"), [("rate limit", "RETRYING"), ("insufficient quota", "DEAD_LETTERED")]
)
async def test_after_ten_waits_a_rate_limit_counts(world: World, error: str, end: str) -> None:
    """U13, R-217: as a failed attempt, and the waits start anew; a spent quota is a dead letter."""
    agent = await world.agent()
    task_id = await world.one()
    for n in range(10):
        assert await world.fail(await world.take(agent), error) is Status.RETRYING
        assert world.live(task_id)["rate_limits"] == n + 1
        await world.engine.operations.retry(task_id)

    assert await world.fail(await world.take(agent), error) == end

    if end == "RETRYING":
        live = world.live(task_id)
        assert (live["attempts"], live["rate_limits"]) == (1, 0)
    assert world.attempts(task_id)[-1]["outcome"] == "failed"


async def test_a_poison_pill(world: World) -> None:
    """R-136, F-26: three failures with two agents; the same agent thrice is none."""
    one, two = await world.agent(), await world.agent()
    poison = await world.one("poison", max_attempts=9)
    clumsy = await world.one("clumsy", max_attempts=9)
    for agent in (one, one, two):
        assert world.status(poison) == "READY"
        await world.fail(await world.take(agent, types=["poison"]))
        if world.status(poison) == "RETRYING":
            await world.engine.operations.retry(poison)
        await world.fail(await world.take(one, types=["clumsy"]))
        await world.engine.operations.retry(clumsy)

    assert world.statuses([poison, clumsy]) == ["DEAD_LETTERED", "READY"]
    assert world.row("SELECT * FROM lineshaft.dead_letter")["poison_pill"] is True


async def test_the_poison_flag_is_set_also_when_attempts_run_out(world: World) -> None:
    """R-136, F-26: whichever reason comes first."""
    task_id = await world.one(max_attempts=3)
    for _ in range(3):
        await world.fail(await world.take())
        if world.status(task_id) == "RETRYING":
            await world.engine.operations.retry(task_id)

    assert world.row("SELECT * FROM lineshaft.dead_letter")["poison_pill"] is True


@pytest.mark.parametrize(
    ("retry", "category", "end"),
    [
        (None, "auth_failure", "DEAD_LETTERED"),
        (None, "invalid_input", "DEAD_LETTERED"),
        (None, "timeout", "RETRYING"),
        (None, "strange", "RETRYING"),
        (RetrySpec(retry_on=("timeout",)), "strange", "DEAD_LETTERED"),
        (RetrySpec(retry_on=("auth_failure",)), "auth_failure", "RETRYING"),
        (RetrySpec(no_retry_on=("crash",)), None, "DEAD_LETTERED"),
        (RetrySpec(no_retry_on=("rate_limit",)), "rate_limit", "DEAD_LETTERED"),
    ],
)
async def test_what_is_worth_another_attempt(
    world: World, retry: RetrySpec | None, category: str | None, end: str
) -> None:
    """R-118, F-25."""
    await world.one(retry=retry)

    assert await world.fail(await world.take(), category=category) == end


async def test_strategies(world: World) -> None:
    """R-115, F-24: fixed and immediate, and a cap on what grows."""
    agent = await world.agent()
    for spec, delay in (
        (RetrySpec(strategy="fixed", initial_delay_sec=7, jitter=False), 7.0),
        (RetrySpec(strategy="immediate"), 0.0),
        (RetrySpec(initial_delay_sec=500, max_delay_sec=90), 90.0),
    ):
        task_id = await world.one(retry=spec)
        await world.fail(await world.take(agent))
        assert world.waits(task_id) == delay


async def test_fallback_models_from_the_second_failure(world: World) -> None:
    """R-117, F-28: another lane; a revived task starts with its own preferences again."""
    x, y = await world.agent(models_available=("x",)), await world.agent(models_available=("y",))
    task_id = await world.one(model_preferences=["x"], fallback_models=["y"])
    for _ in range(2):
        assert await world.claim(y) == []
        await world.fail(await world.take(x))
        await world.engine.operations.retry(task_id)

    assert await world.claim(x) == []
    task = await world.take(y)
    assert task.model == "y"
    assert await world.fail(task) is Status.DEAD_LETTERED
    await world.engine.operations.retry(task_id)
    assert await world.claim(y) == []
    assert (await world.take(x)).model == "x"


async def test_the_total_over_all_attempts(world: World) -> None:
    """R-238: reached, so no other attempt is worth trying."""
    agent = await world.agent()
    task_id = await world.one(max_total_cost_usd=0.5, max_attempts=9)
    await world.fail(await world.take(agent), spent=cost("0.3"))
    await world.engine.operations.retry(task_id)

    assert await world.fail(await world.take(agent), spent=cost("0.2")) is Status.DEAD_LETTERED
    told = world.rows("SELECT data FROM lineshaft.events WHERE kind = 'task.dead_lettered'")
    assert told[0]["data"]["because"] == "budget_exceeded"


async def test_an_error_of_any_bytes_is_recorded(world: World) -> None:
    """R-110: what a broken program writes must not keep its task from failing."""
    agent = await world.agent()
    await world.one()
    task = await world.take(agent)

    assert await world.fail(task, "a\0b\ud800" + "x" * 20_000, category="my\0own") is Status.RETRYING

    (attempt,) = world.attempts(task.id)
    assert attempt["error"].startswith("a\ufffdb?x")
    assert len(attempt["error"]) == 10_000
    assert attempt["category"] == "my\ufffdown"


async def test_a_claim_can_fail_before_it_is_started(world: World) -> None:
    """R-034."""
    agent = await world.agent()
    await world.one()
    (task,) = await world.claim(agent, start=False)

    assert await world.fail(task) is Status.RETRYING
    assert world.attempts(task.id)[0]["started_at"] is None


async def test_dependents_of_a_dead_letter_wait(world: World) -> None:
    """U6, U7, F-16, F-23: the DAG fails once nothing else can run, and lives again with a retry."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("bad", key="bad"),
        NewTask("good", key="good"),
        NewTask("last", key="last", depends_on=["bad", "good"]),
    )
    ids = {key: found.id for key, found in dag.tasks.items()}
    await world.fail(await world.take(agent, types=["bad"]), category="auth_failure")
    assert world.status(ids["last"]) == "PENDING"
    assert world.dag_row(dag.id)["status"] == "running"

    await world.complete(await world.take(agent, types=["good"]))
    row = world.dag_row(dag.id)
    assert (row["status"], row["dead_lettered"]) == ("failed", 1)
    assert row["ended_at"] == world.clock.now()

    await world.engine.operations.retry(ids["bad"])
    row = world.dag_row(dag.id)
    assert (row["status"], row["dead_lettered"], row["ended_at"]) == ("running", 0, None)
    await world.complete(await world.take(agent))
    await world.complete(await world.take(agent))

    assert world.dag_row(dag.id)["status"] == "completed"
    assert world.dag_kinds(dag.id) == [
        "dag.created",
        "dag.running",
        "dag.failed",
        "dag.running",
        "dag.completed",
    ]


async def test_a_dag_of_dead_letters_and_cancelled_tasks_has_failed(world: World) -> None:
    """U7: cancelled only if all were."""
    agent = await world.agent()
    dag = await world.dag(NewTask("code", key="a"), NewTask("code", key="b"))
    dead = await world.kill(agent)
    (left,) = {found.id for found in dag.tasks.values()} - {dead}
    await world.engine.operations.cancel(left, "no")
    assert world.dag_row(dag.id)["status"] == "failed"

    other = await world.dag(NewTask("code", key="a"), NewTask("code", key="b"))
    for found in other.tasks.values():
        await world.engine.operations.cancel(found.id, "no")

    assert world.dag_row(other.id)["status"] == "cancelled"
    assert world.dag_kinds(other.id) == ["dag.created", "dag.cancelled"]


async def test_a_task_of_another_dag_may_still_save_this_one(world: World) -> None:
    """U7, F-39: failed only when nothing can run, here or upstream elsewhere."""
    agent = await world.agent()
    elsewhere = await world.one("elsewhere")
    dag = await world.dag(
        NewTask("bad", key="bad"), NewTask("waits", key="waits", depends_on=[elsewhere]), NewTask("good")
    )
    await world.fail(await world.take(agent, types=["bad"]), category="auth_failure")
    await world.complete(await world.take(agent, types=["good"]))
    assert world.dag_row(dag.id)["status"] == "running"

    await world.complete(await world.take(agent, types=["elsewhere"]))
    await world.complete(await world.take(agent, types=["waits"]))

    assert world.dag_row(dag.id)["status"] == "failed"


async def test_release(world: World) -> None:
    """R-081: back to READY at once, no attempt used, its place kept; with a delay, later."""
    agent = await world.agent()
    task_id = await world.one(max_cost_usd=1)
    ready_at = world.live(task_id)["ready_at"]
    world.age(minutes=5)
    task = await world.take(agent)

    assert await world.release(task) is Status.READY
    live = world.live(task_id)
    assert (live["attempts"], live["ready_at"], live["epoch"]) == (0, ready_at, 1)
    assert world.kinds(task_id)[-2:] == ["task.released", "task.ready"]
    (claimed,) = await world.claim(agent, start=False)
    assert claimed.epoch == 2

    assert await world.release(claimed, 30) is Status.PENDING
    assert world.waits(task_id) == 30
    assert world.kinds(task_id)[-1] == "task.released"
    assert [attempt["outcome"] for attempt in world.attempts(task_id)] == ["released", "released"]
    assert await world.claim(agent) == []
    world.age(seconds=30)
    assert await world.engine.upkeep.promote_due(10) == 1
    assert (await world.take(agent)).epoch == 3


async def test_registering_again_fails_what_was_held(world: World) -> None:
    """R-079, R-080: as a crash of `agent_restarted`, at once; what it spent stays spent."""
    agent = await world.agent("a", budget_usd=5)
    await world.submit(*[NewTask("code", max_cost_usd=1)] * 3)
    running, validating = await world.claim(agent, 2)
    (claimed,) = await world.claim(agent, start=False)
    await world.engine.lifecycle.heartbeat(agent.id, 1, [Beat(ref(running), spent=cost("0.5"))])

    again = await world.agent("a", budget_usd=100)

    assert world.statuses([running.id, validating.id, claimed.id]) == ["RETRYING"] * 3
    assert {world.attempts(task.id)[0]["error"] for task in (running, claimed)} == {"agent_restarted"}
    assert world.live(running.id)["last_category"] == "crash"
    assert (again.held, again.reserved_usd, again.spent_usd) == (0, ZERO, Decimal("0.5"))
    assert again.budget_usd == 5
    assert world.kinds("a", column="agent_id").count("agent.registered") == 2


async def test_an_agent_is_checked(world: World) -> None:
    """R-079."""
    for fault in ({"max_concurrent_tasks": 0}, {"claim_ttl_sec": 0.01}, {"heartbeat_interval_sec": 1e9}):
        with pytest.raises(InvalidInputError, match=next(iter(fault))):
            await world.agent(**fault)
    agent = await world.agent()
    for change in ({"max_concurrent_tasks": 0}, {"status": "asleep"}, {"add_budget_usd": -1}):
        with pytest.raises(InvalidInputError, match=next(iter(change))):
            await world.engine.fleet.patch(agent.id, **change)
    with pytest.raises(NotFoundError):
        await world.engine.fleet.patch("nobody", status="active")


# Batches that fail.


async def test_a_child_that_fails_takes_its_batch_along(world: World) -> None:
    """R-193, F-48: siblings cancelled, the parent dead; a retry of the parent redoes only those."""
    agent = await world.agent()
    batch = await world.one(
        "batch", lock_key="doc:1", children=[NewTask("one"), NewTask("two"), NewTask("three")]
    )
    after = await world.one("after", depends_on=[batch])
    one = await world.take(agent)
    await world.complete(one, 1)
    two = await world.take(agent)

    await world.fail(two, category="auth_failure")

    (three,) = world.rows("SELECT * FROM lineshaft.tasks WHERE type = 'three'")
    assert world.statuses([batch, one.id, two.id]) == ["DEAD_LETTERED", "COMPLETED", "DEAD_LETTERED"]
    assert (three["status"], three["reason"]) == ("CANCELLED", "sibling failed")
    end = world.end(batch)
    assert (end["reason"], end["category"]) == (f"child {two.id} failed", "dependency")
    assert world.status(after) == "PENDING"
    assert world.lock("doc:1") is None

    assert await world.engine.operations.retry(batch) is Status.PENDING
    assert world.statuses([batch, two.id, three["id"]]) == ["PENDING", "READY", "PENDING"]
    for output in (2, 3):
        task = await world.take(agent)
        assert (world.lock("doc:1") or {})["holder_task_id"] == batch
        await world.complete(task, output)
    assert world.end(batch)["output"] == [1, 2, 3]
    assert world.status(after) == "READY"


async def test_a_nested_failure_takes_all_batches_along(world: World) -> None:
    """R-193, R-195: outwards to the parents, and inwards to whatever stands under later siblings."""
    agent = await world.agent()
    outer = await world.one(
        "outer",
        children=[
            NewTask("inner", children=[NewTask("bad"), NewTask("next")]),
            NewTask("later", children=[NewTask("deep", children=[NewTask("deepest")])]),
        ],
    )

    await world.fail(await world.take(agent), category="auth_failure")

    found = {row["type"]: row["status"] for row in world.rows("SELECT * FROM lineshaft.tasks")}
    assert found == {
        "outer": "DEAD_LETTERED",
        "inner": "DEAD_LETTERED",
        "bad": "DEAD_LETTERED",
        "next": "CANCELLED",
        "later": "CANCELLED",
        "deep": "CANCELLED",
        "deepest": "CANCELLED",
    }
    assert world.dag_row(world.task(outer)["dag_id"])["status"] == "failed"

    await world.engine.operations.retry(outer)
    seen = []
    while claimed := await world.claim(agent, 10):
        seen += [task.type for task in claimed]
        for task in claimed:
            await world.complete(task)
    assert seen == ["bad", "next", "deepest"]
    assert world.status(outer) == "COMPLETED"


async def test_a_batch_whose_children_were_retried_one_by_one(world: World) -> None:
    """R-193: then there is nothing left to do but to complete it, and nobody is handed a batch."""
    agent = await world.agent()
    batch = await world.one("batch", lock_key="doc:1", children=[NewTask("one"), NewTask("two")])
    await world.fail(await world.take(agent), category="auth_failure")
    for type_ in ("one", "two"):
        (row,) = world.rows("SELECT id FROM lineshaft.task WHERE type = %s", type_)
        await world.engine.operations.retry(row["id"])
        task = await world.take(agent)
        # The batch is over, so the child holds the lock itself.
        assert (world.lock("doc:1") or {})["holder_task_id"] == task.id
        await world.complete(task, type_)
        assert world.lock("doc:1") is None

    assert await world.engine.operations.retry(batch) is Status.COMPLETED

    assert world.end(batch)["output"] == ["one", "two"]
    assert world.dag_row(world.task(batch)["dag_id"])["status"] == "completed"


async def test_outputs_of_children_with_ids_of_their_own(world: World) -> None:
    """R-192: in the order they were listed, not of their names; and only those that were listed."""
    agent = await world.agent()
    batch = await world.one("batch", id="b", children=[NewTask("x", id=name) for name in ("z", "m", "a")])
    await world.one("stranger", parent_id=batch, priority=0)

    while claimed := await world.claim(agent):
        await world.complete(claimed[0], claimed[0].id)

    assert world.end(batch)["output"] == ["z", "m", "a"]


# Cancel.


async def test_cancel_cascades(world: World) -> None:
    """R-172, R-173, R-175, U6: dependents with their direct upstream's name, in whatever state."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("a", key="a", idempotency_key="k"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
        NewTask("other", key="other"),
    )
    ids = {key: found.id for key, found in dag.tasks.items()}
    task = await world.take(agent, types=["a"])

    cancelled = await world.engine.operations.cancel(ids["a"], "not needed")

    assert cancelled == sorted(ids[key] for key in "abc")
    assert world.end(ids["a"])["reason"] == "not needed"
    assert world.end(ids["b"])["reason"] == f"Parent {ids['a']} cancelled"
    assert world.end(ids["c"])["reason"] == f"Parent {ids['b']} cancelled"
    assert world.status(ids["other"]) == "READY"
    assert world.attempts(ids["a"])[0]["outcome"] == "cancelled"
    assert world.kinds(ids["b"])[-1] == "task.cancelled"
    assert world.rows("SELECT FROM lineshaft.task_key WHERE expires_at IS NULL") == []
    with pytest.raises(StaleClaimError):
        await world.complete(task)


@pytest.mark.parametrize("way", ["PENDING", "READY", "CLAIMED", "RUNNING", "VALIDATING", "RETRYING"])
async def test_cancel_from_every_live_state(world: World, way: str) -> None:
    """R-036, R-206: slot, money and lock come back."""
    agent = await world.agent()
    upstream = [await world.one("up")] if way == "PENDING" else []
    gate = OutputContract(validation="human" if way == "VALIDATING" else "none")
    task_id = await world.one("x", depends_on=upstream, max_cost_usd=1, lock_key="doc:1", output=gate)
    if way not in {"PENDING", "READY"}:
        (task,) = await world.claim(agent, types=["x"], start=way != "CLAIMED")
        if way == "VALIDATING":
            await world.complete(task)
        if way == "RETRYING":
            await world.fail(task)
    assert world.status(task_id) == way

    assert await world.engine.operations.cancel(task_id, "no") == [task_id]

    assert world.status(task_id) == "CANCELLED"
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"], world.lock("doc:1")) == (0, 0, None)


async def test_cancel_without_cascade(world: World) -> None:
    """R-173: dependents stay, blocked."""
    dag = await world.dag(NewTask("a", key="a"), NewTask("b", key="b", depends_on=["a"]))
    a, b = (found.id for found in dag.tasks.values())

    assert await world.engine.operations.cancel(a, "no", cascade=False) == [a]

    assert world.statuses([a, b]) == ["CANCELLED", "PENDING"]
    assert world.task(b)["blocked_by"] == [a]


async def test_cancelling_again_changes_nothing(world: World) -> None:
    """R-174: 200 for a cancelled one, 409 for what ended otherwise."""
    agent = await world.agent()
    cancelled, done = await world.submit(*(NewTask("code", priority=n) for n in (0, 1)))
    await world.engine.operations.cancel(cancelled, "no")
    await world.complete(await world.take(agent))
    dead = await world.one()
    await world.kill(agent)
    before = world.everything()

    assert await world.engine.operations.cancel(cancelled, "again") == []
    for task_id in (done, dead):
        with pytest.raises(InvalidTransitionError, match="already"):
            await world.engine.operations.cancel(task_id, "no")

    assert world.everything() == before


async def test_a_chain_of_ten_thousand_is_cancelled(world: World) -> None:
    """R-146, R-173: iteratively, in one transaction."""
    names = [f"{n}" for n in range(10_000)]
    tasks = [NewTask("code", key="0")]
    tasks += [NewTask("code", key=name, depends_on=[before]) for before, name in pairwise(names)]
    dag = await world.dag(*tasks)

    cancelled = await world.engine.operations.cancel(dag.tasks["0"].id, "no")

    assert len(cancelled) == 10_000
    assert world.dag_row(dag.id)["status"] == "cancelled"
    assert world.end(dag.tasks["9999"].id)["reason"] == f"Parent {dag.tasks['9998'].id} cancelled"


async def test_cancelling_a_parent_cancels_its_children(world: World) -> None:
    """R-177, R-194: of a batch, and of a task that spawned."""
    agent = await world.agent()
    batch = await world.one("batch", children=[NewTask("one"), NewTask("two")])
    await world.take(agent)
    assert len(await world.engine.operations.cancel(batch, "no")) == 3
    await world.one("parent")
    parent = await world.take(agent)
    (child,) = await world.engine.operations.spawn(ref(parent), [NewTask("child")])

    assert await world.engine.operations.cancel(parent.id, "no") == sorted([parent.id, child.id])
    assert world.end(child.id)["reason"] == f"Parent {parent.id} cancelled"


async def test_cancelling_a_batchs_child_cancels_the_batch(world: World) -> None:
    """R-177, R-190: it can never be whole again."""
    batch = await world.one("batch", children=[NewTask("one"), NewTask("two"), NewTask("three")])
    (two,) = world.rows("SELECT id FROM lineshaft.task WHERE type = 'two'")

    await world.engine.operations.cancel(two["id"], "no")

    assert {row["status"] for row in world.rows("SELECT * FROM lineshaft.tasks")} == {"CANCELLED"}
    assert world.dag_row(world.task(batch)["dag_id"])["status"] == "cancelled"


async def test_a_cancellation_does_not_reach_what_waits_for_a_dead_letter(world: World) -> None:
    """U6, R-173: dependents of a dead-lettered child wait for it, not for the cancelled parent."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    (child,) = await world.engine.operations.spawn(ref(parent), [NewTask("child")])
    waits = await world.one("waits", depends_on=[child.id])
    await world.kill(agent, child.id)

    assert await world.engine.operations.cancel(parent.id, "no") == [parent.id]

    assert world.statuses([child.id, waits]) == ["DEAD_LETTERED", "PENDING"]


# Retry by hand.


async def test_retry_starts_anew_but_the_epoch_goes_on(world: World) -> None:
    """R-122, R-133, F-30: counters at zero, history and cost kept, no zombie matches."""
    agent = await world.agent()
    task_id = await world.one(max_attempts=1)
    old = await world.take(agent)
    await world.fail(old, spent=cost("0.5"))
    world.age(minutes=10)

    assert await world.engine.operations.retry(task_id) is Status.READY

    live = world.live(task_id)
    assert (live["attempts"], live["epoch"], live["revivals"], live["rate_limits"]) == (0, 1, 1, 0)
    assert (live["cost_usd"], live["ready_at"]) == (Decimal("0.5"), world.clock.now())
    assert world.kinds(task_id)[-2:] == ["task.resolved", "task.ready"]
    letter = world.row("SELECT * FROM lineshaft.dead_letter")
    assert (letter["reviewed"], letter["resolution"]) == (True, "retry")
    with pytest.raises(StaleClaimError):
        await world.complete(old)
    new = await world.take(agent)
    assert (new.epoch, new.resume) == (2, True)
    await world.fail(new)
    assert [(a["number"], a["revival"]) for a in world.attempts(task_id)] == [(1, 0), (1, 1)]


async def test_retry_of_a_cancelled_task_waits_for_what_is_open(world: World) -> None:
    """R-122: PENDING while an upstream is not done, READY once it is."""
    agent = await world.agent()
    dag = await world.dag(NewTask("a", key="a"), NewTask("b", key="b", depends_on=["a"]))
    a, b = (found.id for found in dag.tasks.values())
    await world.engine.operations.cancel(a, "no")
    assert world.dag_row(dag.id)["status"] == "cancelled"

    assert await world.engine.operations.retry(b) is Status.PENDING
    assert await world.engine.operations.retry(a) is Status.READY
    assert world.dag_row(dag.id)["cancelled"] == 0
    await world.complete(await world.take(agent))

    assert world.status(b) == "READY"


async def test_retry_later(world: World) -> None:
    """R-132: wait and retry."""
    agent = await world.agent()
    task_id = await world.one()
    await world.kill(agent)

    assert await world.engine.operations.retry(task_id, delay_sec=60) is Status.PENDING

    assert world.waits(task_id) == 60
    assert await world.claim(agent) == []


async def test_retry_of_a_batch_later(world: World) -> None:
    """R-132, R-193: it is its children that wait."""
    agent = await world.agent()
    batch = await world.one("batch", children=[NewTask("one"), NewTask("two")])
    await world.kill(agent)

    assert await world.engine.operations.retry(batch, delay_sec=60) is Status.PENDING

    assert await world.claim(agent) == []
    world.age(seconds=60)
    await world.engine.upkeep.promote_due(10)
    for _ in range(2):
        await world.complete(await world.take(agent))
    assert world.status(batch) == "COMPLETED"


async def test_retry_of_a_retrying_task_is_now(world: World) -> None:
    """R-122, F-51: due at once, counters kept."""
    agent = await world.agent()
    task_id = await world.one()
    await world.fail(await world.take(agent))

    assert await world.engine.operations.retry(task_id) is Status.READY

    assert world.live(task_id)["attempts"] == 1
    assert world.kinds(task_id)[-1] == "task.ready"
    with pytest.raises(InvalidTransitionError, match="it is READY"):
        await world.engine.operations.retry(task_id)


async def test_a_completed_or_running_task_can_not_be_retried(world: World) -> None:
    """R-122, F-49: that would run it twice."""
    agent = await world.agent()
    task_id = await world.one()
    task = await world.take(agent)
    with pytest.raises(InvalidTransitionError, match="it is RUNNING"):
        await world.engine.operations.retry(task_id)
    await world.complete(task)
    with pytest.raises(InvalidTransitionError, match="it is COMPLETED"):
        await world.engine.operations.retry(task_id)


async def test_a_revived_task_takes_its_key_back(world: World) -> None:
    """U8: or is refused if a newer task has it."""
    agent = await world.agent()
    submit = world.engine.submission.submit
    new = NewTask("code", idempotency_key="k", spec={"n": 1})
    (first,) = await submit([new])
    await world.engine.operations.cancel(first.id, "no")
    await world.engine.operations.retry(first.id)
    (again,) = await submit([new])
    assert (again.id, again.duplicate, again.mismatch) == (first.id, True, False)

    await world.engine.operations.cancel(first.id, "no")
    (second,) = await submit([new])
    assert not second.duplicate
    before = world.everything()
    with pytest.raises(AlreadyExistsError, match="'k' is in use"):
        await world.engine.operations.retry(first.id)
    assert world.everything() == before
    assert (await world.take(agent)).id == second.id


async def test_a_revived_child_that_was_spawned_locks_for_itself(world: World) -> None:
    """R-206: its parent is no batch and holds nothing for it."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    await world.engine.operations.spawn(ref(parent), [NewTask("child", lock_key="doc:1")])
    child = await world.kill(agent)
    await world.engine.operations.retry(child)

    await world.complete(await world.take(agent))

    assert world.lock("doc:1") is None


# Spawn.


async def test_spawn_and_go_on(world: World) -> None:
    """R-145, R-012: children in the parent's DAG, which becomes a real one; the parent runs on."""
    agent = await world.agent()
    await world.one("parent", max_cost_usd=1)
    await world.fail(await world.take(agent), spent=cost("0.25"))
    (waiting,) = world.rows("SELECT id FROM lineshaft.task_live")
    await world.engine.operations.retry(waiting["id"])
    parent = await world.take(agent)
    dag_id = world.task(parent.id)["dag_id"]
    assert world.rows("SELECT * FROM lineshaft.dag") == []

    a, b = await world.engine.operations.spawn(
        ref(parent), [NewTask("a", key="a"), NewTask("b", depends_on=["a"])]
    )

    assert world.statuses([parent.id, a.id, b.id]) == ["RUNNING", "READY", "PENDING"]
    assert {world.task(found.id)["parent_id"] for found in (a, b)} == {parent.id}
    assert {world.task(found.id)["dag_id"] for found in (a, b)} == {dag_id}
    row = world.dag_row(dag_id)
    assert (row["status"], row["total"], row["reserved_usd"], row["spent_usd"]) == (
        "running",
        3,
        1,
        Decimal("0.25"),
    )
    await world.complete(parent, spent="0.5")
    row = world.dag_row(dag_id)
    assert (row["status"], row["reserved_usd"], row["spent_usd"]) == ("running", 0, Decimal("0.75"))
    for _ in range(2):
        await world.complete(await world.take(agent))
    assert world.dag_row(dag_id)["status"] == "completed"


@pytest.mark.parametrize("virtual", [True, False], ids=["virtual DAG", "real DAG"])
async def test_spawn_and_wait(world: World, virtual: bool) -> None:
    """R-145, F-36: slot, lock and money are free, no attempt used; then it resumes with its children."""
    agent = await world.agent(max_concurrent_tasks=1)
    new = NewTask("parent", key="p", max_cost_usd=1, lock_key="doc:1", priority=1)
    if virtual:
        await world.submit(new)
    else:
        await world.dag(new)
    parent = await world.take(agent)
    await world.engine.lifecycle.heartbeat(agent.id, 1, [Beat(ref(parent), spent=cost("0.1"))])

    one, two = await world.engine.operations.spawn(ref(parent), [NewTask("x"), NewTask("x")], wait=True)

    live = world.live(parent.id)
    assert (live["status"], live["blocked"], live["attempts"]) == ("PENDING", 2, 0)
    assert world.lock("doc:1") is None
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"], row["spent_usd"]) == (0, 0, Decimal("0.1"))
    assert world.kinds(parent.id)[-1] == "task.waiting"
    assert world.attempts(parent.id)[0]["outcome"] == "waiting"
    await world.complete(await world.take(agent), "first")
    assert world.status(parent.id) == "PENDING"
    await world.complete(await world.take(agent), "second")
    assert world.status(parent.id) == "READY"

    found = await world.claims(agent)

    (again,) = found.tasks
    assert (again.id, again.epoch, again.resume, again.attempts) == (parent.id, 2, True, 0)
    assert decoded(found.resumed[parent.id].children) == {
        one.id: {"status": "COMPLETED", "output": "first"},
        two.id: {"status": "COMPLETED", "output": "second"},
    }
    await world.complete(again, spent="0.2")
    assert world.end(parent.id)["cost_usd"] == Decimal("0.3")


async def test_a_waiting_parent_resumes_however_its_children_end(world: World) -> None:
    """R-145, R-173: dead, cancelled or done; each counts down once, however often it is revived."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    names = ("done", "dead", "cancelled")
    children = await world.engine.operations.spawn(ref(parent), [NewTask(name) for name in names], wait=True)
    done, dead, cancelled = (found.id for found in children)
    await world.fail(await world.take(agent, types=["dead"]), category="auth_failure")
    await world.engine.operations.retry(dead)
    await world.fail(await world.take(agent, types=["dead"]), category="auth_failure")
    await world.engine.operations.cancel(cancelled, "no")
    assert world.live(parent.id)["blocked"] == 1

    await world.complete(await world.take(agent, types=["done"]))

    found = await world.claims(agent)
    assert [task.id for task in found.tasks] == [parent.id]
    ends = decoded(found.resumed[parent.id].children)
    assert {name: child["status"] for name, child in ends.items()} == {
        done: "COMPLETED",
        dead: "DEAD_LETTERED",
        cancelled: "CANCELLED",
    }


async def test_a_parent_may_wait_for_the_same_child_again(world: World) -> None:
    """R-145, U8: a resumed handler runs from the top and spawns with the same keys."""
    agent = await world.agent()
    await world.one("parent")
    new = [NewTask("child", idempotency_key="c")]
    parent = await world.take(agent)
    (child,) = await world.engine.operations.spawn(ref(parent), new, wait=True)
    await world.complete(await world.take(agent))
    parent = await world.take(agent)

    (same,) = await world.engine.operations.spawn(ref(parent), new, wait=True)

    assert (same.id, same.duplicate) == (child.id, True)
    # All have ended already: it is READY at once.
    assert world.status(parent.id) == "READY"
    assert world.kinds(parent.id)[-2:] == ["task.waiting", "task.ready"]
    assert world.dag_row(world.task(parent.id)["dag_id"])["total"] == 2


async def test_waiting_in_circles_is_refused(world: World) -> None:
    """R-143: a child, new or known, that needs its parent first could never end."""
    agent = await world.agent()
    await world.one("parent", idempotency_key="parent")
    parent = await world.take(agent)
    await world.one("after", depends_on=[parent.id], idempotency_key="after")
    indirect = await world.one("indirect", depends_on=[parent.id])
    before = world.everything()

    for child in (
        NewTask("child", depends_on=[parent.id]),
        NewTask("child", depends_on=[indirect]),
        NewTask("after", idempotency_key="after"),
        NewTask("parent", idempotency_key="parent"),
    ):
        with pytest.raises(CycleError, match=parent.id):
            await world.engine.operations.spawn(ref(parent), [child], wait=True)

    assert world.everything() == before
    # Without waiting there is no circle: the child comes after its parent.
    refs = {"context_refs": [f"task:{parent.id}:output"]}
    (after,) = await world.engine.operations.spawn(ref(parent), [NewTask("child", spec=refs)])
    await world.complete(parent, "mine")
    found = await world.claims(agent, 10)
    assert after.id in {task.id for task in found.tasks}
    assert found.inputs == {parent.id: b'"mine"'}


async def test_what_can_not_be_spawned(world: World) -> None:
    """R-142, R-145: all or nothing, and nothing from a task that isn't running."""
    agent = await world.agent()
    await world.one("parent")
    (claimed,) = await world.claim(agent, start=False)
    spawn = world.engine.operations.spawn
    with pytest.raises(InvalidTransitionError):
        await spawn(ref(claimed), [NewTask("x")])
    await world.engine.lifecycle.start([ref(claimed)])
    before = world.everything()

    with pytest.raises(InvalidInputError, match="at least one"):
        await spawn(ref(claimed), [])
    with pytest.raises(CycleError):
        await spawn(
            ref(claimed), [NewTask("x", key="a", depends_on=["b"]), NewTask("x", key="b", depends_on=["a"])]
        )
    with pytest.raises(InvalidInputError, match="used twice"):
        await spawn(ref(claimed), [NewTask("x", key="a"), NewTask("x", key="a")])
    with pytest.raises(DependencyNotFoundError):
        await spawn(ref(claimed), [NewTask("x", depends_on=["nope"])], wait=True)
    with pytest.raises(InvalidInputError, match="at most 10000"):
        await spawn(ref(claimed), [NewTask("x")] * 10_001)

    assert world.everything() == before


async def test_many_children_go_by_copy(world: World) -> None:
    """R-146: the parent waits for all of them."""
    agent = await world.agent(max_concurrent_tasks=1_000)
    await world.one("parent")
    parent = await world.take(agent)

    children = await world.engine.operations.spawn(ref(parent), [NewTask("x")] * 200, wait=True)

    assert world.live(parent.id)["blocked"] == len(children) == 200
    tasks = await world.claim(agent, 200)
    await world.engine.lifecycle.complete([world.completion(task) for task in tasks])
    assert (await world.take(agent)).id == parent.id


async def test_a_spawned_batch_is_waited_for_as_a_whole(world: World) -> None:
    """R-145, R-192."""
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)
    (batch,) = await world.engine.operations.spawn(
        ref(parent), [NewTask("batch", children=[NewTask("one"), NewTask("two")])], wait=True
    )
    for n in (1, 2):
        await world.complete(await world.take(agent), n)

    found = await world.claims(agent)

    assert [task.id for task in found.tasks] == [parent.id]
    assert decoded(found.resumed[parent.id].children) == {batch.id: {"status": "COMPLETED", "output": [1, 2]}}


# Late dependencies, and the critical path.


async def test_a_dependency_added_later(world: World) -> None:
    """R-143, and the HTTP contract: READY goes back to PENDING; what is done already holds nobody up."""
    agent = await world.agent()
    done = await world.one("done")
    await world.complete(await world.take(agent))
    a, b, task_id = await world.submit(NewTask("a"), NewTask("b"), NewTask("c"))
    add = world.engine.operations.add_dependencies

    assert await add(task_id, [done]) is Status.READY
    assert await add(task_id, [a, a]) is Status.PENDING
    assert await add(task_id, [a, b, done]) is Status.PENDING

    assert world.task(task_id)["blocked_by"] == sorted([a, b])
    assert world.kinds(task_id)[-1] == "task.waiting"
    assert world.kinds(task_id).count("task.waiting") == 1
    for _ in range(2):
        await world.complete(await world.take(agent))
    assert (await world.take(agent)).id == task_id
    with pytest.raises(InvalidTransitionError, match="it is RUNNING"):
        await add(task_id, [a])


async def test_late_dependencies_that_are_refused(world: World) -> None:
    """R-010, R-143, F-40: unknown, cancelled, or closing a cycle, which is named."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("a", key="a"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
    )
    a, b, c = (found.id for found in dag.tasks.values())
    cancelled = await world.one("x")
    await world.engine.operations.cancel(cancelled, "no")
    dead = await world.one("x", priority=0)
    await world.kill(agent, dead)
    add = world.engine.operations.add_dependencies
    before = world.everything()

    with pytest.raises(CycleError) as caught:
        await add(a, [c])
    assert caught.value.cycle == (a, c, b, a)
    with pytest.raises(CycleError):
        await add(a, [a])
    with pytest.raises(DependencyNotFoundError, match="nope"):
        await add(a, ["nope"])
    with pytest.raises(InvalidInputError, match="was cancelled"):
        await add(a, [cancelled])
    for ended in (cancelled, dead):
        with pytest.raises(InvalidTransitionError, match="Can't add a dependency"):
            await add(ended, [a])

    assert world.everything() == before
    assert await add(a, [dead]) is Status.PENDING


async def test_the_critical_path_follows_the_graph(world: World) -> None:
    """R-148, R-163: with dependencies added, cancelled, revived, and with parents that wait."""
    agent = await world.agent()
    chain = await world.dag(
        NewTask("a", key="a"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
    )
    a, b, c = (found.id for found in chain.tasks.values())
    single = await world.one("single")
    plain = world.live(single)["rank"]

    def downstream(*ids: str) -> list[int]:
        return [world.live(task_id)["downstream"] for task_id in ids]

    assert downstream(a, b, c, single) == [2, 1, 0, 0]
    await world.engine.operations.add_dependencies(a, [single])
    assert downstream(a, b, c, single) == [2, 1, 0, 3]
    assert world.live(single)["rank"] == pytest.approx(plain - 3)

    await world.engine.operations.cancel(c, "no")
    assert downstream(a, b, single) == [1, 0, 2]
    await world.engine.operations.retry(c)
    assert downstream(a, b, c, single) == [2, 1, 0, 3]

    # A dead letter that is revived has as much below it as before.
    await world.kill(agent, single)
    await world.engine.operations.retry(single)
    assert downstream(single) == [3]

    parent = await world.take(agent)
    child, last = await world.engine.operations.spawn(
        ref(parent), [NewTask("child", key="child"), NewTask("last", depends_on=["child"])], wait=True
    )
    assert downstream(child.id, last.id) == [5, 4]
