"""Agents: registration, claims, heartbeats, status."""

from msgspec.structs import replace

from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import examples, requests, work_calls
from lineshaft.server.routes.work_calls import item_of, only
from lineshaft.server.service import Call
from lineshaft.types import AgentInfo, NewAgent, Page, RegisteredAgent, Scope, Task, documents, protocol
from lineshaft.types.protocol import View

routes = Routes()


@routes.post(
    "/v1/agents/{id:path}/claim",
    Scope.AGENT,
    protocol.ClaimResult[Task],
    codes=("not_found", "superseded"),
    example={"incarnation": 1, "limit": 1, "wait_sec": 30},
)
async def claim_work(call: Call, body: protocol.Claim) -> Answer:
    """Claim up to `limit` tasks, best first, waiting for up to `wait_sec` until there is one.

    They are CLAIMED until they are started; with `start` they are RUNNING at once. An empty list means that
    there was no work in that time.
    """
    item = protocol.ClaimItem(
        agent_id=call.path["id"],
        incarnation=body.incarnation,
        limit=body.limit,
        types=body.types,
        start=body.start,
    )
    return Answer(only(await work_calls.claim(call, [item], wait_sec=body.wait_sec, view=View.FULL)))


@routes.post(
    "/v1/agents/{id:path}/heartbeat",
    Scope.AGENT,
    protocol.HeartbeatResult,
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
async def heartbeat(call: Call, body: protocol.Heartbeat) -> Answer:
    """Renew the leases of tasks.

    Returns for each task `continue`, `cancel` (it was cancelled) or `lost` (another agent may have it).
    """
    item = item_of(protocol.HeartbeatItem, body, agent_id=call.path["id"])
    return Answer(only(await work_calls.heartbeat(call, [item])))


@routes.post(
    "/v1/agents/{id:path}/drain",
    Scope.AGENT,
    AgentInfo,
    codes=("not_found",),
    example={"incarnation": 1},
)
async def drain_agent(call: Call, body: protocol.AgentInstance) -> Answer:
    """Take no more work, and finish the tasks that are held. Waiting claims of the instance end at once."""
    agent_id = call.path["id"]
    call.principal.check_agent(agent_id)
    await call.service.engine.fleet.drain(agent_id, body.incarnation)
    call.service.long_polls.end(agent_id, body.incarnation)
    return Answer(await call.service.engine.fleet.read(agent_id))


@routes.post(
    "/v1/agents/{id:path}/leave",
    Scope.AGENT,
    AgentInfo,
    codes=("not_found",),
    example={"incarnation": 1},
)
async def leave_agent(call: Call, body: protocol.AgentInstance) -> Answer:
    """Go offline: the process ends. Waiting claims of the instance end at once."""
    agent_id = call.path["id"]
    call.principal.check_agent(agent_id)
    await call.service.engine.fleet.leave(agent_id, body.incarnation)
    call.service.long_polls.end(agent_id, body.incarnation)
    return Answer(await call.service.engine.fleet.read(agent_id))


@routes.post(
    "/v1/agents/{id:path}/siblings",
    Scope.AGENT,
    protocol.SiblingNames,
    codes=("not_found", "superseded"),
    example={"incarnation": 2, "gone": ["host-a/pid-4711"]},
)
async def watch_siblings(call: Call, body: protocol.Siblings) -> Answer:
    """Report instances on the caller's host whose processes are dead, and learn which ones to watch.

    What a dead instance held fails as `crash` at once, instead of when its lease expires. Only instances of
    the same agent and the same `host` as the caller's are accepted; others are ignored.
    """
    agent_id = call.path["id"]
    call.principal.check_agent(agent_id)
    names = await call.service.engine.fleet.siblings(
        agent_id, body.incarnation, gone=body.gone, everyone=body.everyone
    )
    return Answer(protocol.SiblingNames(names))


@routes.post(
    "/v1/agents",
    Scope.AGENT,
    {201: RegisteredAgent, 200: RegisteredAgent},
    codes=("already_exists",),
    example=examples.AGENT,
    simplify=documents.agent,
)
async def register_agent(call: Call, body: NewAgent) -> Answer:
    """Register a process of an agent; 200 if the agent's id was registered before.

    Any number of processes of one agent work side by side, each with an `instance` name of its own. An
    instance that is registered again supersedes the earlier one: the tasks that it held fail as `crash` at
    once. The same happens to instances in `gone`, if they are of the same `host`. `incarnation` names the
    caller in all later calls; `instances` in the answer has only this one.

    The budget is a total over the agent's life, set by the first registration that has one, or by the token
    where that has a budget; `warnings` says if another one was declared. A token that is bound to an agent
    registers only that agent, whose id may then be left out. A repeated call with the same Idempotency-Key
    returns the same and supersedes nothing.
    """
    key = requests.key_of(call.headers.get("idempotency-key"), None)
    principal = call.principal
    if principal.agent_id is not None:
        body = replace(body, id=body.id or principal.agent_id)
        principal.check_agent(body.id or principal.agent_id)
    agent = await call.service.engine.fleet.register(body, key=key, budget_usd=principal.agent_budget_usd)
    return Answer(agent, 201 if agent.incarnation == 1 else 200)


@routes.delete("/v1/agents/{id:path}", Scope.OPERATE, codes=("not_found", "invalid_transition"))
async def delete_agent(call: Call, query: requests.ActQuery) -> Answer:
    """Delete an agent that has no live instance. Its history, budget and spend are kept."""
    await call.service.engine.fleet.delete(call.path["id"], reason=query.reason)
    return Answer(status=204)


@routes.get("/v1/agents", Scope.READ, Page[AgentInfo])
async def list_agents(call: Call, query: requests.AgentQuery) -> Answer:
    """List agents by id."""
    agents = call.service.engine.fleet
    return Answer(await agents.page(status=query.status, limit=query.limit, cursor=query.cursor))


@routes.get("/v1/agents/{id:path}", Scope.READ, AgentInfo, codes=("not_found",))
async def get_agent(call: Call) -> Answer:
    """Read an agent."""
    return Answer(await call.service.engine.fleet.read(call.path["id"]))


@routes.patch(
    "/v1/agents/{id:path}",
    Scope.OPERATE,
    AgentInfo,
    codes=("not_found",),
    example={"add_budget_usd": 10},
)
async def change_agent(call: Call, body: requests.ChangeAgent) -> Answer:
    """Change an agent's budget, its status, or the slots of its instances.

    `budget_usd` is a new total, null for unlimited. `draining` and `offline` take no more work until the
    status is changed to `active`. `max_concurrent_tasks` applies to each instance, present and future; null
    returns to what each declares.
    """
    agent = await call.service.engine.fleet.patch(
        call.path["id"],
        budget_usd=body.budget_usd,
        add_budget_usd=body.add_budget_usd,
        status=body.status,
        max_concurrent_tasks=body.max_concurrent_tasks,
        reason=body.reason,
    )
    return Answer(agent)
