"""The checker itself: a run in which all is well, and for each rule a run with one thing wrong."""

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.engine.feed.events import Cursor, Snapshot
from tests.chaos.checker import RULES, check
from tests.chaos.evidence import (
    AttemptFact,
    CorrectionFact,
    DisputeFact,
    EdgeFact,
    EventFact,
    Evidence,
    PurseFact,
    StepFact,
    TaskFact,
)
from tests.chaos.rules.feed import place_after

COST = Decimal("0.01")


def good() -> Evidence:
    """`first` fails once and is completed by another agent; `second` depends on it; both lock one document.

    `third` is a dead letter, `waiting` depends on it, and `poor` has a DAG without money.
    """
    events = _events(
        ("first", 0, None, "task.created task.ready"),
        ("second", 0, None, "task.created"),
        ("third", 0, None, "task.created task.ready"),
        ("waiting", 0, None, "task.created"),
        ("poor", 0, None, "task.created task.ready"),
        ("first", 1, "a", "task.claimed task.started"),
        ("first", 1, "a", "task.failed task.retry_scheduled"),
        ("first", 1, None, "task.ready"),
        ("first", 2, "b", "task.claimed task.started"),
        ("first", 2, "b", "task.validating task.completed"),
        ("second", 0, None, "task.ready"),
        ("second", 1, "a", "task.claimed task.started"),
        ("second", 1, "a", "task.validating task.completed"),
        ("third", 1, "b", "task.claimed task.started"),
        ("third", 1, "b", "task.failed task.dead_lettered"),
    )
    return Evidence(
        records=[
            _record(1, "client", "submit", call="1", ids=["first", "second", "third", "waiting", "poor"]),
            _record(2, "client", "answered", call="1", verdict="ok"),
            _claimed(3, "a", "first", 1),
            _record(4, "a", "begun", task="first", epoch=1, attempt=1),
            _record(5, "a", "ran_step", task="first", epoch=1, name="s"),
            _record(6, "a", "step", call="2", task="first", epoch=1, name="s", data=1, cost="0.01"),
            _record(7, "a", "answered", call="2", stored=1),
            _record(8, "a", "fail", call="3", items=[_item("first", 1)]),
            _record(9, "a", "answered", call="3", statuses=["RETRYING"], errors=[None]),
            _claimed(10, "b", "first", 2, steps=["s"]),
            _record(11, "b", "begun", task="first", epoch=2, attempt=2),
            _record(12, "b", "complete", call="4", items=[_item("first", 2, output={"by": "b"})]),
            _record(13, "b", "answered", call="4", statuses=["COMPLETED"], errors=[None]),
            # The first one comes back too late.
            _record(14, "a", "complete", call="5", items=[_item("first", 1, output={"by": "a"})]),
            _record(15, "a", "answered", call="5", statuses=[None], errors=["stale_claim"]),
            _claimed(16, "a", "second", 1, inputs={"task:first:output": {"by": "b"}}),
            _record(17, "a", "begun", task="second", epoch=1, attempt=1),
            _record(18, "a", "complete", call="6", items=[_item("second", 1, output={"by": "a"})]),
            _record(19, "a", "answered", call="6", statuses=["COMPLETED"], errors=[None]),
            _claimed(20, "b", "third", 1),
            _record(21, "reader", "page", events=_read(events), next="…"),
        ],
        tasks={
            task.id: task
            for task in (
                _task(
                    "first", "COMPLETED", 2, cost_usd=2 * COST, agent_id="b", output={"by": "b"}, lock_key="d"
                ),
                _task(
                    "second", "COMPLETED", 1, cost_usd=COST, agent_id="a", output={"by": "a"}, lock_key="d"
                ),
                _task("third", "DEAD_LETTERED", 1, agent_id="b"),
                _task("waiting", "PENDING", 0),
                _task("poor", "READY", 0, parked="dag_budget", dag_id="poor-dag", max_cost_usd=Decimal(1)),
            )
        },
        edges=[
            EdgeFact(task_id="second", depends_on="first"),
            EdgeFact(task_id="waiting", depends_on="third", satisfied=False),
        ],
        attempts=[
            AttemptFact(
                task_id="first", epoch=1, outcome="failed", agent_id="a", incarnation=1, cost_usd=COST
            ),
            AttemptFact(task_id="third", epoch=1, outcome="failed", agent_id="b", incarnation=1),
        ],
        steps=[StepFact(task_id="first", name="s", epoch=1, data=1)],
        events=events,
        agents=[
            PurseFact(id="a", spent_usd=2 * COST, limit_usd=Decimal(1)),
            PurseFact(id="b", spent_usd=COST),
        ],
        dags=[PurseFact(id="poor-dag", spent_usd=Decimal(0), limit_usd=Decimal("0.5"))],
        spent_usd=3 * COST,
    )


