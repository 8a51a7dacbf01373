"""The methods of `Lineshaft` about agents, guards and the installation."""

from collections.abc import Sequence
from decimal import Decimal

from msgspec import UNSET, UnsetType

from lineshaft.client.artifacts import Artifacts
from lineshaft.client.backend import Backend
from lineshaft.client.sources import Sources
from lineshaft.types import (
    AgentInfo,
    Attention,
    Breaker,
    Costs,
    Limits,
    Lock,
    NewToken,
    Page,
    Readiness,
    Slowdown,
    Stats,
    ThroughputHistory,
    Token,
    VelocityAction,
    Waiting,
)
from lineshaft.types.costs import DEFAULT_DAYS
from lineshaft.types.filters import Names, names
from lineshaft.types.page import DEFAULT_LIMIT


class Administration:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        #: Files that tasks read and write.
        self.artifacts = Artifacts(backend)

    @property
    def sources(self) -> Sources:
        """Schedules, webhooks and other rules that create work."""
        return Sources(self.backend)

    # Agents.

    async def agents(
        self, *, status: Names = (), limit: int = DEFAULT_LIMIT, cursor: str | None = None
    ) -> Page[AgentInfo]:
        """One page of agents by id; `status` is active, draining or offline."""
        return await self.backend.agents(status=names(status), limit=limit, cursor=cursor)

    async def get_agent(self, agent_id: str) -> AgentInfo:
        return await self.backend.agent(agent_id)

    async def change_agent(
        self,
        agent_id: str,
        *,
        status: str | None = None,
        max_concurrent_tasks: int | UnsetType | None = UNSET,
        budget_usd: Decimal | float | UnsetType | None = UNSET,
        add_budget_usd: Decimal | float | None = None,
        reason: str | None = None,
    ) -> AgentInfo:
        """Change an agent's status (`draining` claims nothing new), slots or budget.

        `max_concurrent_tasks` applies to each instance; None returns to what each declares. `budget_usd` is a
        new total, None for unlimited; `add_budget_usd` adds to the current one.
        """
        return await self.backend.change_agent(
            agent_id,
            status=status,
            max_concurrent_tasks=max_concurrent_tasks,
            budget_usd=budget_usd,
            add_budget_usd=add_budget_usd,
            reason=reason,
        )

    async def delete_agent(self, agent_id: str, *, reason: str | None = None) -> None:
        """Remove an agent without live instances. Its history, budget and spend are kept."""
        await self.backend.delete_agent(agent_id, reason=reason)

    # Limits of the installation.

    async def limits(self) -> Limits:
        """What every process obeys, with what was spent today."""
        return await self.backend.limits()

    async def change_limits(
        self,
        *,
        daily_budget_usd: Decimal | float | UnsetType | None = UNSET,
        velocity_usd: Decimal | float | UnsetType | None = UNSET,
        velocity_window_sec: float | UnsetType = UNSET,
        velocity_action: VelocityAction | UnsetType = UNSET,
        default_max_cost_usd: Decimal | float | UnsetType | None = UNSET,
        crash_cost_fraction: float | UnsetType = UNSET,
        reason: str | None = None,
    ) -> Limits:
        """Change the limits that are given; None: no limit."""
        given = {
            "daily_budget_usd": daily_budget_usd,
            "velocity_usd": velocity_usd,
            "velocity_window_sec": velocity_window_sec,
            "velocity_action": velocity_action,
            "default_max_cost_usd": default_max_cost_usd,
            "crash_cost_fraction": crash_cost_fraction,
        }
        changes = {name: value for name, value in given.items() if value is not UNSET}
        return await self.backend.change_limits(changes, reason=reason)

    # Guards.

    async def breakers(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Breaker]:
        """Circuit breakers that have counted a failure or were opened; all others are closed."""
        return await self.backend.breakers(limit=limit, cursor=cursor)

    async def open_breaker(self, key: str, *, reason: str | None = None) -> Breaker:
        """Block a task type, or `model:NAME`, until the breaker is reset."""
        return await self.backend.open_breaker(key, reason=reason)

    async def reset_breaker(self, key: str, *, reason: str | None = None) -> Breaker:
        """Close a breaker and clear its failures."""
        return await self.backend.reset_breaker(key, reason=reason)

    async def locks(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Lock]:
        """Document locks that are held."""
        return await self.backend.locks(limit=limit, cursor=cursor)

    async def release_lock(self, key: str, *, reason: str | None = None) -> None:
        """Take a lock from its holder; the next waiting task gets it."""
        await self.backend.release_lock(key, reason=reason)

    async def slowdowns(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Slowdown]:
        """Slowdowns after rate limits that are in force."""
        return await self.backend.slowdowns(limit=limit, cursor=cursor)

    async def end_slowdown(self, key: str, *, reason: str | None = None) -> None:
        """End a slowdown at once: `model:NAME`, `provider:NAME` or `*`."""
        await self.backend.end_slowdown(key, reason=reason)

    async def pause(
        self,
        type: str | None = None,  # noqa: A002 - the name of the field
        *,
        reason: str | None = None,
    ) -> None:
        """Stop claims of a task type, or of all types. Running tasks continue."""
        await self.backend.pause(type, reason=reason)

    async def resume(
        self,
        type: str | None = None,  # noqa: A002 - the name of the field
        *,
        reason: str | None = None,
    ) -> None:
        """End a pause. Resuming what is not paused changes nothing."""
        await self.backend.resume(type, reason=reason)

    # The installation.

    async def stats(self) -> Stats:
        """Queue depth, throughput and spending."""
        return await self.backend.stats()

    async def waiting(self) -> Waiting:
        """How many tasks wait for which reason."""
        return await self.backend.waiting()

    async def throughput(self) -> ThroughputHistory:
        """What ended in each minute of the last hour, and how long recent tasks had waited."""
        return await self.backend.throughput()

    async def costs(
        self,
        *,
        days: int = DEFAULT_DAYS,
        type: str | None = None,  # noqa: A002 - the name of the field
        model: str | None = None,
        agent_id: str | None = None,
    ) -> Costs:
        """Costs of the last UTC days by day, type, model, agent and DAG, and today's with a forecast.

        With a type, model or agent only those of its attempts.
        """
        return await self.backend.costs(days=days, type_=type, model=model, agent_id=agent_id)

    async def attention(self) -> Attention:
        """What needs a person, and what holds work back."""
        return await self.backend.attention()

    async def health(self) -> Readiness:
        """Raises UnavailableError unless a migrated database can be reached."""
        return await self.backend.health()

    async def tokens(self) -> Sequence[Token]:
        """All tokens of the HTTP API, including revoked ones, oldest first."""
        return await self.backend.tokens()

    async def create_token(
        self,
        name: str,
        scope: str,
        *,
        agent_id: str | None = None,
        budget_usd: Decimal | float | None = None,
    ) -> NewToken:
        """Create a token: `scope` is read, submit, agent, operate or admin. The secret is shown only here.

        With the scope agent, `agent_id` binds it to one agent, and `budget_usd` is that agent's budget.
        """
        return await self.backend.create_token(name, scope, agent_id=agent_id, budget_usd=budget_usd)

    async def revoke_token(self, which: str) -> None:
        """Revoke a token by id, or every token with this name."""
        await self.backend.revoke_token(which)
