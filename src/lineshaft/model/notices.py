"""Notifications made from events: the kinds, their texts, and how they are grouped into messages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

#: Characters of an error or a note that are quoted.
_MAX_QUOTED = 300
#: Bytes of an event's data as JSON: the database has the rest.
_MAX_DATA = 16_000
#: Notices that one message contains in full.
_MAX_IN_FULL = 20


class NoticeKind(StrEnum):
    DEAD_LETTER = "dead_letter"
    POISON_PILL = "poison_pill"
    BREAKER_OPENED = "breaker_opened"
    BUDGET_BLOCKED = "budget_blocked"
    DAG_FAILED = "dag_failed"
    APPROVAL_WAITING = "approval_waiting"
    AGENT_OFFLINE = "agent_offline"
    ALERT = "alert"
    #: The DAG of a standalone task failed, which its dead letter says too. Not sent by default.
    SINGLE_DAG_FAILED = "single_dag_failed"
    #: A decision about a dead letter. For the review log; not sent to people by default.
    REVIEW = "review"
    #: Claims of a model, of a provider or of all models are paused. For programs, not for people.
    SLOWDOWN = "slowdown"
    #: Work that has ended, for those who asked for it. Not sent by default.
    TASK_COMPLETED = "task_completed"
    TASK_CANCELLED = "task_cancelled"
    DAG_COMPLETED = "dag_completed"
    DAG_CANCELLED = "dag_cancelled"


#: What a destination receives if its configuration names no kinds.
DEFAULT_KINDS = frozenset(NoticeKind) - {
    NoticeKind.SINGLE_DAG_FAILED,
    NoticeKind.REVIEW,
    NoticeKind.SLOWDOWN,
    NoticeKind.TASK_COMPLETED,
    NoticeKind.TASK_CANCELLED,
    NoticeKind.DAG_COMPLETED,
    NoticeKind.DAG_CANCELLED,
}

_EVENT_OF = {
    NoticeKind.DEAD_LETTER: "task.dead_lettered",
    NoticeKind.POISON_PILL: "task.dead_lettered",
    NoticeKind.BREAKER_OPENED: "breaker.opened",
    NoticeKind.BUDGET_BLOCKED: "budget.blocked",
    NoticeKind.DAG_FAILED: "dag.failed",
    NoticeKind.SINGLE_DAG_FAILED: "dag.failed",
    NoticeKind.APPROVAL_WAITING: "approval.waiting",
    NoticeKind.AGENT_OFFLINE: "agent.offline",
    NoticeKind.ALERT: "alert",
    NoticeKind.REVIEW: "task.resolved",
    NoticeKind.SLOWDOWN: "signal.slowdown",
    NoticeKind.TASK_COMPLETED: "task.completed",
    NoticeKind.TASK_CANCELLED: "task.cancelled",
    NoticeKind.DAG_COMPLETED: "dag.completed",
    NoticeKind.DAG_CANCELLED: "dag.cancelled",
}
_KIND_OF: dict[str, NoticeKind] = {
    event: kind
    for kind, event in _EVENT_OF.items()
    if kind not in {NoticeKind.POISON_PILL, NoticeKind.SINGLE_DAG_FAILED}
}


class NoticeEvent(NamedTuple):
    """The fields of an event that a notice is made from."""

    kind: str
    at: datetime
    task_id: str | None
    dag_id: str | None
    agent_id: str | None
    data: Mapping[str, Any] | None
    #: The type of the task.
    type: str | None = None
    #: The title of the task or the DAG.
    title: str | None = None


class Notice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: NoticeKind
    at: datetime
    text: str
    task_id: str | None = None
    dag_id: str | None = None
    agent_id: str | None = None
    #: The type of the task.
    type: str | None = None
    #: The title of the task or the DAG.
    title: str | None = None
    data: Any = None


class Notification(Struct, frozen=True, kw_only=True):
    """One notice, or several of one kind when there are too many."""

    #: The same for every delivery attempt, so that a receiver can detect duplicates.
    id: str
    kind: NoticeKind
    title: str
    text: str
    count: int
    #: The first ones, where there are many.
    notices: tuple[Notice, ...]


def events_of(kinds: Collection[NoticeKind]) -> frozenset[str]:
    """The kinds of events that these notices are made from."""
    return frozenset(_EVENT_OF[kind] for kind in kinds)


def notices(events: Sequence[NoticeEvent], kinds: Collection[NoticeKind]) -> list[Notice]:
    """One notice for each event of these kinds; an alert that repeats the event before it is left out."""
    found: list[Notice] = []
    before: NoticeEvent | None = None
    for event in events:
        repeated = event.kind == "alert" and before is not None and event[1:] == before[1:]
        notice = None if repeated else _notice(event)
        if notice is not None and notice.kind in kinds:
            found.append(notice)
            before = None if notice.kind is NoticeKind.REVIEW else event
    return found


def _notice(event: NoticeEvent) -> Notice | None:
    kind: NoticeKind | None = _KIND_OF.get(event.kind)
    data = event.data or {}
    if kind is None:
        return None
    if kind is NoticeKind.DEAD_LETTER and data.get("poison_pill"):
        kind = NoticeKind.POISON_PILL
    if kind is NoticeKind.DAG_FAILED and data.get("single"):
        kind = NoticeKind.SINGLE_DAG_FAILED
    # The same as the event of its task.
    if kind in {NoticeKind.DAG_COMPLETED, NoticeKind.DAG_CANCELLED} and data.get("single"):
        return None
    # An agent that stops goes offline without this field; only a lost agent is worth a notice.
    if kind is NoticeKind.AGENT_OFFLINE and "last_heartbeat" not in data:
        return None
    small = event.data if len(msgspec.json.encode(data)) <= _MAX_DATA else {"left_out": "too large"}
    return Notice(
        kind=kind,
        at=event.at,
        text=_TEXTS[kind](event, data),
        task_id=event.task_id,
        dag_id=event.dag_id,
        agent_id=event.agent_id,
        type=event.type,
        title=event.title,
        data=small,
    )


def _subject(event: NoticeEvent) -> str:
    if event.task_id is not None:
        return _task(event)
    return _dag(event) if event.dag_id is not None else f"Agent {event.agent_id}"


def _task(event: NoticeEvent) -> str:
    # A task without a title of its own is named by its type.
    names = dict.fromkeys(filter(None, (event.type, _quoted(event.title))))
    return f"Task {event.task_id}" + (f" ({': '.join(names)})" if names else "")


def _dag(event: NoticeEvent) -> str:
    return f"DAG {event.dag_id}" + (f" ({_quoted(event.title)})" if event.title else "")


def _message(data: Mapping[str, Any]) -> str:
    return _quoted(data.get("message") or data.get("reason"))


def _cause(data: Mapping[str, Any]) -> str:
    cause = _quoted(data.get("error") or data.get("reason"))
    return f": {cause}" if cause else ""


def _quoted(value: object) -> str:
    text = " ".join(str(value or "").split())
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


_Text = Callable[[NoticeEvent, Mapping[str, Any]], str]
_TEXTS: dict[NoticeKind, _Text] = {
    NoticeKind.DEAD_LETTER: lambda event, data: f"{_task(event)} moved to dead letter queue{_cause(data)}",
    NoticeKind.POISON_PILL: lambda event, data: f"{_task(event)} fails with every agent{_cause(data)}",
    NoticeKind.BREAKER_OPENED: lambda _, data: (
        _message(data) or f"Circuit breaker {data.get('key', '')} is open"
    ),
    NoticeKind.BUDGET_BLOCKED: lambda event, data: _message(data) or f"{_subject(event)} is out of budget",
    NoticeKind.DAG_FAILED: lambda event, _: f"{_dag(event)} is blocked by dead letters",
    NoticeKind.SINGLE_DAG_FAILED: lambda event, _: f"{_dag(event)} has failed, with its only task",
    NoticeKind.APPROVAL_WAITING: lambda event, _: f"{_task(event)} is waiting for approval",
    NoticeKind.AGENT_OFFLINE: lambda event, data: (
        f"Agent {event.agent_id} is offline; last heartbeat at {data['last_heartbeat']}"
    ),
    NoticeKind.ALERT: lambda _, data: _message(data) or "Attention needed",
    NoticeKind.REVIEW: lambda event, data: (
        f"{_task(event)}: {data.get('resolution', 'retry')} by {data.get('reviewer') or 'hand'}"
    ),
    NoticeKind.SLOWDOWN: lambda _, data: (
        f"Slowdown of {data.get('key')}: no claims until {data.get('until')}"
    ),
    NoticeKind.TASK_COMPLETED: lambda event, _: (
        f"{_task(event)} was completed. To see its output: lineshaft task show {event.task_id}"
    ),
    NoticeKind.TASK_CANCELLED: lambda event, data: f"{_task(event)} was cancelled{_cause(data)}",
    NoticeKind.DAG_COMPLETED: lambda event, _: (
        f"{_dag(event)} was completed. To see its tasks: lineshaft dag show {event.dag_id}"
    ),
    NoticeKind.DAG_CANCELLED: lambda event, data: f"{_dag(event)} was cancelled{_cause(data)}",
}

_TITLES = {
    NoticeKind.DEAD_LETTER: "Dead letter",
    NoticeKind.POISON_PILL: "Poison pill",
    NoticeKind.BREAKER_OPENED: "Circuit breaker open",
    NoticeKind.BUDGET_BLOCKED: "Out of budget",
    NoticeKind.DAG_FAILED: "DAG failed",
    NoticeKind.SINGLE_DAG_FAILED: "DAG failed",
    NoticeKind.APPROVAL_WAITING: "Approval needed",
    NoticeKind.AGENT_OFFLINE: "Agent offline",
    NoticeKind.ALERT: "Alert",
    NoticeKind.REVIEW: "Dead letter reviewed",
    NoticeKind.SLOWDOWN: "Slowdown",
    NoticeKind.TASK_COMPLETED: "Task completed",
    NoticeKind.TASK_CANCELLED: "Task cancelled",
    NoticeKind.DAG_COMPLETED: "DAG completed",
    NoticeKind.DAG_CANCELLED: "DAG cancelled",
}


def message(message_id: str, contents: Sequence[Notice]) -> Notification:
    """Combine notices of one kind, at least one, into a message."""
    kind, count = contents[0].kind, len(contents)
    lines = [notice.text for notice in contents[:_MAX_IN_FULL]]
    if count > _MAX_IN_FULL:
        lines.append(f"… and {count - _MAX_IN_FULL} more")
    return Notification(
        id=message_id,
        kind=kind,
        title=_TITLES[kind] if count == 1 else f"{_TITLES[kind]} ({count} times)",
        text="\n".join(lines),
        count=count,
        notices=tuple(contents[:_MAX_IN_FULL]),
    )


class DueNotice(NamedTuple):
    id: int
    kind: str
    #: The message it is part of, if a delivery was tried before.
    message: int | None


def plan(
    due: Sequence[DueNotice], sent: Mapping[str, int], *, most: int | None, room: int
) -> list[tuple[int, ...]]:
    """Group the notices that are sent now into messages; the others stay due.

    In a time window at most `most` messages of each kind are sent, of which `sent` have been. The last one
    contains all remaining notices, so that none is dropped. A message that was tried before is sent
    unchanged.
    """
    again: dict[int, list[int]] = {}
    fresh: dict[str, list[int]] = {}
    for notice in sorted(due):
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