def _task(name: str, status: str, epoch: int, **facts: Any) -> TaskFact:
    known: dict[str, Any] = {"id": name, "dag_id": "dag", "status": status, "epoch": epoch}
    return TaskFact(**known | facts)


def _record(t: float, who: str, what: str, **facts: Any) -> dict[str, Any]:
    return {"t": float(t), "who": who, "pid": 1, "what": what, **facts}


def _claimed(t: float, agent: str, task: str, epoch: int, **facts: Any) -> dict[str, Any]:
    facts = {"steps": [], "inputs": {}} | facts
    return _record(t, agent, "claimed", task=task, epoch=epoch, agent=agent, incarnation=1, **facts)


def _item(task: str, epoch: int, **facts: Any) -> dict[str, Any]:
    return {"task": task, "epoch": epoch, "cost": str(COST), "output": None} | facts


def _events(*rows: tuple[str, int, str | None, str]) -> list[EventFact]:
    return [
        EventFact(
            seq=seq, n=n, last=n == len(kinds.split()), kind=kind, task_id=task, agent_id=agent, epoch=epoch
        )
        for seq, (task, epoch, agent, kinds) in enumerate(rows, 1)
        for n, kind in enumerate(kinds.split(), 1)
    ]


def _read(events: list[EventFact]) -> list[list[str | None]]:
    def cursor(event: EventFact) -> str:
        seq, skip = place_after(event)
        return Cursor(Snapshot(1), Snapshot(1000), seq, skip).encode()

    return [[cursor(event), event.kind, event.task_id] for event in events]


# One thing wrong at a time.


def drop_task(evidence: Evidence) -> None:
    del evidence.tasks["third"]
    evidence.events = [event for event in evidence.events if event.task_id != "third"]
    evidence.records = [r for r in evidence.records if r.get("task") != "third" and r["what"] != "page"]
    evidence.attempts = evidence.attempts[:1]
    evidence.edges = evidence.edges[:1]
    evidence.tasks["waiting"] = replace(evidence.tasks["waiting"], status="CANCELLED")
    evidence.events = [*evidence.events, *_events(("waiting", 0, None, "task.cancelled"))]


def half_a_submission(evidence: Evidence) -> None:
    drop_task(evidence)
    evidence.records = [r for r in evidence.records if (r["what"], r.get("call")) != ("answered", "1")]


def unasked(evidence: Evidence) -> None:
    submit = evidence.records[0]
    evidence.records = [{**submit, "ids": submit["ids"][1:]}, *evidence.records[1:]]


def stuck(evidence: Evidence) -> None:
    evidence.edges = evidence.edges[:1]


def unparked_in_vain(evidence: Evidence) -> None:
    evidence.dags = [replace(evidence.dags[0], limit_usd=Decimal(5))]


def other_output(evidence: Evidence) -> None:
    evidence.tasks["second"] = replace(evidence.tasks["second"], output={"by": "another"})


def two_winners(evidence: Evidence) -> None:
    _answer(evidence, "5", statuses=["COMPLETED"], errors=[None])


def completion_lost(evidence: Evidence) -> None:
    """It was answered, and is gone: what a fail-over to a standby that lags behind does."""
    evidence.tasks["second"] = replace(
        evidence.tasks["second"], status="READY", epoch=0, agent_id=None, output=None
    )


def completion_of_nobody(evidence: Evidence) -> None:
    evidence.records = [r for r in evidence.records if r.get("call") != "6"]


def failure_not_recorded(evidence: Evidence) -> None:
    evidence.attempts = evidence.attempts[1:]


def step_lost(evidence: Evidence) -> None:
    evidence.steps = []


def child_lost(evidence: Evidence) -> None:
    _add(
        evidence,
        _record(30, "a", "spawn", call="9", task="second", epoch=1, key="k"),
        _record(31, "a", "answered", call="9", children=["child"]),
    )


def cancel_lost(evidence: Evidence) -> None:
    _add(
        evidence,
        _record(30, "client", "cancel", call="9", task="third"),
        _record(31, "client", "answered", call="9", verdict="ok"),
    )


def revival_lost(evidence: Evidence) -> None:
    _add(
        evidence,
        _record(30, "client", "revive", call="9"),
        _record(31, "client", "answered", call="9", task="third", verdict="ok"),
    )


def refused_but_done(evidence: Evidence) -> None:
    _answer(evidence, "6", statuses=[None], errors=["stale_claim"])


def step_run_again(evidence: Evidence) -> None:
    _add(evidence, _record(11.5, "b", "ran_step", task="first", epoch=2, name="s"))


def step_not_given(evidence: Evidence) -> None:
    _change(evidence, lambda r: r["what"] == "claimed" and r["steps"], steps=[])


