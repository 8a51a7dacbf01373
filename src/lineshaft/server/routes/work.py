"""Work: the worker protocol in batches, and its per-task routes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Raw

from lineshaft.clock import lease_time
from lineshaft.operations import examples, new_tasks
from lineshaft.operations.operation import operation
from lineshaft.server.framework.routing import ItemsOf
from lineshaft.server.long_poll import check_in_time, watch_disconnect
from lineshaft.server.routes import work_calls
from lineshaft.server.routes.work_calls import answer, decoded, only
from lineshaft.server.service import Call
from lineshaft.types import Scope, Task, documents, protocol
from lineshaft.types.assignments import Assignment
from lineshaft.types.protocol import Batch, BatchView, ViewedBatch
from lineshaft.types.request import Nothing
from lineshaft.types.work import ClaimedTask

_CLAIM_CODES = ("not_found", "stale_claim", "invalid_transition")
_TASK = {"id": "task_01J8K2M3N4P5Q6R7S8T9V0W1X2", "claim_token": examples.CLAIM_TOKEN}
_TOKEN = {"claim_token": examples.CLAIM_TOKEN}

Items = dict[str, Any]


# Batches. Items are decoded one by one, so that an invalid one is refused alone.


def _batch(
    name: str, shape: Any, /, *results: Any, example: Any = None, repeatable: bool = True, **item: Any
) -> Callable[[Any], Any]:
    """Describe a batch, whose body has this shape; `item` has further fields of the example's only item."""
    return operation(
        f"POST /v1/work/{name}",
        Scope.AGENT,
        response={200: ItemsOf(results)},
        example=example or {"items": [{**_TASK, **item}]},
        repeatable=repeatable,
        body_shape=shape,
    )


@_batch(
    "claim",
    protocol.ClaimBatch[protocol.ClaimItem],
    protocol.ClaimResult[Task],
    protocol.ClaimResult[ClaimedTask],
    repeatable=False,
    example={
        "items": [{"agent_id": "coder-1", "incarnation": 1, "limit": 3, "types": ["code"], "start": True}],
        "wait_sec": 0,
    },
)
async def claim_batch(call: Call, request: protocol.ClaimBatch[Raw]) -> Items:
    """Claim tasks for several agents, waiting for up to `wait_sec` until one of them has work.

    An item returns what `POST /v1/agents/{id}/claim` returns. With `"view": "work"` each `task` has only what
    a worker needs. `poll` is a unique name for this call; a later call with the same name, also one without
    items, ends it: it returns at once with what it has.
    """
    items = decoded(request.items, protocol.ClaimItem)
    results = await work_calls.claim(
        call, items, wait_sec=request.wait_sec, view=request.view, poll=request.poll
    )
    return answer(results, call)


@_batch(
    "heartbeat",
    Batch[protocol.HeartbeatItem],
    protocol.HeartbeatResult,
    example={"items": [{"agent_id": "coder-1", "incarnation": 1, "tasks": [_TASK]}]},
)
async def heartbeat_batch(call: Call, request: Batch[Raw]) -> Items:
    """Renew the leases of several agents' tasks; one heartbeat serves a whole process."""
    return answer(await work_calls.heartbeat(call, decoded(request.items, protocol.HeartbeatItem)), call)


@_batch(
    "complete",
    ViewedBatch[protocol.CompleteItem],
    protocol.CompletedTask,
    protocol.Outcome,
    output={"data": {"sum": 3}},
)
async def complete_batch(call: Call, request: ViewedBatch[Raw]) -> Items:
    """Complete tasks with their outputs. With `"view": "work"` an item returns only `id` and `status`."""
    items = decoded(request.items, protocol.CompleteItem)
    return answer(await work_calls.complete(call, items, request.view), call)


@_batch("fail", ViewedBatch[protocol.FailItem], Task, protocol.Outcome, error="the page could not be read")
async def fail_batch(call: Call, request: ViewedBatch[Raw]) -> Items:
    """Report failed attempts. With `"view": "work"` an item returns only `id`, `status`, `retry_in_sec`."""
    return answer(await work_calls.fail(call, decoded(request.items, protocol.FailItem), request.view), call)


@_batch("release", ViewedBatch[protocol.ReleaseItem], Task, protocol.Outcome, delay_sec=60)
async def release_batch(call: Call, request: ViewedBatch[Raw]) -> Items:
    """Give claims up without using an attempt.

    With `"view": "work"` an item returns only `id` and `status`.
    """
    items = decoded(request.items, protocol.ReleaseItem)
    return answer(await work_calls.release(call, items, request.view), call)


