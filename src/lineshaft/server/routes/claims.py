"""What agents do with the tasks they hold. Every call names its claim by the token."""

from msgspec import Raw

from lineshaft.errors import InvalidInputError
from lineshaft.model.storable import is_storable, readable_json
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.long_poll import departure_of, telling
from lineshaft.server.routes import examples, requests, responses
from lineshaft.server.routes.assignments import assignments
from lineshaft.server.routes.claim_tokens import claim_of
from lineshaft.server.service import Call
from lineshaft.types import Scope, Task
from lineshaft.types.work import Completion, Failure, NewCheckpoint, NewSpawn, NewStep, Release

routes = Routes()

_OF_CLAIMS = ("not_found", "stale_claim", "invalid_transition")
_MAX_STEP_NAME = 1_000


@routes.post("/v1/tasks/{id}/complete", Scope.AGENT, Task, codes=_OF_CLAIMS, example=examples.COMPLETION)
async def complete_task(call: Call, body: requests.Complete) -> Answer:
    """Hand in the output.

    The task is COMPLETED then; VALIDATING while a gate runs or a person decides; RETRYING or DEAD_LETTERED if
    it was refused, with `failure_category` and `failure_reason`. Repeating it answers the same.
    """
    completion = Completion(
        claim_of(call.path["id"], body.claim_token),
        output=readable_json("output.data", bytes(body.output.data)),
        artifacts=requests.json_or_none("output.artifacts", body.output.artifacts),
        decision_report=requests.json_or_none("output.decision_report", body.output.decision_report),
        spent=body.spent,
        output_type=body.output.type,
    )
    (moved,) = await call.service.engine.work.complete([completion])
    moved.unwrap()
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/fail",
    Scope.AGENT,
    Task,
    codes=_OF_CLAIMS,
    example={"claim_token": examples.CLAIM_TOKEN, "error": "the page could not be read"},
)
async def fail_task(call: Call, body: requests.Fail) -> Answer:
    """An attempt failed: it is retried, waited for (a rate limit) or dead-lettered, as its policy says."""
    failure = Failure(
        claim_of(call.path["id"], body.claim_token),
        body.error,
        body.category,
        body.retry_after_sec,
        body.spent,
    )
    (moved,) = await call.service.engine.work.fail([failure])
    moved.unwrap()
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/start",
    Scope.AGENT,
    Task,
    codes=_OF_CLAIMS,
    example={"claim_token": examples.CLAIM_TOKEN},
)
async def start_task(call: Call, body: requests.Start) -> Answer:
    """Begin: the task is RUNNING, and lives by heartbeats from now on."""
    (moved,) = await call.service.engine.work.start([claim_of(call.path["id"], body.claim_token)])
    moved.unwrap()
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/claim",
    Scope.AGENT,
    responses.Assignment,
    codes=(
        *("not_found", "superseded", "already_claimed", "invalid_transition", "not_claimable"),
        *("capability_mismatch", "budget_exceeded"),
    ),
    example={"agent_id": "coder-1", "incarnation": 1},
)
async def claim_task(call: Call, body: requests.ClaimTask) -> Answer:
    """Claim this very task, whoever comes before it in the queue."""
    engine = call.service.engine
    async with departure_of(call.receive) as departure:
        await call.service.engine.fleet.present(body.agent_id, body.incarnation)
        claim = await engine.claims.claim_task(body.agent_id, body.incarnation, call.path["id"])
        with telling(engine, claim, departure):
            (found,) = await assignments(engine, claim)
    return Answer(found)


@routes.post(
    "/v1/tasks/{id}/release",
    Scope.AGENT,
    Task,
    codes=_OF_CLAIMS,
    example={"claim_token": examples.CLAIM_TOKEN, "delay_sec": 60},
)
async def release_task(call: Call, body: requests.Release) -> Answer:
    """Hand a task back without using an attempt; with a delay it comes back later."""
    handed_back = Release(claim_of(call.path["id"], body.claim_token), body.delay_sec or None)
    (moved,) = await call.service.engine.work.release([handed_back])
    moved.unwrap()
    return await _task(call)


@routes.post(
    "/v1/tasks/{id}/subtasks",
    Scope.AGENT,
    {201: responses.SubmittedItems},
    codes=(*_OF_CLAIMS, "cycle_detected", "dependency_not_found", "already_exists"),
    example={"claim_token": examples.CLAIM_TOKEN, "tasks": [examples.TASK], "wait": True},
    check_body=requests.check_task_count,
)
async def create_subtasks(call: Call, body: requests.Subtasks) -> Answer:
    """Create children in the task's DAG.

    With `wait` the task goes PENDING and its slot is free; when all children have ended, in whatever way, it
    is claimed again with their outcomes. They may depend on each other by `key`.
    """
    requests.check_tasks(body.tasks, keys=True)
    claim = claim_of(call.path["id"], body.claim_token)
    checkpoint = requests.json_or_none("checkpoint", body.checkpoint)
    tasks = requests.keyed(body.tasks, call.headers.get("idempotency-key"))
    spawn = NewSpawn(claim, tasks, wait=body.wait, checkpoint=checkpoint)
    (result,) = await call.service.engine.work.spawn([spawn])
    return Answer(responses.SubmittedItems(list(result.unwrap().submitted)), 201)


@routes.put(
    "/v1/tasks/{id}/checkpoint",
    Scope.AGENT,
    responses.Checkpoint,
    codes=_OF_CLAIMS,
    example={"claim_token": examples.CLAIM_TOKEN, "data": {"page": 7}},
)
async def save_checkpoint(call: Call, body: requests.Save) -> Answer:
    """Keep durable progress; it is handed to whoever claims the task next."""
    claim = claim_of(call.path["id"], body.claim_token)
    checkpoint = NewCheckpoint(claim, readable_json("data", bytes(body.data)))
    (saved,) = await call.service.engine.work.save_checkpoints([checkpoint])
    if saved.error is not None:
        raise saved.error
    return Answer(responses.Checkpoint(body.data))


@routes.put(
    "/v1/tasks/{id}/steps/{name:path}",
    Scope.AGENT,
    responses.Step,
    codes=_OF_CLAIMS,
    example={"claim_token": examples.CLAIM_TOKEN, "data": {"found": 3}},
)
async def save_step(call: Call, body: requests.Save) -> Answer:
    """Keep the result of a step that must not run again; answers with the one that counts, the first."""
    name = call.path["name"]
    if not 1 <= len(name) <= _MAX_STEP_NAME or not is_storable(name):
        raise InvalidInputError(errors=[("name", f"must be a text of 1 to {_MAX_STEP_NAME} characters")])
    claim = claim_of(call.path["id"], body.claim_token)
    step = NewStep(claim, name, readable_json("data", bytes(body.data)))
    (recorded,) = await call.service.engine.work.record_steps([step])
    kept = recorded.unwrap()
    return Answer(responses.Step(name, Raw(kept)))


async def _task(call: Call) -> Answer:
    return Answer(await call.service.engine.read.task(call.path["id"]))
