"""Work: the worker protocol in batches, and its per-task routes."""

from typing import Any

from msgspec import Raw

from lineshaft.server.framework.routing import Answer, ItemsOf, Routes
from lineshaft.server.long_poll import watch_disconnect
from lineshaft.server.routes import examples, requests, work_calls
from lineshaft.server.routes.work_calls import answer, decoded, item_of, only
from lineshaft.server.service import Call
from lineshaft.types import Scope, Task, documents, protocol
from lineshaft.types.assignments import Assignment
from lineshaft.types.protocol import View
from lineshaft.types.work import ClaimedTask, LeftBehind

routes = Routes()

_CLAIM_CODES = ("not_found", "stale_claim", "invalid_transition")
_TASK = {"id": "task_01J8K2M3N4P5Q6R7S8T9V0W1X2", "claim_token": examples.CLAIM_TOKEN}
_TOKEN = {"claim_token": examples.CLAIM_TOKEN}


def _batch_example(**fields: Any) -> dict[str, Any]:
    return {"items": [{**_TASK, **fields}]}


# Batches.


@routes.post(
    "/v1/work/claim",
    Scope.AGENT,
    ItemsOf(protocol.ClaimResult[Task], protocol.ClaimResult[ClaimedTask]),
    example={
        "items": [{"agent_id": "coder-1", "incarnation": 1, "limit": 3, "types": ["code"], "start": True}],
        "wait_sec": 0,
    },
    body_shape=protocol.ClaimBatch[protocol.ClaimItem],
)
async def claim_batch(call: Call, body: protocol.ClaimBatch[Raw]) -> Answer:
    """Claim tasks for several agents, waiting for up to `wait_sec` until one of them has work.

    An item returns what `POST /v1/agents/{id}/claim` returns. With `"view": "work"` each `task` has only what
    a worker needs. `poll` is a unique name for this call; a later call with the same name, also one without
    items, ends it: it returns at once with what it has.
    """
    items = decoded(body.items, protocol.ClaimItem)
    found = await work_calls.claim(call, items, wait_sec=body.wait_sec, view=body.view, poll=body.poll)
    return Answer(answer(found, call))


@routes.post(
    "/v1/work/heartbeat",
    Scope.AGENT,
    ItemsOf(protocol.HeartbeatResult),
    example={"items": [{"agent_id": "coder-1", "incarnation": 1, "tasks": [_TASK]}]},
    body_shape=protocol.Batch[protocol.HeartbeatItem],
)
async def heartbeat_batch(call: Call, body: protocol.Batch[Raw]) -> Answer:
    """Renew the leases of several agents' tasks; one heartbeat serves a whole process."""
    found = await work_calls.heartbeat(call, decoded(body.items, protocol.HeartbeatItem))
    return Answer(answer(found, call))


@routes.post(
    "/v1/work/complete",
    Scope.AGENT,
    ItemsOf(protocol.CompletedTask, protocol.Outcome),
    example=_batch_example(output={"data": {"sum": 3}}),
    body_shape=protocol.ViewedBatch[protocol.CompleteItem],
)
async def complete_batch(call: Call, body: protocol.ViewedBatch[Raw]) -> Answer:
    """Complete tasks with their outputs. With `"view": "work"` an item returns only `id` and `status`."""
    found = await work_calls.complete(call, decoded(body.items, protocol.CompleteItem), body.view)
    return Answer(answer(found, call))


@routes.post(
    "/v1/work/fail",
    Scope.AGENT,
    ItemsOf(Task, protocol.Outcome),
    example=_batch_example(error="the page could not be read"),
    body_shape=protocol.ViewedBatch[protocol.FailItem],
)
async def fail_batch(call: Call, body: protocol.ViewedBatch[Raw]) -> Answer:
    """Report failed attempts. With `"view": "work"` an item returns only `id`, `status`, `retry_in_sec`."""
    found = await work_calls.fail(call, decoded(body.items, protocol.FailItem), body.view)
    return Answer(answer(found, call))


@routes.post(
    "/v1/work/release",
    Scope.AGENT,
    ItemsOf(Task, protocol.Outcome),
    example=_batch_example(delay_sec=60),
    body_shape=protocol.ViewedBatch[protocol.ReleaseItem],
)
async def release_batch(call: Call, body: protocol.ViewedBatch[Raw]) -> Answer:
    """Give claims up without using an attempt.

    With `"view": "work"` an item returns only `id` and `status`.
    """
    found = await work_calls.release(call, decoded(body.items, protocol.ReleaseItem), body.view)
    return Answer(answer(found, call))


