"""Defaults of task types: limits that tasks of a type get where their callers leave them out.

Agents declare them for the types that they serve, and people set them. Only limits travel this way, never
capabilities or gates: an agent can't rewrite what others submit.
"""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

import msgspec

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.model.fields import CHECKS, LIMIT_CHECKS, Faults, invalid, stored_json
from lineshaft.model.presets import FACTORY, preset_names
from lineshaft.model.retry import FailureCategory, RetryPolicy, retry_delay
from lineshaft.model.tasks import LIMITS_OF_TYPES, RetrySpec, TypeLimits, policy, retry_spec

T = TypeVar("T", bound=TypeLimits)

#: Characters of a description, and bytes of a schema.
MAX_DESCRIPTION = 10_000
MAX_SCHEMA_BYTES = 65_536
#: Retries whose delays decide which of two policies waits longer.
_COMPARED_RETRIES = 6
#: Where a limit comes from that no agent declared.
BY_HAND = "hand"


class TypeDefaults(TypeLimits, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an agent declares about a type. The limits apply to its tasks, the rest is shown."""

    parameters_schema: dict[str, Any] | None = None
    result_schema: dict[str, Any] | None = None
    description: str | None = None


class Declared(NamedTuple):
    """What one version of an agent declares about a type."""

    agent_id: str
    defaults: TypeDefaults


class Effective(NamedTuple):
    limits: TypeLimits
    #: By name of the limit: `agent:ID`, or BY_HAND.
    origins: dict[str, str]


def effective_limits(by_hand: TypeLimits, declared: Iterable[Declared]) -> Effective:
    """What was set by hand, otherwise the strictest value that an agent declares."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    by_agent = sorted(declared, key=lambda one: one.agent_id)
    for name in LIMITS_OF_TYPES:
        if (value := getattr(by_hand, name)) is not None:
            values[name], origins[name] = value, BY_HAND
            continue
        candidates = [one for one in by_agent if getattr(one.defaults, name) is not None]
        if candidates:
            strictest = min(candidates, key=lambda one: _strictness(name, getattr(one.defaults, name)))
            values[name], origins[name] = getattr(strictest.defaults, name), f"agent:{strictest.agent_id}"
    return Effective(TypeLimits(**values), origins)


def _strictness(name: str, value: Any) -> Any:
    """The smaller, the stricter. A retry policy is stricter if it retries less, then if it waits longer."""
    if name != "retry":
        return Decimal(str(value))
    rules = _policy(value)
    retried = sum(rules.retries(category) for category in FailureCategory)
    return retried, -sum(
        retry_delay(rules, failures, lambda: 0.5) for failures in range(1, _COMPARED_RETRIES)
    )


def differences(type_: str, declared: TypeLimits, effective: Effective) -> list[str]:
    """What an agent declares about a type but doesn't count, for people."""
    warnings = []
    for name in LIMITS_OF_TYPES:
        value, counts = getattr(declared, name), getattr(effective.limits, name)
        if value is None or value == counts:
            continue
        origin = effective.origins[name]
        who = "a person has set" if origin == BY_HAND else f"{origin.removeprefix('agent:')!r} declares"
        why = "" if origin == BY_HAND else ", which is stricter"
        warnings.append(
            f"{name}={shown_limit(value)} of type {type_!r} doesn't count: {who} {shown_limit(counts)}{why}. "
            f"To decide: lineshaft types set {type_} --{_FLAGS[name]} VALUE"
        )
    return warnings


_FLAGS = {
    "max_cost_usd": "max-cost",
    "max_attempts": "max-attempts",
    "max_duration_sec": "max-duration",
    "retry": "retry",
}


def shown_limit(value: Any) -> str:
    if isinstance(value, RetrySpec):
        return msgspec.json.encode(value).decode()
    return f"{value.normalize():f}" if isinstance(value, Decimal) else f"{value:g}"


def checked(defaults: TypeDefaults, place: str) -> TypeDefaults:
    """The same with exact amounts; raises InvalidInputError with all faults. `place` names it there."""
    faults: Faults = []
    if defaults.retry is not None:
        defaults = msgspec.structs.replace(defaults, retry=retry_spec(defaults.retry, faults))
    faults += limit_faults(defaults)
    for name in ("parameters_schema", "result_schema"):
        if (schema := getattr(defaults, name)) is not None:
            size = len(stored_json(name, schema, faults))
            if size > MAX_SCHEMA_BYTES:
                faults.append((name, f"must be at most {MAX_SCHEMA_BYTES} bytes of JSON, got {size}"))
    text = defaults.description
    if text is not None and (len(text) > MAX_DESCRIPTION or "\0" in text):
        faults.append(("description", f"must be a text of up to {MAX_DESCRIPTION} characters"))
    if faults:
        raise invalid(faults, place)
    return normal(defaults)


def limit_faults(limits: TypeLimits) -> Faults:
    faults: Faults = []
    for name in ("max_cost_usd", "max_attempts", "max_duration_sec"):
        value = getattr(limits, name)
        check = LIMIT_CHECKS.get(name) or CHECKS[name]
        if value is not None and (fault := check(value)):
            faults.append((name, fault))
    if limits.retry is not None:
        try:
            _policy(limits.retry)
        except InvalidInputError as error:
            faults += [(f"retry.{name}", fault) for name, fault in error.errors]
    return faults


def normal(limits: T) -> T:
    """The same as it is read from the database, to be compared: amounts are exact, and lists are tuples."""
    cost = limits.max_cost_usd
    rounded = msgspec.structs.replace(limits, max_cost_usd=None if cost is None else money(cost))
    return msgspec.json.decode(msgspec.json.encode(rounded), type=type(limits))


def _policy(retry: RetrySpec) -> RetryPolicy:
    """With what each preset has for the fields that are left out; returns that with factory's."""
    fields = msgspec.structs.asdict(retry)
    by_preset = {name: policy(fields, name) for name in preset_names()}
    return by_preset[FACTORY.name]


def changed(before: TypeLimits, after: TypeLimits) -> dict[str, Any]:
    """The limits that differ, for an event; amounts are numbers there."""
    return {
        name: {"from": _plain(getattr(before, name)), "to": _plain(getattr(after, name))}
        for name in LIMITS_OF_TYPES
        if getattr(before, name) != getattr(after, name)
    }


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value
