"""Agents: registration, status, budgets."""

from decimal import Decimal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from lineshaft.engine.caller import caller
from lineshaft.operations import examples, new_tasks
from lineshaft.operations.operation import Engine, operation
from lineshaft.operations.wire import Body, Header
from lineshaft.types import AgentInfo, NewAgent, Page, RegisteredAgent, Scope, documents
from lineshaft.types.agents import AgentInstance, SiblingNames, Siblings
from lineshaft.types.request import Act, ActById, ById, OnePage, Request


class InstanceOfAgent(AgentInstance, frozen=True, kw_only=True):
    #: The id of the agent.
    id: str


@operation(
    "POST /v1/agents/{id:path}/drain",
    Scope.AGENT,
    repeatable=True,
    codes=("not_found",),
    example={"incarnation": 1},
)
async def drain_agent(engine: Engine, request: InstanceOfAgent) -> AgentInfo:
    """Take no more work, and finish the tasks that are held. Waiting claims of the instance end at once."""
    caller().check_agent(request.id)
    await engine.fleet.drain(request.id, request.incarnation)
    return await engine.fleet.read(request.id)


@operation(
    "POST /v1/agents/{id:path}/leave",
    Scope.AGENT,
    repeatable=True,
    codes=("not_found",),
    example={"incarnation": 1},
)
async def leave_agent(engine: Engine, request: InstanceOfAgent) -> AgentInfo:
    """Go offline: the process ends. Waiting claims of the instance end at once."""
    caller().check_agent(request.id)
    await engine.fleet.leave(request.id, request.incarnation)
    return await engine.fleet.read(request.id)


class SiblingsOfInstance(Siblings, frozen=True, kw_only=True):
    #: The id of the agent.
    id: str


@operation(
    "POST /v1/agents/{id:path}/siblings",
    Scope.AGENT,
    repeatable=True,
    codes=("not_found", "superseded"),
    example={"incarnation": 2, "gone": ["host-a/pid-4711"]},
)
async def watch_siblings(engine: Engine, request: SiblingsOfInstance) -> SiblingNames:
    """Report instances on the caller's host whose processes are dead, and learn which ones to watch.

    What a dead instance held fails as `crash` at once, instead of when its lease expires. Only instances of
    the same agent and the same `host` as the caller's are accepted; others are ignored.
    """
    caller().check_agent(request.id)
    names = await engine.fleet.siblings(
        request.id, request.incarnation, gone=request.gone, everyone=request.everyone
    )
    return SiblingNames(names)


class RegisterAgent(Request, frozen=True, kw_only=True):
    agent: Body[NewAgent]
    idempotency_key: Header = None


@operation(
    "POST /v1/agents",
    Scope.AGENT,
    created=lambda agent: agent.incarnation == 1,
    codes=("already_exists",),
    example=examples.AGENT,
    simplify=documents.agent,
)
async def register_agent(engine: Engine, request: RegisterAgent) -> RegisteredAgent:
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
    agent, who = request.agent, caller()
    key = new_tasks.key_of(request.idempotency_key, None)
    if who.agent_id is not None:
        agent = replace(agent, id=agent.id or who.agent_id)
        who.check_agent(agent.id or who.agent_id)
    return await engine.fleet.register(agent, key=key, budget_usd=who.agent_budget_usd)


@operation("DELETE /v1/agents/{id:path}", Scope.OPERATE, codes=("not_found", "invalid_transition"))
async def delete_agent(engine: Engine, request: ActById) -> None:
    """Delete an agent that has no live instance. Its history, budget and spend are kept."""
    await engine.fleet.delete(request.id, reason=request.reason)


class ListAgents(OnePage, frozen=True, kw_only=True):
    status: tuple[str, ...] = ()


@operation("GET /v1/agents", Scope.READ)
async def list_agents(engine: Engine, request: ListAgents) -> Page[AgentInfo]:
    """List agents by id."""
    return await engine.fleet.page(status=request.status, limit=request.limit, cursor=request.cursor)


@operation("GET /v1/agents/{id:path}", Scope.READ, codes=("not_found",))
async def get_agent(engine: Engine, request: ById) -> AgentInfo:
    """Read an agent."""
    return await engine.fleet.read(request.id)


class ChangeAgent(Act, frozen=True, kw_only=True):
    id: str
    #: A new total; null: unlimited.
    budget_usd: Decimal | float | UnsetType | None = UNSET
    add_budget_usd: Decimal | float | None = None
    status: str | None = None
    #: How many tasks each instance takes; null: as each declares.
    max_concurrent_tasks: int | UnsetType | None = UNSET


@operation("PATCH /v1/agents/{id:path}", Scope.OPERATE, codes=("not_found",), example={"add_budget_usd": 10})
async def change_agent(engine: Engine, request: ChangeAgent) -> AgentInfo:
    """Change an agent's budget, its status, or the slots of its instances.

    `budget_usd` is a new total, null for unlimited. `draining` and `offline` take no more work until the
    status is changed to `active`. `max_concurrent_tasks` applies to each instance, present and future; null
    returns to what each declares.
    """
    return await engine.fleet.patch(
        request.id,
        budget_usd=request.budget_usd,
        add_budget_usd=request.add_budget_usd,
        status=request.status,
        max_concurrent_tasks=request.max_concurrent_tasks,
        reason=request.reason,
    )