@routes.post(
    "/v1/work/start",
    Scope.AGENT,
    ItemsOf(Task, protocol.Outcome),
    example=_batch_example(),
    body_shape=protocol.ViewedBatch[protocol.StartItem],
)
async def start_batch(call: Call, body: protocol.ViewedBatch[Raw]) -> Answer:
    """Start claimed tasks. With `"view": "work"` an item returns only `id` and `status`."""
    found = await work_calls.start(call, decoded(body.items, protocol.StartItem), body.view)
    return Answer(answer(found, call))


@routes.post(
    "/v1/work/cancel",
    Scope.AGENT,
    ItemsOf(Task, protocol.Outcome),
    example=_batch_example(reason="no longer needed"),
    body_shape=protocol.ViewedBatch[protocol.CancelItem],
)
async def cancel_batch(call: Call, body: protocol.ViewedBatch[Raw]) -> Answer:
    """Cancel tasks, as `POST /v1/tasks/{id}/cancel` does."""
    found = await work_calls.cancel(call, decoded(body.items, protocol.CancelItem), body.view)
    return Answer(answer(found, call))


@routes.post(
    "/v1/work/steps",
    Scope.AGENT,
    ItemsOf(protocol.StepResult),
    example=_batch_example(name="search", data={"found": 3}, cost_usd=0.04, step_cost_usd=0.02),
    body_shape=protocol.Batch[protocol.StepItem],
)
async def step_batch(call: Call, body: protocol.Batch[Raw]) -> Answer:
    """Record results of durable steps."""
    return Answer(answer(await work_calls.record_steps(call, decoded(body.items, protocol.StepItem)), call))


@routes.post(
    "/v1/work/checkpoint",
    Scope.AGENT,
    ItemsOf(protocol.CheckpointResult),
    example=_batch_example(data={"page": 7}),
    body_shape=protocol.Batch[protocol.CheckpointItem],
)
async def checkpoint_batch(call: Call, body: protocol.Batch[Raw]) -> Answer:
    """Save durable progress of several tasks."""
    found = await work_calls.save_checkpoints(call, decoded(body.items, protocol.CheckpointItem))
    return Answer(answer(found, call))


@routes.post(
    "/v1/work/spawn",
    Scope.AGENT,
    ItemsOf(protocol.SpawnedTasks),
    example=_batch_example(key="pages", tasks=[{"type": "page"}], wait=True),
    body_shape=protocol.Batch[protocol.SpawnItem],
)
async def spawn_batch(call: Call, body: protocol.Batch[Raw]) -> Answer:
    """Create children of several tasks, as `POST /v1/tasks/{id}/subtasks` does."""
    return Answer(answer(await work_calls.spawn(call, decoded(body.items, protocol.SpawnItem)), call))


@routes.post("/v1/work/maintain", Scope.AGENT, protocol.Maintained, example={})
async def maintain(call: Call, body: requests.Nothing) -> Answer:  # noqa: ARG001 - no fields, but checked
    """Make due tasks READY and take back lost ones, now.

    Servers do this on their own; agents call it when something of theirs is about to be due. One run serves
    all concurrent callers.
    """
    return Answer(protocol.Maintained(await call.service.on_demand.run()))


@routes.get("/v1/work/retries", Scope.AGENT, protocol.RetryDue)
async def next_retry(call: Call, query: requests.RetryQuery) -> Answer:
    """When the first retry of these types is due, if within `within_sec`, and how many are."""
    found = await call.service.engine.schedule.retry_within(query.type, query.within_sec)
    return Answer(protocol.RetryDue(found.due_sec, found.count))


@routes.get("/v1/work/left-behind", Scope.AGENT, LeftBehind)
async def left_behind(call: Call, query: requests.TypesQuery) -> Answer:
    """How many tasks of these types wait for a time, are held, or are READY all the same."""
    return Answer(await call.service.engine.schedule.left_behind(query.type))


# One task.


@routes.post(
    "/v1/tasks/{id}/complete",
    Scope.AGENT,
    protocol.CompletedTask,
    codes=_CLAIM_CODES,
    example=examples.COMPLETION,
)
async def complete_task(call: Call, body: protocol.Complete) -> Answer:
    """Complete a task with its output.

    The task is then COMPLETED; VALIDATING while a gate runs or a person decides; RETRYING or DEAD_LETTERED if
    the output was rejected, with `failure_category` and `failure_reason`. A repeated call returns the same.

    With `"next": true` the same instance claims and starts its next task in the same call, whatever became of
    this one, without waiting: `next_claim` is an item as in a claim, or null. `{"types": [...]}` instead of
    true restricts it. A repeated call returns the same claim while that is held, else null. An error claims
    nothing.
    """
    item = item_of(protocol.CompleteItem, body, id=call.path["id"])
    return Answer(only(await work_calls.complete(call, [item], View.FULL)))


