"""What waits for a person: dead letters and approvals."""

from lineshaft.engine.review import approvals
from lineshaft.engine.review.dead_letter_views import DeadLetterFilter
from lineshaft.engine.tokens import Scope
from lineshaft.model.reviews import Decision
from lineshaft.server.framework import problems
from lineshaft.server.framework.routing import Answer, Call, Routes
from lineshaft.server.routes import requests, responses, review_responses

routes = Routes()


@routes.get("/v1/dead-letters", Scope.READ, review_responses.DeadLetterPage)
async def list_dead_letters(call: Call, query: requests.LetterQuery) -> Answer:
    """What failed for good, newest first."""
    wanted = DeadLetterFilter(
        reviewed=query.reviewed,
        type=query.type,
        category=query.category,
        error_contains=query.error_contains,
        poison_pill=query.poison_pill,
        dag_id=query.dag_id,
        resolution=query.resolution,
        pattern=query.pattern,
        hidden=query.hidden,
    )
    page = await call.service.engine.dead_letters.letters(wanted, limit=query.limit, cursor=query.cursor)
    return Answer(
        review_responses.DeadLetterPage(
            [review_responses.dead_letter(view) for view in page.items], page.next_cursor
        )
    )


@routes.get("/v1/dead-letters/groups", Scope.READ, review_responses.DeadLetterGroups)
async def list_dead_letter_groups(call: Call, query: requests.GroupQuery) -> Answer:
    """What nobody has looked at, by like error; the largest group first."""
    groups = await call.service.engine.dead_letters.groups(
        types=query.type, categories=query.category, limit=query.limit
    )
    return Answer(review_responses.DeadLetterGroups(groups))


@routes.get("/v1/dead-letters/{id}", Scope.READ, review_responses.DeadLetter, codes=("not_found",))
async def get_dead_letter(call: Call) -> Answer:
    """The last time that a task failed for good, with its whole history and what was decided since."""
    return Answer(
        review_responses.dead_letter(await call.service.engine.dead_letters.letter(call.path["id"]))
    )


@routes.post(
    "/v1/dead-letters/{id}/resolve",
    Scope.OPERATE,
    responses.Task,
    codes=("not_found", "invalid_transition", "already_exists", "dependency_not_found", "cycle_detected"),
    example={"resolution": "retry", "reviewer": "ada", "note": "the site is back"},
)
async def resolve_dead_letter(call: Call, body: Decision) -> Answer:
    """Decide about a dead letter. Of two who decide at once one wins, and the other is told (409)."""
    await call.service.engine.dead_letters.resolve(call.path["id"], body)
    return Answer(responses.task(await call.service.engine.insights.task(call.path["id"])))


@routes.post(
    "/v1/dead-letters/resolve",
    Scope.OPERATE,
    review_responses.Resolved,
    example={"filter": {"category": "timeout"}, "resolution": "retry", "reviewer": "ada", "note": "all back"},
)
async def resolve_dead_letters(call: Call, body: requests.ResolveMany) -> Answer:
    """Decide about everything open that a filter finds, up to 1,000 at once.

    One that can't be resolved keeps none of the others from it; `more` says that there are more than these.
    """
    done = await call.service.engine.dead_letters.resolve_all(body.filter.letters(), body.decision())
    refused = [
        review_responses.Refusal(task_id, problems.problem(error).code, str(error))
        for task_id, error in done.refused.items()
    ]
    return Answer(review_responses.Resolved(done.resolved, refused, done.more))


@routes.get("/v1/reports", Scope.READ, review_responses.ReportPage)
async def search_reports(call: Call, query: requests.ReportQuery) -> Answer:
    """Decision reports with all of these words, newest first; a phrase stands in quotes."""
    page = await call.service.engine.reports.search(
        query.q, type_=query.type, dag_id=query.dag_id, limit=query.limit, cursor=query.cursor
    )
    return Answer(
        review_responses.ReportPage(
            [review_responses.report(found) for found in page.items], page.next_cursor
        )
    )


@routes.get("/v1/approvals", Scope.READ, review_responses.ApprovalPage)
async def list_approvals(call: Call, query: requests.Page) -> Answer:
    """Outputs that wait to be approved, and tasks that wait to be done by a person; the longest first."""
    page = await call.service.engine.approvals.waiting(limit=query.limit, cursor=query.cursor)
    return Answer(
        review_responses.ApprovalPage(
            [review_responses.approval(found) for found in page.items], page.next_cursor
        )
    )


@routes.post(
    "/v1/approvals/{id}",
    Scope.OPERATE,
    responses.Task,
    codes=("not_found", "invalid_transition"),
    example={"approve": True, "reviewer": "ada", "note": "looks right"},
)
async def decide(call: Call, body: requests.Approve) -> Answer:
    """Approve or refuse an output, or hand in the answer of a task that is a person's."""
    decision = approvals.Decision(
        body.approve,
        body.reviewer,
        body.note,
        requests.json_or_none("data", body.data),
        requests.json_or_none("decision_report", body.decision_report),
    )
    await call.service.engine.approvals.decide(call.path["id"], decision)
    return Answer(responses.task(await call.service.engine.insights.task(call.path["id"])))
