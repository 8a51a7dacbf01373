"""What operations answer with. JSON that the database has is passed on as it is."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from lineshaft.engine.agents import AgentInfo
from lineshaft.engine.feed.events import Event as StoredEvent
from lineshaft.engine.read import views
from lineshaft.engine.read.reading import Page
from lineshaft.engine.submit.submission import Submitted
from lineshaft.model.retry import RetryPolicy
from lineshaft.server.framework import problems


class OutputGate(Struct, frozen=True):
    method: str
    schema: Raw | None


class Output(Struct, frozen=True, kw_only=True):
    type: str | None
    #: One method, or several gates in order.
    validation: str | tuple[OutputGate, ...]
    validation_schema: Raw | None
    require_decision_report: bool
    #: While VALIDATING this is what was handed in; it counts once the task is COMPLETED.
    data: Raw | None
    artifacts: Raw | None
    decision_report: Raw | None


class Task(Struct, frozen=True, kw_only=True):
    id: str
    dag_id: str
    parent_id: str | None
    idempotency_key: str | None
    type: str
    title: str
    spec: Raw
    preset: str
    required_capabilities: list[str]
    model_preferences: list[str]
    fallback_models: list[str]
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    max_duration_sec: float | None
    heartbeat_interval_sec: float | None
    status: str
    priority: int
    #: By the formula of claims, now; null once it has ended. The lowest is next.
    effective_priority: float | None
    tier: str | None
    priority_boost_per_minute: float
    deadline: datetime | None
    run_at: datetime | None
    depends_on: list[str]
    blocked_by: list[str]
    #: Set while a dead letter somewhere upstream holds it up.
    blocked_reason: str | None
    lock_key: str | None
    #: READY, but waiting for `lock` or `dag_budget`.
    parked: str | None
    is_batch: bool
    max_attempts: int
    attempts: int
    #: How often it was revived by hand.
    revivals: int
    retry: RetryPolicy
    retry_at: datetime | None
    #: The one that holds it, or under which it ended.
    claim: views.ClaimView | None
    lease_until: datetime | None
    model: str | None
    progress: Raw | None
    output: Output
    failure_reason: str | None
    failure_category: str | None
    failure_history: list[views.FailureView]
    cost_usd: Decimal
    reserved_usd: Decimal
    tokens_used: views.TokensView
    tags: list[str]
    created_by: str | None
    created_at: datetime
    ready_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    cancelled_at: datetime | None
    cancel_reason: str | None
    #: Only where something was submitted: its idempotency key was known already.
    duplicate: bool | UnsetType = UNSET
    #: ... and what was asked now differs from what that task was asked for.
    mismatch: bool | UnsetType = UNSET


_CHANGED = {"spec", "tier", "progress", "output", "duplicate", "mismatch"}
_COPIED = tuple(name for name in Task.__struct_fields__ if name not in _CHANGED)


def raw(json: bytes | None) -> Raw | None:
    return None if json is None else Raw(json)


def task(view: views.TaskView, **more: Any) -> Task:
    return Task(
        **{name: getattr(view, name) for name in _COPIED},
        spec=Raw(view.spec),
        tier=None if view.tier is None else str(view.tier),
        progress=raw(view.progress),
        output=_output(view.output),
        **more,
    )


def _output(view: views.OutputView) -> Output:
    validation = view.validation
    return Output(
        type=view.type,
        validation=validation
        if isinstance(validation, str)
        else tuple(OutputGate(gate.method, raw(gate.schema)) for gate in validation),
        validation_schema=raw(view.validation_schema),
        require_decision_report=view.require_decision_report,
        data=raw(view.data),
        artifacts=raw(view.artifacts),
        decision_report=raw(view.decision_report),
    )


class TaskPage(Struct, frozen=True):
    items: list[Task]
    next_cursor: str | None


def task_page(page: Page[views.TaskView]) -> TaskPage:
    return TaskPage([task(view) for view in page.items], page.next_cursor)


class SubmittedItem(Struct, frozen=True):
    id: str
    duplicate: bool
    #: The key was known, but what was asked now differs.
    mismatch: bool | UnsetType = UNSET


class SubmittedItems(Struct, frozen=True):
    items: list[SubmittedItem]


def submitted_item(item: Submitted) -> SubmittedItem:
    return SubmittedItem(item.id, item.duplicate, item.mismatch or UNSET)


def submitted_items(submitted: Sequence[Submitted]) -> SubmittedItems:
    return SubmittedItems([submitted_item(item) for item in submitted])


class Dag(Struct, frozen=True, kw_only=True):
    id: str
    title: str
    #: pending, running, completed, failed or cancelled.
    status: str
    created_by: str | None
    tasks: list[str]
    roots: list[str]
    leaves: list[str]
    #: The longest chain that is still to be done.
    critical_path: list[str]
    counts: dict[str, int]
    budget_ceiling_usd: Decimal | None
    reserved_usd: Decimal
    spent_usd: Decimal
    created_at: datetime
    completed_at: datetime | None
    #: A standalone task's own.
    virtual: bool


def dag(view: views.DagView) -> Dag:
    return Dag(**{name: getattr(view, name) for name in Dag.__struct_fields__})


class DagPage(Struct, frozen=True):
    items: list[Dag]
    next_cursor: str | None


class SubmittedDag(Struct, frozen=True):
    dag: Dag
    #: By the keys of the call.
    tasks: Mapping[str, str]
    #: The same, with whether each stands for a task that was there already.
    submitted: Mapping[str, SubmittedItem]
    duplicate: bool | UnsetType = UNSET


class Attempt(Struct, frozen=True):
    epoch: int
    number: int
    revival: int
    agent_id: str | None
    model: str | None
    #: running, validating, completed, failed, rate_limited, released, waiting or cancelled.
    outcome: str
    category: str | None
    error: str | None
    claimed_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    cost_usd: Decimal
    tokens_used: views.TokensView
    output: Raw | None


_ATTEMPT_COPIED = tuple(n for n in Attempt.__struct_fields__ if n not in {"tokens_used", "output"})


def attempt(view: views.AttemptView) -> Attempt:
    return Attempt(
        **{name: getattr(view, name) for name in _ATTEMPT_COPIED},
        tokens_used=views.TokensView(view.tokens_input, view.tokens_output),
        output=raw(view.output),
    )


class AttemptPage(Struct, frozen=True):
    items: list[Attempt]
    next_cursor: str | None = None


class Event(Struct, frozen=True):
    #: Read after this to go on behind this event.
    cursor: str
    kind: str
    at: datetime
    task_id: str | None
    dag_id: str | None
    agent_id: str | None
    epoch: int | None
    data: Raw | None


def event(stored: StoredEvent) -> Event:
    return Event(
        stored.cursor,
        stored.kind,
        stored.at,
        stored.task_id,
        stored.dag_id,
        stored.agent_id,
        stored.epoch,
        raw(stored.data),
    )


class EventPage(Struct, frozen=True):
    items: list[Event]
    next_cursor: str | None
    #: These are all that have happened so far.
    caught_up: bool


class Agent(Struct, frozen=True, kw_only=True):
    id: str
    type: str | None
    capabilities: list[str]
    #: null: any type that it is capable of.
    types: list[str] | None
    models_available: list[str]
    max_concurrent_tasks: int
    current_tasks: int
    #: null: unlimited.
    budget_usd: Decimal | None
    budget_remaining_usd: Decimal | None
    spent_usd: Decimal
    reserved_usd: Decimal
    #: active, draining or offline.
    status: str
    last_heartbeat: datetime
    poll_interval_sec: float
    claim_ttl_sec: float
    heartbeat_interval_sec: float
    incarnation: int
    registered_at: datetime


_AGENT_COPIED = tuple(name for name in Agent.__struct_fields__ if name != "current_tasks")


def agent(view: AgentInfo) -> Agent:
    return Agent(**{name: getattr(view, name) for name in _AGENT_COPIED}, current_tasks=view.held)


class AgentPage(Struct, frozen=True):
    items: list[Agent]
    next_cursor: str | None


class Assignment(Struct, frozen=True, kw_only=True):
    """A claimed task with all that is needed to work on it."""

    task: Task
    #: Goes with every call about this claim.
    claim_token: str
    model: str | None
    #: What `spec.context_refs` refer to, by reference.
    inputs: dict[str, Any]
    #: What became of the children it waited for: {id: {"status", "output"}}.
    children: Raw
    #: It was started before.
    resume: bool
    checkpoint: Raw | None
    #: Results of durable steps by name.
    steps: Raw
    #: {"category", "error"} of the attempt before, if that failed.
    last_error: Raw | None


class Assignments(Struct, frozen=True):
    tasks: list[Assignment]
    slowdown_until: datetime | UnsetType = UNSET


class HeartbeatResponse(Struct, frozen=True):
    #: By task: continue, cancel or lost.
    tasks: dict[str, str]
    #: active or draining.
    status: str
    slowdown_until: datetime | UnsetType = UNSET


class Why(Struct, frozen=True):
    runnable: bool
    reasons: list[problems.Reason]
    status: str


class Checkpoint(Struct, frozen=True):
    data: Raw


class Step(Struct, frozen=True):
    name: str
    #: What counts: the first result that was recorded.
    data: Raw


class Locks(Struct, frozen=True):
    items: Sequence[views.LockView]
    next_cursor: str | None


class Breakers(Struct, frozen=True):
    items: Sequence[views.BreakerView]
    next_cursor: str | None


class Slowdowns(Struct, frozen=True):
    items: Sequence[views.SlowdownView]
    next_cursor: str | None


class Paused(Struct, frozen=True):
    #: null: everything.
    type: str | None
    paused: bool


class Depth(Struct, frozen=True):
    status: str
    #: null: it has ended, and is in no tier.
    tier: str | None
    count: int
    exact: bool


class Throughput(Struct, frozen=True):
    window_sec: float
    completed: int
    cancelled: int
    dead_lettered: int
    exact: bool


class Stats(Struct, frozen=True, kw_only=True):
    as_of: datetime
    depth: list[Depth]
    by_status: dict[str, int]
    #: Since when the task is READY that waits longest.
    oldest_ready_at: datetime | None
    oldest_ready_sec: float | None
    oldest_ready_exact: bool
    throughput: dict[str, Throughput]
    spend_today_usd: Decimal
    spend_today_exact: bool
    #: Types that are paused; * is all.
    paused: list[str]


class Health(Struct, frozen=True):
    status: str
    version: str


class Readiness(Struct, frozen=True):
    status: str
    database: str
    #: Whether agents that wait are woken at once; they poll otherwise.
    wakeups: bool


class Ended(Struct, frozen=True):
    #: By id: `open`, or ended as a `task` or as a `dag`, or `unknown`.
    ids: dict[str, str]


def encoded(value: Any) -> bytes:
    return _encoder.encode(value)


_encoder = msgspec.json.Encoder(decimal_format="number")
