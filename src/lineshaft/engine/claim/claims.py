"""Claims: which agent gets which tasks.

The statement `claim_tasks` decides about everything. Where there is nothing to weigh, the shorter
`claim_fast` gives the same result, for one task the function behind `claim_one`, and they are tried first.

A breaker that may be probed is left alone by ordinary claims. They report that there is one, and the agent's
next claim begins with the probe, or this one ends with it if there is room: otherwise an agent with enough
other work would never try.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from lineshaft.engine.artifacts.artifacts import read_artifacts
from lineshaft.engine.claim.fast_path import FastClaim, FastPath, claim_fast
from lineshaft.engine.claim.rows import claimed_tasks
from lineshaft.engine.claim.single import claim_one
from lineshaft.engine.guards.breakers import MODEL, Breakers
from lineshaft.engine.guards.locks import LOCK_TTL_SEC
from lineshaft.engine.guards.outside import OutsideLocks
from lineshaft.engine.guards.task_types import TaskTypes
from lineshaft.engine.live.parking import look_at_quotas, unpark_lock_waiters
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.pipeline import Call, pipelined, row_type, transaction
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.read.unknown_instance import unknown_instance
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.model.accounts import ACCOUNT
from lineshaft.types.artifacts import REF_PREFIX, InputArtifact, artifact_id
from lineshaft.types.work import (
    MAX_INPUT_BYTES,
    Claim,
    ClaimedTask,
    ClaimRef,
    PastAttempt,
    Presence,
    Resumed,
    input_ids,
)

_SQL = catalog.load(__name__)
#: A claim that found other tasks in its way looks again, at most this often; parked tasks aren't in the way.
_ROUNDS = 1_000
#: How long it waits for transactions that hold all tasks it found: mostly other claims, which end soon.
_PAUSES_SEC = (0.01, 0.04, 0.16)
#: A new generation is worth opening after so many claims; one that can't be closed yet is tried again sooner.
_TURN_AFTER = 5_000
_CLOSE_AFTER = 500
_MOVED_AT_ONCE = 5_000
#: A claim that would come back short promotes this many due tasks first; the promoter does the rest.
_PROMOTED_AT_ONCE = 1_000


#: How many tasks are parked with one whose quota is full, if their quotas are, too: more with each round.
_FIRST_AHEAD, _MOST_AHEAD = 10, 2_000


class Upkeep(Protocol):
    """What claims need of the maintenance."""

    async def promote_for_claim(self, limit: int, task_id: str | None = None) -> int: ...

    async def expire_task(self, task_id: str) -> None: ...

    async def turn_generation(self, left: int) -> bool: ...

    async def close_generations(self, limit: int) -> int: ...


class _Outcome(Protocol):
    """The columns of `claim_tasks` that are about the whole claim: those of the first row."""

    id: str | None
    now: datetime
    #: None: the instance claims nothing now, or is unknown.
    claim_ttl_sec: float | None
    #: The agent could take something.
    has_room: bool
    #: The agent has a budget, of which a task without `max_cost_usd` reserves nothing.
    is_uncapped: bool
    #: There may be a task that other agents can take, but not this one.
    leaves_some: bool
    #: Tasks that were in the way of others are parked now; or the money must be counted again.
    again: bool
    #: Parts of lanes where other claims took the best tasks, though there is more elsewhere.
    contested: list[int]
    #: Other transactions hold everything that is claimable.
    missed: bool
    #: Tasks that have a document lock, but weren't claimed.
    stranded: list[str]
    #: What quotas count for tasks that weren't claimed: to be looked at after the commit.
    looks: list[str] | None
    #: Document locks whose waiters may be able to go on now.
    passed_on: list[str]
    #: There are tasks with a fair_key.
    has_fair: bool
    #: A breaker may be probed.
    probe_due: bool
    #: There were fewer tasks than asked for, but the delay of another one has passed.
    due: bool
    slowdown_until: datetime | None


class _Round(Struct, frozen=True):
    """The result of one statement."""

    tasks: list[ClaimedTask]
    outcome: _Outcome
    #: There may be turns that this statement didn't see.
    more_turns: bool = False


class _Turns(Protocol):
    """The result of `make_turns`."""

    ids: list[str]
    lanes: list[int]
    keys: list[str]
    names: list[str]
    is_cut: bool


class _Holder(Struct, frozen=True):
    id: str
    epoch: int
    agent_id: str
    incarnation: int


def _claim_columns(claims: Sequence[ClaimRef]) -> dict[str, Any]:
    return {"ids": [claim.id for claim in claims], "epochs": [claim.epoch for claim in claims]}


class Undelivered(Protocol):
    """Releases claims that don't reach their agent."""

    def release_if_undelivered(self, tasks: list[ClaimedTask]) -> AbstractContextManager[None]: ...

    async def release(self, tasks: Sequence[ClaimedTask]) -> None: ...


