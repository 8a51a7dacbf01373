"""What waits for a person: outputs at a gate, and tasks that only a person can do."""

import json
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.errors import InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, NewTask, OutputContract
from lineshaft.types import Approval, ApprovalDecision, Page
from tests.gate_verdicts import gated_attempts
from tests.world import World, ref, release_claims

REPORT = {"why": "asked for", "what": "a page", "tradeoffs": "none worth naming"}
FORM = {"type": "object", "required": ["ok"], "properties": {"ok": {"type": "boolean"}}}
GATED = OutputContract(validation="human", validation_schema={"ask": "Is it nice?"})


def yes(reviewer: str = "ann", **fields: Any) -> ApprovalDecision:
    return ApprovalDecision(approve=True, reviewer=reviewer, **fields)


def no(reviewer: str = "ann", **fields: Any) -> ApprovalDecision:
    return ApprovalDecision(approve=False, reviewer=reviewer, **fields)


async def at_the_gate(world: World, **fields: Any) -> str:
    """A task whose output waits for a person."""
    task_id = await world.one("gated", **({"output": GATED} | fields))
    task = await world.take(await world.agent(), types=["gated"])
    assert await world.complete(task, {"draft": 1}, "0.5") is Status.VALIDATING
    return task_id


async def for_a_person(world: World, **fields: Any) -> str:
    fields = {"required_capabilities": ["human"]} | fields
    return await world.one("errand", **fields)


async def waiting(world: World, **options: Any) -> Page[Approval]:
    return await world.engine.approvals.waiting(**options)


async def test_both_kinds_are_listed_the_longest_first(world: World) -> None:
    """http-api.md: items {task, kind, schema, since}."""
    first = await for_a_person(world, output=OutputContract(validation="json-schema", validation_schema=FORM))
    since = world.clock.now()
    world.age(minutes=1)
    second = await at_the_gate(world)
    world.age(minutes=1)
    third = await for_a_person(world)
    await world.one("for an agent")
    await for_a_person(world, depends_on=[third])

    page = await waiting(world)

    assert [(item.task.id, item.kind) for item in page.items] == [
        (first, "task"),
        (second, "gate"),
        (third, "task"),
    ]
    assert [item.schema for item in page.items] == [FORM, {"ask": "Is it nice?"}, None]
    assert page.items[0].since == since
    assert page.items[1].task.output.data == {"draft": 1}, "the reviewer sees the output"
    assert page.next_cursor is None


async def test_page_by_page(world: World) -> None:
    ids = [await (at_the_gate(world) if n % 2 else for_a_person(world)) for n in range(7)]
    found: list[str] = []
    cursor = None
    for _ in range(4):
        page = await waiting(world, limit=2, cursor=cursor)
        found += [item.task.id for item in page.items]
        cursor = page.next_cursor

    assert cursor is None
    assert sorted(found) == sorted(ids)
    assert len(set(found)) == 7


async def test_waiting_for_a_person_is_reported_once(world: World) -> None:
    """`approval.waiting`: at a gate when the output gets there; for a task by the validator, once a turn."""
    gated = await at_the_gate(world)
    errand = await for_a_person(world)
    assert world.kinds(gated)[-2:] == ["task.validating", "approval.waiting"]

    assert await world.engine.approvals.announce(100) == 1
    assert await world.engine.approvals.announce(100) == 0

    assert world.kinds(errand)[-1] == "approval.waiting"
    event = world.row(
        "SELECT data FROM lineshaft.events WHERE task_id = %s AND kind = 'approval.waiting'", errand
    )
    assert event["data"] == {"kind": "task"}
    person = await world.agent(capabilities=["human"])
    await world.release(await world.take(person, types=["errand"]))
    assert await world.engine.approvals.announce(100) == 1, "it waits again"


# At a gate.


async def test_an_approved_output_completes_its_task(world: World) -> None:
    """R-090: with who decided, and why."""
    task_id = await at_the_gate(world)

    assert await world.engine.approvals.decide(task_id, yes(note="fine")) is Status.COMPLETED

    assert world.end(task_id)["output"] == {"draft": 1}
    (attempt,) = await gated_attempts(world.engine, task_id)
    (verdict,) = attempt.verdicts
    assert (verdict.method, verdict.passed, verdict.by, verdict.reasons) == ("human", True, "ann", ["fine"])
    assert verdict.at == world.clock.now()
    assert (await waiting(world)).items == []


async def test_a_refused_output_is_a_failed_attempt(world: World) -> None:
    """R-098: the next attempt gets the person's reasons."""
    task_id = await at_the_gate(world)

    assert await world.engine.approvals.decide(task_id, no(note="too long")) is Status.RETRYING

    (attempt,) = world.attempts(task_id)
    assert (attempt["category"], attempt["error"]) == ("invalid_output", "human: rejected by ann: too long")
    assert attempt["cost_usd"] == Decimal("0.5")


