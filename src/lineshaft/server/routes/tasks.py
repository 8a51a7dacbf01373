"""Submitting, reading and operating tasks."""

from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from lineshaft.errors import ForbiddenError
from lineshaft.model.tasks import NewTask
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import examples, requests, responses
from lineshaft.server.routes.claim_tokens import claim_of
from lineshaft.server.service import Call
from lineshaft.types import Attempt, Page, Scope, Task, Why
from lineshaft.types.work import Cancellation

routes = Routes()


@routes.post(
    "/v1/tasks",
    Scope.SUBMIT,
    {201: Task, 200: Task},
    codes=("dependency_not_found", "already_exists", "not_found"),
    example=examples.TASK,
    check_body=requests.check_task_count,
)
async def submit_task(call: Call, body: NewTask) -> Answer:
    """Submit a task.

    200 with `"duplicate": true` if its idempotency key is in force already: then it is the existing task.
    """
    requests.check_tasks([body], keys=False, place="")
    key = requests.key_of(call.headers.get("idempotency-key"), body.idempotency_key)
    (submitted,) = await call.service.engine.submission.submit([requests.with_key(body, key)])
    found = await call.service.engine.read.task(submitted.id)
    if not submitted.duplicate:
        return Answer(found, 201)
    return Answer(replace(found, duplicate=True, mismatch=submitted.mismatch or UNSET))


@routes.post(
    "/v1/tasks/batch",
    Scope.SUBMIT,
    {201: responses.SubmittedItems},
    codes=("dependency_not_found", "already_exists", "not_found"),
    example={"tasks": [examples.TASK]},
    check_body=requests.check_task_count,
)
async def submit_batch(call: Call, body: requests.Batch) -> Answer:
    """Submit up to 10,000 tasks, all or nothing.

    They may depend on tasks that exist, not on each other: that is a DAG.
    """
    requests.check_tasks(body.tasks, keys=False)
    tasks = requests.keyed(body.tasks, call.headers.get("idempotency-key"))
    submitted = await call.service.engine.submission.submit(tasks)
    return Answer(responses.SubmittedItems(submitted), 201)


@routes.get("/v1/tasks", Scope.READ, Page[Task])
async def list_tasks(call: Call, query: requests.TaskQuery) -> Answer:
    """List tasks, newest first, or who is next first with `order=priority`.

    A filter that is given several times means any of these. A page may be short and have more behind it: go
    on until `next_cursor` is null.
    """
    queries = call.service.engine.read
    return Answer(await queries.tasks(query, order=query.order, limit=query.limit, cursor=query.cursor))


@routes.get("/v1/tasks/{id}", Scope.READ, Task, codes=("not_found",))
async def get_task(call: Call) -> Answer:
    """A task, as it is now."""
    return await _task(call)


@routes.get("/v1/tasks/{id}/attempts", Scope.READ, Page[Attempt], codes=("not_found",))
async def list_attempts(call: Call) -> Answer:
    """Every claim there was, in order, with the one under way and the one that succeeded."""
    return Answer(Page(await call.service.engine.read.attempts(call.path["id"])))


@routes.get("/v1/tasks/{id}/steps", Scope.READ, dict[str, Any], codes=("not_found",))
async def list_steps(call: Call) -> Answer:
    """Results of durable steps by name, in the order in which they were recorded."""
    return Answer(await call.service.engine.read.steps(call.path["id"]))


@routes.get("/v1/tasks/{id}/why", Scope.READ, Why, codes=("not_found",))
async def explain_task(call: Call) -> Answer:
    """Why a task is not running."""
    return Answer(await call.service.engine.read.why(call.path["id"]))


@routes.patch(
    "/v1/tasks/{id}",
    Scope.OPERATE,
    Task,
    codes=("not_found", "invalid_transition"),
    example={"priority": 10, "tags": ["urgent"]},
)
async def change_task(call: Call, body: requests.Change) -> Answer:
    """Change priority, deadline or tags of a task that has not ended. A deadline of null is none."""
    await call.service.engine.operations.change(
        call.path["id"], priority=body.priority, deadline=body.deadline, tags=body.tags
    )
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/dependencies",
    Scope.OPERATE,
    Task,
    codes=("not_found", "invalid_transition", "dependency_not_found", "cycle_detected"),
    example={"depends_on": ["task_01J8K2M3N4P5Q6R7S8T9V0W1X2"]},
)
async def add_dependencies(call: Call, body: requests.Dependencies) -> Answer:
    """Make a task that nobody has claimed yet wait for others too."""
    await call.service.engine.operations.add_dependencies(call.path["id"], body.depends_on)
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/cancel",
    Scope.AGENT,
    Task,
    codes=("not_found", "invalid_transition", "stale_claim"),
    example={"reason": "no longer needed"},
)
async def cancel_task(call: Call, body: requests.Cancel) -> Answer:
    """Cancel a task, its children and, with `cascade`, all that depends on it.

    With the scope `agent` only what one holds, proved by `claim_token`. Cancelling again changes nothing.
    """
    task_id = call.path["id"]
    if body.claim_token is not None:
        await _cancel_held(call, body, body.claim_token)
    elif call.principal.may(Scope.OPERATE):
        await call.service.engine.operations.cancel(task_id, body.reason, cascade=body.cascade)
    else:
        raise ForbiddenError(
            f"{call.principal.name!r} has the scope agent and may cancel only what it holds: send the "
            "claim_token. Other tasks need the scope operate."
        )
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/retry",
    Scope.OPERATE,
    Task,
    codes=("not_found", "invalid_transition", "already_exists"),
    example={},
)
async def retry_task(call: Call, body: requests.Retry) -> Answer:
    """Revive a DEAD_LETTERED or CANCELLED task with fresh counters, or end the wait of a RETRYING one."""
    await call.service.engine.operations.retry(call.path["id"], delay_sec=body.delay_sec)
    return await _task(call)


@routes.post("/v1/ended", Scope.READ, responses.Ended, example={"ids": ["task_01J8K2M3N4P5Q6R7S8T9V0W1X2"]})
async def which_ended(call: Call, body: requests.AskEnded) -> Answer:
    """Which of these tasks and DAGs have ended, for whoever waits for many."""
    return Answer(responses.Ended(await call.service.engine.read.ended(body.ids)))


async def _cancel_held(call: Call, body: requests.Cancel, token: str) -> None:
    claim = claim_of(call.path["id"], token)
    (moved,) = await call.service.engine.work.cancel([Cancellation(claim, body.reason, cascade=body.cascade)])
    moved.unwrap()


async def _task(call: Call) -> Answer:
    return Answer(await call.service.engine.read.task(call.path["id"]))
