"""The methods of `Lineshaft` about agents, guards and the installation."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from msgspec import UNSET, UnsetType

from lineshaft import types as t
from lineshaft.client.artifacts import Artifacts
from lineshaft.client.backend import Backend
from lineshaft.client.sources import Sources
from lineshaft.model.durations import seconds
from lineshaft.operations import agents, guards, quotas, stats, task_types, tokens
from lineshaft.types.costs import DEFAULT_DAYS
from lineshaft.types.filters import Names, names
from lineshaft.types.page import DEFAULT_LIMIT
from lineshaft.types.request import ActById, ActByKey, ById, Nothing, OnePage


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
    ) -> t.Page[t.AgentInfo]:
        """One page of agents by id; `status` is active, draining or offline."""
        request = agents.ListAgents(status=tuple(names(status)), limit=limit, cursor=cursor)
        return await self.backend.call(agents.list_agents, request)

    async def get_agent(self, agent_id: str) -> t.AgentInfo:
        return await self.backend.call(agents.get_agent, ById(id=agent_id))

    async def change_agent(
        self,
        agent_id: str,
        *,
        status: str | None = None,
        max_concurrent_tasks: int | UnsetType | None = UNSET,
        budget_usd: Decimal | float | UnsetType | None = UNSET,
        add_budget_usd: Decimal | float | None = None,
        reason: str | None = None,
    ) -> t.AgentInfo:
        """Change an agent's status (`draining` claims nothing new), slots or budget.

        `max_concurrent_tasks` applies to each instance; None returns to what each declares. `budget_usd` is a
        new total, None for unlimited; `add_budget_usd` adds to the current one.
        """
        request = agents.ChangeAgent(
            id=agent_id,
            status=status,
            max_concurrent_tasks=max_concurrent_tasks,
            budget_usd=budget_usd,
            add_budget_usd=add_budget_usd,
            reason=reason,
        )
        return await self.backend.call(agents.change_agent, request)

    async def delete_agent(self, agent_id: str, *, reason: str | None = None) -> None:
        """Remove an agent without live instances. Its history, budget and spend are kept."""
        await self.backend.call(agents.delete_agent, ActById(id=agent_id, reason=reason))

    # Limits of the installation.

    async def limits(self) -> t.Limits:
        """What every process obeys, with what was spent today."""
        return await self.backend.call(guards.get_limits, Nothing())

    async def change_limits(
        self,
        *,
        daily_budget_usd: Decimal | float | UnsetType | None = UNSET,
        velocity_usd: Decimal | float | UnsetType | None = UNSET,
        velocity_window_sec: float | UnsetType = UNSET,
        velocity_action: t.VelocityAction | UnsetType = UNSET,
        default_max_cost_usd: Decimal | float | UnsetType | None = UNSET,
        crash_cost_fraction: float | UnsetType = UNSET,
        judge_max_cost_usd: Decimal | float | UnsetType = UNSET,
        from_settings: Sequence[str] = (),
        reason: str | None = None,
    ) -> t.Limits:
        """Change the limits that are given; None: no limit.

        They stay until they are named in `from_settings`: then the settings of servers count again.
        """
        request = guards.ChangeLimits(
            daily_budget_usd=daily_budget_usd,
            velocity_usd=velocity_usd,
            velocity_window_sec=velocity_window_sec,
            velocity_action=velocity_action,
            default_max_cost_usd=default_max_cost_usd,
            crash_cost_fraction=crash_cost_fraction,
            judge_max_cost_usd=judge_max_cost_usd,
            from_settings=tuple(from_settings),
            reason=reason,
        )
        return await self.backend.call(guards.change_limits, request)

    # Task types.

    async def types(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> t.Page[t.TypeInfo]:
        """Task types by name, with the defaults of their tasks and where each comes from."""
        return await self.backend.call(task_types.list_types, OnePage(limit=limit, cursor=cursor))

    async def get_type(self, type: str) -> t.TypeInfo:  # noqa: A002 - the name of the field
        return await self.backend.call(task_types.get_type, task_types.ByType(type=type))

    async def set_type(
        self,
        type: str,  # noqa: A002 - as above
        *,
        max_cost_usd: Decimal | float | UnsetType | None = UNSET,
        max_attempts: int | UnsetType | None = UNSET,
        max_duration_sec: t.Duration | UnsetType | None = UNSET,
        retry: t.RetrySpec | UnsetType | None = UNSET,
        parameters_schema: dict[str, Any] | UnsetType | None = UNSET,
        result_schema: dict[str, Any] | UnsetType | None = UNSET,
        description: str | UnsetType | None = UNSET,
        reason: str | None = None,
    ) -> t.TypeInfo:
        """Set defaults of a type, which win over what agents declare; None: as agents declare it."""
        request = task_types.SetType(
            type=type,
            max_cost_usd=max_cost_usd,
            max_attempts=max_attempts,
            max_duration_sec=max_duration_sec
            if isinstance(max_duration_sec, UnsetType)
            else seconds(max_duration_sec),
            retry=retry,
            parameters_schema=parameters_schema,
            result_schema=result_schema,
            description=description,
            reason=reason,
        )
        return await self.backend.call(task_types.set_type, request)

    # Guards.

    async def breakers(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> t.Page[t.Breaker]:
        """Circuit breakers that have counted a failure or were opened; all others are closed."""
        return await self.backend.call(guards.list_breakers, OnePage(limit=limit, cursor=cursor))

    async def open_breaker(self, key: str, *, reason: str | None = None) -> t.Breaker:
        """Block a task type, or `model:NAME`, until the breaker is reset."""
        return await self.backend.call(guards.open_breaker, ActByKey(key=key, reason=reason))

    async def reset_breaker(self, key: str, *, reason: str | None = None) -> t.Breaker:
        """Close a breaker and clear its failures."""
        return await self.backend.call(guards.reset_breaker, ActByKey(key=key, reason=reason))

    async def locks(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> t.Page[t.Lock]:
        """Document locks that are held."""
        return await self.backend.call(guards.list_locks, OnePage(limit=limit, cursor=cursor))

    async def release_lock(self, key: str, *, reason: str | None = None) -> None:
        """Take a lock from its holder; the next waiting task gets it."""
        await self.backend.call(guards.release_lock, ActByKey(key=key, reason=reason))

    async def slowdowns(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> t.Page[t.Slowdown]:
        """Slowdowns after rate limits that are in force."""
        return await self.backend.call(guards.list_slowdowns, OnePage(limit=limit, cursor=cursor))

    async def end_slowdown(self, key: str, *, reason: str | None = None) -> None:
        """End a slowdown at once: `model:NAME`, `provider:NAME` or `*`."""
        await self.backend.call(guards.end_slowdown, ActByKey(key=key, reason=reason))

    async def pause(
        self,
        type: str | None = None,  # noqa: A002 - the name of the field
        *,
        reason: str | None = None,
    ) -> None:
        """Stop claims of a task type, or of all types. Running tasks continue."""
        await self.backend.call(guards.pause, guards.PauseOrResume(type=type, reason=reason))

    async def resume(
        self,
        type: str | None = None,  # noqa: A002 - the name of the field
        *,
        reason: str | None = None,
    ) -> None:
        """End a pause. Resuming what is not paused changes nothing."""
        await self.backend.call(guards.resume, guards.PauseOrResume(type=type, reason=reason))

    # Quotas.

    async def quotas(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> t.Page[t.Quota]:
        """Quotas by name, with what runs and waits, and who holds them."""
        return await self.backend.call(quotas.list_quotas, OnePage(limit=limit, cursor=cursor))

    async def get_quota(self, name: str) -> t.QuotaDetails:
        """A quota with its busiest keys, and the tasks that hold it, use its rate and wait for it."""
        return await self.backend.call(quotas.get_quota, quotas.ByName(name=name))

    async def set_quota(
        self,
        name: str,
        match: str,
        *,
        each: bool = True,
        max_running: int | None = None,
        max_waiting: int | None = None,
        rate: t.Rate | None = None,
        weight: float = 1.0,
        reason: str | None = None,
    ) -> t.Quota:
        """Set a quota, whole; None: no limit. It applies from the next claim, and running tasks count.

        `match` is a key (`type:code`, `model:M`, `agent:ID`, `tag:TAG`, or one of the tasks' own
        `quota_keys`) or `PREFIX:*`. `each`: every matching key has its own limits; otherwise all share one.
        """
        request = quotas.SetQuota(
            name=name,
            match=match,
            each=each,
            max_running=max_running,
            max_waiting=max_waiting,
            rate=None
            if rate is None
            else quotas.NewRate(amount=rate.amount, unit=str(rate.unit), per_sec=rate.per_sec),
            weight=weight,
            reason=reason,
        )
        return await self.backend.call(quotas.set_quota, request)

    async def delete_quota(self, name: str, *, reason: str | None = None) -> None:
        """Delete a quota: tasks that waited for it can be claimed."""
        await self.backend.call(quotas.delete_quota, quotas.DeleteQuota(name=name, reason=reason))

    # The installation.

    async def stats(self) -> t.Stats:
        """Queue depth, throughput and spending."""
        return await self.backend.call(stats.get_stats, Nothing())

    async def waiting(self) -> t.Waiting:
        """How many tasks wait for which reason."""
        return await self.backend.call(stats.get_waiting, Nothing())

    async def throughput(self) -> t.ThroughputHistory:
        """What ended in each minute of the last hour, and how long recent tasks had waited."""
        return await self.backend.call(stats.get_throughput, Nothing())

    async def costs(
        self,
        *,
        days: int = DEFAULT_DAYS,
        type: str | None = None,  # noqa: A002 - the name of the field
        model: str | None = None,
        agent_id: str | None = None,
    ) -> t.Costs:
        """Costs of the last UTC days by day, type, model, agent and DAG, and today's with a forecast.

        With a type, model or agent only those of its attempts.
        """
        request = stats.GetCosts(days=days, type=type, model=model, agent_id=agent_id)
        return await self.backend.call(stats.get_costs, request)

    async def attention(self) -> t.Attention:
        """What needs a person, and what holds work back."""
        return await self.backend.call(stats.get_attention, Nothing())

    async def health(self) -> t.Readiness:
        """Raises UnavailableError unless a migrated database can be reached."""
        return await self.backend.health()

    async def tokens(self) -> Sequence[t.Token]:
        """All tokens of the HTTP API, including revoked ones, oldest first."""
        return (await self.backend.call(tokens.list_tokens, Nothing())).items

    async def create_token(
        self, name: str, scope: str, *, agent_id: str | None = None, budget_usd: Decimal | float | None = None
    ) -> t.NewToken:
        """Create a token: `scope` is read, submit, agent, operate or admin. The secret is shown only here.

        With the scope agent, `agent_id` binds it to one agent, and `budget_usd` is that agent's budget.
        """
        request = tokens.CreateToken(name=name, scope=scope, agent_id=agent_id, budget_usd=budget_usd)
        return await self.backend.call(tokens.create_token, request)

    async def revoke_token(self, which: str, *, pause_sources: bool = False) -> None:
        """Revoke a token by id, or every token with this name.

        Sources of a token that is bound to an agent pause; those of others only with `pause_sources`.
        """
        request = tokens.RevokeToken(id=which, pause_sources=pause_sources)
        await self.backend.call(tokens.revoke_token, request)
