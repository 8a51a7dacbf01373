"""What people are told about, made of events: which of them, and in which words."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

#: Of an error or a note, in a sentence.
_QUOTED = 300
#: Of an event's data as JSON: a notification is a hint, the whole is in the database.
_MAX_DATA = 16_000
#: So many of those that are told in one message are told in full.
_IN_FULL = 20


class NoticeKind(StrEnum):
    DEAD_LETTER = "dead_letter"
    POISON_PILL = "poison_pill"
    BREAKER_OPENED = "breaker_opened"
    BUDGET_BLOCKED = "budget_blocked"
    DAG_FAILED = "dag_failed"
    APPROVAL_WAITING = "approval_waiting"
    AGENT_OFFLINE = "agent_offline"
    ALERT = "alert"
    #: A decision about a dead letter. For the log of reviews; nobody is woken for it.
    REVIEW = "review"
    #: Claims of a model, a provider or of everything are held back for a while. For programs, not for people.
    SLOWDOWN = "slowdown"


#: What a destination is told that doesn't say what it wants.
USUAL = frozenset(NoticeKind) - {NoticeKind.REVIEW, NoticeKind.SLOWDOWN}

_EVENT_OF = {
    NoticeKind.DEAD_LETTER: "task.dead_lettered",
    NoticeKind.POISON_PILL: "task.dead_lettered",
    NoticeKind.BREAKER_OPENED: "breaker.opened",
    NoticeKind.BUDGET_BLOCKED: "budget.blocked",
    NoticeKind.DAG_FAILED: "dag.failed",
    NoticeKind.APPROVAL_WAITING: "approval.waiting",
    NoticeKind.AGENT_OFFLINE: "agent.offline",
    NoticeKind.ALERT: "alert",
    NoticeKind.REVIEW: "task.resolved",
    NoticeKind.SLOWDOWN: "signal.slowdown",
}
_KIND_OF: dict[str, NoticeKind] = {
    event: kind for kind, event in _EVENT_OF.items() if kind is not NoticeKind.POISON_PILL
}


class Happened(NamedTuple):
    """An event, as far as notices go."""

    kind: str
    at: datetime
    task_id: str | None
    dag_id: str | None
    agent_id: str | None
    data: Mapping[str, Any] | None


class Notice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: NoticeKind
    at: datetime
    text: str
    task_id: str | None = None
    dag_id: str | None = None
    agent_id: str | None = None
    data: Any = None


class Message(Struct, frozen=True, kw_only=True):
    """What is sent: one notice, or several of one kind when there are too many."""

    #: The same each time it is tried: who gets it twice can tell.
    id: str
    kind: NoticeKind
    title: str
    text: str
    count: int
    #: Some of them, where there are many.
    notices: tuple[Notice, ...]


def events_of(kinds: Collection[NoticeKind]) -> frozenset[str]:
    """The events that these are made of."""
    return frozenset(_EVENT_OF[kind] for kind in kinds)


def notices(events: Sequence[Happened], kinds: Collection[NoticeKind]) -> list[Notice]:
    """One for each event that is wanted; an alert that comes with an event is no second one."""
    found: list[Notice] = []
    before: Happened | None = None
    for event in events:
        repeated = event.kind == "alert" and before is not None and event[1:] == before[1:]
        notice = None if repeated else _notice(event)
        if notice is not None and notice.kind in kinds:
            found.append(notice)
            before = None if notice.kind is NoticeKind.REVIEW else event
    return found


def _notice(event: Happened) -> Notice | None:
    kind: NoticeKind | None = _KIND_OF.get(event.kind)
    data = event.data or {}
    if kind is None:
        return None
    if kind is NoticeKind.DEAD_LETTER and data.get("poison_pill"):
        kind = NoticeKind.POISON_PILL
    # An agent that stops says goodbye; only one that fell silent is news.
    if kind is NoticeKind.AGENT_OFFLINE and "last_heartbeat" not in data:
        return None
    small = event.data if len(msgspec.json.encode(data)) <= _MAX_DATA else {"left_out": "too large"}
    return Notice(
        kind=kind,
        at=event.at,
        text=_WORDS[kind](event, data),
        task_id=event.task_id,
        dag_id=event.dag_id,
        agent_id=event.agent_id,
        data=small,
    )


def _subject(event: Happened) -> str:
    if event.task_id is not None:
        return f"Task {event.task_id}"
    return f"DAG {event.dag_id}" if event.dag_id is not None else f"Agent {event.agent_id}"


def _said(data: Mapping[str, Any]) -> str:
    return _quoted(data.get("message") or data.get("reason"))


def _cause(data: Mapping[str, Any]) -> str:
    cause = _quoted(data.get("error") or data.get("reason"))
    return f": {cause}" if cause else ""


def _quoted(value: object) -> str:
    text = " ".join(str(value or "").split())
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"


_Words = Callable[[Happened, Mapping[str, Any]], str]
_WORDS: dict[NoticeKind, _Words] = {
    NoticeKind.DEAD_LETTER: lambda event, data: f"Task {event.task_id} failed for good{_cause(data)}",
    NoticeKind.POISON_PILL: lambda event, data: (
        f"Task {event.task_id} fails whichever agent tries it{_cause(data)}"
    ),
    NoticeKind.BREAKER_OPENED: lambda _, data: (
        _said(data) or f"The circuit breaker {data.get('key', '')} is open"
    ),
    NoticeKind.BUDGET_BLOCKED: lambda event, data: _said(data) or f"{_subject(event)} waits for money",
    NoticeKind.DAG_FAILED: lambda event, _: f"DAG {event.dag_id} can't go on: see its dead letters",
    NoticeKind.APPROVAL_WAITING: lambda event, _: f"Task {event.task_id} waits for a person",
    NoticeKind.AGENT_OFFLINE: lambda event, data: (
        f"Agent {event.agent_id} was last heard of at {data['last_heartbeat']}"
    ),
    NoticeKind.ALERT: lambda _, data: _said(data) or "Something needs a person",
    NoticeKind.REVIEW: lambda event, data: (
        f"Task {event.task_id}: {data.get('resolution', 'retry')} by {data.get('reviewer') or 'hand'}"
    ),
    NoticeKind.SLOWDOWN: lambda _, data: (
        f"Slow down {data.get('key')}: nothing of it is claimed until {data.get('until')}"
    ),
}

_TITLES = {
    NoticeKind.DEAD_LETTER: "Dead letter",
    NoticeKind.POISON_PILL: "Poison pill",
    NoticeKind.BREAKER_OPENED: "Circuit breaker open",
    NoticeKind.BUDGET_BLOCKED: "Out of budget",
    NoticeKind.DAG_FAILED: "DAG failed",
    NoticeKind.APPROVAL_WAITING: "Approval needed",
    NoticeKind.AGENT_OFFLINE: "Agent offline",
    NoticeKind.ALERT: "Alert",
    NoticeKind.REVIEW: "Dead letter reviewed",
    NoticeKind.SLOWDOWN: "Slow down",
}


def message(message_id: str, told: Sequence[Notice]) -> Message:
    """`told` are of one kind, and at least one."""
    kind, count = told[0].kind, len(told)
    lines = [notice.text for notice in told[:_IN_FULL]]
    if count > _IN_FULL:
        lines.append(f"… and {count - _IN_FULL} more")
    return Message(
        id=message_id,
        kind=kind,
        title=_TITLES[kind] if count == 1 else f"{_TITLES[kind]} ({count} times)",
        text="\n".join(lines),
        count=count,
        notices=tuple(told[:_IN_FULL]),
    )


class Waiting(NamedTuple):
    """A notice that is due."""

    id: int
    kind: str
    #: Of which message it is part, if it was sent before.
    message: int | None


def plan(
    waiting: Sequence[Waiting], sent: Mapping[str, int], *, most: int | None, room: int
) -> list[tuple[int, ...]]:
    """Which notices go out now, in which messages; what isn't in any waits.

    Of each kind at most `most` messages go out in a window, of which `sent` have. The last of them takes
    along all that wait: nothing is left out, only told together. What was sent before goes again as it was.
    """
    again: dict[int, list[int]] = {}
    fresh: dict[str, list[int]] = {}
    for notice in sorted(waiting):
        if notice.message is None:
            fresh.setdefault(notice.kind, []).append(notice.id)
        else:
            again.setdefault(notice.message, []).append(notice.id)
    messages = [tuple(ids) for ids in again.values()]
    for kind, ids in fresh.items():
        left = len(ids) if most is None else most - sent.get(kind, 0)
        if len(ids) <= left:
            messages += [(one,) for one in ids]
        elif left > 0:
            messages += [(one,) for one in ids[: left - 1]]
            messages.append(tuple(ids[left - 1 :]))
    return sorted(messages)[:room]
