"""Documents that carry system-managed fields: requests in the full form of a task, an agent or a DAG.

Somebody who keeps tasks as documents sends them as they are, with the fields that the system fills in. Such a
field is removed where its value says nothing new, and refused otherwise. Decoders refuse unknown fields, so a
document is only looked at after a decoder has refused it; ordinary requests cost nothing extra.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.types.problems import invalid_input

T = TypeVar("T")

#: Removes system-managed fields from a decoded request; raises InvalidInputError for what says something new.
Simplify = Callable[[Any], Any]

_Faults = list[tuple[str, str]]
_Rule = tuple[Callable[[Any], bool], str]


def decode(body: bytes | Raw, decoder: "msgspec.json.Decoder[T]", simplify: Simplify | None) -> T:
    """Decode a request, which may be a document if there is a `simplify`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        if simplify is None:
            raise
    given = msgspec.json.decode(body)
    return decoder.decode(msgspec.json.encode(simplify(given)))


def converted(given: Any, kind: type[T], simplify: Simplify) -> T:
    """As the server reads it, with the same errors."""
    try:
        return decode(msgspec.json.encode(given), msgspec.json.Decoder(kind), simplify)
    except msgspec.ValidationError as error:
        raise invalid_input(error) from None


def unwrapped(given: Any) -> Any:
    """The document itself, where it is the only field of an object: `task` or `dag`."""
    if isinstance(given, dict) and len(given) == 1:
        ((name, inner),) = given.items()
        if name in {"task", "dag"} and isinstance(inner, dict):
            return inner
    return given


def task(given: Any) -> Any:
    """A task without system-managed fields."""
    return _checked(given, _task)


def tasks(given: Any) -> Any:
    """A list of tasks."""
    return _checked(given, _tasks)


def with_tasks(given: Any) -> Any:
    """A request whose field `tasks` is a list of tasks."""
    return _checked(given, _with_tasks)


def dag(given: Any) -> Any:
    """A DAG, whose tasks must be objects: ids of existing tasks can't be put into a new DAG.

    Its `id` is its idempotency key, unless it has one.
    """
    return _checked(given, _dag)


def agent(given: Any) -> Any:
    """An agent without system-managed fields. Without a budget, what is left of one is its budget."""
    return _checked(given, _agent)


def _checked(given: Any, simplify: Callable[[Any, str, _Faults], Any]) -> Any:
    faults: _Faults = []
    found = simplify(given, "", faults)
    if faults:
        raise InvalidInputError(errors=faults)
    return found


def _is_time(value: Any) -> bool:
    try:
        msgspec.convert(value, datetime)
    except msgspec.ValidationError:
        return False
    return True


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _is_unused(value: Any) -> bool:
    return (
        isinstance(value, dict) and value.keys() <= {"input", "output"} and all(map(_is_zero, value.values()))
    )


def _is_null(value: Any) -> bool:
    return value is None


def _is_empty(value: Any) -> bool:
    return isinstance(value, list) and not value


_NULL: _Rule = (_is_null, "null")
_EMPTY: _Rule = (_is_empty, "[]")
_ZERO: _Rule = (_is_zero, "0")
_OF_TASK: Mapping[str, _Rule] = {
    "status": (lambda value: isinstance(value, str) and value.lower() == "pending", "'pending'"),
    "attempts": _ZERO,
    "blocked_by": _EMPTY,
    "cost_usd": _ZERO,
    "tokens_used": (_is_unused, "zeros"),
    "started_at": _NULL,
    "completed_at": _NULL,
    "created_at": (_is_time, "a time"),
}
_OF_OUTPUT: Mapping[str, _Rule] = {"data": _NULL, "artifacts": _EMPTY}
_OF_CLAIM: Mapping[str, _Rule] = {
    "agent_id": _NULL,
    "instance": _NULL,
    "claimed_at": _NULL,
    "heartbeat_at": _NULL,
    "epoch": (lambda value: value is None or _is_zero(value), "0"),
}
_OF_DAG: Mapping[str, _Rule] = {
    "status": _OF_TASK["status"],
    "created_at": _OF_TASK["created_at"],
    "completed_at": _NULL,
}
_OF_AGENT: Mapping[str, _Rule] = {
    "status": (lambda value: value == "active", "'active'"),
    "current_tasks": (lambda _: True, ""),
    "last_heartbeat": (lambda _: True, ""),
}


