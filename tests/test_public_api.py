"""The names that programs import: complete, and loaded when they are first used."""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import lineshaft
from lineshaft import types


def public(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name[0].isupper()}


def test_every_name_is_there() -> None:
    for name in lineshaft.__all__:
        assert getattr(lineshaft, name) is not None
    assert len(lineshaft.__all__) == len(set(lineshaft.__all__))


def test_a_name_that_is_not_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'lineshaft' has no attribute 'Linshaft'"):
        getattr(lineshaft, "Linshaft")  # noqa: B009 - type checkers know that it isn't there


def test_importing_it_loads_nothing_heavy() -> None:
    """`lineshaft --version` answers at once."""
    heavy = {"asyncio", "msgspec", "psycopg", "fastapi"}
    code = f"import sys, lineshaft; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"


def test_a_context_shows_what_handlers_use() -> None:
    """What the agent needs is in a separate object."""
    both = {name for name in dir(lineshaft.TaskContext) if not name.startswith("_")}

    assert both == {name for name in dir(lineshaft.SyncTaskContext) if not name.startswith("_")}
    assert both == {
        *("agent_id", "dag_id", "deadline", "epoch", "id", "inputs", "model", "parent_id", "spec"),
        *("task", "time_limit_sec", "title", "type"),
        *("attempt", "last_checkpoint", "last_error", "max_attempts", "previous_attempts", "resume", "steps"),
        *("artifact", "cancelled", "check_cancelled", "log", "progress", "slowdown_until", "spend"),
        *("spent_usd", "checkpoint", "spawn", "state", "step", "put_artifact", "open_artifact"),
        *("sleep", "wait_for", "quota", "account"),
    }


def test_dir_is_complete() -> None:
    assert dir(lineshaft) == sorted(lineshaft.__all__)


#: What programs import: from `lineshaft`, or from `lineshaft.types`.
EXPORTED = public(types) | {name: getattr(lineshaft, name) for name in lineshaft.__all__}


def test_a_name_has_one_meaning() -> None:
    """A value that both modules have is the same."""
    both = public(types).keys() & set(lineshaft.__all__)

    assert {"NewTask", "Task"} <= both
    assert [name for name in both if getattr(types, name) is not getattr(lineshaft, name)] == []


def test_the_public_names_fit_on_one_screen() -> None:
    """What only a reference needs is in `lineshaft.types`."""
    assert len(Path(str(lineshaft.__file__)).read_text(encoding="utf-8").splitlines()) <= 60


def _classes(annotation: Any) -> Iterator[type]:
    """The classes of Lineshaft in an annotation."""
    if isinstance(annotation, type) and annotation.__module__.startswith("lineshaft."):
        yield annotation
    if isinstance(annotation, list | tuple):
        arguments: Iterable[Any] = annotation
    else:
        arguments = (get_origin(annotation), *get_args(annotation))
    for argument in arguments:
        if argument is not None:
            yield from _classes(argument)


def _hints(thing: Any) -> dict[str, Any]:
    return get_type_hints(thing, localns=EXPORTED)


def _used_by(public: type) -> Iterator[tuple[str, type]]:
    """What fields have, and what methods take and return."""
    if dataclasses.is_dataclass(public) or hasattr(public, "__struct_fields__"):
        for name, annotation in _hints(public).items():
            if not name.startswith("_"):
                yield from ((f"{public.__name__}.{name}", found) for found in _classes(annotation))
    for name, member in inspect.getmembers(public):
        if name != "__init__" and name.startswith("_"):
            continue
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and function.__module__.startswith("lineshaft."):
            for annotation in _hints(function).values():
                yield from ((f"{public.__name__}.{name}", found) for found in _classes(annotation))


#: Not for users.
INTERNAL = {
    "Backend": "Lineshaft(backend=…) is for tests",
    "Blocking": "the base of all that works without an event loop",
    "Clock": "Lineshaft(clock=…) is for Workbench",
    "LoopThread": "SyncLineshaft.loop is for its handles and for SyncWorkbench",
    "CheckCommand": "Checks(commands=…) comes from the settings",
    "Judge": "Checks(judge=…) comes from the settings",
    "ShownVerification": "a Verification as it is read; lineshaft.types has it",
}
#: Made by Lineshaft only: what their constructors take doesn't matter.
NOT_CONSTRUCTED = (
    "TaskContext",
    "SyncTaskContext",
    "QuotaUse",
    "TaskType",
    "TaskFunction",
    "TaskHandle",
    "DagHandle",
    "Artifact",
    "SyncArtifact",
)


def test_what_public_methods_take_and_return_is_exported() -> None:
    missing = {
        f"{found.__module__}.{found.__qualname__} in {place}"
        for public in EXPORTED.values()
        if isinstance(public, type)
        for place, found in _used_by(public)
        if EXPORTED.get(found.__name__) is not found and found.__name__ not in INTERNAL
        if not place.endswith("__init__") or not place.startswith((*NOT_CONSTRUCTED, "TaskRef", "DagRef"))
    }
    assert sorted(missing) == []


def test_an_agent_over_http_needs_no_driver() -> None:
    """Neither an agent nor a client of a server loads psycopg."""
    code = (
        "import sys, lineshaft; lineshaft.Agent('a'); lineshaft.Lineshaft('http://127.0.0.1:1', token='t'); "
        "print([name for name in sys.modules if name.startswith('psycopg')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
