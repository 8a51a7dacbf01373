"""Agents and their instances: registration, presence, reads and changes.

An agent is a role, with a budget and a status. An instance is one running process of it, with its own
capabilities, slots and heartbeat; claims lock the row of their instance.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from lineshaft.engine.feed.actor import act_json, with_actor
from lineshaft.engine.guards.task_types import TaskTypes
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows
from lineshaft.engine.read.unknown_instance import unknown_instance
from lineshaft.engine.transition.fail import Failures
from lineshaft.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTransitionError,
    NotFoundError,
)
from lineshaft.ids import new_id
from lineshaft.model.accounts import account_fault
from lineshaft.model.budget import money
from lineshaft.model.fields import check_fields
from lineshaft.model.instance_names import short_names
from lineshaft.model.storable import is_storable
from lineshaft.model.type_defaults import TypeDefaults, checked
from lineshaft.types import AgentAccount, AgentInfo, InstanceInfo, NewAgent, Page, RegisteredAgent
from lineshaft.types.agents import MAX_GONE, MAX_INSTANCE, MAX_VERSION
from lineshaft.types.features import FEATURES
from lineshaft.types.page import check_limit

_SQL = catalog.load(__name__)
MAX_SLOTS = 10_000
#: Instances that are offline and hold nothing: so many of each agent are shown.
_OFFLINE_SHOWN = 10
#: Siblings on the same machine whose processes an instance watches.
_WATCHED = 3


class Present(Struct, frozen=True):
    #: active, draining or offline: set by hand, or as its process reported.
    status: str
    capabilities: list[str]
    types: list[str] | None
    models_available: list[str]
    #: The end of the longest slowdown of its models; None: no slowdown.
    slowdown_until: datetime | None


class _Registered(NamedTuple):
    agent_id: str
    incarnation: int


class _Superseded(NamedTuple):
    incarnation: int
    held: int


class _Role(NamedTuple):
    """What a new instance takes from its agent."""

    incarnation: int
    set_status: str | None
    set_max_tasks: int | None


class _AgentRow(Struct, frozen=True):
    id: str
    type: str | None
    budget_usd: Decimal | None
    spent_usd: Decimal
    reserved_usd: Decimal
    set_status: str | None
    set_max_tasks: int | None
    incarnation: int
    registered_at: datetime


class _InstanceRow(InstanceInfo, frozen=True, kw_only=True):
    """`status` is that of the process; what was set by hand isn't considered. Without tasks."""

    agent_id: str
    accounts: list[str]


class _Replicas(Struct, frozen=True):
    """Instances of one agent that are alike, together."""

    status: str
    capabilities: list[str]
    types: list[str] | None
    models_available: list[str]
    accounts: list[str]
    max_concurrent_tasks: int
    current_tasks: int
    last_heartbeat: datetime


class _Use(NamedTuple):
    agent_id: str
    share: float


class _HeldRow(NamedTuple):
    agent_id: str
    incarnation: int
    task_ids: list[str]