async def test_behind_the_person_other_gates_may_stand(world: World) -> None:
    listed = (Gate("human"), Gate("regex", "draft"), Gate("human"))
    task_id = await at_the_gate(world, output=OutputContract(validation=listed))

    assert await world.engine.approvals.decide(task_id, yes()) is Status.VALIDATING
    assert await world.engine.approvals.decide(task_id, yes(reviewer="bob")) is Status.COMPLETED

    (attempt,) = await gated_attempts(world.engine, task_id)
    assert [(v.method, v.by) for v in attempt.verdicts] == [
        ("human", "ann"),
        ("regex", None),
        ("human", "bob"),
    ]


async def test_a_reviewer_doesnt_write_the_output(world: World) -> None:
    task_id = await at_the_gate(world)
    before = world.everything()

    with pytest.raises(InvalidInputError, match="data: must be omitted"):
        await world.engine.approvals.decide(task_id, yes(data=b"1"))

    assert world.everything() == before


# A person's task.


async def test_a_person_answers_a_task(world: World) -> None:
    """`data` is the output; dependents, DAG and events as for any other completion."""
    dag = await world.dag(
        NewTask(
            "errand",
            key="a",
            required_capabilities=["human"],
            output=OutputContract(validation="json-schema", validation_schema=FORM),
        ),
        NewTask("next", key="b", depends_on=["a"]),
    )
    task_id = dag.tasks["a"].id

    assert (
        await world.engine.approvals.decide(task_id, yes(data=b'{"ok": true}', note="done"))
        is Status.COMPLETED
    )

    end = world.end(task_id)
    assert (end["output"], end["agent_id"], end["epoch"], end["cost_usd"]) == (
        {"ok": True},
        "human:ann",
        1,
        0,
    )
    assert world.kinds(task_id)[-4:] == ["task.claimed", "task.started", "task.validating", "task.completed"]
    assert world.status(dag.tasks["b"].id) == "READY"
    assert world.dag_row(dag.id)["status"] == "running"
    assert "dag.running" in world.dag_kinds(dag.id)
    (attempt,) = await world.engine.read.attempts(task_id)
    assert (attempt.outcome, attempt.agent_id) == ("completed", "human:ann")


async def test_a_form_that_was_filled_in_wrongly_is_handed_back(world: World) -> None:
    """No attempt fails: the person gets an error, and tries again."""
    task_id = await for_a_person(
        world, output=OutputContract(validation="json-schema", validation_schema=FORM)
    )
    before = world.everything()

    for data in (b"{}", b'{"ok": "maybe"}', None):
        with pytest.raises(InvalidInputError) as caught:
            await world.engine.approvals.decide(task_id, yes(data=data))
        assert [place for place, _ in caught.value.errors] == ["data"]
        assert world.everything() == before


async def test_a_person_refuses_a_task(world: World) -> None:
    """Not retried: what a person rejects is a dead letter, with the reason."""
    task_id = await for_a_person(world)

    assert await world.engine.approvals.decide(task_id, no(note="not my job")) is Status.DEAD_LETTERED

    end = world.end(task_id)
    assert (end["reason"], end["category"]) == ("human: rejected by ann: not my job", "cancelled")
    (attempt,) = world.attempts(task_id)
    assert (attempt["outcome"], attempt["agent_id"], attempt["number"]) == ("failed", "human:ann", 1)


async def test_a_person_is_asked_for_reports_too(world: World) -> None:
    """R-093: where the task asks for one."""
    task_id = await for_a_person(world, preset="loki")

    with pytest.raises(InvalidInputError, match="decision_report: incomplete_decision_report"):
        await world.engine.approvals.decide(task_id, yes(data=b"1"))

    report = json.dumps(REPORT).encode()
    assert await world.engine.approvals.decide(task_id, yes(data=b"1", report=report)) is Status.COMPLETED
    assert world.end(task_id)["decision_report"] == REPORT


async def test_four_eyes(world: World) -> None:
    """A person's answer may have to be approved by a person."""
    task_id = await for_a_person(world, output=OutputContract(validation="human"))

    assert await world.engine.approvals.decide(task_id, yes(data=b"1")) is Status.VALIDATING
    assert [item.kind for item in (await waiting(world)).items] == ["gate"]
    assert await world.engine.approvals.decide(task_id, yes(reviewer="bob")) is Status.COMPLETED


async def test_an_agent_that_stands_for_a_person_may_claim_it_as_well(world: World) -> None:
    """R-057: by its capability; while it holds the task, no person is asked."""
    task_id = await for_a_person(world)
    assert await world.claim(await world.agent()) == []
    person = await world.agent(capabilities=["human"])
    task = await world.take(person)

    assert (await waiting(world)).items == []
    with pytest.raises(InvalidTransitionError, match="it is RUNNING"):
        await world.engine.approvals.decide(task_id, yes(data=b"1"))
    assert await world.complete(task, 1) is Status.COMPLETED


