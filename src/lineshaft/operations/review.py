"""Work that needs a person: dead letters, approvals, decision reports."""

from msgspec import Raw, field

from lineshaft import types as t
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.operations.operation import Engine, operation
from lineshaft.operations.wire import Body
from lineshaft.types import Page, Scope, Task
from lineshaft.types.json import json_or_none, null
from lineshaft.types.page import DEFAULT_LIMIT
from lineshaft.types.request import ById, Limit, OnePage, Request


class ListLetters(t.DeadLetterFilter, frozen=True, kw_only=True):
    limit: Limit = DEFAULT_LIMIT
    cursor: str | None = None

    check = OnePage.check


@operation("GET /v1/dead-letters", Scope.READ)
async def list_dead_letters(engine: Engine, request: ListLetters) -> Page[t.DeadLetter]:
    """List tasks that failed permanently, newest first."""
    return await engine.dead_letters.find(request, limit=request.limit, cursor=request.cursor)


class ListGroups(Request, frozen=True, kw_only=True):
    type: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    limit: Limit = DEFAULT_LIMIT

    check = OnePage.check


@operation("GET /v1/dead-letters/groups", Scope.READ)
async def list_dead_letter_groups(engine: Engine, request: ListGroups) -> Page[t.DeadLetterGroup]:
    """Group unreviewed dead letters by similar error; the largest group first."""
    groups = await engine.dead_letters.groups(
        types=request.type, categories=request.category, limit=request.limit
    )
    return Page(groups)


@operation("GET /v1/dead-letters/{id}", Scope.READ, codes=("not_found",))
async def get_dead_letter(engine: Engine, request: ById) -> t.DeadLetter:
    """Read the last permanent failure of a task, with its history and decisions."""
    return await engine.dead_letters.get(request.id)


class Resolve(ById, frozen=True, kw_only=True):
    decision: Body[ResolutionRequest]

    def check(self) -> None:
        self.decision.check()


@operation(
    "POST /v1/dead-letters/{id}/resolve",
    Scope.OPERATE,
    codes=(
        "not_found",
        "invalid_transition",
        "already_exists",
        "dependency_not_found",
        "cycle_detected",
        "rate_limited",
    ),
    example={"resolution": "retry", "reviewer": "ada", "note": "the site is back"},
)
async def resolve_dead_letter(engine: Engine, request: Resolve) -> Task:
    """Resolve a dead letter. Of two concurrent decisions the first wins; the other is 409."""
    await engine.dead_letters.resolve(request.id, request.decision)
    return await engine.read.task(request.id)


class ResolveMany(ResolutionRequest, frozen=True, kw_only=True):
    filter: t.DeadLetterFilter


@operation(
    "POST /v1/dead-letters/resolve",
    Scope.OPERATE,
    example={"filter": {"category": "timeout"}, "resolution": "retry", "reviewer": "ada", "note": "all back"},
)
async def resolve_dead_letters(engine: Engine, request: ResolveMany) -> t.BulkResolution:
    """Resolve all open dead letters that match a filter, up to 1,000 at once.

    One that can't be resolved doesn't affect the others; `more` is true if there are more than these.
    """
    return await engine.dead_letters.resolve_all(request.filter, request)


class SearchReports(OnePage, frozen=True, kw_only=True):
    q: str = ""
    type: str | None = None
    dag_id: str | None = None


@operation("GET /v1/reports", Scope.READ)
async def search_reports(engine: Engine, request: SearchReports) -> Page[t.Report]:
    """Search decision reports for all of these words, newest first; quotes make a phrase."""
    return await engine.reports.search(
        request.q, type_=request.type, dag_id=request.dag_id, limit=request.limit, cursor=request.cursor
    )


@operation("GET /v1/approvals", Scope.READ)
async def list_approvals(engine: Engine, request: OnePage) -> Page[t.Approval]:
    """List outputs that wait for approval and tasks that wait for a person; the longest waiting first."""
    return await engine.approvals.waiting(limit=request.limit, cursor=request.cursor)


class Approve(Request, frozen=True, kw_only=True):
    approve: bool
    reviewer: str
    note: str | None = None
    #: The output, if the person does the task.
    data: Raw = field(default_factory=null)
    decision_report: Raw = field(default_factory=null)

    def check(self) -> None:
        self.decision()

    def decision(self) -> t.ApprovalDecision:
        return t.ApprovalDecision(
            self.approve,
            self.reviewer,
            self.note,
            json_or_none("data", self.data),
            json_or_none("decision_report", self.decision_report),
        )


class Decide(Approve, frozen=True, kw_only=True):
    #: The id of the task.
    id: str


@operation(
    "POST /v1/approvals/{id}",
    Scope.OPERATE,
    codes=("not_found", "invalid_transition"),
    example={"approve": True, "reviewer": "ada", "note": "looks right"},
)
async def decide(engine: Engine, request: Decide) -> Task:
    """Approve or reject an output, or complete a task that a person does."""
    await engine.approvals.decide(request.id, request.decision())
    return await engine.read.task(request.id)
