"""Validation of a task's fields: text, names, numbers, times, money, JSON."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money, shown
from lineshaft.model.presets import preset_names
from lineshaft.model.priority import check_priority
from lineshaft.model.storable import NOT_FINITE, contains_nan, json_fault

MAX_TEXT = 1_000
MAX_LIST = 1_000
#: A task may depend on all others of its submission.
MAX_DEPENDENCIES = 10_000
MAX_SPEC_BYTES = 4 << 20
MAX_ATTEMPTS = 1_000
MIN_SECONDS = 0.05
LONGEST_SECONDS = 365 * 86_400.0

#: Field and fault.
Faults = list[tuple[str, str]]
#: What is wrong with a value, or None.
Check = Callable[[Any], str | None]

_SAFE_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def check_fields(**fields: Any) -> None:
    """Raise the same errors as a submission would."""
    faults = [(name, fault) for name, value in fields.items() if (fault := CHECKS[name](value))]
    if faults:
        raise InvalidInputError(errors=faults)


def invalid(faults: Faults, place: str) -> InvalidInputError:
    prefix = f"{place}." if place else ""
    return InvalidInputError(errors=[(prefix + name, fault) for name, fault in faults])


def encoded_json(name: str, value: Any, *, place: str = "") -> bytes:
    """The JSON of a value as it is stored; raises InvalidInputError for the field `name`."""
    faults: Faults = []
    encoded = stored_json(name, value, faults)
    if faults:
        raise invalid(faults, place)
    return encoded


def stored_json(name: str, value: Any, faults: Faults) -> bytes:
    """The JSON of a value as it is stored; adds a fault if JSON or PostgreSQL can't represent it."""
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        faults.append((name, f"must be JSON: {error}"))
        return b"null"
    if len(encoded) > MAX_SPEC_BYTES:
        faults.append(
            (
                name,
                f"must be at most {MAX_SPEC_BYTES} bytes of JSON, got {len(encoded)}; put it in an artifact",
            )
        )
    if fault := json_fault(encoded):
        faults.append((name, fault))
    if contains_nan(value, encoded):
        faults.append((name, NOT_FINITE))
    return encoded


def text_fault(value: Any) -> str | None:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_TEXT or "\0" in value:
        return f"must be a text of 1 to {MAX_TEXT} characters, got {shown(value)}"
    if not value.isascii() and _SURROGATE.search(value):
        return f"must be valid Unicode, got {shown(value)}"
    return None


_SURROGATE = re.compile("[\ud800-\udfff]")


def _texts(value: Any, most: int = MAX_LIST) -> str | None:
    if value in ((), []):
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > most:
        return f"must be a list of at most {most} texts, got {shown(value)}"
    for item in value:
        if fault := text_fault(item):
            return fault
    return None


def _dependencies(value: Any) -> str | None:
    return _texts(value, MAX_DEPENDENCIES)


def _inputs(value: Any) -> str | None:
    if not isinstance(value, Mapping) or len(value) > MAX_LIST:
        return (
            f"must be an object of at most {MAX_LIST} names with a task, or a list, each, got {shown(value)}"
        )
    for name, tasks in value.items():
        fault = text_fault(name) or (text_fault(tasks) if isinstance(tasks, str) else _dependencies(tasks))
        if fault:
            return f"{shown(name)} {fault}"
    return None


def _id(value: Any) -> str | None:
    if not isinstance(value, str) or not 1 <= len(value) <= 128 or not _SAFE_ID_CHARACTERS.issuperset(value):  # noqa: PLR2004
        return f"must be 1 to 128 letters, digits, '.', '_' or '-', got {shown(value)}"
    return None if value[0].isalnum() else f"must start with a letter or digit, got {shown(value)}"