def claim_given_twice(evidence: Evidence) -> None:
    _add(evidence, _claimed(10.5, "a", "first", 2, steps=["s"]))


def claim_not_recorded(evidence: Evidence) -> None:
    _add(evidence, _claimed(30, "a", "poor", 1))


def claim_of_another(evidence: Evidence) -> None:
    _change(evidence, lambda r: r["what"] == "claimed" and r["task"] == "third", agent="a")


def two_processes_of_one_incarnation(evidence: Evidence) -> None:
    _change(evidence, lambda r: r["what"] == "claimed" and r["task"] == "second", pid=2)


def attempt_of_another_process(evidence: Evidence) -> None:
    evidence.attempts = [replace(evidence.attempts[0], incarnation=2), *evidence.attempts[1:]]


def living_process_reported(evidence: Evidence) -> None:
    """It claims `second` afterwards."""
    evidence.attempts = [replace(evidence.attempts[0], error="agent_restarted"), *evidence.attempts[1:]]


def claimed_while_held(evidence: Evidence) -> None:
    _swap(evidence, ("first", "task.failed"), ("first", "task.claimed", 2))


def epoch_skipped(evidence: Evidence) -> None:
    evidence.events = [
        replace(event, epoch=5) if (event.task_id, event.kind) == ("third", "task.claimed") else event
        for event in evidence.events
    ]


def document_held_twice(evidence: Evidence) -> None:
    """`second` is claimed while `first` is held, though it doesn't depend on it any more."""
    evidence.edges = evidence.edges[1:]
    rows = list(evidence.events)
    begins = next(
        n for n, e in enumerate(rows) if (e.task_id, e.kind, e.epoch) == ("first", "task.claimed", 2)
    )
    early = [
        e for e in rows if e.task_id == "second" and e.kind in {"task.ready", "task.claimed", "task.started"}
    ]
    rest = [event for event in rows if event not in early]
    evidence.events = rest[: begins + 1] + early + rest[begins + 1 :]


def started_too_soon(evidence: Evidence) -> None:
    evidence.events = sorted(
        evidence.events, key=lambda e: (e.task_id == "first" and e.epoch == 2, e.seq, e.n)
    )


def began_too_soon(evidence: Evidence) -> None:
    _change(evidence, lambda r: r["what"] == "begun" and r["task"] == "second", t=1.5)


def wrong_input(evidence: Evidence) -> None:
    _change(
        evidence, lambda r: r["what"] == "claimed" and r["inputs"], inputs={"task:first:output": {"by": "a"}}
    )


def impossible_move(evidence: Evidence) -> None:
    evidence.events = [
        event for event in evidence.events if (event.task_id, event.kind) != ("second", "task.started")
    ]


def state_without_event(evidence: Evidence) -> None:
    evidence.tasks["third"] = replace(evidence.tasks["third"], status="CANCELLED")


def event_seen_twice(evidence: Evidence) -> None:
    page = _page(evidence)
    _change(evidence, _is_page, events=[*page, page[-1]])


def event_missed(evidence: Evidence) -> None:
    page = _page(evidence)
    _change(evidence, _is_page, events=page[:3] + page[4:])


def event_vanished(evidence: Evidence) -> None:
    """It was read, and is gone."""
    evidence.events = [event for event in evidence.events if event.kind != "task.dead_lettered"]


def seen_out_of_order(evidence: Evidence) -> None:
    page = _page(evidence)
    page[0:2] = reversed(page[0:2])
    _change(evidence, _is_page, events=page)


def effect_seen_first(evidence: Evidence) -> None:
    page = _page(evidence)
    cause = next(entry for entry in page if entry[1:] == ["task.completed", "first"])
    page.remove(cause)
    _change(evidence, _is_page, events=[*page, cause])


def money_vanished(evidence: Evidence) -> None:
    evidence.agents = [replace(evidence.agents[0], spent_usd=COST), evidence.agents[1]]


def overdrawn(evidence: Evidence) -> None:
    evidence.agents = [replace(evidence.agents[0], limit_usd=COST), evidence.agents[1]]


def promised_too_much(evidence: Evidence) -> None:
    evidence.dags = [replace(evidence.dags[0], reserved_usd=Decimal(1))]


def charged_twice(evidence: Evidence) -> None:
    evidence.tasks["second"] = replace(evidence.tasks["second"], cost_usd=2 * COST)
    evidence.agents = [replace(evidence.agents[0], spent_usd=3 * COST), evidence.agents[1]]
    evidence.spent_usd = 4 * COST


def day_not_charged(evidence: Evidence) -> None:
    evidence.spent_usd = 2 * COST


