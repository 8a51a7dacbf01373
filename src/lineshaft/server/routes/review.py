"""Work that needs a person: dead letters, approvals, decision reports."""

from lineshaft.model.reviews import ResolutionRequest
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import requests
from lineshaft.server.service import Call
from lineshaft.types import (
    Approval,
    ApprovalDecision,
    BulkResolution,
    DeadLetter,
    DeadLetterGroup,
    Page,
    Report,
    Scope,
    Task,
)
from lineshaft.types.protocol import json_or_none

routes = Routes()


@routes.get("/v1/dead-letters", Scope.READ, Page[DeadLetter])
async def list_dead_letters(call: Call, query: requests.LetterQuery) -> Answer:
    """List tasks that failed permanently, newest first."""
    letters = call.service.engine.dead_letters
    return Answer(await letters.find(query, limit=query.limit, cursor=query.cursor))


@routes.get("/v1/dead-letters/groups", Scope.READ, Page[DeadLetterGroup])
async def list_dead_letter_groups(call: Call, query: requests.GroupQuery) -> Answer:
    """Group unreviewed dead letters by similar error; the largest group first."""
    groups = await call.service.engine.dead_letters.groups(
        types=query.type, categories=query.category, limit=query.limit
    )
    return Answer(Page(groups))


@routes.get("/v1/dead-letters/{id}", Scope.READ, DeadLetter, codes=("not_found",))
async def get_dead_letter(call: Call) -> Answer:
    """Read the last permanent failure of a task, with its history and decisions."""
    return Answer(await call.service.engine.dead_letters.get(call.path["id"]))


@routes.post(
    "/v1/dead-letters/{id}/resolve",
    Scope.OPERATE,
    Task,
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
async def resolve_dead_letter(call: Call, body: ResolutionRequest) -> Answer:
    """Resolve a dead letter. Of two concurrent decisions the first wins; the other is 409."""
    await call.service.engine.dead_letters.resolve(call.path["id"], body)
    return Answer(await call.service.engine.read.task(call.path["id"]))


@routes.post(
    "/v1/dead-letters/resolve",
    Scope.OPERATE,
    BulkResolution,
    example={"filter": {"category": "timeout"}, "resolution": "retry", "reviewer": "ada", "note": "all back"},
)
async def resolve_dead_letters(call: Call, body: requests.ResolveMany) -> Answer:
    """Resolve all open dead letters that match a filter, up to 1,000 at once.

    One that can't be resolved doesn't affect the others; `more` is true if there are more than these.
    """
    return Answer(await call.service.engine.dead_letters.resolve_all(body.filter, body))


@routes.get("/v1/reports", Scope.READ, Page[Report])
async def search_reports(call: Call, query: requests.ReportQuery) -> Answer:
    """Search decision reports for all of these words, newest first; quotes make a phrase."""
    page = await call.service.engine.reports.search(
        query.q, type_=query.type, dag_id=query.dag_id, limit=query.limit, cursor=query.cursor
    )
    return Answer(page)


@routes.get("/v1/approvals", Scope.READ, Page[Approval])
async def list_approvals(call: Call, query: requests.Page) -> Answer:
    """List outputs that wait for approval and tasks that wait for a person; the longest waiting first."""
    page = await call.service.engine.approvals.waiting(limit=query.limit, cursor=query.cursor)
    return Answer(page)


@routes.post(
    "/v1/approvals/{id}",
    Scope.OPERATE,
    Task,
    codes=("not_found", "invalid_transition"),
    example={"approve": True, "reviewer": "ada", "note": "looks right"},
)
async def decide(call: Call, body: requests.Approve) -> Answer:
    """Approve or reject an output, or complete a task that a person does."""
    decision = ApprovalDecision(
        body.approve,
        body.reviewer,
        body.note,
        json_or_none("data", body.data),
        json_or_none("decision_report", body.decision_report),
    )
    await call.service.engine.approvals.decide(call.path["id"], decision)
    return Answer(await call.service.engine.read.task(call.path["id"]))
