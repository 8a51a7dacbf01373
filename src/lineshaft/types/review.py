"""Work that needs a person: dead letters, resolutions, approvals, decision reports."""

from datetime import datetime
from decimal import Decimal
from functools import cached_property
from typing import Any

from msgspec import Raw, Struct, field

from lineshaft.errors import InvalidInputError
from lineshaft.model.fields import MAX_TEXT
from lineshaft.model.reviews import Resolution
from lineshaft.model.states import Status
from lineshaft.model.storable import check_json, is_storable
from lineshaft.types.json import JsonStruct, decoded, null
from lineshaft.types.tasks import FailedAttempt, Task
from lineshaft.types.work import check_report_size

MAX_NOTE = 5_000


class Review(JsonStruct, frozen=True, kw_only=True):
    """One decision about a dead letter."""

    at: datetime
    resolution: Resolution
    #: None: a retry by hand that bypassed the review.
    reviewer: str | None
    note: str | None
    not_before: datetime | None
    #: Only with `modify_and_retry`: the previous spec, and the places that were changed.
    spec_before_json: Raw = field(name="spec_before", default_factory=null)
    spec_change_json: Raw = field(name="spec_change", default_factory=null)

    @cached_property
    def spec_before(self) -> Any:
        return decoded(self.spec_before_json)

    @cached_property
    def spec_change(self) -> Any:
        return decoded(self.spec_change_json)


class DeadLetter(JsonStruct, frozen=True, kw_only=True):
    """A task that failed permanently, with its whole history and every decision since."""

    task_id: str
    dag_id: str
    type: str
    title: str
    spec_json: Raw = field(name="spec")
    #: How often the task had been revived before.
    revival: int
    #: Every failed attempt, including those before earlier revivals.
    failure_history: list[FailedAttempt]
    total_cost_usd: Decimal
    dead_lettered_at: datetime
    category: str
    error: str
    #: The part that similar errors have in common.
    pattern: str
    poison_pill: bool
    reviewed: bool
    #: The last decision; `reviews` has all of them.
    resolution: Resolution | None
    reviewer: str | None
    note: str | None
    reviewed_at: datetime | None
    hidden: bool
    reviews: list[Review]
    #: The current status of the task.
    status: Status

    @cached_property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = decoded(self.spec_json)
        return found


class DeadLetterGroup(Struct, frozen=True, kw_only=True):
    """Unreviewed dead letters with similar errors."""

    pattern: str
    count: int
    poison_pills: int
    total_cost_usd: Decimal
    first_at: datetime
    last_at: datetime
    categories: list[str]
    types: list[str]
    #: A sample, newest first.
    task_ids: list[str]
    #: The newest error, in full.
    example: str


class Refusal(Struct, frozen=True):
    """A dead letter that a bulk resolution could not resolve."""

    task_id: str
    code: str
    detail: str


class BulkResolution(Struct, frozen=True):
    resolved: list[str]
    refused: list[Refusal]
    #: More dead letters match than one call resolves: call again.
    more: bool


class Approval(JsonStruct, frozen=True):
    """Something that waits for a person."""

    task: Task
    #: `gate`: the output waits for approval. `task`: a person must do the task.
    kind: str
    #: What the person is asked for: the gate's schema, or the JSON Schema of the output.
    schema_json: Raw = field(name="schema")
    since: datetime

    @cached_property
    def schema(self) -> Any:
        return decoded(self.schema_json)


class ApprovalDecision(Struct, frozen=True):
    approve: bool
    reviewer: str
    note: str | None = None
    #: The output as JSON, if the person does the task.
    data: bytes | None = None
    #: The decision report as JSON, if the task requires one.
    report: bytes | None = None

    def __post_init__(self) -> None:
        faults = []
        if not self.reviewer.strip() or len(self.reviewer) > MAX_TEXT or not is_storable(self.reviewer):
            faults.append(("reviewer", f"must be a text of 1 to {MAX_TEXT} characters: who decides"))
        if self.note is not None and (len(self.note) > MAX_NOTE or not is_storable(self.note)):
            faults.append(("note", f"must be a text of at most {MAX_NOTE} characters"))
        if faults:
            raise InvalidInputError(errors=faults)
        check_json(data=self.data, decision_report=self.report)
        check_report_size(self.report)

    @property
    def reasons(self) -> tuple[str, ...]:
        note = self.note.strip() if self.note else ""
        if self.approve:
            return (note,) if note else ()
        return (f"rejected by {self.reviewer}" + (f": {note}" if note else ""),)


class Report(JsonStruct, frozen=True):
    """Why an agent did what it did."""

    task_id: str
    type: str
    title: str
    dag_id: str
    agent_id: str | None
    model: str | None
    ended_at: datetime
    decision_report_json: Raw = field(name="decision_report")

    @cached_property
    def decision_report(self) -> Any:
        return decoded(self.decision_report_json)