class Fleet:
    def __init__(self, database: Database, fail: Failures, types: TaskTypes) -> None:
        self._database = database
        self._fail = fail
        self._types = types

    # Registration.

    async def register(
        self, agent: NewAgent, *, key: str | None = None, budget_usd: Decimal | None = None
    ) -> RegisteredAgent:
        """Create an instance. One of the same name is superseded: its claims fail as `agent_restarted`.

        The same happens to instances in `gone`. `budget_usd` comes from the agent's token and counts instead
        of the budget that the agent declares. With the idempotency key of an instance, that one is returned
        and nothing changes.
        """
        _check(agent)
        task_defaults = _checked_defaults(agent)
        agent_id = agent.id or new_id("agent")
        declared = None if agent.budget_usd is None else money(agent.budget_usd, "budget_usd")
        values = {
            **self._database.now,
            "id": agent_id,
            "agent_id": agent_id,
            "type": agent.type,
            "budget": declared if budget_usd is None else budget_usd,
            "name": agent.instance,
            "host": agent.host,
            "gone": list(agent.gone),
            "capabilities": list(dict.fromkeys(agent.capabilities)),
            "types": None if agent.types is None else list(dict.fromkeys(agent.types)),
            "models": list(dict.fromkeys(agent.models_available)),
            "accounts": list(dict.fromkeys(agent.accounts)),
            "version": agent.version,
            "max_tasks": agent.max_concurrent_tasks,
            "poll_interval": agent.poll_interval_sec,
            "claim_ttl": agent.claim_ttl_sec,
            "heartbeat_interval": agent.heartbeat_interval_sec,
            "key": key,
        }
        changed_types: list[str] = []

        async def work(connection: Connection) -> _Registered:
            existing = None if key is None else await self._registered_with(connection, key, agent.id)
            if existing is not None:
                return existing
            changed_types[:] = await self._types.declare(connection, agent_id, agent.version, task_defaults)
            # Mostly here, where the rows of tasks are locked before those of agents, as everywhere.
            await self._end_claims(connection, agent_id, await self._superseded(connection, values))
            (role,) = await fetch_rows(connection, _Role, _SQL["register_agent"], values)
            # Again under the lock of the agent: another registration may have had this name since.
            await self._remove(connection, agent_id, await self._superseded(connection, values))
            await connection.execute(_SQL["register_instance"], values | role._asdict())
            if agent.accounts:
                await connection.execute(_SQL["insert_accounts"], values)
            data = {"incarnation": role.incarnation, "instance": agent.instance}
            await self._log(connection, "agent.registered", agent_id, data)
            return _Registered(agent_id, role.incarnation)

        registered = await self._database.run(work)
        await self._types.apply(changed_types)
        info = await self._read_registered(registered)
        fields = {name: getattr(info, name) for name in info.__struct_fields__}
        warnings = _budget_warnings(info, declared, budget_usd) + await self._types.warnings(task_defaults)
        return RegisteredAgent(**fields, warnings=warnings, features=sorted(FEATURES))

    async def _read_registered(self, registered: _Registered) -> AgentInfo:
        """The agent with only this instance, so that a thousandth replica starts as fast as the first."""
        agent_id, incarnation = registered
        asked = {
            **self._database.now,
            "ids": [agent_id],
            "agent_id": agent_id,
            "incarnation": incarnation,
            "incarnations": [incarnation],
            "offline": 1,
        }
        async with self._database.connection() as connection:
            agents = await fetch_rows(connection, _AgentRow, _SQL["read_agents"], asked)
            instances = await fetch_rows(connection, _InstanceRow, _SQL["read_instances"], asked)
            if not agents or not instances:
                # Another process has registered the same name since.
                raise await unknown_instance(connection, agent_id, incarnation)
            groups = await fetch_rows(connection, _Replicas, _SQL["read_replicas"], asked)
            held = (
                await fetch_column(connection, _SQL["held_by"], asked) if instances[0].current_tasks else []
            )
            accounts = await self._accounts(connection, groups)
        info = _agent(agents[0], groups, [_instance(agents[0], instances[0], held)], accounts)
        return msgspec.structs.replace(info, incarnation=incarnation)

    async def _registered_with(
        self, connection: Connection, key: str, agent_id: str | None
    ) -> _Registered | None:
        await connection.execute(_SQL["lock_registration_key"], {"key": key})
        for registered in await fetch_rows(connection, _Registered, _SQL["registered_with"], {"key": key}):
            if agent_id not in {None, registered.agent_id}:
                raise AlreadyExistsError(
                    f"Asked to register agent {agent_id!r} with the idempotency key {key!r}, but agent "
                    f"{registered.agent_id!r} was registered with it. Use a separate key for each "
                    "registration."
                )
            return registered
        return None

    async def _superseded(self, connection: Connection, values: dict[str, Any]) -> list[_Superseded]:
        return await fetch_rows(connection, _Superseded, _SQL["superseded"], values)

    async def _end_claims(
        self, connection: Connection, agent_id: str, instances: Sequence[_Superseded]
    ) -> None:
        """What these instances hold fails as `agent_restarted`."""
        if not any(instance.held for instance in instances):
            return
        incarnations = [instance.incarnation for instance in instances]
        asked = {"agent_id": agent_id, "incarnations": incarnations}
        held = await fetch_column(connection, _SQL["held_by"], asked)
        await self._fail.fail_held(connection, agent_id, incarnations, held)

    async def _remove(self, connection: Connection, agent_id: str, instances: Sequence[_Superseded]) -> None:
        """Instances whose processes are gone, or must end."""
        if not instances:
            return
        asked = {"agent_id": agent_id, "incarnations": [instance.incarnation for instance in instances]}
        rows = await fetch_rows(connection, _Superseded, _SQL["lock_instances"], asked)
        # Claims that they made just before. The failed attempts have the names of the instances.
        await self._end_claims(connection, agent_id, rows)
        await connection.execute(_SQL["remove_instances"], asked)

    async def siblings(
        self, agent_id: str, incarnation: int, *, gone: Sequence[str] = (), everyone: bool = False
    ) -> list[str]:
        """An instance reports processes on its machine that are dead: what they held fails at once.

        Returns the names of other instances on the same machine: some for this one to watch, or all.
        """
        asked = {"agent_id": agent_id, "incarnation": incarnation, "gone": list(gone)}

        async def work(connection: Connection) -> None:
            dead = await fetch_rows(connection, _Superseded, _SQL["gone_siblings"], asked)
            await self._end_claims(connection, agent_id, dead)
            await self._remove(connection, agent_id, dead)

        if gone:
            await self._database.run(work)
        async with self._database.connection() as connection:
            asked["limit"] = MAX_GONE if everyone else _WATCHED
            names = await fetch_column(connection, _SQL["siblings"], asked)
            if not names and not await fetch_column(connection, _SQL["find_instance"], asked):
                raise await unknown_instance(connection, agent_id, incarnation)
        return names

    # Reads.

    async def read(self, agent_id: str) -> AgentInfo:
        agents = await self.read_all([agent_id])
        if not agents:
            raise NotFoundError(f"There is no agent {agent_id!r}.")
        return agents[0]

    async def read_all(
        self, agent_ids: list[str] | None = None, *, seen_within_sec: float | None = None
    ) -> list[AgentInfo]:
        """`seen_within_sec`: without agents that have been offline for longer."""
        asked = {**self._database.now, "ids": agent_ids, "incarnation": None, "offline": _OFFLINE_SHOWN}
        async with self._database.connection() as connection:
            agents = await fetch_rows(connection, _AgentRow, _SQL["read_agents"], asked)
            instances = await fetch_rows(connection, _InstanceRow, _SQL["read_instances"], asked)
            held = await fetch_rows(connection, _HeldRow, _SQL["read_held"], asked)
            accounts = await self._accounts(connection, instances)
        tasks = {(row.agent_id, row.incarnation): row.task_ids for row in held}
        by_agent: dict[str, list[_InstanceRow]] = {}
        for instance in instances:
            by_agent.setdefault(instance.agent_id, []).append(instance)
        infos = []
        for row in agents:
            replicas = by_agent.get(row.id, [])
            shown = [
                _instance(row, replica, tasks.get((row.id, replica.incarnation), [])) for replica in replicas
            ]
            infos.append(_agent(row, replicas, shown, accounts))
        if seen_within_sec is None:
            return infos
        now = self._database.now["now"] or datetime.now(UTC)
        return [
            agent
            for agent in infos
            if agent.last_heartbeat is not None
            and (agent.status != "offline" or (now - agent.last_heartbeat).total_seconds() < seen_within_sec)
        ]

    async def _accounts(
        self, connection: Connection, rows: Sequence[_InstanceRow | _Replicas]
    ) -> dict[str, AgentAccount]:
        """By name, those of all these instances."""
        if not (names := _union(row.accounts for row in rows)):
            return {}
        asked = {**self._database.now, "accounts": names}
        found = await fetch_rows(connection, AgentAccount, _SQL["read_accounts"], asked)
        return {account.name: account for account in found}

    async def utilization(self) -> dict[str, float]:
        """The share of time in which the instances of each agent held at least one task, 0 to 1."""
        async with self._database.connection() as connection:
            uses = await fetch_rows(connection, _Use, _SQL["utilization"], self._database.now)
        return {use.agent_id: use.share for use in uses}

    async def page(self, *, status: Sequence[str], limit: int, cursor: str | None) -> Page[AgentInfo]:
        """By id."""
        check_limit(limit)
        agents = [agent for agent in await self.read_all() if not status or agent.status in status]
        start = 0 if cursor is None else sum(agent.id <= cursor for agent in agents)
        items = agents[start : start + limit]
        return Page(items, items[-1].id if len(agents) > start + limit else None)

    # Changes by hand.

    async def patch(
        self,
        agent_id: str,
        *,
        budget_usd: Decimal | float | UnsetType | None = UNSET,
        add_budget_usd: Decimal | float | None = None,
        status: str | None = None,
        max_concurrent_tasks: int | UnsetType | None = UNSET,
        reason: str | None = None,
    ) -> AgentInfo:
        """`budget_usd`: a new total; None: unlimited.

        `status`: draining and offline stay, whatever its processes report, until it is set to active.
        `max_concurrent_tasks`: of each instance, present and future; None: as each declares.
        """
        if status not in {None, "active", "draining", "offline"}:
            raise InvalidInputError(
                errors=[("status", f"must be active, draining or offline, got {status!r}")]
            )
        if max_concurrent_tasks is not UNSET and max_concurrent_tasks is not None:
            _refuse(_slot_faults(max_concurrent_tasks))
        if add_budget_usd is not None and budget_usd is not UNSET:
            raise InvalidInputError(errors=[("add_budget_usd", "can't be given together with budget_usd")])
        values = {
            **self._database.now,
            "id": agent_id,
            "act": act_json(reason=reason),
            "sets_budget": budget_usd is not UNSET,
            "budget": None if budget_usd is UNSET or budget_usd is None else money(budget_usd, "budget_usd"),
            "add_budget": None if add_budget_usd is None else money(add_budget_usd, "add_budget_usd"),
            "status": status,
            "sets_max_tasks": max_concurrent_tasks is not UNSET,
            "max_tasks": None if max_concurrent_tasks is UNSET else max_concurrent_tasks,
            # Money concerns only the agent.
            "for_instances": status is not None or max_concurrent_tasks is not UNSET,
        }

        async def work(connection: Connection) -> None:
            if values["for_instances"]:
                await connection.execute(_SQL["lock_all_instances"], values)
            await connection.execute(_SQL["patch_agent"], values)

        await self._database.run(work)
        return await self.read(agent_id)

    async def delete(self, agent_id: str, *, reason: str | None = None) -> None:
        """Remove an agent from lists. Its budget and spend are kept for when it registers again."""
        asked = {**self._database.now, "agent_id": agent_id}
        act = with_actor({"deleted": True}, reason)

        async def work(connection: Connection) -> None:
            offline = await fetch_rows(connection, _Superseded, _SQL["offline_instances"], asked)
            await self._end_claims(connection, agent_id, offline)
            if not await fetch_column(connection, _SQL["lock_agent"], asked):
                raise NotFoundError(f"There is no agent {agent_id!r}.")
            live = await fetch_column(connection, _SQL["live_instances"], asked)
            if live:
                raise InvalidTransitionError(
                    f"Asked to delete agent {agent_id!r}, but {len(live)} of its instances are alive, among "
                    f"them {short_names(live)[0]!r}. Stop their processes first."
                )
            offline = await fetch_rows(connection, _Superseded, _SQL["offline_instances"], asked)
            await self._remove(connection, agent_id, offline)
            await connection.execute(_SQL["delete_agent"], asked)
            await connection.execute(_SQL["forget_counters"], {"ids": [agent_id]})
            await self._log(connection, "agent.changed", agent_id, act)

        await self._database.run(work)
        await self._types.forget_ended()

    # Duties.

    async def mark_offline(self) -> list[str]:
        """Report instances without a heartbeat for three intervals, and at least 90 s; each silence once.

        Returns the ids of their agents.
        """
        async with self._database.connection() as connection:
            return await fetch_column(connection, _SQL["mark_offline"], self._database.now)

    async def forget(self, *, silent_sec: float, unused_sec: float, limit: int) -> int:
        """Delete instances that have been silent for long, and agents that were only ever used once.

        Returns the number of deleted instances or agents, whichever is larger.
        """
        asked = {**self._database.now, "silent": silent_sec, "unused": unused_sec, "limit": limit}

        async def work(connection: Connection) -> int:
            instances = await connection.execute(_SQL["forget_instances"], asked)
            unused = await fetch_column(connection, _SQL["unused_agents"], asked)
            if unused:
                await connection.execute(_SQL["forget_agents"], {"ids": unused})
                await connection.execute(_SQL["forget_counters"], {"ids": unused})
            return max(instances.rowcount, len(unused))

        forgotten = await self._database.run(work)
        await self._types.forget_ended()
        return forgotten

    # Presence.

    async def present(self, agent_id: str, incarnation: int) -> Present:
        """Record that an instance is alive, because it asks for work; also returns what it may claim."""
        asked = {**self._database.now, "agent_id": agent_id, "incarnation": incarnation}
        async with self._database.connection() as connection:
            present = await fetch_row(connection, Present, _SQL["present"], asked)
            if present is None:
                raise await unknown_instance(connection, agent_id, incarnation)
        return present

    async def drain(self, agent_id: str, incarnation: int) -> None:
        """An instance that is about to stop: it claims nothing more."""
        await self._execute("drain", agent_id, incarnation)

    async def leave(self, agent_id: str, incarnation: int) -> None:
        """An instance that has stopped: it is offline at once."""
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