@_batch("start", ViewedBatch[protocol.StartItem], Task, protocol.Outcome)
async def start_batch(call: Call, request: ViewedBatch[Raw]) -> Items:
    """Start claimed tasks. With `"view": "work"` an item returns only `id` and `status`."""
    items = decoded(request.items, protocol.StartItem)
    return answer(await work_calls.start(call, items, request.view), call)


@_batch("cancel", ViewedBatch[protocol.CancelItem], Task, protocol.Outcome, reason="no longer needed")
async def cancel_batch(call: Call, request: ViewedBatch[Raw]) -> Items:
    """Cancel tasks, as `POST /v1/tasks/{id}/cancel` does."""
    items = decoded(request.items, protocol.CancelItem)
    return answer(await work_calls.cancel(call, items, request.view), call)


@_batch(
    "steps",
    Batch[protocol.StepItem],
    protocol.StepResult,
    name="search",
    data={"found": 3},
    cost_usd=0.04,
    step_cost_usd=0.02,
)
async def step_batch(call: Call, request: Batch[Raw]) -> Items:
    """Record results of durable steps."""
    return answer(await work_calls.record_steps(call, decoded(request.items, protocol.StepItem)), call)


@_batch("checkpoint", Batch[protocol.CheckpointItem], protocol.CheckpointResult, data={"page": 7})
async def checkpoint_batch(call: Call, request: Batch[Raw]) -> Items:
    """Save durable progress of several tasks."""
    items = decoded(request.items, protocol.CheckpointItem)
    return answer(await work_calls.save_checkpoints(call, items), call)


@_batch(
    "spawn",
    Batch[protocol.SpawnItem],
    protocol.SpawnedTasks,
    key="pages",
    tasks=[{"type": "page"}],
    wait=True,
)
async def spawn_batch(call: Call, request: Batch[Raw]) -> Items:
    """Create children of several tasks, as `POST /v1/tasks/{id}/subtasks` does."""
    return answer(await work_calls.spawn(call, decoded(request.items, protocol.SpawnItem)), call)


@_batch(
    "suspend",
    Batch[protocol.SuspendItem],
    protocol.SuspendResult,
    name="approval",
    signal="approved",
    timeout_sec=86_400,
)
async def suspend_batch(call: Call, request: Batch[Raw]) -> Items:
    """Let several tasks sleep or wait for signals, as `POST /v1/tasks/{id}/suspend` does."""
    return answer(await work_calls.suspend(call, decoded(request.items, protocol.SuspendItem)), call)


@operation("POST /v1/work/maintain", Scope.AGENT, repeatable=True, example={})
async def maintain(call: Call, request: Nothing) -> protocol.Maintained:  # noqa: ARG001 - no fields, but checked
    """Make due tasks READY and take back lost ones, now.

    Servers do this on their own; agents call it when something of theirs is about to be due. One run serves
    all concurrent callers.
    """
    return protocol.Maintained(await call.service.on_demand.run())


# One task. Each of these requests is an item of a batch, with the id in the path.

_work = partial(operation, repeatable=True, codes=_CLAIM_CODES)


@_work(
    "POST /v1/tasks/{id}/complete", Scope.AGENT, response=protocol.CompletedTask, example=examples.COMPLETION
)
async def complete_task(call: Call, request: protocol.CompleteItem) -> Any:
    """Complete a task with its output.

    The task is then COMPLETED; VALIDATING while a gate runs or a person decides; RETRYING or DEAD_LETTERED if
    the output was rejected, with `failure_category` and `failure_reason`. A repeated call returns the same.

    With `"next": true` the same instance claims and starts its next task in the same call, whatever became of
    this one, without waiting: `next_claim` is an item as in a claim, or null. `{"types": [...]}` instead of
    true restricts it. A repeated call returns the same claim while that is held, else null. An error claims
    nothing.
    """
    return only(await work_calls.complete(call, [request], BatchView.FULL))


@_work(
    "POST /v1/tasks/{id}/fail",
    Scope.AGENT,
    response=Task,
    example={**_TOKEN, "error": "the page could not be read"},
)
async def fail_task(call: Call, request: protocol.FailItem) -> Any:
    """Report a failed attempt. The task is retried, waits for a rate limit, or is dead-lettered."""
    return only(await work_calls.fail(call, [request], BatchView.FULL))


