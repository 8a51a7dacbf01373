"""Claiming: which agent gets which tasks. The statement `claim_tasks` does it all; this hands it over.

Where nothing is to be weighed the shorter `claim_plain` gives the same answer, and is tried first.

A breaker that may be probed is left alone by ordinary claims. They tell that there is one, and the agent's
next claim begins with the probe, or this one ends with it if there is room: otherwise an agent with enough
other work would never try.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import msgspec
from psycopg.rows import class_row

from lineshaft.engine.claim.fast_path import FastPath
from lineshaft.engine.guards.breakers import MODEL, Breakers
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.pipeline import pipelined, transaction
from lineshaft.errors import LineshaftError, NotFoundError, SupersededError, UnavailableError
from lineshaft.types.work import Claim, ClaimedTask, Resumed

LOCK_TTL_SEC = 600.0
#: A claim that found tasks in the way looks again, this often at most; what is parked is in nobody's way.
_ROUNDS = 1_000
#: So long it waits for those who hold all that it found. Mostly that is another claim, over at once.
_PAUSES_SEC = (0.01, 0.04, 0.16)
#: A new generation is worth opening after so many claims; one that can't be closed yet is tried again sooner.
_TURN_AFTER = 5_000
_CLOSE_AFTER = 500
_MOVED_AT_ONCE = 5_000


class Generations(Protocol):
    """What claims ask of maintenance."""

    async def turn_generation(self, left: int) -> bool: ...

    async def close_generations(self, limit: int) -> int: ...


@dataclass(frozen=True, slots=True)
class _Round:
    """What one statement gave."""

    tasks: list[ClaimedTask]
    #: The agent could take something.
    has_room: bool
    #: There may be something that it can't take, though others can.
    leaves_some: bool
    #: Some were in the way of others, and are no more; or it must be decided anew what can be paid.
    again: bool
    #: Where others were just taking what was best, though there is more elsewhere.
    contested: list[int]
    #: Somebody else holds all that is there.
    missed: bool
    #: Who has a lock for nothing.
    stranded: list[str]
    #: A breaker may be probed.
    probe_due: bool
    slowdown_until: datetime | None


class _Plain(NamedTuple):
    """What the short way gave."""

    tasks: list[ClaimedTask]
    has_room: bool
    #: Nothing is to be weighed, and there is nothing elsewhere.
    is_all: bool
    #: Somebody else holds all that is there.
    missed: bool


class Returns(Protocol):
    """Takes back what nobody is told of."""

    def release_if_undelivered(self, tasks: list[ClaimedTask]) -> AbstractContextManager[None]: ...


class _ProbeTakenError(Exception):
    """Another claim was quicker with the probe: this one is rolled back."""


class Claims:
    def __init__(
        self,
        database: Database,
        generations: Generations,
        why_not: Callable[[str, str], Awaitable[LineshaftError]],
        breakers: Breakers,
        returning: Returns,
        *,
        daily_budget_usd: Decimal | None = None,
    ) -> None:
        """`why_not` tells why an agent, named second, can't have a task."""
        self._database = database
        self._why_not = why_not
        self._generations = generations
        self._breakers = breakers
        self._returning = returning
        self._daily_budget = daily_budget_usd
        self._sql = catalog.load("claim/claims")
        self._plain = catalog.load("claim/fast_path")["claim_plain"]
        self._shortcut = FastPath()
        self._take_probing = catalog.load("guards/breakers")["take_probing"]
        self._unpark = catalog.load("transition/changes")["unpark_lock_waiters"]
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
        tried = agent_id in self._probers
        if tried:
            tasks = await self._claim_probes(parameters, stranded)
        elif self._daily_budget is None and self._shortcut.is_open(agent_id):
            plain = await self._database.run_alone(lambda own: self._claim_plain(own, parameters))
            if plain.is_all:
                whole = Claim(plain.tasks, has_room=plain.has_room, leaves_some=not plain.has_room)
                return await self._claimed(whole)
            if plain.missed:
                await asyncio.sleep(_PAUSES_SEC[0])
            tasks = plain.tasks
        claim = Claim(tasks)
        try:
            last = await self._claim_in_rounds(parameters, limit, tasks, stranded)
            claim = Claim(
                tasks,
                slowdown_until=last.slowdown_until,
                has_room=last.has_room,
                leaves_some=last.leaves_some,
            )
            if not tried and len(tasks) < limit and agent_id in self._probers:
                parameters["limit"] = limit - len(tasks)
                tasks += await self._claim_probes(parameters, stranded)
            if stranded := stranded - {task.id for task in tasks}:
                await self._database.run(lambda own: self._free(own, sorted(stranded)))
        except UnavailableError:
            # What is had already is given: nobody else knows who has it.
            if not tasks:
                raise
        return await self._claimed(claim)

    async def _claim_in_rounds(
        self, parameters: dict[str, Any], limit: int, tasks: list[ClaimedTask], stranded: set[str]
    ) -> _Round:
        """Look until there are enough, or no more to be had; gives the last round.

        Whoever is told that there is nothing, while there is, waits for the next wake-up, or poll.
        """
        pauses = iter(_PAUSES_SEC)
        rounds, missed = 0, False
        while True:
            rounds += 1
            parameters["limit"] = limit - len(tasks)
            found = await self._database.run_alone(lambda own: self._claim_once(own, parameters))
            tasks += found.tasks
            stranded.update(found.stranded)
            missed = missed or found.missed
            if len(tasks) == limit or rounds == _ROUNDS:
                return found
            if found.again or found.contested or found.stranded:
                parameters["passed_over"] = [*parameters["passed_over"], *found.contested]
                continue
            pause = next(pauses, None)
            if tasks or not missed or pause is None:
                return found
            await asyncio.sleep(pause)
            missed, parameters["passed_over"] = False, []

    async def _claimed(self, claim: Claim) -> Claim:
        self._left += len(claim.tasks)
        if self._left >= self._turn_at:
            # The tasks are taken, whatever becomes of that.
            with contextlib.suppress(UnavailableError):
                await self._turn()
        return await self._with_history(claim)

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
        return await self._with_history(Claim(tasks, slowdown_until=found.slowdown_until))

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
        *_, rows = await pipelined(connection, *calls)
        now, claim_ttl_sec, *of_all = rows[0][-10:]
        agent_id = parameters["agent_id"]
        tasks: list[ClaimedTask] = []
        if rows[0][0] is not None:
            common = (parameters["start"], now, claim_ttl_sec)
            tasks = [ClaimedTask(*row[:-10] + common) for row in rows]
        found = _Round(tasks, *of_all)
        (self._probers.add if found.probe_due else self._probers.discard)(agent_id)
        if tasks:
            return found
        # Nothing to do, or nobody to do it: an agent that was superseded must be told.
        agent = await connection.execute(self._sql["find_agent"], {"agent_id": agent_id})
        _check_agent(agent_id, parameters["incarnation"], await agent.fetchone())
        return found

    async def _claim_plain(self, connection: Connection, parameters: dict[str, Any]) -> _Plain:
        (rows,) = await pipelined(connection, (self._plain, {**self._database.now, **parameters}))
        rows.sort(key=itemgetter(-1))
        *_, now, claim_ttl_sec, has_room, weigh, contested, missed, _ = rows[0]
        self._shortcut.tried(parameters["agent_id"], worked=not weigh)
        common = (parameters["start"], now, claim_ttl_sec)
        tasks = [ClaimedTask(*row[:-7] + common) for row in rows if row[0] is not None]
        return _Plain(tasks, has_room, not (weigh or contested or missed), missed and not contested)

    async def _free(self, connection: Connection, task_ids: list[str]) -> None:
        cursor = await connection.execute(self._sql["free_stranded"], {"ids": task_ids})
        keys = [row[0] for row in await cursor.fetchall()]
        if keys:
            await connection.execute(self._unpark, {"keys": keys})

    async def _with_history(self, claim: Claim) -> Claim:
        resumed = [task.id for task in claim.tasks if task.resume]
        wanted = sorted({name for task in claim.tasks for name in _context_tasks(task.spec)})
        if not resumed and not wanted:
            return claim
        with self._returning.release_if_undelivered(claim.tasks):
            await self._read_history(claim, resumed, wanted)
        return claim

    async def _read_history(self, claim: Claim, resumed: list[str], wanted: list[str]) -> None:
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
