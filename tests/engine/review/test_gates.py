"""Outputs at gates: submitted, checked at once, accepted, rejected."""

from decimal import Decimal
from typing import Any

import pytest

from lineshaft.errors import InvalidInputError, StaleClaimError
from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec
from lineshaft.types.work import Completion, Spent
from tests.engine.review.gate_helpers import PERSON, REPORT, URL, ZERO, gates, hand_in
from tests.world import World, only, ref, spawn_children, without_gates

# At once.


async def test_an_output_that_passes_completes_its_task_at_once(world: World) -> None:
    """R-090, R-095, R-099: through VALIDATING, and answered COMPLETED; money, slot and lock as ever."""
    agent = await world.agent(budget_usd=5)
    dag = await world.dag(
        NewTask("a", key="a", output=URL, max_cost_usd=1, lock_key="doc:1"),
        NewTask("b", key="b", depends_on=["a"]),
    )
    task = await world.take(agent)

    status = await hand_in(
        world, task, "https://example.org", cost_usd=Decimal("0.25"), tokens_input=7, tokens_output=3
    )

    assert status is Status.COMPLETED
    end = world.end(task.id)
    assert (end["output"], end["agent_id"], end["epoch"]) == ("https://example.org", agent.id, 1)
    assert (end["cost_usd"], end["tokens_input"], end["tokens_output"]) == (Decimal("0.25"), 7, 3)
    assert world.kinds(task.id)[-2:] == ["task.validating", "task.completed"]
    assert world.status(dag.tasks["b"].id) == "READY"
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"], row["spent_usd"]) == (0, ZERO, Decimal("0.25"))
    assert world.dag_row(dag.id)["spent_usd"] == Decimal("0.25")
    assert world.lock("doc:1") is None
    (attempt,) = world.attempts(task.id)
    assert (attempt["outcome"], attempt["ended_at"], attempt["output"]) == (
        "completed",
        world.clock.now(),
        None,
    )
    assert [(v["method"], v["passed"]) for v in attempt["verdicts"]] == [("regex", True)]
    assert [a.outcome for a in await world.engine.read.attempts(task.id)] == ["completed"]


async def test_an_output_that_is_refused_fails_its_attempt(world: World) -> None:
    """R-033, R-098, R-100: `invalid_output`, with the reasons, which the next attempt gets."""
    agent = await world.agent(budget_usd=5)
    task_id = await world.one(output=URL, max_cost_usd=1, retry=RetrySpec(strategy="immediate"))
    task = await world.take(agent)

    status = await hand_in(world, task, "nothing", cost_usd=Decimal("0.25"), tokens_input=7, tokens_output=3)

    assert status is Status.RETRYING
    (attempt,) = world.attempts(task_id)
    assert (attempt["outcome"], attempt["category"]) == ("failed", "invalid_output")
    assert attempt["error"] == r"regex: output.data doesn't match https?://\S+"
    assert (attempt["cost_usd"], attempt["tokens_input"], attempt["tokens_output"]) == (Decimal("0.25"), 7, 3)
    assert attempt["output"]["data"] == "nothing", "people can see what was refused"
    assert [v["passed"] for v in attempt["verdicts"]] == [False]
    live = world.live(task_id)
    assert (live["attempts"], live["cost_usd"], live["tokens_input"]) == (1, Decimal("0.25"), 7)
    assert world.kinds(task_id)[-3:] == ["task.validating", "task.failed", "task.retry_scheduled"]
    row = world.agent_row(agent)
    assert (row["held"], row["reserved_usd"], row["spent_usd"]) == (0, ZERO, Decimal("0.25"))
    await world.engine.maintenance.promote_due(10)
    (past,) = (await world.claims(agent)).past_attempts[task_id]
    assert (past.category, past.error) == ("invalid_output", attempt["error"])


async def test_the_last_attempt_that_is_refused_is_a_dead_letter(world: World) -> None:
    """R-098."""
    agent = await world.agent()
    task_id = await world.one(output=URL, max_attempts=1)

    assert await hand_in(world, await world.take(agent), "no") is Status.DEAD_LETTERED

    end = world.end(task_id)
    assert (end["category"], end["output"]) == ("invalid_output", None)
    assert end["reason"].startswith("regex: ")


async def test_after_two_refused_outputs_the_fallback_models_take_over(world: World) -> None:
    """R-117: refused outputs are failed attempts like any other."""
    agent = await world.agent(models_available=["big", "small"])
    await world.one(
        max_attempts=5,
        retry=RetrySpec(strategy="immediate"),
        output=URL,
        model_preferences=["small"],
        fallback_models=["big"],
    )
    models = []
    for _ in range(3):
        task = await world.take(agent)
        models.append(task.model)
        await hand_in(world, task, "no")
        await world.engine.maintenance.promote_due(10)

    assert models == ["small", "small", "big"]