@_work("POST /v1/tasks/{id}/start", Scope.AGENT, response=Task, example=_TOKEN)
async def start_task(call: Call, request: protocol.StartItem) -> Any:
    """Start a claimed task: it is RUNNING, and heartbeats keep its lease."""
    return only(await work_calls.start(call, [request], BatchView.FULL))


class ClaimThisTask(protocol.ClaimTask, frozen=True, kw_only=True):
    id: str


@operation(
    "POST /v1/tasks/{id}/claim",
    Scope.AGENT,
    codes=(
        *("not_found", "superseded", "already_claimed", "invalid_transition", "not_claimable"),
        *("capability_mismatch", "budget_exceeded"),
    ),
    example={"agent_id": "coder-1", "incarnation": 1},
)
async def claim_task(call: Call, request: ClaimThisTask) -> Assignment[Task]:
    """Claim this task, regardless of the order of the queue."""
    service = call.service
    call.caller.check_agent(request.agent_id)
    async with watch_disconnect(call.receive) as disconnected:
        await service.engine.fleet.present(request.agent_id, request.incarnation)
        asked_at = lease_time()
        claim = await service.engine.claims.claim_task(request.agent_id, request.incarnation, request.id)
        with service.long_polls.delivering(claim.tasks, disconnected):
            assignment = await work_calls.assigned_task(service, claim)
            check_in_time(claim.tasks, asked_at)
            return assignment


@_work("POST /v1/tasks/{id}/release", Scope.AGENT, response=Task, example={**_TOKEN, "delay_sec": 60})
async def release_task(call: Call, request: protocol.ReleaseItem) -> Any:
    """Give a claim up without using an attempt; with a delay the task comes back later."""
    return only(await work_calls.release(call, [request], BatchView.FULL))


@operation(
    "POST /v1/tasks/{id}/subtasks",
    Scope.AGENT,
    response=protocol.SpawnedTasks,
    created=True,
    repeatable=True,
    codes=(*_CLAIM_CODES, "cycle_detected", "dependency_not_found", "already_exists", "rate_limited"),
    example={**_TOKEN, "tasks": [examples.TASK], "wait": True},
    check_body=new_tasks.check_dag_count,
    simplify=documents.with_tasks,
)
async def create_subtasks(call: Call, request: protocol.SpawnItem) -> Any:
    """Create children in the task's DAG. They may depend on each other by `key`.

    With `wait` the task goes PENDING and its slot is free; when all children have ended, in whatever way, it
    is claimed again with their outcomes.
    """
    return only(await work_calls.spawn(call, [request]))


@_work(
    "POST /v1/tasks/{id}/suspend",
    Scope.AGENT,
    response=protocol.SuspendResult,
    codes=(*_CLAIM_CODES, "budget_exceeded"),
    example={**_TOKEN, "name": "approval", "signal": "approved", "timeout_sec": 86_400},
)
async def suspend_task(call: Call, request: protocol.SuspendItem) -> Any:
    """Sleep, or wait for a signal, without holding anything.

    With `suspended` true the claim is over and the task is PENDING: no attempt is used, and slot, locks and
    reservation are free. It is claimed again when the signal has come or the time has passed; make this call
    again then. With `suspended` false the claim goes on: `signal` is what it waited for, or null if the time
    has passed. That is recorded as the step `name`, together with the receipt of the signal, so a repeated
    call, also under a later claim, returns the same.
    """
    return only(await work_calls.suspend(call, [request]))


@_work(
    "PUT /v1/tasks/{id}/checkpoint",
    Scope.AGENT,
    response=protocol.CheckpointResult,
    example={**_TOKEN, "data": {"page": 7}},
)
async def save_checkpoint(call: Call, request: protocol.CheckpointItem) -> Any:
    """Save durable progress, which is returned with the next claim of the task."""
    return only(await work_calls.save_checkpoints(call, [request]))


@_work(
    "PUT /v1/tasks/{id}/steps/{name:path}",
    Scope.AGENT,
    response=protocol.StepResult,
    example={**_TOKEN, "data": {"found": 3}},
)
async def save_step(call: Call, request: protocol.StepItem) -> Any:
    """Record the result of a step that must not run again. Returns the result that counts: the first one."""
    return only(await work_calls.record_steps(call, [request]))
