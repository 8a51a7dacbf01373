"""What a process with agents in Python asks for: the same as other agents do, but in batches.

Claims are named by task and epoch here, as `task.claim` shows it.
"""

from collections.abc import Sequence

from msgspec import Raw, Struct

from lineshaft.client import protocol
from lineshaft.server.framework import problems
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.long_poll import departure_of, telling
from lineshaft.server.routes import requests
from lineshaft.server.service import Call
from lineshaft.types import Problem, Scope
from lineshaft.types.work import (
    Cancellation,
    HeartbeatAnswers,
    Moved,
    NewCheckpoint,
    NewSpawn,
    NewStep,
)

routes = Routes()

_EXAMPLE_CLAIM = {"id": "task_01J8K2M3N4P5Q6R7S8T9V0W1X2", "epoch": 1}
_EXAMPLE_MEMBER = {"agent_id": "coder-1", "incarnation": 1}


class MovedTask(Struct, frozen=True):
    id: str
    #: Where it stands now; null: it didn't move, or has ended otherwise.
    status: str | None
    error: Problem | None


class MovedTasks(Struct, frozen=True):
    #: In the order of the call.
    items: list[MovedTask]


def _moved(moved: Sequence[Moved]) -> Answer:
    return Answer(
        MovedTasks(
            [
                MovedTask(one.id, one.status, None if one.error is None else problems.problem(one.error))
                for one in moved
            ]
        )
    )


@routes.post(
    "/v1/crew/claim",
    Scope.AGENT,
    protocol.Work,
    codes=("not_found", "superseded"),
    example={**_EXAMPLE_MEMBER, "limit": 3, "types": ["code"]},
)
async def claim_and_start(call: Call, body: protocol.ClaimWork) -> Answer:
    """Claim up to `limit` tasks of these types, best first, and start them: they are RUNNING at once."""
    engine = call.service.engine
    call.service.waiting_room.came(body.agent_id, body.incarnation)
    async with departure_of(call.receive) as departure:
        claim = await engine.claims.claim(
            body.agent_id, body.incarnation, limit=body.limit, types=body.types, start=True
        )
        with telling(engine, claim, departure):
            past = claim.past_attempts
    if len(claim.tasks) == body.limit:
        call.service.waiting_room.pass_on(body.agent_id, body.incarnation)
    else:
        types = frozenset() if claim.leaves_some else frozenset(body.types)
        call.service.waiting_room.decline(body.agent_id, body.incarnation, unless_for=types)
    return Answer(protocol.Work.of(claim, past))


@routes.post(
    "/v1/crew/wait",
    Scope.AGENT,
    protocol.Woken,
    codes=("not_found", "superseded"),
    example={**_EXAMPLE_MEMBER, "types": ["code"], "wait_sec": 0},
)
async def wait_for_work(call: Call, body: protocol.Wait) -> Answer:
    """Wait until there may be something to claim; `false`: there was nothing in that time."""
    async with departure_of(call.receive) as departure:
        woken = await call.service.waiting_room.wait(
            body.agent_id,
            body.incarnation,
            types=frozenset(body.types),
            seconds=body.wait_sec,
            departure=departure,
        )
    return Answer(protocol.Woken(woken))


@routes.post(
    "/v1/crew/heartbeat",
    Scope.AGENT,
    HeartbeatAnswers,
    example={
        "agents": [_EXAMPLE_MEMBER],
        "tasks": [{**_EXAMPLE_CLAIM, "agent_id": "coder-1"}],
    },
)
async def beat(call: Call, body: protocol.CrewBeat) -> Answer:
    """One heartbeat for all agents of a process and all they hold; one without an answer is superseded."""
    return Answer(await call.service.engine.work.heartbeat(body.presences, body.held))


@routes.post(
    "/v1/crew/complete",
    Scope.AGENT,
    MovedTasks,
    example={"items": [{**_EXAMPLE_CLAIM, "output": {"sum": 3}}]},
)
async def complete_claims(call: Call, body: protocol.Completions) -> Answer:
    """Hand in outputs. Each is told what became of it: one that is refused keeps none of the others."""
    return _moved(await call.service.engine.work.complete([item.completion for item in body.items]))


@routes.post(
    "/v1/crew/fail",
    Scope.AGENT,
    MovedTasks,
    example={"items": [{**_EXAMPLE_CLAIM, "error": "the page could not be read"}]},
)
async def fail_claims(call: Call, body: protocol.Failures) -> Answer:
    """Attempts failed; each is told what became of it."""
    return _moved(await call.service.engine.work.fail([item.failure for item in body.items]))


