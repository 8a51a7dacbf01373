"""Attempts that fail: retried, waited for, or dead-lettered, as the model decides; and batches with them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from lineshaft.engine.guards.breakers import Breakers, FailedAttempt
from lineshaft.engine.guards.slowdowns import RateLimited, Slowdowns
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import raw_json
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.transition.changes import Changes, LockedTask
from lineshaft.engine.transition.outcomes import HELD, has_duplicate_tasks, record_failure
from lineshaft.engine.transition.task_locks import TaskLocks
from lineshaft.model import breaker, budget, graph, ratelimit, retry
from lineshaft.model.priority import Lane
from lineshaft.model.states import Status
from lineshaft.model.tasks import policy
from lineshaft.types.work import UNREPORTED, ClaimRef, Failure, Moved, Spent

_SQL = catalog.load("transition/fail")
_BATCH_OUTPUTS = catalog.load("transition/complete")["batch_outputs"]

_Decision = retry.Retry | retry.DeadLetter | ratelimit.WaitForLimit


class _Decided(NamedTuple):
    task: LockedTask
    failure: Failure
    decision: _Decision


class Failing(TaskLocks):
    def __init__(
        self,
        database: Database,
        lanes: Lanes,
        *,
        uniform: retry.Uniform = random.random,
        breakers: Breakers | None = None,
    ) -> None:
        super().__init__(database)
        self._lanes = lanes
        self._uniform = uniform
        self._breakers = breakers or Breakers(database)
        self._slowdowns = Slowdowns(database)

    async def fail(self, failures: Sequence[Failure]) -> list[Moved]:
        """A failed attempt: retried, waited for (a rate limit), or dead-lettered, as the model decides."""
        if has_duplicate_tasks([item.claim for item in failures]):
            return [answer for item in failures for answer in await self.fail([item])]

        async def work(connection: Connection) -> list[Moved]:
            locked = await self.lock_with_dependents(connection, [item.claim.id for item in failures])
            held = []
            rest = []
            for item in failures:
                task = locked.get(item.claim.id)
                if task is not None and task.epoch == item.claim.epoch and task.status in HELD:
                    held.append((task, item))
                else:
                    rest.append(item)
            moved = await self._fail_locked(connection, held)
            if rest:
                claims = [item.claim for item in rest]
                moved = {m.id: m for m in await self._answer(connection, claims, set(), None, "fail")} | moved
            return [moved[item.claim.id] for item in failures]

        return await self._database.run(work)

    async def fail_held(self, connection: Connection, agent_id: str, ids: Sequence[str]) -> None:
        """Everything that an agent holds fails because it was registered again."""
        if not ids:
            return
        locked = await self.lock_with_dependents(connection, ids)
        await self._fail_locked(
            connection,
            [
                (task, _system_failure(task, retry.SystemReason.AGENT_RESTARTED))
                for task in locked.values()
                if task.agent_id == agent_id and task.status in HELD
            ],
        )

    async def expire(
        self,
        connection: Connection,
        ids: Sequence[str],
        reason_of: Callable[[LockedTask], retry.SystemReason],
    ) -> list[str]:
        """Tasks whose lease has run out fail; gives the reasons."""
        held = [t for t in (await self.lock_with_dependents(connection, ids)).values() if t.status in HELD]
        reasons = [reason_of(task) for task in held]
        await self._fail_locked(
            connection,
            [(task, _system_failure(task, reason)) for task, reason in zip(held, reasons, strict=True)],
        )
        return [reason.value for reason in reasons]

    async def _fail_locked(
        self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]
    ) -> dict[str, Moved]:
        if not failures:
            return {}
        changes = Changes(self._database.now)
        decided = await self._decide_all(connection, failures)
        # Those that die come first: what goes down with their batches is not tried again.
        dead = [each for each in decided if isinstance(each.decision, retry.DeadLetter)]
        moved = await self._record(connection, changes, dead)
        spent = {each.task.id: each.failure.spent for each in decided}
        cancelled = await self._fail_batches(connection, changes, [each.task for each in dead], spent)
        moved |= {name: Moved(name, Status.CANCELLED) for name in spent if name in cancelled}
        rest = [each for each in decided if each.task.id not in moved]
        moved |= await self._record(connection, changes, rest)
        await self.finish(connection, changes)
        limits: list[RateLimited] = []
        against: list[FailedAttempt] = []
        for task, failure, decision in [*dead, *rest]:
            if isinstance(decision, ratelimit.WaitForLimit):
                limits.append(RateLimited(task.agent_id, task.model, decision.slowdown_sec, failure.error))
            elif breaker.counts_against(failure.kind):
                against.append(FailedAttempt(task.id, task.type, task.model))
        await self._breakers.failed(connection, against)
        await self._slowdowns.signal_slowdowns(connection, limits)
        return moved

    async def _decide_all(
        self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]
    ) -> list[_Decided]:
        cursor = await connection.execute(
            _SQL["failed_agents"],
            {"ids": [t.id for t, _ in failures], "revivals": [t.revivals for t, _ in failures]},
        )
        agents: dict[str, list[str | None]] = dict(await cursor.fetchall())
        decided = []
        for task, reported in failures:
            failure = _overdrawn(task, reported)
            decision = self._decide(task, failure, [*agents.get(task.id, []), task.agent_id])
            decided.append(_Decided(task, failure, decision))
        return decided

    async def _record(
        self, connection: Connection, changes: Changes, decided: Sequence[_Decided]
    ) -> dict[str, Moved]:
        moved = {}
        for task, failure, decision in decided:
            lane_id = task.lane_id
            if isinstance(decision, retry.Retry):
                lane_id = await self._lane(connection, task, decision.models)
            moved[task.id] = Moved(task.id, record_failure(changes, task, failure, decision, lane_id))
        return moved

    def _decide(self, task: LockedTask, failure: Failure, agents: list[str | None]) -> _Decision:
        rules = policy(msgspec.json.decode(task.retry) if task.retry else None, task.preset)
        if failure.is_rate_limit:
            told = failure.error if failure.retry_after_sec is None else failure.retry_after_sec
            now = self._database.now["now"] or datetime.now(UTC)
            waited = ratelimit.decide_rate_limit(
                waits_so_far=task.rate_limits,
                retry_after_sec=ratelimit.parse_retry_after(told, now),
                spent_quota=ratelimit.is_spent_quota(failure.error),
                uniform=self._uniform,
                refused=rules.refuses(failure.kind),
            )
            total = task.cost_usd + failure.spent.cost(task)
            if budget.total_limit_reached(total, task.max_total_cost_usd):
                # Waits use no attempts, but they use money: no way around the limit.
                return retry.DeadLetter(retry.DeadLetterReason.BUDGET_EXCEEDED, poison_pill=False)
            if isinstance(waited, ratelimit.WaitForLimit):
                return waited
            if isinstance(waited, ratelimit.QuotaSpent):
                return retry.DeadLetter(retry.DeadLetterReason.QUOTA_SPENT, poison_pill=False)
        return retry.decide_failure(
            category=failure.kind,
            attempts=task.attempts + 1,
            max_attempts=task.max_attempts,
            policy=rules,
            failed_agents=agents,
            uniform=self._uniform,
            total_cost_usd=task.cost_usd + failure.spent.cost(task),
            max_total_cost_usd=task.max_total_cost_usd,
            model_preferences=task.model_preferences,
            fallback_models=task.fallback_models,
        )

    async def _lane(self, connection: Connection, task: LockedTask, models: Sequence[str]) -> int:
        """The lane of the next attempt: another one, once the fallback models are in force."""
        if list(models) == task.model_preferences:
            return task.lane_id
        lane = Lane(
            task.type,
            tuple(task.required_capabilities),
            tuple(models),
            task.priority_boost_per_minute,
            task.max_cost_usd,
        )
        return (await self._lanes.find(connection, [lane]))[lane]

    # Batches.

    async def finish(self, connection: Connection, changes: Changes) -> None:
        """Write changes that may end the children of batches."""
        await self.finish_batches(connection, await changes.write(connection))

    async def finish_batches(self, connection: Connection, batches: list[str]) -> None:
        """Batches whose children are all done are done themselves, and so may be the batches above them."""
        while batches:
            cursor = await connection.execute(_BATCH_OUTPUTS, {"ids": batches})
            outputs: dict[str, dict[str, msgspec.Raw | None]] = {name: {} for name in batches}
            after: dict[str, dict[str, list[str]]] = {name: {} for name in batches}
            for parent, child, output, before in await cursor.fetchall():
                outputs[parent][child] = raw_json(output)
                after[parent][child] = before
            changes = Changes(self._database.now)
            for task in (await self.lock(connection, batches)).values():
                listed = [name for name in graph.order(after[task.id]) if name in outputs[task.id]]
                output = msgspec.json.encode([outputs[task.id][name] for name in listed])
                changes.end(task, Status.COMPLETED, spent=UNREPORTED, output=output)
                changes.event(task, ["task.completed"])
            batches = await changes.write(connection)

    async def _fail_batches(
        self,
        connection: Connection,
        changes: Changes,
        dead: list[LockedTask],
        spent: Mapping[str, Spent],
    ) -> set[str]:
        """A child that failed for good takes its batch along: siblings cancelled, parent dead (R-193).

        `spent` is what some of them have just reported. Gives who was cancelled.
        """
        ended = {task.id for task in dead}
        cancelled: set[str] = set()
        while parents := sorted({t.parent_id for t in dead if t.parent_id is not None} - ended - cancelled):
            causes = {t.parent_id: t for t in dead}
            families = await self.lock(connection, parents)
            batches = [task for task in families.values() if task.is_batch]
            ended |= {task.id for task in batches}
            siblings = await self._lock_below(connection, [task.id for task in batches], ended | cancelled)
            for task in siblings:
                used = spent.get(task.id, UNREPORTED)
                changes.end(task, Status.CANCELLED, spent=used, reason="sibling failed")
                changes.attempt(task, "cancelled", spent=used)
                changes.event(task, ["task.cancelled"], {"reason": "sibling failed"})
            for task in batches:
                reason = f"child {causes[task.id].id} failed"
                changes.end(
                    task, Status.DEAD_LETTERED, spent=UNREPORTED, reason=reason, category="dependency"
                )
                changes.event(task, ["task.dead_lettered"], {"reason": reason})
            cancelled |= {task.id for task in siblings}
            dead = batches
        return cancelled

    async def _lock_below(
        self, connection: Connection, ids: list[str], without: set[str]
    ) -> list[LockedTask]:
        """Whatever is live below these tasks."""
        known: set[str] = set()
        locked: dict[str, LockedTask] = {}
        # Whoever spawns holds the parent: once these are locked, no more can come.
        while not (found := await self._descendants(connection, ids, without)) <= known:
            known = found
            locked = await self.lock(connection, sorted(found))
        return list(locked.values())

    async def _descendants(self, connection: Connection, ids: list[str], without: set[str]) -> set[str]:
        """Children of these tasks, and theirs; not those of the ones left out."""
        found: set[str] = set()
        while ids:
            cursor = await connection.execute(_SQL["children"], {"ids": ids})
            ids = [row[0] for row in await cursor.fetchall() if row[0] not in found and row[0] not in without]
            found |= set(ids)
        return found


def _system_failure(task: LockedTask, reason: retry.SystemReason) -> Failure:
    return Failure(ClaimRef(task.id, task.epoch), reason.value, reason.value)


def _overdrawn(task: LockedTask, failure: Failure) -> Failure:
    """However an attempt failed: if it cost more than it may, that is why it isn't tried again (R-235)."""
    cost = failure.spent.cost(task)
    if failure.kind == retry.FailureCategory.BUDGET_EXCEEDED or not budget.over_task_limit(
        cost, task.max_cost_usd
    ):
        return failure
    error = f"cost {cost} USD, more than max_cost_usd {task.max_cost_usd}; and: {failure.error}"
    return replace(failure, error=error, category=retry.FailureCategory.BUDGET_EXCEEDED)
