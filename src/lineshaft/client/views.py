"""Tasks and DAGs as programs see them: plain Python values, with the names that the HTTP API uses."""

from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.engine.feed.events import Event as StoredEvent
from lineshaft.engine.read import views
from lineshaft.engine.review import approvals, dead_letter_views, reports
from lineshaft.model.retry import RetryPolicy
from lineshaft.model.reviews import Resolution
from lineshaft.model.states import Status


class Claimed(Struct, frozen=True):
    """Who holds a task, or under whose claim it ended."""

    agent_id: str
    claimed_at: datetime | None
    heartbeat_at: datetime | None
    heartbeat_interval_sec: float
    epoch: int


class Output(Struct, frozen=True, kw_only=True):
    type: str | None = None
    validation: Any = "none"
    validation_schema: Any = None
    require_decision_report: bool = False
    data: Any = None
    artifacts: Any = None
    decision_report: Any = None


class Task(Struct, frozen=True, kw_only=True):
    id: str
    dag_id: str
    parent_id: str | None
    idempotency_key: str | None
    type: str
    title: str
    spec: dict[str, Any]
    required_capabilities: list[str]
    model_preferences: list[str]
    fallback_models: list[str]
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    max_duration_sec: float | None
    status: Status
    priority: int
    effective_priority: float | None
    tier: str | None
    priority_boost_per_minute: float
    deadline: datetime | None
    run_at: datetime | None
    depends_on: list[str]
    blocked_by: list[str]
    lock_key: str | None
    max_attempts: int
    attempts: int
    retry: RetryPolicy
    retry_at: datetime | None
    claim: Claimed | None
    model: str | None
    progress: Any
    output: Output
    failure_reason: str | None
    failure_category: str | None
    failure_history: list[views.FailureView]
    cost_usd: Decimal
    tokens_used: views.TokensView
    tags: list[str]
    created_by: str | None
    created_at: datetime
    ready_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    cancelled_at: datetime | None
    cancel_reason: str | None

    @property
    def result(self) -> Any:
        """What the handler returned; None until the task is COMPLETED."""
        return self.output.data if self.status is Status.COMPLETED else None


class Dag(Struct, frozen=True, kw_only=True):
    id: str
    title: str
    #: pending, running, completed, failed or cancelled.
    status: str
    created_by: str | None
    tasks: list[str]
    roots: list[str]
    leaves: list[str]
    critical_path: list[str]
    counts: dict[str, int]
    budget_ceiling_usd: Decimal | None
    reserved_usd: Decimal
    spent_usd: Decimal
    created_at: datetime
    completed_at: datetime | None


class Event(Struct, frozen=True):
    #: Read after this to go on behind this event.
    cursor: str
    kind: str
    at: datetime
    task_id: str | None
    dag_id: str | None
    agent_id: str | None
    data: Any


class Approval(Struct, frozen=True):
    """Something that waits for a person."""

    task: Task
    #: `gate`: its output waits to be approved. `task`: it waits to be done.
    kind: str
    #: What the person is asked for: the gate's own, or the JSON Schema of the answer.
    schema: Any
    since: datetime


class Report(Struct, frozen=True):
    """Why an agent did what it did."""

    task_id: str
    type: str
    title: str
    dag_id: str
    agent_id: str | None
    model: str | None
    ended_at: datetime
    decision_report: Any


class Review(Struct, frozen=True, kw_only=True):
    """One decision about a dead letter."""

    at: datetime
    resolution: Resolution
    #: None: a retry by hand, past the desk.
    reviewer: str | None
    note: str | None
    not_before: datetime | None
    #: The spec as it was, and the places that were changed; only with `modify_and_retry`.
    spec_before: Any
    spec_change: Any


class DeadLetter(Struct, frozen=True, kw_only=True):
    """A task that failed for good, with its whole history and what was decided since."""

    task_id: str
    dag_id: str
    type: str
    title: str
    spec: dict[str, Any]
    #: How often it had been revived when it came here.
    revival: int
    failure_history: list[views.FailureView]
    total_cost_usd: Decimal
    dead_lettered_at: datetime
    category: str
    error: str
    #: What alike errors have in common.
    pattern: str
    poison_pill: bool
    reviewed: bool
    #: The last decision; all of them are in `reviews`.
    resolution: Resolution | None
    reviewer: str | None
    note: str | None
    reviewed_at: datetime | None
    hidden: bool
    reviews: list[Review]
    #: Where the task stands now.
    status: Status


_COPIED = frozenset(Task.__struct_fields__) - {"spec", "tier", "claim", "progress", "output"}
_DAG_FIELDS = Dag.__struct_fields__
_LETTER_COPIED = frozenset(DeadLetter.__struct_fields__) - {"spec", "reviews"}
_REVIEW_COPIED = frozenset(Review.__struct_fields__) - {"spec_before", "spec_change"}


def decoded(json: bytes | None) -> Any:
    return None if json is None else msgspec.json.decode(json)


def task_of(view: views.TaskView) -> Task:
    return Task(
        **{name: getattr(view, name) for name in _COPIED},
        spec=decoded(view.spec),
        tier=None if view.tier is None else str(view.tier),
        claim=None if view.claim is None else Claimed(*msgspec.structs.astuple(view.claim)),
        progress=decoded(view.progress),
        output=_output_of(view.output),
    )


def _output_of(view: views.OutputView) -> Output:
    validation: Any = view.validation
    if not isinstance(validation, str):
        validation = [{"method": gate.method, "schema": decoded(gate.schema)} for gate in validation]
    return Output(
        type=view.type,
        validation=validation,
        validation_schema=decoded(view.validation_schema),
        require_decision_report=view.require_decision_report,
        data=decoded(view.data),
        artifacts=decoded(view.artifacts),
        decision_report=decoded(view.decision_report),
    )


def dag_of(view: views.DagView) -> Dag:
    return Dag(**{name: getattr(view, name) for name in _DAG_FIELDS})


def approval_of(found: approvals.Approval) -> Approval:
    return Approval(task_of(found.task), found.kind, decoded(found.schema), found.since)


def report_of(found: reports.Report) -> Report:
    return Report(
        found.id,
        found.type,
        found.title,
        found.dag_id,
        found.agent_id,
        found.model,
        found.ended_at,
        decoded(found.decision_report),
    )


def dead_letter_of(view: dead_letter_views.DeadLetterView) -> DeadLetter:
    return DeadLetter(
        **{name: getattr(view, name) for name in _LETTER_COPIED},
        spec=decoded(view.spec),
        reviews=[
            Review(
                **{name: getattr(review, name) for name in _REVIEW_COPIED},
                spec_before=decoded(review.spec_before),
                spec_change=decoded(review.spec_change),
            )
            for review in view.reviews
        ],
    )


def event_of(event: StoredEvent) -> Event:
    return Event(
        event.cursor,
        event.kind,
        event.at,
        event.task_id,
        event.dag_id,
        event.agent_id,
        decoded(event.data),
    )