async def test_gates_are_passed_in_order_until_one_refuses(world: World) -> None:
    """R-095: several gates; after a rejection no other gate runs."""
    agent = await world.agent()
    listed = [
        Gate("json-schema", {"type": "string"}),
        Gate("regex", "^a"),
        Gate("regex", "z$"),
        Gate("human"),
    ]
    await world.submit(*[NewTask("code", output=gates(*listed), max_attempts=1)] * 3)
    one, two, three = await world.claim(agent, 3)

    assert await hand_in(world, one, 7) is Status.DEAD_LETTERED
    assert await hand_in(world, two, "ab") is Status.DEAD_LETTERED
    assert await hand_in(world, three, "az") is Status.VALIDATING

    said = [
        [(v["gate"], v["method"], v["passed"]) for v in world.attempts(t.id)[0]["verdicts"]]
        for t in (one, two, three)
    ]
    assert said == [
        [(0, "json-schema", False)],
        [(0, "json-schema", True), (1, "regex", True), (2, "regex", False)],
        [(0, "json-schema", True), (1, "regex", True), (2, "regex", True)],
    ]


async def test_a_batch_of_completions_with_and_without_gates(world: World) -> None:
    """R-246: each is answered for itself."""
    agent = await world.agent()
    await world.submit(
        NewTask("plain"),
        NewTask("good", output=URL),
        NewTask("bad", output=URL),
        NewTask("ask", output=PERSON),
    )
    tasks = {task.type: task for task in await world.claim(agent, 4)}
    outputs = {"plain": 1, "good": "http://x", "bad": "x", "ask": 1}

    moved = await world.engine.work.complete(
        [world.completion(tasks[name], said) for name, said in outputs.items()]
    )

    assert [answer.status for answer in moved] == ["COMPLETED", "COMPLETED", "RETRYING", "VALIDATING"]
    assert world.agent_row(agent)["held"] == 0


async def test_a_call_that_is_repeated_is_answered_as_the_first(world: World) -> None:
    """R-100: whatever the gates said, and whatever it says the second time."""
    agent = await world.agent()
    await world.submit(
        NewTask("good", output=URL),
        NewTask("bad", output=URL),
        NewTask("dead", output=URL, max_attempts=1),
        NewTask("ask", output=PERSON),
    )
    tasks = {task.type: task for task in await world.claim(agent, 4)}
    outputs = {"good": "http://x", "bad": "x", "dead": "x", "ask": 1}
    first = [await hand_in(world, tasks[name], said) for name, said in outputs.items()]
    before = world.everything()

    again = [await hand_in(world, tasks[name], "http://other") for name in outputs]

    assert again == first == ["COMPLETED", "RETRYING", "DEAD_LETTERED", "VALIDATING"]
    assert world.everything() == before


async def test_a_process_that_died_before_it_looked(world: World) -> None:
    """R-072, R-100: the output is safe; the agent's next call goes on with it; the first output counts."""
    agent = await world.agent()
    await world.one(output=URL)
    task = await world.take(agent)
    spent = Spent(tokens_input=5)
    first = Completion(ref(task), b'"http://first"', spent=spent)
    (moved,) = await without_gates(world.engine).complete([first])
    assert moved.status is Status.VALIDATING
    assert await world.heartbeat(agent.id, 1, [ref(task)]) == {task.id: "continue"}

    assert await hand_in(world, task, "http://second", tokens_input=5) is Status.COMPLETED

    end = world.end(task.id)
    assert (end["output"], end["tokens_input"]) == ("http://first", 5)


async def test_a_stale_holder_is_refused_whatever_it_hands_in(world: World) -> None:
    """R-100."""
    agent = await world.agent()
    await world.one(output=URL)
    task = await world.take(agent)
    await world.release(task)
    await world.take(agent)

    moved = only(await world.engine.work.complete([world.completion(task, "http://x")]))

    assert isinstance(moved.error, StaleClaimError)
    assert world.kinds(task.id)[-1] == "task.late_result"


# Decision reports.


