"""Every value that crosses a boundary between engine, server, client, command line and user code, once.

Nothing here imports the database driver or an HTTP library.
"""

from lineshaft.model.durations import Duration
from lineshaft.model.forecast import Forecast
from lineshaft.model.priority import Tier
from lineshaft.model.retry import FailureCategory, RetryPolicy, Strategy
from lineshaft.model.reviews import Resolution
from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec, TaskDefaults, TaskOptions
from lineshaft.types.agents import AgentInfo, InstanceInfo, NewAgent, RegisteredAgent
from lineshaft.types.artifacts import Artifact
from lineshaft.types.attention import Attention
from lineshaft.types.changes import TaskChange
from lineshaft.types.costs import CostFigures, CostLine, Costs, DagCosts, DayCosts, HourCosts, TodayCosts
from lineshaft.types.dags import Dag, NewDag, SubmittedDag
from lineshaft.types.events import Event, EventPage
from lineshaft.types.filters import (
    DagFilter,
    DeadLetterFilter,
    MatchedTasks,
    TaskFilter,
    TaskFilters,
    TaskOrder,
)
from lineshaft.types.guards import Breaker, Lock, Pause, Slowdown
from lineshaft.types.limits import Limits, VelocityAction
from lineshaft.types.page import Page
from lineshaft.types.problems import Fault, Problem
from lineshaft.types.review import (
    Approval,
    ApprovalDecision,
    BulkResolution,
    DeadLetter,
    DeadLetterGroup,
    Refusal,
    Report,
    Review,
)
from lineshaft.types.sources import (
    Fired,
    Firing,
    FiringOutcome,
    NewSource,
    Source,
    SourceChange,
    SourceFields,
    SourceKind,
    Verification,
)
from lineshaft.types.stats import (
    ArtifactUsage,
    Depth,
    Minute,
    Readiness,
    Reason,
    ReasonCode,
    Stats,
    Throughput,
    ThroughputHistory,
    Waits,
    Why,
)
from lineshaft.types.tasks import (
    Attempt,
    ClaimInfo,
    FailedAttempt,
    OutputGate,
    Submitted,
    Task,
    TaskOutput,
    TokensUsed,
)
from lineshaft.types.tokens import NewToken, Scope, Token
from lineshaft.types.typed_task import TypedTask
from lineshaft.types.waiting import Waiting, WaitingReason
from lineshaft.types.work import Child, PastAttempt

__all__ = [
    "AgentInfo",
    "Approval",
    "ApprovalDecision",
    "Artifact",
    "ArtifactUsage",
    "Attempt",
    "Attention",
    "Breaker",
    "BulkResolution",
    "Child",
    "ClaimInfo",
    "CostFigures",
    "CostLine",
    "Costs",
    "Dag",
    "DagCosts",
    "DagFilter",
    "DayCosts",
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetterGroup",
    "Depth",
    "Duration",
    "Event",
    "EventPage",
    "FailedAttempt",
    "FailureCategory",
    "Fault",
    "Fired",
    "Firing",
    "FiringOutcome",
    "Forecast",
    "Gate",
    "HourCosts",
    "InstanceInfo",
    "Limits",
    "Lock",
    "MatchedTasks",
    "Minute",
    "NewAgent",
    "NewDag",
    "NewSource",
    "NewTask",
    "NewToken",
    "OutputContract",
    "OutputGate",
    "Page",
    "PastAttempt",
    "Pause",
    "Problem",
    "Readiness",
    "Reason",
    "ReasonCode",
    "Refusal",
    "RegisteredAgent",
    "Report",
    "Resolution",
    "RetryPolicy",
    "RetrySpec",
    "Review",
    "Scope",
    "Slowdown",
    "Source",
    "SourceChange",
    "SourceFields",
    "SourceKind",
    "Stats",
    "Status",
    "Strategy",
    "Submitted",
    "SubmittedDag",
    "Task",
    "TaskChange",
    "TaskDefaults",
    "TaskFilter",
    "TaskFilters",
    "TaskOptions",
    "TaskOrder",
    "TaskOutput",
    "Throughput",
    "ThroughputHistory",
    "Tier",
    "TodayCosts",
    "Token",
    "TokensUsed",
    "TypedTask",
    "VelocityAction",
    "Verification",
    "Waiting",
    "WaitingReason",
    "Waits",
    "Why",
]
