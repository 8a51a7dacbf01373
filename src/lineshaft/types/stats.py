"""Figures about the whole queue, and what a task is waiting for."""

from datetime import datetime
from decimal import Decimal

from msgspec import UNSET, Struct, UnsetType, field

from lineshaft.model.open_enum import OpenEnum
from lineshaft.model.priority import Tier
from lineshaft.model.states import Status


class Depth(Struct, frozen=True):
    status: Status
    #: None: the tasks have ended and have no tier.
    tier: Tier | None
    count: int
    exact: bool


class Throughput(Struct, frozen=True):
    """Tasks that ended within a window of time."""

    window_sec: float
    completed: int
    cancelled: int
    dead_lettered: int
    exact: bool


class Minute(Struct, frozen=True):
    """What ended within a minute; `failed` counts attempts, the others tasks."""

    #: The beginning of the minute.
    at: datetime
    completed: int = 0
    failed: int = 0
    dead_lettered: int = 0
    cancelled: int = 0


class Waits(Struct, frozen=True):
    """Seconds from READY to the first start, of the tasks that ended last."""

    #: How many tasks; at most 1,000.
    tasks: int
    p50_sec: float | None
    p95_sec: float | None
    p99_sec: float | None


class ThroughputHistory(Struct, frozen=True):
    as_of: datetime
    #: Sixty minutes, oldest first; the last is the current one.
    minutes: list[Minute]
    waits: Waits
    #: How old the figures are: more than seconds where the database accepts no writes.
    figures_age_sec: float = 0.0


class ArtifactUsage(Struct, frozen=True):
    """What the artifact store holds. A content is stored once, however many artifacts have it."""

    contents: int
    bytes: int
    exact: bool


class Stats(Struct, frozen=True, kw_only=True):
    as_of: datetime
    depth: list[Depth]
    by_status: dict[Status, int]
    #: Since when the task that has waited longest is READY; None: no task is READY.
    oldest_ready_at: datetime | None
    oldest_ready_sec: float | None
    oldest_ready_exact: bool
    #: `last_minute` and `last_hour`.
    throughput: dict[str, Throughput]
    #: Since midnight UTC.
    spend_today_usd: Decimal
    artifacts: ArtifactUsage
    #: Types that are paused; `*` is every type.
    paused: list[str]
    #: States whose number in `by_status` is an estimate.
    by_status_estimated: list[Status] = field(default_factory=list)


class Readiness(Struct, frozen=True):
    """A server, or a client's own connection, that can reach a migrated database."""

    status: str
    database: str
    #: Idle agents are woken at once; otherwise they poll.
    wakeups: bool
    #: How: `redis`, `notify` (PostgreSQL) or `polling`; None: no agent waits here, or it is older.
    wakeup_mode: str | None = None
    wakeup_mode_since: datetime | None = None


class ReasonCode(OpenEnum):
    BLOCKED_BY_DEPENDENCY = "blocked_by_dependency"
    UPSTREAM_DEAD_LETTERED = "upstream_dead_lettered"
    WAITING_RETRY = "waiting_retry"
    WAITING_GATE = "waiting_gate"
    GATE_BUDGET = "gate_budget"
    WAITING_APPROVAL = "waiting_approval"
    SCHEDULED = "scheduled"
    SLEEPING = "sleeping"
    WAITING_SIGNAL = "waiting_signal"
    NO_CAPABLE_AGENT = "no_capable_agent"
    NO_AFFORDABLE_AGENT = "no_affordable_agent"
    DAG_BUDGET = "dag_budget"
    DAILY_BUDGET = "daily_budget"
    BREAKER_OPEN = "breaker_open"
    LOCK_HELD = "lock_held"
    SLOWDOWN = "slowdown"
    #: Agents have no open account.
    ACCOUNT_CLOSED = "account_closed"
    AGENTS_FULL = "agents_full"
    PAUSED = "paused"
    QUOTA = "quota"
    DEADLINE_MISSED = "deadline_missed"
    #: It is held by an agent.
    CLAIMED = "claimed"
    RUNNING = "running"
    #: It has ended.
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    DEAD_LETTERED = "dead_lettered"


class Reason(Struct, frozen=True, omit_defaults=True):
    code: ReasonCode
    detail: str
    #: When the first account opens, where that is known; only of `account_closed`.
    until: datetime | None = None
    # Of the code `quota`.
    quota: str | UnsetType = UNSET
    #: What it counts for: the key, or the pattern whose keys share one limit.
    key: str | UnsetType = UNSET
    limit: float | UnsetType = UNSET
    used: float | UnsetType = UNSET
    #: Tasks that hold it, up to 100.
    holders: list[str] | UnsetType = UNSET
    #: When its rate has room again; without it, as soon as one of the holders ends.
    free_at: datetime | UnsetType = UNSET


class Why(Struct, frozen=True):
    """What a task is waiting for, what it is doing, or how it ended."""

    #: A claim would get it now. Always false for a task that is held or has ended.
    runnable: bool
    reasons: list[Reason]
    status: Status
    task_id: str

    @property
    def summary(self) -> str:
        """All reasons in one line."""
        if self.runnable:
            return f"{self.status} and runnable: the next free agent claims it in order of priority"
        reasons = "; ".join(f"{reason.code}: {reason.detail.rstrip('.')}" for reason in self.reasons)
        return f"{self.status} ({reasons})" if reasons else self.status.value