def correction_not_booked(evidence: Evidence) -> None:
    evidence.corrections = [CorrectionFact(task_id="second", agent_id="a", amount_usd=-COST)]
    evidence.tasks["second"] = replace(evidence.tasks["second"], cost_usd=Decimal(0))
    evidence.spent_usd = 2 * COST


def counted_beyond_the_ceiling(evidence: Evidence) -> None:
    evidence.disputes = [
        DisputeFact(task_id="second", epoch=1, agent_id="a", ceiling_usd=COST / 2),
    ]


def tables_disagree(evidence: Evidence) -> None:
    evidence.broken_rules = {"an agent holds what its rows say": [{"id": "a", "held": 1}]}


WRONGS: list[tuple[Callable[[Evidence], None], str]] = [
    (drop_task, "no accepted task is lost"),
    (half_a_submission, "no accepted task is lost"),
    (unasked, "nothing comes from nowhere"),
    (stuck, "everything comes to an end"),
    (unparked_in_vain, "everything comes to an end"),
    (other_output, "one recorded outcome"),
    (two_winners, "one recorded outcome"),
    (completion_lost, "one recorded outcome"),
    (completion_of_nobody, "one recorded outcome"),
    (failure_not_recorded, "whatever was answered is so"),
    (step_lost, "whatever was answered is so"),
    (child_lost, "whatever was answered is so"),
    (cancel_lost, "whatever was answered is so"),
    (revival_lost, "whatever was answered is so"),
    (refused_but_done, "a refused claim changes nothing"),
    (step_run_again, "recorded steps don't run again"),
    (step_not_given, "recorded steps don't run again"),
    (claim_given_twice, "a claim belongs to one agent"),
    (claim_not_recorded, "a claim belongs to one agent"),
    (claim_of_another, "a claim belongs to one agent"),
    (two_processes_of_one_incarnation, "an incarnation is one process"),
    (attempt_of_another_process, "attempts name their process"),
    (living_process_reported, "only dead processes are reported"),
    (claimed_while_held, "one claim at a time"),
    (epoch_skipped, "one claim at a time"),
    (document_held_twice, "one holder of a document"),
    (started_too_soon, "dependents start after dependencies"),
    (began_too_soon, "handlers begin after dependencies"),
    (wrong_input, "inputs are recorded outputs"),
    (impossible_move, "events follow the state machine"),
    (state_without_event, "events follow the state machine"),
    (event_seen_twice, "readers see each event once"),
    (event_missed, "readers see each event once"),
    (event_vanished, "readers see each event once"),
    (seen_out_of_order, "readers see causes first"),
    (effect_seen_first, "readers see causes first"),
    (money_vanished, "agents spent what their claims cost"),
    (overdrawn, "no agent spends more than its budget"),
    (promised_too_much, "no agent spends more than its budget"),
    (charged_twice, "costs are what agents reported"),
    (day_not_charged, "days have spent what all tasks cost"),
    (correction_not_booked, "agents spent what their claims cost"),
    (counted_beyond_the_ceiling, "costs are what agents reported"),
    (tables_disagree, "tables agree"),
]


def _is_page(record: Any) -> bool:
    return bool(record["what"] == "page")


def _page(evidence: Evidence) -> list[Any]:
    return [list(entry) for entry in next(filter(_is_page, evidence.records))["events"]]


def _add(evidence: Evidence, *records: dict[str, Any]) -> None:
    evidence.records = [*evidence.records, *records]


def _change(evidence: Evidence, which: Callable[[Any], Any], **facts: Any) -> None:
    assert any(map(which, evidence.records))
    evidence.records = [{**r, **facts} if which(r) else r for r in evidence.records]


def _answer(evidence: Evidence, call: str, **facts: Any) -> None:
    _change(evidence, lambda r: r["what"] == "answered" and r["call"] == call, **facts)


def _swap(evidence: Evidence, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    def place(what: tuple[Any, ...]) -> int:
        fits = ((e.task_id, e.kind, e.epoch)[: len(what)] == what for e in evidence.events)
        return list(fits).index(True)

    events = list(evidence.events)
    a, b = place(one), place(other)
    events[a], events[b] = events[b], events[a]
    evidence.events = events


def test_a_run_in_which_all_is_well() -> None:
    assert {rule: found for rule, found in check(good()).items() if found} == {}


@pytest.mark.parametrize(("spoil", "rule"), WRONGS, ids=[spoil.__name__ for spoil, _ in WRONGS])
def test_one_thing_wrong(spoil: Callable[[Evidence], None], rule: str) -> None:
    evidence = good()
    spoil(evidence)

    assert check(evidence)[rule], f"not detected: {check(evidence)}"


def test_every_rule_can_be_broken() -> None:
    assert {rule for _, rule in WRONGS} == RULES.keys()