@routes.post(
    "/v1/tasks/{id}/fail",
    Scope.AGENT,
    Task,
    codes=_CLAIM_CODES,
    example={**_TOKEN, "error": "the page could not be read"},
)
async def fail_task(call: Call, body: protocol.Fail) -> Answer:
    """Report a failed attempt. The task is retried, waits for a rate limit, or is dead-lettered."""
    item = item_of(protocol.FailItem, body, id=call.path["id"])
    return Answer(only(await work_calls.fail(call, [item], View.FULL)))


@routes.post("/v1/tasks/{id}/start", Scope.AGENT, Task, codes=_CLAIM_CODES, example=_TOKEN)
async def start_task(call: Call, body: protocol.Start) -> Answer:
    """Start a claimed task: it is RUNNING, and heartbeats keep its lease."""
    item = item_of(protocol.StartItem, body, id=call.path["id"])
    return Answer(only(await work_calls.start(call, [item], View.FULL)))


@routes.post(
    "/v1/tasks/{id}/claim",
    Scope.AGENT,
    Assignment[Task],
    codes=(
        *("not_found", "superseded", "already_claimed", "invalid_transition", "not_claimable"),
        *("capability_mismatch", "budget_exceeded"),
    ),
    example={"agent_id": "coder-1", "incarnation": 1},
)
async def claim_task(call: Call, body: protocol.ClaimTask) -> Answer:
    """Claim this task, regardless of the order of the queue."""
    service = call.service
    call.principal.check_agent(body.agent_id)
    async with watch_disconnect(call.receive) as disconnected:
        await service.engine.fleet.present(body.agent_id, body.incarnation)
        claim = await service.engine.claims.claim_task(body.agent_id, body.incarnation, call.path["id"])
        with service.long_polls.delivering(claim.tasks, disconnected):
            found = await work_calls.assigned_task(service, claim)
    return Answer(found)


@routes.post(
    "/v1/tasks/{id}/release",
    Scope.AGENT,
    Task,
    codes=_CLAIM_CODES,
    example={**_TOKEN, "delay_sec": 60},
)
async def release_task(call: Call, body: protocol.ReleaseClaim) -> Answer:
    """Give a claim up without using an attempt; with a delay the task comes back later."""
    item = item_of(protocol.ReleaseItem, body, id=call.path["id"])
    return Answer(only(await work_calls.release(call, [item], View.FULL)))


@routes.post(
    "/v1/tasks/{id}/cancel",
    Scope.AGENT,
    Task,
    codes=("not_found", "invalid_transition", "stale_claim"),
    example={"reason": "no longer needed"},
)
async def cancel_task(call: Call, body: protocol.Cancel) -> Answer:
    """Cancel a task, its children and, with `cascade`, everything that depends on it.

    With the scope `agent` only a task that the caller holds, with its `claim_token`. Cancelling again changes
    nothing.
    """
    item = item_of(protocol.CancelItem, body, id=call.path["id"])
    return Answer(only(await work_calls.cancel(call, [item], View.FULL)))


@routes.post(
    "/v1/tasks/{id}/subtasks",
    Scope.AGENT,
    {201: protocol.SpawnedTasks},
    codes=(*_CLAIM_CODES, "cycle_detected", "dependency_not_found", "already_exists", "rate_limited"),
    example={**_TOKEN, "tasks": [examples.TASK], "wait": True},
    check_body=requests.check_dag_count,
    simplify=documents.with_tasks,
)
async def create_subtasks(call: Call, body: protocol.Subtasks) -> Answer:
    """Create children in the task's DAG. They may depend on each other by `key`.

    With `wait` the task goes PENDING and its slot is free; when all children have ended, in whatever way, it
    is claimed again with their outcomes.
    """
    item = item_of(protocol.SpawnItem, body, id=call.path["id"])
    return Answer(only(await work_calls.spawn(call, [item])), 201)


@routes.put(
    "/v1/tasks/{id}/checkpoint",
    Scope.AGENT,
    protocol.CheckpointResult,
    codes=_CLAIM_CODES,
    example={**_TOKEN, "data": {"page": 7}},
)
async def save_checkpoint(call: Call, body: protocol.SaveCheckpoint) -> Answer:
    """Save durable progress, which is returned with the next claim of the task."""
    item = item_of(protocol.CheckpointItem, body, id=call.path["id"])
    return Answer(only(await work_calls.save_checkpoints(call, [item])))


@routes.put(
    "/v1/tasks/{id}/steps/{name:path}",
    Scope.AGENT,
    protocol.StepResult,
    codes=_CLAIM_CODES,
    example={**_TOKEN, "data": {"found": 3}},
)
async def save_step(call: Call, body: protocol.RecordStep) -> Answer:
    """Record the result of a step that must not run again. Returns the result that counts: the first one."""
    item = item_of(protocol.StepItem, body, id=call.path["id"], name=call.path["name"])
    return Answer(only(await work_calls.record_steps(call, [item])))
