"""Lineshaft: a durable task queue for fleets of AI agents, on PostgreSQL."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lineshaft.agent import (
        Agent,
        BudgetExceeded,
        Cancel,
        Fail,
        Result,
        Snooze,
        SyncTaskContext,
        TaskCancelled,
        TaskContext,
    )
    from lineshaft.checks.registry import Checks
    from lineshaft.checks.verdict import CandidateOutput, Verdict
    from lineshaft.client import Dag, Event, Lineshaft, SyncLineshaft, Task
    from lineshaft.errors import LineshaftError
    from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec
    from lineshaft.types.work import Child

__all__ = [
    "Agent",
    "BudgetExceeded",
    "Cancel",
    "CandidateOutput",
    "Checks",
    "Child",
    "Dag",
    "Event",
    "Fail",
    "Gate",
    "Lineshaft",
    "LineshaftError",
    "NewTask",
    "OutputContract",
    "Result",
    "RetrySpec",
    "Snooze",
    "SyncLineshaft",
    "SyncTaskContext",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "Verdict",
    "__version__",
]

_MODULES = {
    "lineshaft.agent": (
        *("Agent", "BudgetExceeded", "Cancel", "Fail", "Result", "Snooze", "SyncTaskContext"),
        *("TaskCancelled", "TaskContext"),
    ),
    "lineshaft.checks.registry": ("Checks",),
    "lineshaft.checks.verdict": ("CandidateOutput", "Verdict"),
    "lineshaft.client": ("Dag", "Event", "Lineshaft", "SyncLineshaft", "Task"),
    "lineshaft.errors": ("LineshaftError",),
    "lineshaft.model.tasks": ("Gate", "NewTask", "OutputContract", "RetrySpec"),
    "lineshaft.engine.transition.spawn": ("Child",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: `lineshaft --version` needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lineshaft' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - only when something is asked for

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
