"""What people are shown who decide about dead letters, decision reports and outputs."""

from datetime import datetime
from decimal import Decimal

from msgspec import Raw, Struct

from lineshaft.engine.read.views import FailureView
from lineshaft.engine.review.approvals import Approval as StoredApproval
from lineshaft.engine.review.dead_letter_views import DeadLetterGroup, DeadLetterView
from lineshaft.engine.review.reports import Report as StoredReport
from lineshaft.server.routes.responses import Task, raw, task


class DeadLetterReview(Struct, frozen=True, kw_only=True):
    at: datetime
    resolution: str
    #: null: a retry by hand, past the desk.
    reviewer: str | None
    note: str | None
    not_before: datetime | None
    spec_before: Raw | None
    spec_change: Raw | None


class DeadLetter(Struct, frozen=True, kw_only=True):
    task_id: str
    dag_id: str
    type: str
    title: str
    spec: Raw
    revival: int
    #: Every failed attempt, those before earlier revivals too.
    failure_history: list[FailureView]
    total_cost_usd: Decimal
    dead_lettered_at: datetime
    category: str
    error: str
    #: What alike errors have in common.
    pattern: str
    poison_pill: bool
    reviewed: bool
    resolution: str | None
    reviewer: str | None
    note: str | None
    reviewed_at: datetime | None
    hidden: bool
    reviews: list[DeadLetterReview]
    #: Where the task stands now.
    status: str


class DeadLetterPage(Struct, frozen=True):
    items: list[DeadLetter]
    next_cursor: str | None


_LETTER_COPIED = tuple(n for n in DeadLetter.__struct_fields__ if n not in {"spec", "reviews"})
_REVIEW_COPIED = ("at", "resolution", "reviewer", "note", "not_before")


def dead_letter(view: DeadLetterView) -> DeadLetter:
    reviews = [
        DeadLetterReview(
            **{name: getattr(review, name) for name in _REVIEW_COPIED},
            spec_before=raw(review.spec_before),
            spec_change=raw(review.spec_change),
        )
        for review in view.reviews
    ]
    copied = {name: getattr(view, name) for name in _LETTER_COPIED}
    return DeadLetter(**copied, spec=Raw(view.spec), reviews=reviews)


class DeadLetterGroups(Struct, frozen=True):
    items: list[DeadLetterGroup]
    next_cursor: str | None = None


class Report(Struct, frozen=True):
    """Why an agent did what it did."""

    task_id: str
    type: str
    title: str
    dag_id: str
    agent_id: str | None
    model: str | None
    ended_at: datetime
    decision_report: Raw


class ReportPage(Struct, frozen=True):
    items: list[Report]
    next_cursor: str | None


def report(found: StoredReport) -> Report:
    return Report(
        found.id,
        found.type,
        found.title,
        found.dag_id,
        found.agent_id,
        found.model,
        found.ended_at,
        Raw(found.decision_report),
    )


class Refusal(Struct, frozen=True):
    task_id: str
    code: str
    detail: str


class Resolved(Struct, frozen=True):
    resolved: list[str]
    refused: list[Refusal]
    #: There are more than one call decides about: call again.
    more: bool


class Approval(Struct, frozen=True):
    task: Task
    #: `gate`: its output waits to be approved. `task`: it waits to be done.
    kind: str
    schema: Raw | None
    since: datetime


class ApprovalPage(Struct, frozen=True):
    items: list[Approval]
    next_cursor: str | None


def approval(found: StoredApproval) -> Approval:
    return Approval(task(found.task), found.kind, raw(found.schema), found.since)
