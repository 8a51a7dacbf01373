"""Submitting, reading and operating tasks."""

from itertools import count
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from lineshaft.model.tasks import NewTask
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import examples, requests, responses
from lineshaft.server.service import Call
from lineshaft.types import Attempt, MatchedTasks, Page, Scope, Task, TaskChange, Why, documents

routes = Routes()


@routes.post(
    "/v1/tasks",
    Scope.SUBMIT,
    {201: Task, 200: Task},
    codes=("dependency_not_found", "already_exists", "not_found", "rate_limited"),
    example=examples.TASK,
    check_body=requests.check_task_count,
    simplify=documents.task,
)
async def submit_task(call: Call, body: NewTask) -> Answer:
    """Submit a task.

    200 with `"duplicate": true` and the existing task if one with this idempotency key exists.
    """
    requests.check_tasks([body], keys=False, place="")
    requests.check_creators(call.principal, [body])
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
    codes=("dependency_not_found", "already_exists", "not_found", "rate_limited"),
    example={"tasks": [examples.TASK]},
    check_body=requests.check_task_count,
    simplify=documents.with_tasks,
)
async def submit_batch(call: Call, body: requests.Batch) -> Answer:
    """Submit up to 10,000 tasks, all or nothing.

    They may depend on existing tasks; tasks that depend on each other are a DAG.
    """
    requests.check_tasks(body.tasks, keys=False)
    requests.check_creators(call.principal, body.tasks)
    tasks = requests.keyed(body.tasks, call.headers.get("idempotency-key"), count())
    submitted = await call.service.engine.submission.submit(tasks)
    return Answer(responses.SubmittedItems(submitted), 201)


@routes.get("/v1/tasks", Scope.READ, Page[Task])
async def list_tasks(call: Call, query: requests.TaskQuery) -> Answer:
    """List tasks, newest first, or in the order of the queue with `order=priority`.

    A repeated filter matches any of its values. A page may be short and have more behind it: continue until
    `next_cursor` is null.
    """
    queries = call.service.engine.read
    return Answer(await queries.tasks(query, order=query.order, limit=query.limit, cursor=query.cursor))


@routes.get("/v1/tasks/{id}", Scope.READ, Task, codes=("not_found", "payload_too_large"))
async def get_task(call: Call, query: requests.ReadTask) -> Answer:
    """Read a task. With `full=1` its output has the data also if that is large."""
    answer = await _task(call)
    return Answer(await call.service.engine.artifacts.with_data(answer.value)) if query.full else answer


@routes.get("/v1/tasks/{id}/attempts", Scope.READ, Page[Attempt], codes=("not_found",))
async def list_attempts(call: Call) -> Answer:
    """List all claims of a task, in order, including the current and the successful one."""
    return Answer(Page(await call.service.engine.read.attempts(call.path["id"])))


@routes.get("/v1/tasks/{id}/steps", Scope.READ, dict[str, Any], codes=("not_found",))
async def list_steps(call: Call) -> Answer:
    """Read results of durable steps by name, in the order in which they were recorded."""
    return Answer(await call.service.engine.read.steps(call.path["id"]))


@routes.get("/v1/tasks/{id}/why", Scope.READ, Why, codes=("not_found",))
async def explain_task(call: Call) -> Answer:
    """Explain what a task is waiting for, what it is doing, or how it ended."""
    return Answer(await call.service.engine.read.why(call.path["id"]))


@routes.patch(
    "/v1/tasks/{id}",
    Scope.OPERATE,
    Task,
    codes=("not_found", "invalid_transition"),
    example={"priority": 10, "tags": ["urgent"]},
)
async def change_task(call: Call, body: TaskChange) -> Answer:
    """Change priority, deadline, tags or limits of a task that has not ended, or the limits of a dead letter.

    The limits are `max_cost_usd`, `max_total_cost_usd`, `max_attempts` and `max_duration_sec`; a task that is
    held keeps those that its attempt began with. Null removes the deadline or a cost limit.
    The deadline of a task with `expire_at_deadline` can be changed after it was cancelled, to retry it.
    """
    await call.service.engine.operations.change(call.path["id"], body)
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/dependencies",
    Scope.OPERATE,
    Task,
    codes=("not_found", "invalid_transition", "dependency_not_found", "cycle_detected"),
    example={"depends_on": ["task_01J8K2M3N4P5Q6R7S8T9V0W1X2"]},
)
async def add_dependencies(call: Call, body: requests.Dependencies) -> Answer:
    """Add dependencies to a task that has not been claimed yet."""
    await call.service.engine.operations.add_dependencies(call.path["id"], body.depends_on)
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/retry",
    Scope.OPERATE,
    Task,
    codes=("not_found", "invalid_transition", "already_exists"),
    example={},
)
async def retry_task(call: Call, body: requests.Retry) -> Answer:
    """Revive a DEAD_LETTERED or CANCELLED task with fresh counters, or retry a RETRYING task now."""
    await call.service.engine.operations.retry(call.path["id"], delay_sec=body.delay_sec)
    return await _task(call)


@routes.post(
    "/v1/tasks/cancel",
    Scope.OPERATE,
    MatchedTasks,
    example={"filter": {"type": ["crawl"], "status": ["READY"]}, "dry_run": True},
)
async def cancel_matching(call: Call, body: requests.CancelMatching) -> Answer:
    """Cancel all tasks that match a filter and have not ended, with their children and dependents.

    In chunks, each in its own transaction. With `dry_run` it only returns which tasks match.
    """
    found = await call.service.engine.matching.cancel(body.filter, body.reason, dry_run=body.dry_run)
    return Answer(found)


@routes.post(
    "/v1/tasks/retry",
    Scope.OPERATE,
    MatchedTasks,
    example={"filter": {"status": ["DEAD_LETTERED"], "tag": ["sprint:12"]}, "dry_run": True},
)
async def retry_matching(call: Call, body: requests.RetryMatching) -> Answer:
    """Retry all tasks that match a filter and are DEAD_LETTERED, CANCELLED or RETRYING.

    In chunks, each in its own transaction. One that can't be retried is left as it is. With `dry_run` it only
    returns which tasks match.
    """
    return Answer(await call.service.engine.matching.retry(body.filter, dry_run=body.dry_run))


@routes.post("/v1/ended", Scope.READ, responses.Ended, example={"ids": ["task_01J8K2M3N4P5Q6R7S8T9V0W1X2"]})
async def which_ended(call: Call, body: requests.AskEnded) -> Answer:
    """Report which of these tasks and DAGs have ended."""
    return Answer(responses.Ended(await call.service.engine.read.ended(body.ids)))


@routes.get("/v1/ids", Scope.READ, responses.FoundIds)
async def find_ids(call: Call, query: requests.IdQuery) -> Answer:
    """Find the tasks and DAGs that a short form or a prefix of an id means, at most 20 of each.

    The short form of `task_01J8K2M3N4P5Q6R7S8T9V0W1X2` is `J8K2M3N4-W1X2`. A complete id means only itself.
    """
    return Answer(responses.FoundIds(await call.service.engine.read.find_ids(query.name, query.kind)))


async def _task(call: Call) -> Answer:
    return Answer(await call.service.engine.read.task(call.path["id"]))
