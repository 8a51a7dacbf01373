"""What a mirror writes besides queue files: events, signals, decisions, figures of the orchestrator.

Each is derived from the event feed. The last line of `events.jsonl` is the place in the feed, so a mirror
that is started again goes on there; what was done for the events behind it may be done twice.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lineshaft.integrations.loki.claimer import ORCHESTRATOR, RATE_LIMITED
from lineshaft.integrations.loki.folder import (
    UnreadableFileError,
    append_lines,
    last_lines,
    read_object,
    write_object,
)
from lineshaft.integrations.loki.records import iso
from lineshaft.integrations.notify import review_log, slowdown_file
from lineshaft.model.notices import NoticeEvent, NoticeKind, message, notices
from lineshaft.types import Breaker, Event

EVENTS = "events.jsonl"
DECISIONS = "logs/decisions"
REVIEW_NEEDED = "signals/HUMAN_REVIEW_NEEDED"
#: Too frequent to be kept in a file.
_LEFT_OUT = frozenset({"task.progress"})
_SOURCE = "lineshaft"


class Place(NamedTuple):
    cursor: str
    #: A task that the events are about.
    task_id: str


def last_place(root: Path) -> Place | None:
    """Where the events of the folder end; None: there are none."""
    cursor = None
    for line in reversed(last_lines(root / EVENTS)):
        try:
            data = msgspec.json.decode(line)["data"]
            cursor = cursor or data["cursor"]
            if isinstance(data.get("task_id"), str) and isinstance(cursor, str):
                return Place(cursor, data["task_id"])
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
            continue
    return None


def write(root: Path, events: Sequence[Event]) -> None:
    """Everything that these events ask for; the events themselves last."""
    found = [_notice_event(event) for event in events]
    for notice in notices(found, (NoticeKind.REVIEW,)):
        review_log.append(root / DECISIONS, message("", [notice]))
    if slowed := notices(found, (NoticeKind.SLOWDOWN,)):
        slowdown_file.write(root / "signals", message("", slowed))
    for event in events:
        if event.kind == "task.rate_limited":
            signal = {"task": event.task_id, "agent": event.agent_id, "at": iso(event.at)}
            write_object(root / RATE_LIMITED, _data(event) | signal)
    count = _ended(events)
    if any(count.values()):
        _add_metrics(root, count)
    append_lines(root / EVENTS, [_line(event) for event in events if event.kind not in _LEFT_OUT])


def _notice_event(event: Event) -> NoticeEvent:
    return NoticeEvent(
        event.kind,
        event.at,
        event.task_id,
        event.dag_id,
        event.agent_id,
        _data(event),
        event.type,
        event.title,
    )


def _data(event: Event) -> dict[str, Any]:
    try:
        return event.data if isinstance(event.data, dict) else {}
    except msgspec.DecodeError:
        return {}  # numbers that only PostgreSQL can hold


def _line(event: Event) -> bytes:
    about = {"task_id": event.task_id, "dag_id": event.dag_id, "agent_id": event.agent_id}
    known = {name: value for name, value in about.items() if value is not None}
    data = _data(event) | known | {"cursor": event.cursor}
    return msgspec.json.encode({"timestamp": iso(event.at), "type": event.kind, "data": data})


def _ended(events: Sequence[Event]) -> dict[str, int]:
    kinds = [event.kind for event in events]
    return {
        "tasksCompleted": kinds.count("task.completed"),
        "tasksFailed": kinds.count("task.dead_lettered"),
    }


def _add_metrics(root: Path, count: Mapping[str, int]) -> None:
    def change(state: dict[str, Any]) -> None:
        metrics = state.get("metrics")
        metrics = state["metrics"] = metrics if isinstance(metrics, dict) else {}
        for name, number in count.items():
            before = metrics.get(name)
            metrics[name] = (before if isinstance(before, int) else 0) + number

    _change_orchestrator(root, change)


def write_breakers(root: Path, breakers: Sequence[Breaker]) -> None:
    """The state of every breaker that has counted a failure."""
    found = {
        breaker.key: {
            "state": breaker.state.replace("_", "-"),
            "failures": breaker.failures,
            "lastFailure": iso(breaker.last_failure),
            "openedAt": iso(breaker.opened_at),
            "halfOpenAt": iso(breaker.half_open_at),
            "probeTaskId": breaker.probe_task_id,
        }
        for breaker in breakers
    }

    def change(state: dict[str, Any]) -> None:
        state["circuitBreakers"] = found

    _change_orchestrator(root, change)


def _change_orchestrator(root: Path, change: Any) -> None:
    """Read, modify, write: other keys stay. A file that can't be read is left alone."""
    path = root / ORCHESTRATOR
    try:
        state = read_object(path)
    except UnreadableFileError:
        return
    before = msgspec.json.encode(state)
    change(state)
    if msgspec.json.encode(state) != before:
        write_object(path, state)


def write_review_needed(root: Path, dead_letters: Sequence[str], now: datetime) -> None:
    """Present while there are dead letters; one of another program stays."""
    path = root / REVIEW_NEEDED
    if dead_letters:
        write_object(path, {"source": _SOURCE, "deadLetters": sorted(dead_letters), "at": iso(now)})
        return
    try:
        if read_object(path).get("source") == _SOURCE:
            path.unlink(missing_ok=True)
    except UnreadableFileError:
        return
