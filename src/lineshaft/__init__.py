"""Lineshaft: a durable task queue for fleets of AI agents, on PostgreSQL."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lineshaft.agent import (
        Agent,
        AttemptCancelled,
        BudgetExceeded,
        Cancel,
        Fail,
        Result,
        Snooze,
        SyncTaskContext,
        TaskContext,
        TaskDecorator,
        TaskFunction,
        TaskType,
    )
    from lineshaft.checks.registry import Checks
    from lineshaft.checks.verdict import CandidateOutput, Verdict
    from lineshaft.client import (
        DagHandle,
        DagRef,
        DagReference,
        Lineshaft,
        SyncDagHandle,
        SyncLineshaft,
        SyncTaskHandle,
        TaskHandle,
        TaskRef,
        TaskReference,
    )
    from lineshaft.errors import LineshaftError, OutputTypeError, TaskCancelled, TaskFailed
    from lineshaft.settings import Settings
    from lineshaft.types import (
        AgentInfo,
        Approval,
        Attempt,
        Breaker,
        BulkResolution,
        Child,
        ClaimInfo,
        Dag,
        DeadLetter,
        DeadLetterGroup,
        Depth,
        Duration,
        Event,
        EventPage,
        FailedAttempt,
        FailureCategory,
        Gate,
        Lock,
        MatchedTasks,
        NewTask,
        NewToken,
        OutputContract,
        OutputGate,
        Page,
        PastAttempt,
        Readiness,
        Reason,
        ReasonCode,
        Refusal,
        Report,
        Resolution,
        RetryPolicy,
        RetrySpec,
        Review,
        Scope,
        Slowdown,
        Stats,
        Status,
        Strategy,
        Task,
        TaskDefaults,
        TaskFilters,
        TaskOptions,
        TaskOrder,
        TaskOutput,
        Throughput,
        Tier,
        Token,
        TokensUsed,
        TypedTask,
        Why,
    )

__all__ = [
    "Agent",
    "AgentInfo",
    "Approval",
    "Attempt",
    "AttemptCancelled",
    "Breaker",
    "BudgetExceeded",
    "BulkResolution",
    "Cancel",
    "CandidateOutput",
    "Checks",
    "Child",
    "ClaimInfo",
    "Dag",
    "DagHandle",
    "DagRef",
    "DagReference",
    "DeadLetter",
    "DeadLetterGroup",
    "Depth",
    "Duration",
    "Event",
    "EventPage",
    "Fail",
    "FailedAttempt",
    "FailureCategory",
    "Gate",
    "Lineshaft",
    "LineshaftError",
    "Lock",
    "MatchedTasks",
    "NewTask",
    "NewToken",
    "OutputContract",
    "OutputGate",
    "OutputTypeError",
    "Page",
    "PastAttempt",
    "Readiness",
    "Reason",
    "ReasonCode",
    "Refusal",
    "Report",
    "Resolution",
    "Result",
    "RetryPolicy",
    "RetrySpec",
    "Review",
    "Scope",
    "Settings",
    "Slowdown",
    "Snooze",
    "Stats",
    "Status",
    "Strategy",
    "SyncDagHandle",
    "SyncLineshaft",
    "SyncTaskContext",
    "SyncTaskHandle",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "TaskDecorator",
    "TaskDefaults",
    "TaskFailed",
    "TaskFilters",
    "TaskFunction",
    "TaskHandle",
    "TaskOptions",
    "TaskOrder",
    "TaskOutput",
    "TaskRef",
    "TaskReference",
    "TaskType",
    "Throughput",
    "Tier",
    "Token",
    "TokensUsed",
    "TypedTask",
    "Verdict",
    "Why",
    "__version__",
]

#: Where a name may come from, light modules first.
_MODULES = (
    "lineshaft.types",
    "lineshaft.errors",
    "lineshaft.settings",
    "lineshaft.client",
    "lineshaft.agent",
    "lineshaft.checks.verdict",
    "lineshaft.checks.registry",
)


def __getattr__(name: str) -> Any:
    """Import a name when it is used first: `lineshaft --version` needs none of them."""
    if name in __all__:
        from importlib import import_module  # noqa: PLC0415 - only when something is used

        for module in _MODULES:
            if hasattr(imported := import_module(module), name):
                value = globals()[name] = getattr(imported, name)
                return value
    raise AttributeError(f"module 'lineshaft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
