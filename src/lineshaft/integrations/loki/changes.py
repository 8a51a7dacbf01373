"""What programs have done to the queue files since the mirror last saw them, as acts on tasks. Pure."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Raw, Struct

from lineshaft.integrations.loki.folder import as_record
from lineshaft.integrations.loki.importing import PRECEDENCE
from lineshaft.integrations.loki.records import (
    CANCELLED,
    DEAD_LETTER,
    HELD_BACK,
    IN_PROGRESS,
    PENDING,
    current,
    instant,
)
from lineshaft.integrations.loki.view import View

#: Times in records are whole seconds.
_ROUNDING = timedelta(seconds=1)


class Claimed(Struct, frozen=True):
    id: str
    by: str


class Completed(Struct, frozen=True):
    id: str
    result: Any


class Failed(Struct, frozen=True):
    id: str
    error: Any


class Released(Struct, frozen=True):
    id: str


class Cancelled(Struct, frozen=True):
    id: str
    reason: str


class Retried(Struct, frozen=True):
    id: str


Act = Claimed | Completed | Failed | Released | Cancelled | Retried


class Known(Struct, frozen=True):
    """What the mirror holds of a task."""

    taken: bool
    since: datetime


def sightings(found: Mapping[str, Mapping[str, Raw]]) -> dict[str, tuple[str, Raw]]:
    """For each id that is new or different in some file: the file that counts, and its record there."""
    result: dict[str, tuple[str, Raw]] = {}
    for queue in PRECEDENCE:
        for name, raw in found.get(queue, {}).items():
            result.setdefault(name, (queue, raw))
    return result


def act_of(name: str, queue: str, raw: Raw, view: View, held: Known | None, *, first: bool) -> Act | None:
    """What a changed record of a task asks for; None: nothing, it is written again as it should be.

    `first`: the mirror has just begun, so the file may be older than the task, and says less.
    """
    given = as_record(raw)
    if given is None:
        return None
    record = current(given)
    place = view.place(name)
    if held is not None:
        return _of_held(name, queue, record, held, as_record(view.record(name) or b"{}") or {})
    if first or queue == place:
        return None
    if queue == CANCELLED and place in {PENDING, IN_PROGRESS}:
        return _cancelled(name, record)
    if queue == PENDING and place == DEAD_LETTER:
        return Retried(name)
    return None


def _of_held(
    name: str, queue: str, record: Mapping[str, Any], held: Known, before: Mapping[str, Any]
) -> Act | None:
    error = record.get("lastError")
    match queue:
        case "completed":
            return Completed(name, record.get("result"))
        case "dead-letter":
            return Failed(name, error)
        case "cancelled":
            return _cancelled(name, record)
    by = record.get("claimedBy")
    if isinstance(by, str) and by.strip() and by != HELD_BACK:
        return Claimed(name, by) if _is_of_offer(record, held) else None
    # A program may have claimed it and failed since the last round.
    has_failed = any(record.get(field) != before.get(field) for field in ("lastError", "retries"))
    if queue == PENDING and has_failed and error not in (None, ""):
        return Failed(name, error)
    return Released(name) if queue == PENDING and held.taken else None


def _is_of_offer(record: Mapping[str, Any], held: Known) -> bool:
    """Whether a claim in the file is one of this offer: an older one is of an earlier claim."""
    at = instant(record.get("claimedAt"))
    return not held.taken and (at is None or at >= held.since - _ROUNDING)


def _cancelled(name: str, record: Mapping[str, Any]) -> Cancelled:
    reason = record.get("cancelReason")
    return Cancelled(name, reason if isinstance(reason, str) and reason else "cancelled in the .loki folder")