@routes.post(
    "/v1/crew/release", Scope.AGENT, MovedTasks, example={"items": [{**_EXAMPLE_CLAIM, "delay_sec": 60}]}
)
async def release_claims(call: Call, body: protocol.HandBacks) -> Answer:
    """Hand tasks back without using an attempt; with a delay they come back later."""
    return _moved(await call.service.engine.work.release([item.hand_back for item in body.items]))


@routes.post(
    "/v1/crew/cancel",
    Scope.AGENT,
    {204: None},
    codes=("not_found", "stale_claim", "invalid_transition"),
    example={**_EXAMPLE_CLAIM, "reason": "no longer needed"},
)
async def cancel_claim(call: Call, body: protocol.CancelHeld) -> Answer:
    """Cancel a task that one holds, its children and all that depends on it."""
    (moved,) = await call.service.engine.work.cancel(
        [Cancellation(body.claim, body.reason, spent=body.used.spent)]
    )
    moved.unwrap()
    return Answer(status=204)


@routes.post(
    "/v1/crew/step",
    Scope.AGENT,
    protocol.StepKept,
    codes=("not_found", "stale_claim", "invalid_transition"),
    example={**_EXAMPLE_CLAIM, "name": "search", "data": 3, "cost_usd": 0.02, "cost_so_far_usd": 0.04},
)
async def record_step(call: Call, body: protocol.StepDone) -> Answer:
    """Keep a step's result and what it cost; answers with the one that counts, and what is left to spend."""
    cost, so_far = body.costs
    (recorded,) = await call.service.engine.work.record_steps(
        [NewStep(body.claim, body.name, body.json, cost, so_far)]
    )
    return Answer(protocol.StepKept(Raw(recorded.unwrap()), recorded.budgets))


@routes.post(
    "/v1/crew/checkpoint",
    Scope.AGENT,
    {204: None},
    codes=("not_found", "stale_claim", "invalid_transition"),
    example={**_EXAMPLE_CLAIM, "data": {"page": 7}},
)
async def keep_checkpoint(call: Call, body: protocol.CrewCheckpoint) -> Answer:
    """Keep where a task stands."""
    (saved,) = await call.service.engine.work.save_checkpoints([NewCheckpoint(body.claim, body.json)])
    if saved.error is not None:
        raise saved.error
    return Answer(status=204)


@routes.post(
    "/v1/crew/spawn",
    Scope.AGENT,
    protocol.Children,
    codes=(
        *("not_found", "stale_claim", "invalid_transition"),
        *("cycle_detected", "dependency_not_found", "already_exists"),
    ),
    example={**_EXAMPLE_CLAIM, "key": "pages", "tasks": [{"type": "page"}], "wait": True},
    check_body=requests.check_task_count,
)
async def spawn(call: Call, body: protocol.Spawn) -> Answer:
    """Create children once for each key, however often it is called; with `wait` the parent pauses."""
    requests.check_tasks(body.tasks, keys=True)
    (result,) = await call.service.engine.work.spawn(
        [NewSpawn(body.claim, body.tasks, body.key, body.wait, body.used.spent)]
    )
    spawned = result.unwrap()
    return Answer(protocol.Children(spawned.children, spawned.paused))


@routes.post("/v1/crew/drain", Scope.AGENT, {204: None}, example=_EXAMPLE_MEMBER)
async def drain_agent(call: Call, body: protocol.Member) -> Answer:
    """An agent takes nothing more, and finishes what it has."""
    await call.service.engine.fleet.drain(body.agent_id, body.incarnation)
    call.service.waiting_room.leave(body.agent_id, body.incarnation)
    return Answer(status=204)


@routes.post("/v1/crew/leave", Scope.AGENT, {204: None}, example=_EXAMPLE_MEMBER)
async def sign_off_agent(call: Call, body: protocol.Member) -> Answer:
    """An agent is gone: it is offline at once."""
    await call.service.engine.fleet.leave(body.agent_id, body.incarnation)
    call.service.waiting_room.leave(body.agent_id, body.incarnation)
    return Answer(status=204)


@routes.post("/v1/crew/upkeep", Scope.AGENT, protocol.Kept, example={})
async def keep_up(call: Call, body: requests.Nothing) -> Answer:  # noqa: ARG001 - it has no fields, but must be checked
    """Make READY what is due and take back what is lost, now; one run serves all who ask at once."""
    return Answer(protocol.Kept(await call.service.on_demand.run()))


@routes.post("/v1/crew/retries", Scope.AGENT, protocol.RetryDue, example={"types": ["code"], "within_sec": 5})
async def next_retry(call: Call, body: protocol.Retries) -> Answer:
    """When the first retry of these types is due, if that is soon."""
    return Answer(
        protocol.RetryDue(await call.service.engine.schedule.retry_within(body.types, body.within_sec))
    )