@pytest.mark.parametrize(
    "ask", [{"preset": "loki"}, {"output": OutputContract(require_decision_report=True)}]
)
@pytest.mark.parametrize("report", [None, {}, {"why": "so", "what": "this", "tradeoffs": ""}])
async def test_without_a_decision_report_the_attempt_has_failed(world: World, ask: Any, report: Any) -> None:
    """R-093: `incomplete_decision_report`, as `invalid_output`, by preset or by task."""
    agent = await world.agent()
    task_id = await world.one(**ask)

    assert await hand_in(world, await world.take(agent), "x", report) is Status.RETRYING

    (attempt,) = world.attempts(task_id)
    assert (attempt["outcome"], attempt["category"]) == ("failed", "invalid_output")
    assert attempt["error"].startswith("incomplete_decision_report: ")


async def test_with_a_decision_report_it_completes(world: World) -> None:
    """R-093, R-021: stored, and shown with the task."""
    agent = await world.agent()
    task_id = await world.one(preset="loki")

    assert await hand_in(world, await world.take(agent), {"page": 1}, REPORT) is Status.COMPLETED

    view = await world.engine.read.task(task_id)
    assert (view.output.data, view.output.decision_report) == ({"page": 1}, REPORT)


async def test_the_report_comes_before_all_gates(world: World) -> None:
    agent = await world.agent()
    contract = gates(Gate("human"), report=True)
    await world.submit(*[NewTask("code", output=contract)] * 2)
    without, with_one = await world.claim(agent, 2)

    assert await hand_in(world, without, "x") is Status.RETRYING
    assert await hand_in(world, with_one, "x", REPORT) is Status.VALIDATING

    assert [v["method"] for v in world.attempts(with_one.id)[0]["verdicts"]] == ["decision-report"]


async def test_a_report_that_is_a_book_is_refused(world: World) -> None:
    """It could not be searched, even if the task requires none."""
    agent = await world.agent()
    await world.one()
    task = await world.take(agent)
    before = world.everything()

    with pytest.raises(InvalidInputError, match="decision_report: must be at most 65536 bytes"):
        await hand_in(world, task, "x", {"why": "x" * 70_000})

    assert world.everything() == before


# Refused at submission.


@pytest.mark.parametrize(
    ("output", "place"),
    [
        (OutputContract(validation="prayer"), "output.validation"),
        (
            OutputContract(validation="json-schema", validation_schema={"type": "strin"}),
            "output.validation_schema",
        ),
        (OutputContract(validation="json-schema"), "output.validation_schema"),
        (
            OutputContract(validation="json-schema", validation_schema={"$ref": "file:///etc/passwd"}),
            "output.validation_schema",
        ),
        (OutputContract(validation="regex", validation_schema="("), "output.validation_schema"),
        (OutputContract(validation="regex", validation_schema="a\0b"), "output.validation_schema"),
        (
            OutputContract(validation="test-pass", validation_schema={"command": "rm"}),
            "output.validation_schema",
        ),
        (
            OutputContract(validation="llm-judge", validation_schema={"criteria": "x"}),
            "output.validation_schema",
        ),
        (
            OutputContract(validation="json-schema", validation_schema={"const": float("nan")}),
            "output.validation_schema",
        ),
        (gates(Gate("human"), Gate("regex", "[")), "output.validation[1].schema"),
        (gates(Gate("human"), Gate("luck")), "output.validation[1].method"),
    ],
)
async def test_what_can_not_be_checked_is_refused_at_submission(
    world: World, output: OutputContract, place: str
) -> None:
    """R-095, R-096, R-097; hostile input: named by its place, and nothing changed."""
    before = world.everything()
    task = NewTask("code", output=output)
    for prefix, submitting in (
        ("", world.submit(task)),
        ("tasks[1].", world.submit(NewTask("fine"), task)),
        ("tasks[0].children[0].", world.dag(NewTask("batch", children=[task]))),
    ):
        with pytest.raises(InvalidInputError) as caught:
            await submitting
        assert [name for name, _ in caught.value.errors] == [prefix + place]

    assert world.everything() == before


async def test_a_schema_from_the_depths_is_refused_at_submission(world: World) -> None:
    """Hostile input: nested 100,000 deep."""
    schema: Any = True
    for _ in range(100_000):
        schema = {"not": schema}
    before = world.everything()

    with pytest.raises(InvalidInputError, match=r"output\.validation_schema"):
        await world.one(output=OutputContract(validation="json-schema", validation_schema=schema))

    assert world.everything() == before


async def test_spawned_tasks_are_looked_at_too(world: World) -> None:
    agent = await world.agent()
    await world.one()
    parent = await world.take(agent)

    with pytest.raises(InvalidInputError, match=r"output\.validation_schema"):
        await spawn_children(
            world.engine,
            ref(parent),
            [NewTask("x", output=OutputContract(validation="regex", validation_schema="("))],
        )