def _number(low: float, high: float, *, whole: bool = False) -> Check:
    kind = "whole number" if whole else "number"

    def check(value: Any) -> str | None:
        right_type = isinstance(value, int) if whole else isinstance(value, int | float | Decimal)
        # A Decimal NaN can't be compared.
        unordered = isinstance(value, Decimal) and not value.is_finite()
        if isinstance(value, bool) or not right_type or unordered or not low <= value <= high:
            return f"must be a {kind} from {low:.15g} to {high:.15g}, got {shown(value)}"
        return None

    return check


def _instant(value: Any) -> str | None:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return None
    return f"must be a time with a time zone, got {shown(value)}"


def _dollars(value: Any) -> str | None:
    try:
        money(value)
    except InvalidInputError as error:
        return error.errors[0][1]
    return None


def _priority(value: Any) -> str | None:
    if type(value) is int and 0 <= value <= 100:  # noqa: PLR2004 - fast path for the common case
        return None
    try:
        check_priority(value)
    except InvalidInputError as error:
        return error.errors[0][1]
    except (TypeError, ValueError, OverflowError):
        return f"must be a whole number from 0 to 100, got {shown(value)}"
    return None


def _preset(value: Any) -> str | None:
    names = preset_names()
    return None if value in names else f"must be one of {', '.join(names)}, got {shown(value)}"


def _on_failure(value: Any) -> str | None:
    return None if value in {"block", "ignore"} else f"must be block or ignore, got {shown(value)}"


#: What a submission does if a task has its idempotency key.
RETURN, REJECT, REPLACE_WAITING, CANCEL_RUNNING = "return", "reject", "replace_waiting", "cancel_running"
ON_CONFLICT = (RETURN, REJECT, REPLACE_WAITING, CANCEL_RUNNING)
#: Those that change the existing task.
STEERING = (REPLACE_WAITING, CANCEL_RUNNING)


def _on_conflict(value: Any) -> str | None:
    return None if value in ON_CONFLICT else f"must be one of {', '.join(ON_CONFLICT)}, got {shown(value)}"


#: Who creates tasks and DAGs: each prefix is followed by a name.
CREATORS = ("agent:", "human:", "cron:", "event:", "dag:", "system:")


def _creator(value: Any) -> str | None:
    if fault := text_fault(value):
        return fault
    if value.startswith(CREATORS) and value.partition(":")[2].strip():
        return None
    return f"must be one of {', '.join(CREATORS)} and a name, such as human:ann, got {shown(value)}"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"must be true or false, got {shown(value)}"


#: Checks by field of a task.
CHECKS: Mapping[str, Check] = {
    "type": text_fault,
    "key": text_fault,
    "title": text_fault,
    "id": _id,
    "priority": _priority,
    "priority_boost_per_minute": _number(0, 1_000),
    "deadline": _instant,
    "expire_at_deadline": _flag,
    "run_at": _instant,
    "depends_on": _dependencies,
    "inputs": _inputs,
    "parent_id": text_fault,
    "dag_id": text_fault,
    "lock_key": text_fault,
    "max_total_cost_usd": _dollars,
    "heartbeat_interval_sec": _number(MIN_SECONDS, LONGEST_SECONDS),
    "max_attempts": _number(1, MAX_ATTEMPTS, whole=True),
    "idempotency_key": text_fault,
    "idempotency_ttl_sec": _number(0, LONGEST_SECONDS),
    "on_conflict": _on_conflict,
    "debounce_sec": _number(0, LONGEST_SECONDS),
    "max_wait_sec": _number(0, LONGEST_SECONDS),
    "tags": _texts,
    "created_by": _creator,
    "preset": _preset,
    "on_failure": _on_failure,
}
#: Checks of fields that may also be in `spec.constraints`.
LIMIT_CHECKS: Mapping[str, Check] = {
    "max_cost_usd": _dollars,
    "max_duration_sec": _number(MIN_SECONDS, LONGEST_SECONDS),
    "required_capabilities": _texts,
    "model_preferences": _texts,
    "fallback_models": _texts,
}
