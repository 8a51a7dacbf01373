"""One shape per thing: no two structs share most of their fields."""

import dataclasses
import importlib
import itertools
import pkgutil
from collections.abc import Iterator

import msgspec

import lineshaft

#: Smaller structs may look alike by chance.
LEAST_FIELDS = 6
#: Of the fields of either of the two.
MOST_IN_COMMON = 0.6

#: Pairs that may share more, with the reason.
ALLOWED = {
    ("model.tasks.NewTask", "model.tasks.TaskRow"): "what a caller asks for, and what it comes to",
    ("model.retry.RetryPolicy", "model.tasks.RetrySpec"): "a whole policy, and a caller's part of one",
    (
        "engine.guards.breakers._BreakerRow",
        "model.breaker.Breaker",
    ): "a row, and the state that decisions need",
    ("engine.guards.breakers._BreakerRow", "types.guards.Breaker"): "a row, and what callers read",
    ("model.breaker.Breaker", "types.guards.Breaker"): "decisions need no key; callers do",
    ("types.agents.InstanceInfo", "types.agents.NewAgent"): "what a process declares, and what callers read",
    ("engine.guards.limits._LimitsRow", "types.limits.Limits"): "a row, and what callers read",
    (
        "engine.guards.limits._LimitsRow",
        "operations.guards.ChangeLimits",
    ): "a row, and a part of it to change",
    ("operations.guards.ChangeLimits", "types.limits.Limits"): "what to change, and what callers read",
    ("engine.read.waiting._Sum", "types.waiting.WaitingReason"): "a sum while it is made, and the result",
    ("types.protocol.Suspend", "types.waits.NewSuspension"): "the body of a call, and the call of a claim",
    ("types.protocol.Fail", "types.work.Failure"): "the body of a call, and the call of a claim",
    ("types.costs.DagCosts", "types.guards.ShortDag"): "what a DAG cost, and what its next task lacks",
    ("engine.sessions.Session", "types.tokens.NewToken"): "a session has the rights of its token",
    (
        "model.type_defaults.TypeDefaults",
        "operations.task_types.SetType",
    ): "what an agent declares, and what a person sets",
    (
        "model.type_defaults.TypeDefaults",
        "types.task_types.DefaultsOfType",
    ): "what is declared is checked; a response is open to newer values",
    (
        "operations.task_types.SetType",
        "types.task_types.DefaultsOfType",
    ): "what a person sets, and what callers read",
    ("types.tokens.NewToken", "types.tokens.Token"): "the secret is returned once, and lists never have it",
    (
        "types.protocol.CancelItem",
        "types.protocol.CompleteItem",
    ): "each ends a claim, and reports what it used",
    ("types.protocol.CancelItem", "types.protocol.CheckpointItem"): "each is of a claim, and reports its use",
    (
        "types.protocol.CheckpointItem",
        "types.protocol.CompleteItem",
    ): "each is of a claim, and reports its use",
    ("types.protocol.CheckpointItem", "types.protocol.RecordStep"): "each saves data of a claim",
    (
        "engine.sources.registry._Locked",
        "engine.sources.registry._Read",
    ): "a row to change, and a row to show with its totals",
    ("model.notices.Notice", "types.events.Event"): "a text for people, and a record with a cursor",
    (
        "integrations.officeplane.tasks.InQuery",
        "integrations.officeplane.tasks.NewDocumentTask",
    ): "OfficePlane's API takes the same fields in a body or in a query",
}


def fields(kind: type) -> frozenset[str] | None:
    if issubclass(kind, msgspec.Struct):
        return frozenset(name.removesuffix("_json") for name in kind.__struct_fields__)
    if dataclasses.is_dataclass(kind):
        return frozenset(field.name for field in dataclasses.fields(kind))
    return None


def extends_another(kind: type) -> bool:
    """Its fields are written once, in its base class."""
    return any(len(fields(base) or ()) >= LEAST_FIELDS for base in kind.__mro__[1:])


def structs() -> Iterator[tuple[str, frozenset[str]]]:
    """Every struct and dataclass of the package, with the names of its fields."""
    for module in pkgutil.walk_packages(lineshaft.__path__, "lineshaft."):
        if module.name.endswith("__main__"):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            # Not `isinstance`: lazy objects, such as Django's settings, would be loaded.
            if issubclass(type(kind), type) and kind.__module__ == module.name:
                names = fields(kind)
                if names is not None and len(names) >= LEAST_FIELDS and not extends_another(kind):
                    yield f"{module.name}.{kind.__name__}".removeprefix("lineshaft."), names


def alike(one: frozenset[str], other: frozenset[str]) -> bool:
    return len(one & other) > MOST_IN_COMMON * max(len(one), len(other))


def test_no_two_structs_share_most_of_their_fields() -> None:
    found = list(structs())
    assert len(found) > 20
    pairs = {
        tuple(sorted((name, other))): sorted(own & others)
        for (name, own), (other, others) in itertools.combinations(found, 2)
        if alike(own, others)
    }

    assert {pair: common for pair, common in pairs.items() if pair not in ALLOWED} == {}
    assert [pair for pair in ALLOWED if pair not in pairs] == [], "no longer alike: remove them"
