"""Agents: registration, presence, reads and changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows
from lineshaft.engine.transition.fail import Fail
from lineshaft.errors import AlreadyExistsError, InvalidInputError, NotFoundError, SupersededError
from lineshaft.ids import new_id
from lineshaft.model.budget import money
from lineshaft.model.storable import is_storable
from lineshaft.types import AgentInfo, NewAgent, Page, RegisteredAgent
from lineshaft.types.agents import MAX_VERSION
from lineshaft.types.page import check_limit

_SQL = catalog.load(__name__)
MAX_SLOTS = 10_000


@dataclass(frozen=True, slots=True)
class Present:
    incarnation: int
    #: active, draining or offline: set by hand, or as its process reported.
    status: str
    capabilities: list[str]
    types: list[str] | None
    models_available: list[str]
    #: The end of the longest slowdown of its models; None: no slowdown.
    slowdown_until: datetime | None


class Fleet:
    def __init__(self, database: Database, fail: Fail) -> None:
        self._database = database
        self._fail = fail

    async def register(
        self, agent: NewAgent, *, key: str | None = None, budget_usd: Decimal | None = None
    ) -> RegisteredAgent:
        """Create a new incarnation; claims of an earlier one fail as `agent_restarted` at once.

        `budget_usd` comes from the agent's token and counts instead of the budget that the agent declares.
        With the idempotency key of the current incarnation, that one is returned and nothing changes.
        """
        _check(agent)
        agent_id = agent.id or new_id("agent")
        declared = None if agent.budget_usd is None else money(agent.budget_usd, "budget_usd")
        budget = declared if budget_usd is None else budget_usd
        values = {
            **self._database.now,
            "id": agent_id,
            "type": agent.type,
            "capabilities": list(dict.fromkeys(agent.capabilities)),
            "types": None if agent.types is None else list(dict.fromkeys(agent.types)),
            "models": list(dict.fromkeys(agent.models_available)),
            "version": agent.version,
            "max_tasks": agent.max_concurrent_tasks,
            "budget": budget,
            "poll_interval": agent.poll_interval_sec,
            "claim_ttl": agent.claim_ttl_sec,
            "heartbeat_interval": agent.heartbeat_interval_sec,
            "key": key,
        }

        async def work(connection: Connection) -> str:
            existing = None if key is None else await self._registered_with(connection, key, agent.id)
            if existing is not None:
                return existing
            for superseded in await fetch_column(connection, _SQL["incarnation"], {"agent_id": agent_id}):
                await self._fail_held(connection, agent_id, superseded)
            (incarnation,) = await fetch_column(connection, _SQL["register_agent"], values)
            # Claims that the old incarnation made just before it was superseded.
            await self._fail_held(connection, agent_id, incarnation - 1)
            await self._log(connection, "agent.registered", agent_id, {"incarnation": incarnation})
            return agent_id

        found = await self.read(await self._database.run(work))
        fields = {name: getattr(found, name) for name in found.__struct_fields__}
        return RegisteredAgent(**fields, warnings=_budget_warnings(found, declared, budget_usd))

    async def _registered_with(self, connection: Connection, key: str, wanted: str | None) -> str | None:
        await connection.execute(_SQL["lock_registration_key"], {"key": key})
        for known in await fetch_column(connection, _SQL["registered_with"], {"key": key}):
            if wanted not in {None, known}:
                raise AlreadyExistsError(
                    f"Asked to register agent {wanted!r} with the idempotency key {key!r}, but agent "
                    f"{known!r} was registered with it. Use a separate key for each registration."
                )
            return str(known)
        return None

    async def _fail_held(self, connection: Connection, agent_id: str, incarnation: int) -> None:
        held = await fetch_column(connection, _SQL["held_by"], {"agent_id": agent_id})
        await self._fail.fail_held(connection, agent_id, incarnation, held)

    async def read(self, agent_id: str) -> AgentInfo:
        found = await self.read_all([agent_id])
        if not found:
            raise NotFoundError(f"There is no agent {agent_id!r}.")
        return found[0]

    async def read_all(
        self, agent_ids: list[str] | None = None, *, seen_within_sec: float | None = None
    ) -> list[AgentInfo]:
        """`seen_within_sec`: without agents that have been offline for longer."""
        parameters = {**self._database.now, "ids": agent_ids, "seen_within": seen_within_sec}
        async with self._database.connection() as connection:
            return await fetch_rows(connection, AgentInfo, _SQL["read_agents"], parameters)

    async def page(self, *, status: Sequence[str], limit: int, cursor: str | None) -> Page[AgentInfo]:
        """By id."""
        check_limit(limit)
        found = [agent for agent in await self.read_all() if not status or agent.status in status]
        start = 0 if cursor is None else sum(agent.id <= cursor for agent in found)
        items = found[start : start + limit]
        return Page(items, items[-1].id if len(found) > start + limit else None)

    async def patch(
        self,
        agent_id: str,
        *,
        add_budget_usd: Decimal | float | None = None,
        status: str | None = None,
        max_concurrent_tasks: int | None = None,
    ) -> AgentInfo:
        """`status`: draining and offline stay, whatever the process reports, until it is set to active."""
        if status not in {None, "active", "draining", "offline"}:
            raise InvalidInputError(
                errors=[("status", f"must be active, draining or offline, got {status!r}")]
            )
        if max_concurrent_tasks is not None:
            _refuse(_slot_faults(max_concurrent_tasks))
        values = {
            "id": agent_id,
            "add_budget": None if add_budget_usd is None else money(add_budget_usd, "add_budget_usd"),
            "status": status,
            "max_tasks": max_concurrent_tasks,
        }
        async with self._database.connection() as connection:
            await connection.execute(_SQL["patch_agent"], values)
        return await self.read(agent_id)

    async def mark_offline(self) -> list[str]:
        """Report agents without a heartbeat for three intervals, and at least 90 s; each silence once."""
        async with self._database.connection() as connection:
            return await fetch_column(connection, _SQL["mark_offline"], self._database.now)

    async def present(self, agent_id: str, incarnation: int) -> Present:
        """Record that an agent is alive, because it asks for work; also returns what it may claim."""
        parameters = {**self._database.now, "agent_id": agent_id, "incarnation": incarnation}
        async with self._database.connection() as connection:
            found = await fetch_row(connection, Present, _SQL["present"], parameters)
        check_incarnation(agent_id, incarnation, None if found is None else found.incarnation)
        assert found is not None  # noqa: S101 - an unknown agent is refused above
        return found

    async def drain(self, agent_id: str, incarnation: int) -> None:
        """An agent that is about to stop: it claims nothing more."""
        await self._execute("drain", agent_id, incarnation)

    async def leave(self, agent_id: str, incarnation: int) -> None:
        """An agent that has stopped: it is offline at once, until it registers again."""
        await self._execute("leave", agent_id, incarnation)

    async def _execute(self, statement: str, agent_id: str, incarnation: int) -> None:
        async with self._database.connection() as connection:
            await connection.execute(
                _SQL[statement], {**self._database.now, "agent_id": agent_id, "incarnation": incarnation}
            )

    async def _log(self, connection: Connection, kind: str, agent_id: str, data: Any) -> None:
        encoded = msgspec.json.encode(data).decode()
        await connection.execute(
            _SQL["log_agent"],
            {**self._database.now, "kind": kind, "agent_id": agent_id, "data": encoded},
        )


def _budget_warnings(agent: AgentInfo, declared: Decimal | None, granted: Decimal | None) -> list[str]:
    if declared not in {None, agent.budget_usd}:
        given = f"budget_usd={_usd(declared)}"
    elif granted not in {None, agent.budget_usd}:
        given = f"The budget of the token, {_usd(granted)} USD,"
    else:
        return []
    remedy = f"To change it: lineshaft agents change {agent.id} --add-budget USD"
    return [f"{given} is ignored: agent {agent.id!r} has a budget of {_usd(agent.budget_usd)} USD. {remedy}"]


def _usd(amount: Decimal | None) -> str:
    return "unlimited" if amount is None else f"{amount.normalize():f}"


def check_incarnation(agent_id: str, incarnation: int, current: int | None) -> None:
    """`current`: None, if the agent is unknown."""
    if current is None:
        raise NotFoundError(f"There is no agent {agent_id!r}. Register it first.")
    if current != incarnation:
        raise SupersededError(
            f"Agent {agent_id!r} was registered again: this is incarnation {incarnation}, the current one is "
            f"{current}. This process must stop; if it is the right one, register it again."
        )


def _check(agent: NewAgent) -> None:
    faults = _slot_faults(agent.max_concurrent_tasks)
    for name in ("poll_interval_sec", "claim_ttl_sec", "heartbeat_interval_sec"):
        value = getattr(agent, name)
        if not 0.05 <= value <= 86_400:  # noqa: PLR2004 - as in the settings: a twentieth of a second to a day
            faults.append((name, f"must be from 0.05 to 86400 seconds, got {value!r}"))
    if agent.version is not None and not (
        1 <= len(agent.version) <= MAX_VERSION and is_storable(agent.version)
    ):
        faults.append(
            ("version", f"must be a text of 1 to {MAX_VERSION} characters, got {agent.version!r:.100}")
        )
    _refuse(faults)


def _slot_faults(slots: int) -> list[tuple[str, str]]:
    if 1 <= slots <= MAX_SLOTS:
        return []
    return [("max_concurrent_tasks", f"must be from 1 to {MAX_SLOTS}, got {slots!r}")]


def _refuse(faults: list[tuple[str, str]]) -> None:
    if faults:
        raise InvalidInputError(errors=faults)
