"""Agents: registering, reading, changing."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
from psycopg.rows import class_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.transition.lifecycle import Lifecycle
from lineshaft.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from lineshaft.ids import new_id
from lineshaft.model.budget import money
from lineshaft.types import AgentInfo, NewAgent, Page
from lineshaft.types.page import check_limit

MAX_SLOTS = 10_000


class Fleet:
    def __init__(self, database: Database, lifecycle: Lifecycle) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._sql = catalog.load("agents")

    async def register(self, agent: NewAgent, *, key: str | None = None) -> AgentInfo:
        """Make a new incarnation; what an earlier one still held fails as `agent_restarted` at once.

        With the idempotency key of the incarnation in force it is that one, and nothing is changed.
        """
        _check(agent)
        agent_id = agent.id or new_id("agent")
        values = {
            **self._database.now,
            "id": agent_id,
            "type": agent.type,
            "capabilities": list(dict.fromkeys(agent.capabilities)),
            "types": None if agent.types is None else list(dict.fromkeys(agent.types)),
            "models": list(dict.fromkeys(agent.models_available)),
            "max_tasks": agent.max_concurrent_tasks,
            "budget": None if agent.budget_usd is None else money(agent.budget_usd, "budget_usd"),
            "poll_interval": agent.poll_interval_sec,
            "claim_ttl": agent.claim_ttl_sec,
            "heartbeat_interval": agent.heartbeat_interval_sec,
            "key": key,
        }

        async def work(connection: Connection) -> str:
            existing = None if key is None else await self._registered_with(connection, key, agent.id)
            if existing is not None:
                return existing
            await self._fail_held(connection, agent_id)
            cursor = await connection.execute(self._sql["register_agent"], values)
            (incarnation,) = (await cursor.fetchall())[0]
            # What the old incarnation claimed just before it was superseded.
            await self._fail_held(connection, agent_id)
            await self._log(connection, "agent.registered", agent_id, {"incarnation": incarnation})
            return agent_id

        return await self.read(await self._database.run(work))

    async def _registered_with(self, connection: Connection, key: str, wanted: str | None) -> str | None:
        await connection.execute(self._sql["lock_registration_key"], {"key": key})
        cursor = await connection.execute(self._sql["registered_with"], {"key": key})
        row = await cursor.fetchone()
        if row is not None and wanted not in {None, row[0]}:
            raise AlreadyExistsError(
                f"Asked to register agent {wanted!r} with the idempotency key {key!r}, but agent {row[0]!r} "
                "was registered with it. Use a key of its own for each registration."
            )
        return None if row is None else str(row[0])

    async def _fail_held(self, connection: Connection, agent_id: str) -> None:
        cursor = await connection.execute(self._sql["held_by"], {"agent_id": agent_id})
        await self._lifecycle.fail_held(connection, agent_id, [row[0] for row in await cursor.fetchall()])

    async def read(self, agent_id: str) -> AgentInfo:
        found = await self.read_all([agent_id])
        if not found:
            raise NotFoundError(f"There is no agent {agent_id!r}.")
        return found[0]

    async def read_all(
        self, agent_ids: list[str] | None = None, *, seen_within_sec: float | None = None
    ) -> list[AgentInfo]:
        """`seen_within_sec`: without those that have been offline for longer."""
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(AgentInfo)) as cursor,
        ):
            await cursor.execute(
                self._sql["read_agents"],
                {**self._database.now, "ids": agent_ids, "seen_within": seen_within_sec},
            )
            return await cursor.fetchall()

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
            await connection.execute(self._sql["patch_agent"], values)
        return await self.read(agent_id)

    async def mark_offline(self) -> list[str]:
        async with self._database.connection() as connection:
            cursor = await connection.execute(self._sql["mark_offline"], self._database.now)
            return [row[0] for row in await cursor.fetchall()]

    async def _log(self, connection: Connection, kind: str, agent_id: str, data: Any) -> None:
        encoded = msgspec.json.encode(data).decode()
        await connection.execute(
            self._sql["log_agent"],
            {**self._database.now, "kind": kind, "agent_id": agent_id, "data": encoded},
        )


def _check(agent: NewAgent) -> None:
    faults = _slot_faults(agent.max_concurrent_tasks)
    for name in ("poll_interval_sec", "claim_ttl_sec", "heartbeat_interval_sec"):
        value = getattr(agent, name)
        if not 0.05 <= value <= 86_400:  # noqa: PLR2004 - as in the settings: a twentieth of a second to a day
            faults.append((name, f"must be from 0.05 to 86400 seconds, got {value!r}"))
    _refuse(faults)


def _slot_faults(slots: int) -> list[tuple[str, str]]:
    if 1 <= slots <= MAX_SLOTS:
        return []
    return [("max_concurrent_tasks", f"must be from 1 to {MAX_SLOTS}, got {slots!r}")]


def _refuse(faults: list[tuple[str, str]]) -> None:
    if faults:
        raise InvalidInputError(errors=faults)