def _without(
    given: Mapping[str, Any], rules: Mapping[str, _Rule], place: str, faults: _Faults
) -> dict[str, Any]:
    left = dict(given)
    for name, (says_nothing, allowed) in rules.items():
        if name not in left:
            continue
        value = left.pop(name)
        if not says_nothing(value):
            faults.append(
                (place + name, f"is set by the system: leave it out, or send {allowed}, got {shown(value)}")
            )
    return left


def _task(given: Any, place: str, faults: _Faults) -> Any:
    if not isinstance(given, dict):
        return given
    left = _without(given, _OF_TASK, place, faults)
    if isinstance(output := left.get("output"), dict):
        left["output"] = _without(output, _OF_OUTPUT, f"{place}output.", faults)
    if "claim" in left:
        _take_interval(left, left.pop("claim"), place, faults)
    if "children" in left:
        left["children"] = _tasks(left["children"], f"{place}children", faults)
    return left


def _take_interval(task: dict[str, Any], claim: Any, place: str, faults: _Faults) -> None:
    """The interval of heartbeats is the only field of an unclaimed task's claim that is kept."""
    if claim is None:
        return
    if not isinstance(claim, dict):
        faults.append((f"{place}claim", f"is set by the system: leave it out, got {shown(claim)}"))
        return
    left = _without(claim, _OF_CLAIM, f"{place}claim.", faults)
    interval = left.pop("heartbeat_interval_sec", None)
    faults += [(f"{place}claim.{name}", "unknown field") for name in left]
    if interval is not None:
        known = task.setdefault("heartbeat_interval_sec", interval)
        if known is None:
            task["heartbeat_interval_sec"] = interval
        elif known != interval:
            fault = f"is {shown(known)} but claim.heartbeat_interval_sec is {shown(interval)}; give one"
            faults.append((f"{place}heartbeat_interval_sec", fault))


def _tasks(given: Any, place: str, faults: _Faults) -> Any:
    if not isinstance(given, list):
        return given
    return [_task(item, f"{place}[{number}].", faults) for number, item in enumerate(given)]


def _with_tasks(given: Any, place: str, faults: _Faults) -> Any:
    if isinstance(given, dict) and "tasks" in given:
        return given | {"tasks": _tasks(given["tasks"], f"{place}tasks", faults)}
    return given


_DAG_FORM = (
    'must be the tasks themselves, got ids. Send {"title": "…", "tasks": [{"key": "a", "type": "…"}, '
    '{"key": "b", "type": "…", "depends_on": ["a"]}]}; depends_on may also name existing tasks'
)


def _dag(given: Any, place: str, faults: _Faults) -> Any:
    members = given.get("tasks") if isinstance(given, dict) else None
    if isinstance(members, list) and any(isinstance(item, str) for item in members):
        faults.append((f"{place}tasks", _DAG_FORM))
        return given
    if not isinstance(given, dict) or not isinstance(members, list):
        return given
    left = _without(given, _OF_DAG, place, faults)
    _check_ends(left, members, place, faults)
    dag_id = left.pop("id", None)
    if dag_id is not None and left.get("idempotency_key") is None:
        left["idempotency_key"] = dag_id
    # The DAG that they are in anyway.
    left["tasks"] = [
        {name: value for name, value in item.items() if name != "dag_id" or value != dag_id}
        if isinstance(item, dict)
        else item
        for item in members
    ]
    return _with_tasks(left, place, faults)


def _check_ends(dag: dict[str, Any], members: list[Any], place: str, faults: _Faults) -> None:
    """Remove `roots` and `leaves`, which are computed."""
    tasks = [item for item in members if isinstance(item, dict)]
    names = {_name(item) for item in tasks}
    upstream = {_name(item): names.intersection(_texts(item.get("depends_on"))) for item in tasks}
    found = {
        "roots": {name for name, before in upstream.items() if not before},
        "leaves": names - set().union(*upstream.values()),
    }
    for name, computed in found.items():
        if name in dag:
            value = dag.pop(name)
            if value is not None and set(_texts(value)) != computed:
                fault = f"is computed: leave it out, or send {shown(sorted(map(str, computed)))}"
                faults.append((place + name, f"{fault}, got {shown(value)}"))


def _name(task: Mapping[str, Any]) -> Any:
    found = task.get("key") or task.get("id")
    return found if isinstance(found, str) else id(task)


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _agent(given: Any, place: str, faults: _Faults) -> Any:
    if not isinstance(given, dict):
        return given
    left = _without(given, _OF_AGENT, place, faults)
    if "budget_remaining_usd" in left:
        remaining = left.pop("budget_remaining_usd")
        if left.get("budget_usd") is None:
            left["budget_usd"] = remaining
    return left