def _agent(
    row: _AgentRow,
    rows: Sequence[_InstanceRow | _Replicas],
    instances: list[InstanceInfo],
    accounts: Mapping[str, AgentAccount],
) -> AgentInfo:
    """`rows`: all its instances, the newest first, each or in groups; `instances`: those to show."""
    live = [replica for replica in rows if replica.status != "offline"]
    shown = live or rows[:1]
    types = None
    if shown and all(replica.types is not None for replica in shown):
        types = _union(replica.types or () for replica in shown)
    newest = instances[0] if instances else None
    remaining = None if row.budget_usd is None else row.budget_usd - row.spent_usd - row.reserved_usd
    defaults = NewAgent()
    return AgentInfo(
        id=row.id,
        type=row.type,
        capabilities=_union(replica.capabilities for replica in shown),
        types=types,
        models_available=_union(replica.models_available for replica in shown),
        accounts=[accounts[name] for name in _union(replica.accounts for replica in shown)],
        version=None if newest is None else newest.version,
        max_concurrent_tasks=sum(replica.max_concurrent_tasks for replica in shown),
        current_tasks=sum(replica.current_tasks for replica in rows),
        budget_usd=row.budget_usd,
        budget_remaining_usd=remaining,
        spent_usd=row.spent_usd,
        reserved_usd=row.reserved_usd,
        status=row.set_status or _status([replica.status for replica in rows]),
        last_heartbeat=max((replica.last_heartbeat for replica in rows), default=None),
        poll_interval_sec=(newest or defaults).poll_interval_sec,
        claim_ttl_sec=(newest or defaults).claim_ttl_sec,
        heartbeat_interval_sec=(newest or defaults).heartbeat_interval_sec,
        incarnation=row.incarnation,
        registered_at=row.registered_at,
        instances=instances,
    )


