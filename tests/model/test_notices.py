"""Notices: which events, in which words, and how they are grouped."""

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.model.notices import (
    DEFAULT_KINDS,
    DueNotice,
    NoticeEvent,
    NoticeKind,
    events_of,
    message,
    notices,
    plan,
)

AT = datetime(2026, 2, 8, tzinfo=UTC)


def event(kind: str, data: dict[str, Any] | None = None, **ids: str) -> NoticeEvent:
    return NoticeEvent(kind, AT, ids.get("task_id"), ids.get("dag_id"), ids.get("agent_id"), data)


@pytest.mark.parametrize(
    ("happened", "kind", "text"),
    [
        (
            event("task.dead_lettered", {"error": "it\nbroke", "poison_pill": False}, task_id="t"),
            "dead_letter",
            "Task t moved to dead letter queue: it broke",
        ),
        (event("task.dead_lettered", {"reason": "child c failed"}, task_id="t"), "dead_letter", None),
        (
            event("task.dead_lettered", task_id="t")._replace(type="code", title="Implement it"),
            "dead_letter",
            "Task t (code: Implement it) moved to dead letter queue",
        ),
        (
            event("approval.waiting", task_id="t")._replace(type="code", title="code"),
            "approval_waiting",
            "Task t (code) is waiting for approval",
        ),
        (
            event("dag.failed", dag_id="d")._replace(title="Landing page"),
            "dag_failed",
            "DAG d (Landing page) is blocked by dead letters",
        ),
        (
            event("task.dead_lettered", {"error": "no", "poison_pill": True}, task_id="t"),
            "poison_pill",
            "Task t fails with every agent: no",
        ),
        (event("breaker.opened", {"key": "code"}), "breaker_opened", "Circuit breaker code is open"),
        (event("breaker.opened", {"message": "code: 5 failures"}), "breaker_opened", "code: 5 failures"),
        (event("budget.blocked", None, dag_id="d"), "budget_blocked", "DAG d is out of budget"),
        (event("budget.blocked", None, agent_id="a"), "budget_blocked", "Agent a is out of budget"),
        (event("dag.failed", None, dag_id="d"), "dag_failed", "DAG d is blocked by dead letters"),
        (event("approval.waiting", None, task_id="t"), "approval_waiting", "Task t is waiting for approval"),
        (
            event("agent.offline", {"last_heartbeat": "10:00"}, agent_id="a"),
            "agent_offline",
            "Agent a is offline; last heartbeat at 10:00",
        ),
        (event("alert", {"message": "look here"}), "alert", "look here"),
        (event("alert"), "alert", "Attention needed"),
    ],
)
def test_the_text_of_each_kind(happened: NoticeEvent, kind: str, text: str | None) -> None:
    """R-111, R-135."""
    (notice,) = notices([happened], DEFAULT_KINDS)

    assert notice.kind == kind
    assert text in {None, notice.text}
    assert happened.kind in events_of([NoticeKind(kind)])


def test_an_agent_that_stops_makes_no_notice() -> None:
    assert notices([event("agent.offline", None, agent_id="a")], DEFAULT_KINDS) == []


def test_an_alert_that_repeats_an_event_makes_no_second_notice() -> None:
    """An opening breaker is both; a destination for alerts only gets the alert."""
    opened, alert = (event(kind, {"key": "code"}) for kind in ("breaker.opened", "alert"))

    assert [notice.kind for notice in notices([opened, alert], DEFAULT_KINDS)] == ["breaker_opened"]
    assert [notice.kind for notice in notices([opened, alert], {NoticeKind.ALERT})] == ["alert"]
    assert len(notices([alert, event("alert", {"key": "mail"})], DEFAULT_KINDS)) == 2


def test_large_data_is_left_out() -> None:
    (notice,) = notices([event("task.dead_lettered", {"error": "x" * 20_000}, task_id="t")], DEFAULT_KINDS)

    assert notice.data == {"left_out": "too large"}
    assert len(notice.text) < 400


def test_a_message_of_many_notices() -> None:
    many = notices([event("dag.failed", None, dag_id=f"d{n}") for n in range(25)], DEFAULT_KINDS)

    found = message("msg_1", many)

    assert (found.count, found.title, len(found.notices)) == (25, "DAG failed (25 times)", 20)
    assert found.text.splitlines()[-1] == "… and 5 more"


def test_the_last_message_of_a_window_contains_all_due_notices() -> None:
    waiting = [DueNotice(n, "alert", None) for n in range(5)]

    assert plan(waiting, {}, most=3, room=9) == [(0,), (1,), (2, 3, 4)]
    assert plan(waiting, {"alert": 2}, most=3, room=9) == [(0, 1, 2, 3, 4)]
    assert plan(waiting, {"alert": 3}, most=3, room=9) == []
    assert plan(waiting, {"other": 3}, most=5, room=9) == [(0,), (1,), (2,), (3,), (4,)]
    assert plan(waiting, {"alert": 99}, most=None, room=2) == [(0,), (1,)]


WAITING = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.none() | st.integers(0, 3)), max_size=30
).map(
    lambda rows: [
        DueNotice(n, "a" if sent is not None else kind, sent) for n, (kind, sent) in enumerate(rows)
    ]
)


@given(
    WAITING,
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)),
    st.none() | st.integers(1, 5),
    st.integers(1, 40),
)
def test_a_plan_drops_and_repeats_no_notice(
    waiting: list[DueNotice], sent: dict[str, int], most: int | None, room: int
) -> None:
    found = plan(waiting, sent, most=most, room=room)

    kinds = {one.id: one for one in waiting}
    taken = [one for ids in found for one in ids]
    assert len(taken) == len(set(taken))
    assert len(found) <= room
    # Each message is of one kind, and a message that was tried before is unchanged.
    for ids in found:
        assert len({kinds[one].kind for one in ids}) == 1
        assert len({kinds[one].message for one in ids}) == 1
    for again in {one.message for one in waiting} - {None}:
        ids = tuple(one.id for one in waiting if one.message == again)
        assert ids in found or not set(ids) & set(taken)
    # No more new messages of a kind than the window allows.
    new = Counter(kinds[ids[0]].kind for ids in found if kinds[ids[0]].message is None)
    assert most is None or all(
        sent.get(kind, 0) + count <= max(most, sent.get(kind, 0)) for kind, count in new.items()
    )
    # With room for all, a kind that may be sent is sent completely.
    if room == 40:
        for kind in "abc":
            if most is None or sent.get(kind, 0) < most:
                assert {one.id for one in waiting if one.kind == kind and one.message is None} <= set(taken)