class _ProbeTakenError(Exception):
    """Another claim was faster with the probe: this one is rolled back."""


class _GivenBackError(Exception):
    """All claimed tasks were released: their limits were out of date, or their locks are held outside."""


class Claims:
    def __init__(
        self,
        database: Database,
        upkeep: Upkeep,
        why_not: Callable[[str, str, int], Awaitable[LineshaftError]],
        *,
        breakers: Breakers,
        undelivered: Undelivered,
        types: TaskTypes,
        outside: OutsideLocks | None = None,
    ) -> None:
        """`why_not` returns why an instance, named by agent and incarnation, can't claim a task.

        `outside`: document locks that other programs hold too.
        """
        self._database = database
        self._why_not = why_not
        self._upkeep = upkeep
        self._breakers = breakers
        self._undelivered = undelivered
        self._types = types
        self._outside = outside
        self._fast_path = FastPath()
        #: The last claim saw that there are tasks with a fair_key.
        self._has_fair = False
        #: Tasks that this process has claimed since it last turned the generation.
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
        return await self._claim_current(agent_id, incarnation, limit=limit, types=types, start=start)

    async def claim_next(
        self, last: ClaimRef, *, types: list[str] | None = None, looked: FastClaim | None = None
    ) -> Claim:
        """Take and start one task for the instance that has or had this claim.

        `looked` is what was found already, together with a completion.
        """
        if looked is not None and looked.is_all and not looked.due:
            claim = Claim(
                looked.tasks,
                has_room=looked.has_room,
                leaves_some=not looked.has_room,
                inputs=dict(looked.outputs),
            )
            try:
                return await self._claimed(claim)
            except _GivenBackError:
                looked = None
        async with self._database.connection() as connection:
            holders = await fetch_rows(connection, _Holder, _SQL["claim_holders"], _claim_columns([last]))
        if not holders:
            return Claim()
        (holder,) = holders
        return await self._claim_current(
            holder.agent_id, holder.incarnation, limit=1, types=types, start=True, looked=looked, follows=last
        )

    async def _claim_current(
        self, agent_id: str, incarnation: int, *, looked: FastClaim | None = None, **options: Any
    ) -> Claim:
        """Claim until there are tasks that the agent may have, or none at all."""
        for _ in range(_ROUNDS):
            try:
                return await self._claim(agent_id, incarnation, looked=looked, **options)
            except _GivenBackError:
                looked = None
        return Claim()

    async def _claim(
        self,
        agent_id: str,
        incarnation: int,
        *,
        limit: int,
        types: list[str] | None,
        start: bool,
        looked: FastClaim | None = None,
        follows: ClaimRef | None = None,
    ) -> Claim:
        """`follows`: the completion that asked for this claim; only `claim_tasks` records it."""
        parameters = self._parameters(
            agent_id, incarnation, limit=limit, types=types, start=start, follows=follows
        )
        tasks: list[ClaimedTask] = []
        stranded: set[str] = set()
        tried = agent_id in self._probers
        if tried:
            tasks = await self._claim_probes(parameters, stranded)
        elif (fast := looked or await self._look(agent_id, parameters)) is not None:
            if looked is None:
                # A completion has a smaller choice: it may lock only its own DAG.
                self._fast_path.tried(agent_id, worked=not fast.weigh)
            if fast.is_all and not (fast.due and await self._promote()):
                return await self._claimed(
                    Claim(fast.tasks, has_room=fast.has_room, leaves_some=not fast.has_room)
                )
            if fast.missed and not fast.contested:
                await asyncio.sleep(_PAUSES_SEC[0])
            tasks = fast.tasks
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
            # Return what was claimed so far; no other process knows about it.
            if not tasks:
                raise
        return await self._claimed(claim)

    async def _look(self, agent_id: str, parameters: dict[str, Any]) -> FastClaim | None:
        """Claim on the fast path, where it is open: one task costs less by itself."""
        if parameters["follows"] is not None or not self._fast_path.is_open(agent_id):
            return None
        if parameters["limit"] == 1:
            agent = Presence(agent_id, parameters["incarnation"])
            return await claim_one(
                self._database, agent, types=parameters["types"], start=parameters["start"]
            )
        return await self._database.run_alone(
            lambda own: claim_fast(own, {**self._database.now, **parameters})
        )

    async def _claim_in_rounds(
        self, parameters: dict[str, Any], limit: int, tasks: list[ClaimedTask], stranded: set[str]
    ) -> _Outcome:
        """Claim until there are enough tasks, or no more are available; returns the last outcome.

        An agent that finds nothing, though there is something, waits for the next notification, or poll.
        """
        pauses = iter(_PAUSES_SEC)
        rounds, missed, promoted = 0, False, False
        while True:
            rounds += 1
            parameters["limit"] = limit - len(tasks)
            round_ = await self._claim_and_report(parameters)
            tasks += round_.tasks
            outcome = round_.outcome
            stranded.update(outcome.stranded)
            missed = missed or outcome.missed
            if len(tasks) == limit or rounds == _ROUNDS:
                return outcome
            if (
                outcome.again
                or outcome.contested
                or outcome.stranded
                or outcome.passed_on
                or round_.more_turns
            ):
                if outcome.looks:
                    parameters["ahead"] = min(4 * parameters["ahead"] + _FIRST_AHEAD, _MOST_AHEAD)
                parameters["passed_over"] = [*parameters["passed_over"], *outcome.contested]
                continue
            if outcome.due and not promoted:
                promoted = True
                if await self._promote():
                    continue
            pause = next(pauses, None)
            if tasks or not missed or pause is None:
                return outcome
            await asyncio.sleep(pause)
            missed, parameters["passed_over"] = False, []

    async def _promote(self) -> int:
        """Promote due tasks, of whichever lane; returns how many there were."""
        return await self._upkeep.promote_for_claim(_PROMOTED_AT_ONCE)

    async def _claim_and_report(self, parameters: dict[str, Any]) -> _Round:
        round_ = await self._database.run_alone(lambda own: self._claim_once(own, parameters))
        await self._pass_on(round_.outcome.passed_on)
        if round_.outcome.is_uncapped:
            types = {task.type for task in round_.tasks if task.max_cost_usd is None and not task.outdated}
            # The tasks are claimed, whether this works or not.
            with contextlib.suppress(UnavailableError):
                await self._types.report_uncapped(parameters["agent_id"], types)
        return round_

    async def _pass_on(self, lock_keys: Sequence[str]) -> None:
        """Let the next waiters for these document locks go on."""
        if lock_keys:
            # The tasks are claimed, whether this works or not; the promoter looks at its next tick.
            with contextlib.suppress(UnavailableError):
                await self._database.run(lambda own: unpark_lock_waiters(own, lock_keys))

    async def _give_back_outdated(self, tasks: list[ClaimedTask]) -> None:
        """Correct and release tasks that were read out of date; raises if no other is left.

        Their type got other defaults while they were submitted, claimed or held: see `LimitsOfTypes`. Or they
        were replaced while they were claimed (submit/keys.py).
        """
        outdated = [task for task in tasks if task.outdated]
        if not outdated:
            return
        with self._undelivered.release_if_undelivered(tasks):
            await self._types.correct(outdated)
            await self._undelivered.release(outdated)
        tasks[:] = [task for task in tasks if not task.outdated]
        if not tasks:
            raise _GivenBackError

    async def _give_back_locked(self, tasks: list[ClaimedTask]) -> None:
        """Release tasks whose document another program holds; raises if no other is left.

        Every claim of a task with a lock passes here, whichever agent made it and in whatever way.
        """
        keys = {key for task in tasks for key in task.lock_keys}
        if self._outside is None or not keys:
            return
        with self._undelivered.release_if_undelivered(tasks):
            refused = await self._outside.take(keys)
            if not refused:
                return
            given_back = [task for task in tasks if not refused.keys().isdisjoint(task.lock_keys)]
            await self._undelivered.release(given_back)
            await self._outside.mark(refused)
        tasks[:] = [task for task in tasks if refused.keys().isdisjoint(task.lock_keys)]
        if not tasks:
            raise _GivenBackError

    async def _claimed(self, claim: Claim) -> Claim:
        await self._give_back_outdated(claim.tasks)
        await self._give_back_locked(claim.tasks)
        self._left += len(claim.tasks)
        await self._give_up_overspent(claim.tasks)
        if self._left >= self._turn_at:
            # The tasks are claimed, whether this works or not.
            with contextlib.suppress(UnavailableError):
                await self._turn()
        return await self._with_history(claim)

    async def _give_up_overspent(self, tasks: list[ClaimedTask]) -> None:
        """Release tasks that have reached their total limit, which makes them dead letters.

        A report that came after the end of an earlier attempt, or a lowered limit, may have done that.
        """
        # Few have cost anything before they are claimed.
        if not (paid := [task for task in tasks if task.cost_usd > 0]):
            return
        columns = {"ids": [task.id for task in paid], "costs": [task.cost_usd for task in paid]}
        with self._undelivered.release_if_undelivered(tasks):
            async with self._database.connection() as connection:
                over = set(await fetch_column(connection, _SQL["over_total"], columns))
            if over:
                await self._undelivered.release([task for task in paid if task.id in over])
                tasks[:] = [task for task in tasks if task.id not in over]

    async def claim_task(
        self, agent_id: str, incarnation: int, task_id: str, *, start: bool = False
    ) -> Claim:
        """Claim this task, whatever its place in the queue; or raise why it can't be claimed."""
        parameters = self._parameters(agent_id, incarnation, task_id=task_id, start=start)
        round_ = await self._claim_and_report(parameters)
        if not round_.tasks and round_.outcome.due and await self._upkeep.promote_for_claim(1, task_id):
            round_ = await self._claim_and_report(parameters)
        try:
            await self._give_back_outdated(round_.tasks)
        except _GivenBackError:
            round_ = await self._claim_and_report(parameters)
        tasks, stranded = round_.tasks, set(round_.outcome.stranded)
        if not tasks and round_.outcome.probe_due:
            tasks = await self._claim_probes(parameters, stranded)
        if stranded := stranded - {task.id for task in tasks}:
            await self._database.run(lambda own: self._free(own, sorted(stranded)))
        with contextlib.suppress(_GivenBackError):
            await self._give_back_locked(tasks)
        await self._give_up_overspent(tasks)
        if not tasks:
            # If its deadline has passed, the reason is that it is CANCELLED.
            await self._upkeep.expire_task(task_id)
            raise await self._why_not(task_id, agent_id, incarnation)
        return await self._with_history(Claim(tasks, slowdown_until=round_.outcome.slowdown_until))

    async def claim_in(
        self, connection: Connection, agent_id: str, incarnation: int, task_id: str, *, start: bool
    ) -> ClaimedTask | None:
        """Claim this task as part of another operation's transaction; if it can't be, roll that back.

        Neither retries that are due nor breakers that may be probed are looked at.
        """
        parameters = self._parameters(agent_id, incarnation, task_id=task_id, start=start)
        round_ = await self._claim_once(connection, parameters)
        if round_.outcome.passed_on:
            await unpark_lock_waiters(connection, round_.outcome.passed_on)
        found = round_.tasks
        return found[0] if found and not found[0].outdated else None

    async def holders(self, claims: Sequence[ClaimRef]) -> dict[ClaimRef, str]:
        """The agents that made these claims, also where they have ended. Unknown claims are missing."""
        async with self._database.connection() as connection:
            holders = await fetch_rows(connection, _Holder, _SQL["claim_holders"], _claim_columns(claims))
        return {ClaimRef(row.id, row.epoch): row.agent_id for row in holders}

    async def existing(self, task_ids: Sequence[str]) -> set[str]:
        """Those of these tasks that exist."""
        async with self._database.connection() as connection:
            return set(await fetch_column(connection, _SQL["existing_tasks"], {"ids": list(task_ids)}))

    def _parameters(
        self,
        agent_id: str,
        incarnation: int,
        *,
        limit: int = 1,
        types: list[str] | None = None,
        task_id: str | None = None,
        start: bool,
        follows: ClaimRef | None = None,
    ) -> dict[str, Any]:
        return {
            "agent_id": agent_id,
            "incarnation": incarnation,
            "limit": limit,
            "types": types,
            "start": start,
            "task_id": task_id,
            "follows": None if follows is None else follows.id,
            "follows_epoch": None if follows is None else follows.epoch,
            "passed_over": [],
            "turns": False,
            "idle_lanes": [],
            "ahead": 0,
            "lock_ttl": LOCK_TTL_SEC,
            "probing": None,
        }

    async def _claim_probes(self, parameters: dict[str, Any], stranded: set[str]) -> list[ClaimedTask]:
        """One task for each breaker that waits for a probe, if this agent can take one."""
        tasks: list[ClaimedTask] = []
        for _ in range(_ROUNDS):
            try:
                round_ = await self._database.run_alone(
                    lambda own: self._claim_probe(own, parameters, stranded)
                )
            except _ProbeTakenError:
                break
            if round_ is None:
                break
            tasks += round_.tasks
            await self._pass_on(round_.outcome.passed_on)
            # Parked tasks made room for others, as in any claim.
            if len(tasks) == parameters["limit"] or not (round_.tasks or round_.outcome.again):
                break
        return tasks

    async def _claim_probe(
        self, connection: Connection, parameters: dict[str, Any], stranded: set[str]
    ) -> _Round | None:
        """None: there is nothing to probe, or another claim is probing."""
        calls: list[Call] = [(_SQL["lock_due_breakers"], self._database.now)]
        if self._has_fair and parameters["task_id"] is None:
            # In the order of all claims.
            calls.append((_SQL["lock_turns"], {}))
        async with transaction(connection, *calls) as (rows, *_):
            probing = {key for (key,) in rows}
            if not probing:
                return None
            probe = {**parameters, "limit": 1, "probing": sorted(probing)}
            round_ = None
            if probe["task_id"] is None:
                # One that a person has changed: others would fail as before, and open the breaker again.
                for task_id in await fetch_column(connection, _SQL["changed_task"], probe):
                    round_ = await self._claim_once(connection, {**probe, "task_id": task_id})
                    stranded.update(round_.outcome.stranded)
            if round_ is None or not round_.tasks:
                round_ = await self._claim_once(connection, probe)
                stranded.update(round_.outcome.stranded)
            for task in round_.tasks:
                keys = probing & {task.type, f"{MODEL}{task.model}", f"{ACCOUNT}{task.account}"}
                if not await self._breakers.start_probe(connection, task.id, keys):
                    raise _ProbeTakenError
        return round_

    async def _turn(self) -> None:
        """Leave the dead index entries of past claims behind; see the table `generation`."""
        turned = self._left >= _TURN_AFTER and await self._upkeep.turn_generation(self._left)
        open_ones = await self._upkeep.close_generations(_MOVED_AT_ONCE)
        if turned:
            self._left = 0
        # Every claim reads a generation that could not be closed yet: try again soon.
        self._turn_at = self._left + (_CLOSE_AFTER if open_ones else _TURN_AFTER)

    async def _claim_once(self, connection: Connection, parameters: dict[str, Any]) -> _Round:
        """One statement, and where there are tasks with a fair_key what comes before and after it."""
        if not self._has_fair or parameters["task_id"] is not None:
            call = _SQL["claim_tasks"], {**self._database.now, **parameters}
            _, rows = await pipelined(connection, (_SQL["lock_day"], {}), call, named=False)
            round_ = await self._read_round(connection, parameters, rows)
            self._has_fair = round_.outcome.has_fair
            if not self._has_fair or parameters["task_id"] is not None:
                return round_
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            return await self._claim_turns(connection, parameters)
        async with transaction(connection):
            return await self._claim_turns(connection, parameters)

    async def _claim_turns(self, connection: Connection, parameters: dict[str, Any]) -> _Round:
        """A claim that sees the tasks whose turn it is, in a transaction: see make_turns_1."""
        now = self._database.now
        _, made = await pipelined(
            connection, (_SQL["lock_turns"], {}), (_SQL["make_turns"], {**now, **parameters})
        )
        turns: _Turns = made[0]
        claim = {**now, **parameters, "turns": True}
        if turns.is_cut:
            # More would be claimed in another order.
            claim["limit"] = len(turns.ids)
        _, rows, finished = await pipelined(
            connection,
            (_SQL["lock_day"], {}),
            (_SQL["claim_tasks"], claim),
            (_SQL["finish_turns"], {"ids": turns.ids, "lanes": turns.lanes, "keys": turns.keys}),
            named=False,
        )
        if turns.names:
            look_at_quotas(connection, now, names=turns.names)
        round_ = await self._read_round(connection, parameters, rows)
        self._has_fair = round_.outcome.has_fair
        ((idle,),) = finished
        more = turns.is_cut or bool(turns.names)
        if idle and len(round_.tasks) < claim["limit"]:
            # The claim could take nothing there; turns elsewhere are next.
            parameters["idle_lanes"] = [*parameters["idle_lanes"], *idle]
            more = True
        return msgspec.structs.replace(round_, more_turns=more)

    async def _read_round(
        self, connection: Connection, parameters: dict[str, Any], rows: list[Any]
    ) -> _Round:
        row = row_type(_SQL["claim_tasks"])
        outcome: _Outcome = row._make(rows[0])
        if outcome.looks:
            look_at_quotas(connection, self._database.now, names=outcome.looks)
        agent_id = parameters["agent_id"]
        if outcome.probe_due:
            self._probers.add(agent_id)
        else:
            self._probers.discard(agent_id)
        if outcome.id is not None:
            tasks = claimed_tasks(
                row._fields,
                rows,
                started=parameters["start"],
                claimed_at=outcome.now,
                claim_ttl_sec=outcome.claim_ttl_sec or 0.0,
            )
            return _Round(tasks, outcome)
        if outcome.claim_ttl_sec is None and not await fetch_column(
            connection, _SQL["instance_exists"], parameters
        ):
            raise await unknown_instance(connection, agent_id, parameters["incarnation"])
        return _Round([], outcome)

    async def _free(self, connection: Connection, task_ids: list[str]) -> None:
        if keys := await fetch_column(connection, _SQL["free_stranded"], {"ids": task_ids}):
            await unpark_lock_waiters(connection, keys)

    async def _with_history(self, claim: Claim) -> Claim:
        resumed = [task.id for task in claim.tasks if task.resume]
        wanted = inputs_to_read(claim)
        artifacts = sorted({ref for task in claim.tasks for ref in _artifact_ids(task.spec)})
        if not resumed and not wanted and not artifacts:
            return claim
        with self._undelivered.release_if_undelivered(claim.tasks):
            await self._read_history(claim, resumed, wanted, artifacts)
        return claim

    async def _read_history(
        self, claim: Claim, resumed: list[str], wanted: list[tuple[int, str]], artifacts: list[str]
    ) -> None:
        async with self._database.connection() as connection:
            if resumed:
                for before in await fetch_rows(connection, Resumed, _SQL["resumed"], {"ids": resumed}):
                    claim.resumed[before.id] = before
                async with connection.cursor(row_factory=dict_row) as cursor:
                    await cursor.execute(_SQL["past_attempts"], {"ids": resumed})
                    async for row in cursor:
                        task_id = row.pop("task_id")
                        claim.past_attempts.setdefault(task_id, []).append(PastAttempt(**row))
            if wanted:
                readers, ids = map(list, zip(*wanted, strict=True))
                parameters = {"readers": readers, "ids": ids, "most": MAX_INPUT_BYTES}
                (rows,) = await pipelined(connection, (_SQL["inputs"], parameters))
                # The output of a cancelled task is None.
                claim.inputs.update({row.id: row.output for row in rows})
            if artifacts:
                by_id = await read_artifacts(connection, artifacts)
                claim.artifacts.update({name: InputArtifact.of(each) for name, each in by_id.items()})


def inputs_to_read(claim: Claim) -> list[tuple[int, str]]:
    """Upstream tasks, each with the number of its reader: a task, or all tasks with the same inputs.

    The tasks of a fan-out have the same inputs.
    """
    return [
        (reader, name)
        for reader, names in enumerate({tuple(input_ids(task.inputs)) for task in claim.tasks})
        for name in names
        if name not in claim.inputs
    ]


def _artifact_ids(spec: msgspec.Raw) -> list[str]:
    """The ids of the artifacts in `context_refs`."""
    if b'"context_refs"' not in bytes(spec):
        return []
    refs: list[str] = msgspec.json.decode(spec).get("context_refs", [])
    return [artifact_id(ref) for ref in refs if ref.startswith(REF_PREFIX)]