def _status(statuses: Sequence[str]) -> str:
    """The status of an agent: the best of those of its instances."""
    return next((status for status in ("active", "draining") if status in statuses), "offline")


def _union(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(item for items in lists for item in items))


def _instance(agent: _AgentRow, row: _InstanceRow, task_ids: list[str]) -> InstanceInfo:
    fields = {name: getattr(row, name) for name in InstanceInfo.__struct_fields__}
    if row.status != "offline" and agent.set_status is not None:
        fields["status"] = agent.set_status
    return InstanceInfo(**fields | {"task_ids": task_ids})


def _budget_warnings(agent: AgentInfo, declared: Decimal | None, granted: Decimal | None) -> list[str]:
    if declared not in {None, agent.budget_usd}:
        ignored = f"budget_usd={_usd(declared)}"
    elif granted not in {None, agent.budget_usd}:
        ignored = f"The budget of the token, {_usd(granted)} USD,"
    else:
        return []
    remedy = f"To change it: lineshaft agents change {agent.id} --budget USD"
    return [
        f"{ignored} is ignored: agent {agent.id!r} has a budget of {_usd(agent.budget_usd)} USD. {remedy}"
    ]


def _usd(amount: Decimal | None) -> str:
    return "unlimited" if amount is None else f"{amount.normalize():f}"


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
    for name in ("instance", "host"):
        value = getattr(agent, name)
        if value is not None and not (len(value) <= MAX_INSTANCE and is_storable(value)):
            faults.append((name, f"must be a text of up to {MAX_INSTANCE} characters, got {value!r:.100}"))
    if agent.gone and agent.host is None:
        faults.append(("gone", "needs host: only processes of one's own machine can be known to be dead"))
    if agent.budget_usd is not None and agent.id is None:
        faults.append(("budget_usd", "needs an id: without one the money would be new with every start"))
    named = ((name, account_fault(name)) for name in agent.accounts)
    faults += [("accounts", fault) for _, fault in named if fault is not None]
    _refuse(faults)


def _checked_defaults(agent: NewAgent) -> dict[str, TypeDefaults]:
    """What the agent declares about its types, as it is stored."""
    foreign = [] if agent.types is None else sorted(agent.task_defaults.keys() - set(agent.types))
    _refuse([(f"task_defaults.{type_}", "is not among the types that the agent serves") for type_ in foreign])
    for type_ in agent.task_defaults:
        check_fields(type=type_)
    return {
        type_: checked(defaults, f"task_defaults.{type_}")
        for type_, defaults in sorted(agent.task_defaults.items())
    }


def _slot_faults(slots: int) -> list[tuple[str, str]]:
    if 1 <= slots <= MAX_SLOTS:
        return []
    return [("max_concurrent_tasks", f"must be from 1 to {MAX_SLOTS}, got {slots!r}")]


def _refuse(faults: list[tuple[str, str]]) -> None:
    if faults:
        raise InvalidInputError(errors=faults)
