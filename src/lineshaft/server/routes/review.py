"""What waits for a person: dead letters and approvals."""

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
    """What failed for good, newest first."""
    letters = call.service.engine.dead_letters
    return Answer(await letters.find(query, limit=query.limit, cursor=query.cursor))


@routes.get("/v1/dead-letters/groups", Scope.READ, Page[DeadLetterGroup])
async def list_dead_letter_groups(call: Call, query: requests.GroupQuery) -> Answer:
    """What nobody has looked at, by like error; the largest group first."""
    groups = await call.service.engine.dead_letters.groups(
        types=query.type, categories=query.category, limit=query.limit
    )
    return Answer(Page(groups))


@routes.get("/v1/dead-letters/{id}", Scope.READ, DeadLetter, codes=("not_found",))
async def get_dead_letter(call: Call) -> Answer:
    """The last time that a task failed for good, with its whole history and what was decided since."""
    return Answer(await call.service.engine.dead_letters.get(call.path["id"]))


@routes.post(
    "/v1/dead-letters/{id}/resolve",
    Scope.OPERATE,
    Task,
    codes=("not_found", "invalid_transition", "already_exists", "dependency_not_found", "cycle_detected"),
    example={"resolution": "retry", "reviewer": "ada", "note": "the site is back"},
)
async def resolve_dead_letter(call: Call, body: ResolutionRequest) -> Answer:
    """Decide about a dead letter. Of two who decide at once one wins, and the other is told (409)."""
    await call.service.engine.dead_letters.resolve(call.path["id"], body)
    return Answer(await call.service.engine.read.task(call.path["id"]))


@routes.post(
    "/v1/dead-letters/resolve",
    Scope.OPERATE,
    BulkResolution,
    example={"filter": {"category": "timeout"}, "resolution": "retry", "reviewer": "ada", "note": "all back"},
)
async def resolve_dead_letters(call: Call, body: requests.ResolveMany) -> Answer:
    """Decide about everything open that a filter finds, up to 1,000 at once.

    One that can't be resolved keeps none of the others from it; `more` says that there are more than these.
    """
    return Answer(await call.service.engine.dead_letters.resolve_all(body.filter, body))


@routes.get("/v1/reports", Scope.READ, Page[Report])
async def search_reports(call: Call, query: requests.ReportQuery) -> Answer:
    """ResolutionRequest reports with all of these words, newest first; a phrase stands in quotes."""
    page = await call.service.engine.reports.search(
        query.q, type_=query.type, dag_id=query.dag_id, limit=query.limit, cursor=query.cursor
    )
    return Answer(page)


@routes.get("/v1/approvals", Scope.READ, Page[Approval])
async def list_approvals(call: Call, query: requests.Page) -> Answer:
    """Outputs that wait to be approved, and tasks that wait to be done by a person; the longest first."""
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
    """Approve or refuse an output, or hand in the answer of a task that is a person's."""
    decision = ApprovalDecision(
        body.approve,
        body.reviewer,
        body.note,
        json_or_none("data", body.data),
        json_or_none("decision_report", body.decision_report),
    )
    await call.service.engine.approvals.decide(call.path["id"], decision)
    return Answer(await call.service.engine.read.task(call.path["id"]))
