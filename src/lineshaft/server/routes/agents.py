"""Agents: registering, asking for work, saying that they are alive."""

from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.long_poll import departure_of, find_work, telling
from lineshaft.server.routes import examples, requests, responses
from lineshaft.server.routes.assignments import assignments
from lineshaft.server.routes.claim_tokens import claim_of
from lineshaft.server.service import Call
from lineshaft.types import AgentInfo, NewAgent, Page, Scope
from lineshaft.types.work import HeldTask, Presence

routes = Routes()


@routes.post(
    "/v1/agents/{id:path}/claim",
    Scope.AGENT,
    responses.Assignments,
    codes=("not_found", "superseded"),
    example={"incarnation": 1, "limit": 1, "wait_sec": 30},
)
async def claim_work(call: Call, body: requests.Claim) -> Answer:
    """Claim up to `limit` tasks, best first, waiting for up to `wait_sec` until there is one.

    They are CLAIMED until they are started. An empty list means that there was nothing in that time.
    """
    engine = call.service.engine
    async with departure_of(call.receive) as departure:
        found = await find_work(call.service, call.path["id"], body, departure)
        with telling(engine, found.claim, departure):
            tasks = await assignments(engine, found.claim)
    more = {} if found.slowdown_until is None else {"slowdown_until": found.slowdown_until}
    return Answer(responses.Assignments(tasks, **more))


@routes.post(
    "/v1/agents/{id:path}/heartbeat",
    Scope.AGENT,
    responses.HeartbeatResponse,
    codes=("not_found", "superseded"),
    example={
        "incarnation": 1,
        "tasks": [
            {
                "id": "task_01J8K2M3N4P5Q6R7S8T9V0W1X2",
                "claim_token": examples.CLAIM_TOKEN,
                "progress": {"percent": 40},
                "cost_usd": 0.04,
            }
        ],
    },
)
async def heartbeat(call: Call, body: requests.Heartbeat) -> Answer:
    """Renew the leases of tasks; tells for each `continue`, `cancel` (it was cancelled) or `lost`."""
    agent_id = call.path["id"]
    held = [
        HeldTask(
            beat.id,
            claim_of(beat.id, beat.claim_token).epoch,
            agent_id,
            requests.json_or_none("progress", beat.progress),
            beat.spent.cost_usd,
        )
        for beat in body.tasks
    ]
    found = await call.service.engine.work.heartbeat([Presence(agent_id, body.incarnation)], held)
    if agent_id not in found.agents:
        # Unknown, or superseded: raises either way.
        await call.service.engine.fleet.present(agent_id, body.incarnation)
    answers = {task.id: "continue" for task in held} | {ended.id: ended.answer for ended in found.over}
    until = found.slowdowns.get(agent_id)
    more = {} if until is None else {"slowdown_until": until}
    status = "active" if found.agents[agent_id] == "offline" else found.agents[agent_id]
    return Answer(responses.HeartbeatResponse(answers, status, **more))


@routes.post(
    "/v1/agents",
    Scope.AGENT,
    {201: AgentInfo, 200: AgentInfo},
    codes=("already_exists",),
    example=examples.AGENT,
)
async def register_agent(call: Call, body: NewAgent) -> Answer:
    """Register an agent; 200 if its id was registered before.

    Registering again supersedes the earlier incarnation: what that still held fails as `crash` at once. The
    budget is a total over the id's life, set by the first registration. Sent again with the same
    Idempotency-Key, it answers as before and supersedes nothing.
    """
    key = requests.key_of(call.headers.get("idempotency-key"), None)
    agent = await call.service.engine.fleet.register(body, key=key)
    return Answer(agent, 201 if agent.incarnation == 1 else 200)


@routes.get("/v1/agents", Scope.READ, Page[AgentInfo])
async def list_agents(call: Call, query: requests.AgentQuery) -> Answer:
    """List agents by id."""
    agents = call.service.engine.fleet
    return Answer(await agents.page(status=query.status, limit=query.limit, cursor=query.cursor))


@routes.get("/v1/agents/{id:path}", Scope.READ, AgentInfo, codes=("not_found",))
async def get_agent(call: Call) -> Answer:
    """An agent, as it is now."""
    return Answer(await call.service.engine.fleet.read(call.path["id"]))


@routes.patch(
    "/v1/agents/{id:path}",
    Scope.OPERATE,
    AgentInfo,
    codes=("not_found",),
    example={"add_budget_usd": 10},
)
async def change_agent(call: Call, body: requests.ChangeAgent) -> Answer:
    """Add to an agent's budget, change its status (`draining` takes no more work) or its slots."""
    agent = await call.service.engine.fleet.patch(
        call.path["id"],
        add_budget_usd=body.add_budget_usd,
        status=body.status,
        max_concurrent_tasks=body.max_concurrent_tasks,
    )
    return Answer(agent)
