"""Lineshaft: a durable task queue for fleets of AI agents, on PostgreSQL.

Programs import from here what they write themselves. The other values that calls take and return, such as
`Breaker` or `Costs`, are in `lineshaft.types`.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    # `__all__` says which of these names are public here.
    from lineshaft.agent import *
    from lineshaft.checks.registry import *
    from lineshaft.checks.verdict import *
    from lineshaft.client import *
    from lineshaft.errors import *
    from lineshaft.settings import *
    from lineshaft.types import *

__all__ = ["__version__"]
# The queue, and what its calls return to work with.
__all__ += ["Lineshaft", "Settings", "SyncLineshaft"]
__all__ += ["DagHandle", "DagRef", "DagReference", "SyncDagHandle"]
__all__ += ["SyncTaskHandle", "TaskHandle", "TaskRef", "TaskReference"]
__all__ += ["ArtifactReader", "Artifacts", "SyncArtifactReader", "SyncArtifacts"]
__all__ += ["Sources", "SyncSources"]
# Agents, and what handlers take, return and raise.
__all__ += ["Agent", "SyncTaskContext", "TaskContext", "TaskDecorator", "TaskFunction", "TaskType"]
__all__ += ["AttemptCancelled", "BudgetExceeded", "Cancel", "Fail", "QuotaUse", "RateLimited", "Result"]
__all__ += ["SignalTimeout", "Snooze"]
# Output gates.
__all__ += ["CandidateOutput", "Checks", "Verdict"]
# Work: what is submitted, and what is read most.
__all__ += ["ForEach", "Gate", "NewSource", "NewTask", "OutputContract", "RetrySpec", "SourceKind"]
__all__ += ["TypedTask"]
__all__ += ["Artifact", "Child", "Dag", "Event", "Page", "Resolution", "Status", "Task", "Why"]
# Errors.
__all__ += ["LineshaftError", "OutputTypeError", "TaskCancelled", "TaskFailed"]

#: Where a name may come from, light modules first.
_MODULES = ("types", "errors", "settings", "client", "agent", "checks.verdict", "checks.registry")


if not TYPE_CHECKING:  # type checkers would take any name for one that exists

    def __getattr__(name: str) -> Any:
        """Import a name when it is used first: `lineshaft --version` needs none of them."""
        if name in __all__:
            from importlib import import_module  # noqa: PLC0415 - only when something is used

            for module in _MODULES:
                if hasattr(imported := import_module(f"lineshaft.{module}"), name):
                    value = globals()[name] = getattr(imported, name)
                    return value
        raise AttributeError(f"module 'lineshaft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
