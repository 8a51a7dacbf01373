"""Claiming: which agent gets which tasks. The statement `claim_tasks` does it all; this hands it over.

Where nothing is to be weighed the shorter `claim_plain` gives the same answer, and is tried first.

A breaker that may be probed is left alone by ordinary claims. They tell that there is one, and the agent's
next claim begins with the probe, or this one ends with it if there is room: otherwise an agent with enough
other work would never try.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from typing import Any, Protocol

import msgspec
from psycopg.rows import class_row

from lineshaft.errors import LineshaftError, NotFoundError, SupersededError
from lineshaft.model.states import Status
from lineshaft.sql import catalog
from lineshaft.store.breakers import MODEL, Breakers
from lineshaft.store.database import Connection, Database
from lineshaft.store.round_trip import round_trip, transaction
from lineshaft.store.shortcut import Shortcut

LOCK_TTL_SEC = 600.0
#: A claim that found tasks whose lock is held looks again, this often; each time it has parked more of them.
_ROUNDS = 20
#: A new generation is worth opening after so many claims; one that can't be closed yet is tried again sooner.
_TURN_AFTER = 5_000
_CLOSE_AFTER = 500
_MOVED_AT_ONCE = 5_000


class ClaimedTask(msgspec.Struct, frozen=True, gc=False):
    """A row of `claim_tasks`, in its order, and what all rows of a claim have in common."""

    id: str
    #: The fencing number: every write of this claim carries it.
    epoch: int
    #: None while the DAG is virtual: a standalone task's.
    live_dag_id: str | None
    lock_key: str | None
    model: str | None
    attempts: int
    rate_limits: int
    #: Of earlier attempts.
    cost_usd: Decimal
    limit_sec: float
    heartbeat_interval_sec: float
    #: It was started before: steps, checkpoint and children may be there.
    resume: bool
    type: str
    title: str
    spec: bytes
    dag_id: str
    parent_id: str | None
    deadline: datetime | None
    max_attempts: int
    max_cost_usd: Decimal | None
    gates: bytes | None
    require_decision_report: bool
    started: bool
    claimed_at: datetime
    claim_ttl_sec: float

    @property
    def status(self) -> str:
        return Status.RUNNING if self.started else Status.CLAIMED

    @property
    def lease_until(self) -> datetime:
        lease = min(3 * self.heartbeat_interval_sec, self.limit_sec) if self.started else self.claim_ttl_sec
        return self.claimed_at + timedelta(seconds=lease)

    @property
    def limit_at(self) -> datetime | None:
        return self.claimed_at + timedelta(seconds=self.limit_sec) if self.started else None

    @property
    def reserved_usd(self) -> Decimal:
        return self.max_cost_usd or Decimal(0)


class Generations(Protocol):
    """What claims ask of the upkeep."""

    async def turn_generation(self, left: int) -> bool: ...

    async def close_generations(self, limit: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Resumed:
    """What earlier attempts at a task left behind, each as JSON."""

    id: str
    checkpoint: bytes | None = None
    steps: bytes | None = None
    last_error: bytes | None = None
    children: bytes | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    tasks: list[ClaimedTask] = field(default_factory=list)
    #: By task id, for those with `resume`.
    resumed: dict[str, Resumed] = field(default_factory=dict)
    #: Outputs that tasks refer to in `context_refs`, by task id, as JSON.
    inputs: dict[str, bytes | None] = field(default_factory=dict)
    #: Some of this agent's models are slowed down until then; None: none.
    slowdown_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class _Round:
    """What one statement gave."""

    tasks: list[ClaimedTask]
    #: Some were in the way of others, and are no more; or it must be decided anew what can be paid.
    again: bool
    #: Where others were just taking what was best, though there is more elsewhere.
    contested: list[int]
    #: Who has a lock for nothing.
    stranded: list[str]
    #: A breaker may be probed.
    probe_due: bool
    slowdown_until: datetime | None


class _ProbeTakenError(Exception):
    """Another claim was quicker with the probe: this one is rolled back."""


class Claims:
    def __init__(
        self,
        database: Database,
        generations: Generations,
        why_not: Callable[[str, str], Awaitable[LineshaftError]],
        breakers: Breakers,
        *,
        daily_budget_usd: Decimal | None = None,
    ) -> None:
        """`why_not` tells why an agent, named second, can't have a task."""
        self._database = database
        self._why_not = why_not
        self._generations = generations
        self._breakers = breakers
        self._daily_budget = daily_budget_usd
        self._sql = catalog.load("claims")
        self._plain = catalog.load("shortcuts")["claim_plain"]
        self._shortcut = Shortcut()
        self._take_probing = catalog.load("breakers")["take_probing"]
        self._unpark = catalog.load("changes")["unpark_lock_waiters"]
        #: Tasks this process has claimed since it last saw to the generations.
        self._left = 0
        self._turn_at = _TURN_AFTER
        #: Agents whose last claim found a breaker that may be probed.
        self._probers: set[str] = set()

    async def claim(
        self,
        agent_id: str,
        incarnation: int,
        *,
        limit: int = 1,
        types: list[str] | None = None,
        start: bool = False,
    ) -> Claim:
        """Take up to `limit` tasks, best first; with `start` they are RUNNING at once."""
        parameters = self._parameters(agent_id, incarnation, limit=limit, types=types, start=start)
        tasks: list[ClaimedTask] = []
        stranded: set[str] = set()
        slowdown_until = None
        tried = agent_id in self._probers
        if tried:
            tasks = await self._claim_probes(parameters, stranded)
        elif self._daily_budget is None and self._shortcut.is_open(agent_id):
            tasks, is_all = await self._database.run_alone(lambda own: self._claim_plain(own, parameters))
            if is_all:
                return await self._claimed(tasks, None)
        for _ in range(_ROUNDS):
            parameters["limit"] = limit - len(tasks)
            found = await self._database.run_alone(lambda own: self._claim_once(own, parameters))
            tasks += found.tasks
            stranded.update(found.stranded)
            slowdown_until = found.slowdown_until
            # Whoever is told that there is nothing, while there is, waits for the next wake-up, or poll.
            if len(tasks) == limit or not (found.again or found.contested or found.stranded):
                break
            parameters["passed_over"] = [*parameters["passed_over"], *found.contested]
        if not tried and len(tasks) < limit and agent_id in self._probers:
            parameters["limit"] = limit - len(tasks)
            tasks += await self._claim_probes(parameters, stranded)
        if stranded := stranded - {task.id for task in tasks}:
            await self._database.run(lambda own: self._free(own, sorted(stranded)))
        return await self._claimed(tasks, slowdown_until)

    async def _claimed(self, tasks: list[ClaimedTask], slowdown_until: datetime | None) -> Claim:
        self._left += len(tasks)
        if self._left >= self._turn_at:
            await self._turn()
        return await self._with_history(tasks, slowdown_until)

    async def claim_task(
        self, agent_id: str, incarnation: int, task_id: str, *, start: bool = False
    ) -> Claim:
        """Take this very task, whoever comes before it in the queue; or say why it can't be had (R-063)."""
        parameters = self._parameters(agent_id, incarnation, task_id=task_id, start=start)
        found = await self._database.run_alone(lambda own: self._claim_once(own, parameters))
        tasks, stranded = found.tasks, set(found.stranded)
        if not tasks and found.probe_due:
            tasks = await self._claim_probes(parameters, stranded)
        if stranded := stranded - {task.id for task in tasks}:
            await self._database.run(lambda own: self._free(own, sorted(stranded)))
        if not tasks:
            raise await self._why_not(task_id, agent_id)
        return await self._with_history(tasks, found.slowdown_until)

    def _parameters(
        self,
        agent_id: str,
        incarnation: int,
        *,
        limit: int = 1,
        types: list[str] | None = None,
        task_id: str | None = None,
        start: bool,
    ) -> dict[str, Any]:
        return {
            "agent_id": agent_id,
            "incarnation": incarnation,
            "limit": limit,
            "types": types,
            "start": start,
            "task_id": task_id,
            "passed_over": [],
            "lock_ttl": LOCK_TTL_SEC,
            "probing": None,
            "daily_budget": self._daily_budget,
        }

    async def _claim_probes(self, parameters: dict[str, Any], stranded: set[str]) -> list[ClaimedTask]:
        """One task of each breaker that waits for a probe, as far as this agent can take one."""
        tasks: list[ClaimedTask] = []
        for _ in range(_ROUNDS):
            try:
                found = await self._database.run_alone(lambda own: self._claim_probe(own, parameters))
            except _ProbeTakenError:
                break
            if found is None:
                break
            tasks += found.tasks
            stranded.update(found.stranded)
            # What was parked made room for others, as in any claim.
            if len(tasks) == parameters["limit"] or not (found.tasks or found.again):
                break
        return tasks

    async def _claim_probe(self, connection: Connection, parameters: dict[str, Any]) -> _Round | None:
        """None: there is nothing to probe, or another claim is at it."""
        taking = (self._take_probing, self._database.now)
        async with transaction(connection, taking) as (rows,):
            probing = {row[0] for row in rows}
            if not probing:
                return None
            found = await self._claim_once(connection, {**parameters, "limit": 1, "probing": sorted(probing)})
            for task in found.tasks:
                keys = probing & {task.type, f"{MODEL}{task.model}"}
                if not await self._breakers.hand_out(connection, task.id, keys):
                    raise _ProbeTakenError
        return found

    async def _turn(self) -> None:
        """Leave the dead index entries of past claims behind; see the table `generation`."""
        turned = self._left >= _TURN_AFTER and await self._generations.turn_generation(self._left)
        open_ones = await self._generations.close_generations(_MOVED_AT_ONCE)
        if turned:
            self._left = 0
        # A generation that could not be closed yet is looked into by every claim: try again soon.
        self._turn_at = self._left + (_CLOSE_AFTER if open_ones else _TURN_AFTER)

    async def _claim_once(self, connection: Connection, parameters: dict[str, Any]) -> _Round:
        calls = [(self._sql["claim_tasks"], {**self._database.now, **parameters})]
        if parameters["daily_budget"] is not None:
            calls.insert(0, (self._sql["lock_day"], {}))
        *_, rows = await round_trip(connection, *calls)
        *_, now, claim_ttl_sec, again, contested, stranded, probe_due, slowdown_until = rows[0]
        agent_id = parameters["agent_id"]
        (self._probers.add if probe_due else self._probers.discard)(agent_id)
        if rows[0][0] is not None:
            common = (parameters["start"], now, claim_ttl_sec)
            tasks = [ClaimedTask(*row[:-7] + common) for row in rows]
            return _Round(tasks, again, contested, stranded, probe_due, slowdown_until)
        # Nothing to do, or nobody to do it: an agent that was superseded must be told.
        found = await connection.execute(self._sql["find_agent"], {"agent_id": agent_id})
        _check_agent(agent_id, parameters["incarnation"], await found.fetchone())
        return _Round([], again, contested, stranded, probe_due, slowdown_until)

    async def _claim_plain(
        self, connection: Connection, parameters: dict[str, Any]
    ) -> tuple[list[ClaimedTask], bool]:
        """And whether that is all there is for now: nothing to weigh, nothing elsewhere."""
        (rows,) = await round_trip(connection, (self._plain, {**self._database.now, **parameters}))
        rows.sort(key=itemgetter(-1))
        *_, now, claim_ttl_sec, weigh, contested, _ = rows[0]
        self._shortcut.tried(parameters["agent_id"], worked=not weigh)
        common = (parameters["start"], now, claim_ttl_sec)
        tasks = [ClaimedTask(*row[:-5] + common) for row in rows if row[0] is not None]
        return tasks, not (weigh or contested)

    async def _free(self, connection: Connection, task_ids: list[str]) -> None:
        cursor = await connection.execute(self._sql["free_stranded"], {"ids": task_ids})
        keys = [row[0] for row in await cursor.fetchall()]
        if keys:
            await connection.execute(self._unpark, {"keys": keys})

    async def _with_history(self, tasks: list[ClaimedTask], slowdown_until: datetime | None) -> Claim:
        resumed = [task.id for task in tasks if task.resume]
        wanted = sorted({name for task in tasks for name in _context_tasks(task.spec)})
        claim = Claim(tasks, slowdown_until=slowdown_until)
        if not resumed and not wanted:
            return claim
        async with self._database.connection() as connection:
            if resumed:
                async with connection.cursor(row_factory=class_row(Resumed)) as cursor:
                    await cursor.execute(self._sql["resumed"], {"ids": resumed})
                    claim.resumed.update({row.id: row for row in await cursor.fetchall()})
            if wanted:
                # A source that was cancelled is there as None.
                claim.inputs.update(dict.fromkeys(wanted))
                outputs = await connection.execute(self._sql["inputs"], {"ids": wanted})
                claim.inputs.update({row[0]: row[1] for row in await outputs.fetchall()})
        return claim


def _check_agent(agent_id: str, incarnation: int, found: tuple[Any, ...] | None) -> None:
    if found is None:
        raise NotFoundError(f"There is no agent {agent_id!r}. Register it first.")
    if found[0] != incarnation:
        raise SupersededError(
            f"Agent {agent_id!r} was registered again: this is incarnation {incarnation}, the one in force "
            f"is {found[0]}. This process must stop; if it is the right one, register it anew."
        )


def _context_tasks(spec: bytes) -> list[str]:
    if b'"context_refs"' not in spec:
        return []
    refs = msgspec.json.decode(spec).get("context_refs", [])
    return [ref[5:-7] for ref in refs if ref.startswith("task:") and ref.endswith(":output")]