async def test_a_revived_task_waits_for_a_person_again(world: World) -> None:
    task_id = await for_a_person(world)
    await world.engine.approvals.decide(task_id, no())
    await world.engine.revive.retry(task_id)

    assert [item.task.id for item in (await waiting(world)).items] == [task_id]
    assert await world.engine.approvals.decide(task_id, yes(data=b"1")) is Status.COMPLETED
    assert world.end(task_id)["epoch"] == 2


# Nothing to decide.


async def test_there_is_nothing_to_decide(world: World) -> None:
    """The error says what it is, and nothing changes."""
    agent = await world.agent()
    plain = await world.one("plain")
    blocked = await for_a_person(world, depends_on=[plain])
    done = await world.one("done")
    await world.complete(await world.take(agent, types=["done"]))
    before = world.everything()

    for name, found in ((plain, "READY"), (blocked, "PENDING"), (done, "COMPLETED")):
        with pytest.raises(InvalidTransitionError, match=f"it is {found}"):
            await world.engine.approvals.decide(name, yes())
    for name in ("task_nope", "a\0b"):
        with pytest.raises(NotFoundError):
            await world.engine.approvals.decide(name, yes())

    assert world.everything() == before


async def test_deciding_twice(world: World) -> None:
    task_id = await at_the_gate(world)
    await world.engine.approvals.decide(task_id, yes())

    with pytest.raises(InvalidTransitionError, match="it is COMPLETED"):
        await world.engine.approvals.decide(task_id, no())


async def test_the_agent_of_an_output_at_the_gate_has_nothing_to_do_with_it_any_more(world: World) -> None:
    """A heartbeat says so; a release is refused."""
    agent = await world.agent()
    await world.one("gated", output=GATED)
    task = await world.take(agent)
    await world.complete(task, 1)

    (moved,) = await release_claims(world.engine, [ref(task)])

    assert isinstance(moved.error, InvalidTransitionError)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"reviewer": " "}, "reviewer"),
        ({"reviewer": "x" * 1_001}, "reviewer"),
        ({"reviewer": "a\0b"}, "reviewer"),
        ({"note": "x" * 5_001}, "note"),
        ({"note": "\ud800"}, "note"),
        ({"data": b'"\\u0000"'}, "data"),
        ({"report": b'"\\ud800"'}, "decision_report"),
        ({"report": b'"' + b"x" * 70_000 + b'"'}, "decision_report"),
    ],
)
def test_hostile_decisions(fields: dict[str, Any], place: str) -> None:
    """Unicode and NUL in every text."""
    with pytest.raises(InvalidInputError) as caught:
        yes(**fields)
    assert [name for name, _ in caught.value.errors] == [place]


# What a page about one item shows.


async def test_one_item_is_found_while_it_waits(world: World) -> None:
    gated, errand = await at_the_gate(world), await for_a_person(world)
    plain = await world.one("for an agent")
    approvals = world.engine.approvals

    found = await approvals.find(gated)
    assert found is not None
    assert (found.kind, found.schema, found.task.id) == ("gate", {"ask": "Is it nice?"}, gated)
    asked = await approvals.find(errand)
    assert asked is not None
    assert (asked.kind, asked.schema) == ("task", None)
    assert [await approvals.find(name) for name in (plain, "task_unknown", "\0")] == [None] * 3
    await approvals.decide(gated, yes())
    assert await approvals.find(gated) is None


async def test_the_last_decision_of_a_person_is_remembered(world: World) -> None:
    gated, errand = await at_the_gate(world), await for_a_person(world)
    approvals = world.engine.approvals
    assert await approvals.last_decision(gated) is None
    await approvals.decide(gated, no("ann", note="too vague"))
    rejected = await approvals.last_decision(gated)
    assert rejected is not None
    assert (rejected.reviewer, rejected.approved, rejected.at) == ("ann", False, world.clock.now())
    assert rejected.note == "rejected by ann: too vague"

    await approvals.decide(errand, yes("bea", data=b"1"))
    answered = await approvals.last_decision(errand)
    assert answered is not None
    assert (answered.reviewer, answered.approved, answered.at) == ("bea", True, world.clock.now())


async def test_tasks_that_wait_for_an_item_are_counted(world: World) -> None:
    gated, errand = await at_the_gate(world), await for_a_person(world)
    for _ in range(2):
        await world.one("later", depends_on=[gated, errand])
    approvals = world.engine.approvals

    assert await approvals.blocked_by([gated, errand, "task_unknown"]) == {
        gated: 2,
        errand: 2,
        "task_unknown": 0,
    }
    await approvals.decide(errand, yes(data=b"1"))
    assert await approvals.blocked_by([gated, errand]) == {gated: 2, errand: 0}
