"""Failed attempts: the task is retried, waits for a rate limit, or is dead-lettered with its batch."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lineshaft.engine.guards.breakers import Breakers, CountedFailure
from lineshaft.engine.guards.slowdowns import RateLimited, Slowdowns
from lineshaft.engine.live.task_locks import LockedTask, has_duplicate_tasks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_rows, fetch_value
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.transition.effects import Effects
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.model import breaker, budget, ratelimit, retry
from lineshaft.model.presets import preset_named
from lineshaft.model.states import Status
from lineshaft.model.storable import replace_unstorable
from lineshaft.model.tasks import policy
from lineshaft.types.work import MAX_ERROR, UNREPORTED, ClaimRef, Failure, Moved, Spent, end_of

_SQL = catalog.load(__name__)
#: The name of the call, in errors and in the attempts that it ends.
FAIL = "fail"
#: Statuses that a repeated call may find.
_AFTER_FAILURE = (Status.RETRYING, Status.DEAD_LETTERED, Status.READY)

_Decision = retry.RetryDecision | retry.DeadLetterDecision | ratelimit.WaitForLimit


class _Decided(NamedTuple):
    task: LockedTask
    failure: Failure
    decision: _Decision


class _FailedInstances(Struct, frozen=True):
    task_id: str
    instances: list[str | None]


class _OtherAccounts(Struct, frozen=True):
    task_id: str
    wait_sec: float | None


class Failures:
    def __init__(
        self,
        transitions: Transitions,
        lanes: Lanes,
        breakers: Breakers,
        slowdowns: Slowdowns,
        *,
        uniform: retry.Uniform = random.random,
        max_retry_after_sec: float = ratelimit.LONGEST_RETRY_AFTER_SEC,
    ) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks
        self._lanes = lanes
        self._breakers = breakers
        self._slowdowns = slowdowns
        self._uniform = uniform
        self._max_retry_after_sec = max_retry_after_sec

    async def fail(self, failures: Sequence[Failure]) -> list[Moved]:
        if has_duplicate_tasks([item.claim for item in failures]):
            return [result for item in failures for result in await self.fail([item])]

        async def work(connection: Connection) -> list[Moved]:
            locked = await self._locks.lock_with_dependents(connection, [item.claim.id for item in failures])
            spent = {item.claim: item.spent for item in failures}
            booked = await self._locks.book_checked(connection, locked, spent)
            held = []
            rest = []
            for item in failures:
                task = locked.get(item.claim.id)
                if task is not None and task.epoch == item.claim.epoch and task.is_held:
                    used = task if item.account is None else replace(task, account=item.account)
                    held.append((used, replace(item, spent=UNREPORTED) if item.claim in booked else item))
                else:
                    rest.append(item)
            moved = await self.fail_locked(connection, held, ended_by=FAIL)
            claims = [item.claim for item in rest]
            refused = await self._locks.refuse(
                connection,
                claims,
                FAIL,
                repeated=_AFTER_FAILURE,
                ended_by=FAIL,
                spent=spent,
            )
            moved = {result.id: result for result in refused} | moved
            return [moved[item.claim.id] for item in failures]

        moved = await self._database.run(work)
        await self._slowdowns.report_outages_of(failures)
        return moved

    async def fail_held(
        self, connection: Connection, agent_id: str, incarnations: Collection[int], ids: Sequence[str]
    ) -> None:
        """The claims of instances that are superseded, or whose processes are dead, fail."""
        if not ids:
            return
        locked = await self._locks.lock_with_dependents(connection, ids)
        await self.fail_locked(
            connection,
            [
                (task, _system_failure(task, retry.SystemReason.AGENT_RESTARTED))
                for task in locked.values()
                if task.agent_id == agent_id and task.incarnation in incarnations and task.is_held
            ],
        )

    async def expire(
        self,
        connection: Connection,
        ids: Sequence[str],
        reason_of: Callable[[LockedTask], retry.SystemReason],
    ) -> dict[str, str]:
        """Tasks with an expired lease fail; returns the reasons by task."""
        locked = await self._locks.lock_with_dependents(connection, ids)
        held = [task for task in locked.values() if task.is_held]
        reasons = {task.id: reason_of(task) for task in held}
        await self.fail_locked(connection, [(task, _system_failure(task, reasons[task.id])) for task in held])
        return {name: reason.value for name, reason in reasons.items()}

    async def fail_locked(
        self,
        connection: Connection,
        failures: Sequence[tuple[LockedTask, Failure]],
        *,
        ended_by: str | None = None,
    ) -> dict[str, Moved]:
        """Fail attempts at tasks that are locked with their dependents.

        `ended_by`: the call of the claim's holder that ends the attempts; None: something else.
        """
        if not failures:
            return {}
        effects = self._transitions.effects()
        decided = await self._decide_all(connection, failures)
        # Dead letters come first: tasks that are cancelled with their batch aren't retried.
        dead = [each for each in decided if isinstance(each.decision, retry.DeadLetterDecision)]
        moved = await self._record(connection, effects, dead, ended_by)
        spent = {each.task.id: each.failure.spent for each in decided}
        cancelled = await self._fail_batches(connection, effects, [each.task for each in dead], spent)
        moved |= {name: Moved(name, Status.CANCELLED) for name in spent if name in cancelled}
        rest = [each for each in decided if each.task.id not in moved]
        moved |= await self._record(connection, effects, rest, ended_by)
        await self._transitions.write(connection, effects)
        limits: list[RateLimited] = []
        against: list[CountedFailure] = []
        for task, failure, decision in [*dead, *rest]:
            if isinstance(decision, ratelimit.WaitForLimit):
                limits.append(
                    RateLimited(
                        task.agent_id,
                        task.incarnation,
                        task.model,
                        decision.slowdown_sec,
                        failure.error,
                        account=task.account,
                        is_window=decision.is_window,
                    )
                )
            elif breaker.counts_against(failure.kind):
                # A category is the agent's word; only Lineshaft knows that a process was lost.
                is_lost = ended_by is None and failure.category in retry.LOST_PROCESS
                lost = _process(task) if is_lost else None
                by_default = preset_named(task.preset).counts_for_breakers
                against.append(
                    CountedFailure(
                        task.id, task.type, task.model, lost, by_default=by_default, account=task.account
                    )
                )
        await self._breakers.failed(connection, against)
        await self._slowdowns.signal_slowdowns(connection, limits)
        return moved

    async def _decide_all(
        self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]
    ) -> Sequence[_Decided]:
        rows = await fetch_rows(
            connection,
            _FailedInstances,
            _SQL["failed_instances"],
            {"ids": [t.id for t, _ in failures], "revivals": [t.revivals for t, _ in failures]},
        )
        instances = {row.task_id: row.instances for row in rows}
        decided = []
        fraction = await self._crash_cost_fraction(connection, failures)
        now = await self._now(connection, failures)
        for task, reported in failures:
            failure = _overdrawn(task, _with_crash_cost(task, reported, fraction))
            decision = self._decide(task, failure, [*instances.get(task.id, []), _process(task)], now)
            decided.append(_Decided(task, failure, decision))
        return await self._with_other_accounts(connection, decided)

    async def _with_other_accounts(
        self, connection: Connection, decided: Sequence[_Decided]
    ) -> Sequence[_Decided]:
        """What met the end of a window doesn't wait for it while its agent has another account."""
        closed = [
            task
            for task, _, decision in decided
            if isinstance(decision, ratelimit.WaitForLimit)
            and decision.long_waits > task.long_waits
            and task.account is not None
        ]
        if not closed:
            return decided
        parameters = {
            **self._database.now,
            "ids": [task.id for task in closed],
            "agent_ids": [task.agent_id for task in closed],
            "incarnations": [task.incarnation for task in closed],
            "accounts": [task.account for task in closed],
        }
        rows = await fetch_rows(connection, _OtherAccounts, _SQL["other_accounts"], parameters)
        waits = {row.task_id: row.wait_sec for row in rows if row.wait_sec is not None}
        return [
            each._replace(
                decision=replace(each.decision, wait_sec=min(waits[each.task.id], each.decision.wait_sec))
            )
            if isinstance(each.decision, ratelimit.WaitForLimit) and each.task.id in waits
            else each
            for each in decided
        ]

    async def _now(self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]) -> datetime:
        """What seconds until an instant count from: if one is named, the time of this transaction."""
        if any(failure.retry_at is not None for _, failure in failures):
            at: datetime = await fetch_value(connection, _SQL["transaction_time"], self._database.now)
            return at
        return self._database.now["now"] or datetime.now(UTC)

    async def _crash_cost_fraction(
        self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]
    ) -> Decimal:
        """The least share of their reservations that these attempts are taken to have cost."""
        if not any(task.reserved_usd and _crashed(failure) for task, failure in failures):
            return Decimal(0)
        return Decimal(await fetch_value(connection, _SQL["crash_cost_fraction"], {}))

    async def _record(
        self, connection: Connection, effects: Effects, decided: Sequence[_Decided], ended_by: str | None
    ) -> dict[str, Moved]:
        moved = {}
        for task, failure, decision in decided:
            lane_id = task.lane_id
            if not isinstance(decision, retry.DeadLetterDecision):
                models = _other_models(task, decision)
                lane_id = await self._lanes.next(connection, task, failure.spent, models)
            status = _record_failure(effects, task, failure, decision, lane_id, ended_by=ended_by)
            moved[task.id] = Moved(
                task.id, status, retry_in_sec=_delay(decision), failure_reason=failure.error[:MAX_ERROR]
            )
        return moved

    def _retry_after(self, failure: Failure, now: datetime) -> float | None:
        longest = self._max_retry_after_sec
        if failure.retry_at is not None:
            wait_sec = (failure.retry_at - now).total_seconds()
            return ratelimit.parse_retry_after(wait_sec, now, longest_sec=longest)
        if failure.retry_after_sec is None:
            return ratelimit.retry_after_in_error(failure.error, now, longest_sec=longest)
        return ratelimit.parse_retry_after(failure.retry_after_sec, now, longest_sec=longest)

    def _decide(
        self, task: LockedTask, failure: Failure, instances: list[str | None], now: datetime
    ) -> _Decision:
        rules = policy(msgspec.json.decode(task.retry) if task.retry else None, task.preset)
        if failure.is_rate_limit:
            waited = ratelimit.decide_rate_limit(
                waits_so_far=task.rate_limits,
                long_waits_so_far=task.long_waits,
                retry_after_sec=self._retry_after(failure, now),
                spent_quota=ratelimit.is_spent_quota(failure.error),
                uniform=self._uniform,
                refused=rules.refuses(failure.kind),
            )
            total = task.cost_usd + failure.spent.cost(task)
            if budget.total_limit_reached(total, task.max_total_cost_usd):
                # Waiting uses no attempts, but money: the limit applies here too.
                return retry.DeadLetterDecision(retry.DeadLetterReason.BUDGET_EXCEEDED, poison_pill=False)
            if isinstance(waited, ratelimit.WaitForLimit):
                return waited
            if isinstance(waited, ratelimit.QuotaSpent):
                return retry.DeadLetterDecision(retry.DeadLetterReason.QUOTA_SPENT, poison_pill=False)
        return retry.decide_failure(
            category=failure.kind,
            attempts=task.attempts + 1,
            max_attempts=task.max_attempts,
            policy=rules,
            failed_agents=instances,
            uniform=self._uniform,
            ends_poison_pills=preset_named(task.preset).ends_poison_pills,
            total_cost_usd=task.cost_usd + failure.spent.cost(task),
            max_total_cost_usd=task.max_total_cost_usd,
            model_preferences=task.model_preferences,
            fallback_models=task.fallback_models,
        )

    async def _fail_batches(
        self,
        connection: Connection,
        effects: Effects,
        dead: list[LockedTask],
        spent: Mapping[str, Spent],
    ) -> set[str]:
        """A dead-lettered child fails its batch: siblings are cancelled, the parent is dead-lettered.

        `spent` is what some of them have just reported. Returns the cancelled tasks.
        """
        ended = {task.id for task in dead}
        cancelled: set[str] = set()
        while parents := sorted({t.parent_id for t in dead if t.parent_id is not None} - ended - cancelled):
            families = await self._locks.lock(connection, parents)
            batches = [task for task in families.values() if task.is_batch]
            children = await self._locks.children(connection, [task.id for task in batches])
            causes = {t.parent_id: t for t in dead if t.id in children}
            batches = [task for task in batches if task.id in causes]
            ended |= {task.id for task in batches}
            siblings = await self._lock_below(connection, [task.id for task in batches], ended | cancelled)
            for task in siblings:
                used = spent.get(task.id, UNREPORTED)
                effects.end(task, Status.CANCELLED, spent=used, reason="sibling failed")
                effects.attempt(task, "cancelled", spent=used)
                effects.event(task, ["task.cancelled"], {"reason": "sibling failed"})
            for task in batches:
                reason = f"child {causes[task.id].id} failed"
                effects.end(
                    task, Status.DEAD_LETTERED, spent=UNREPORTED, reason=reason, category="dependency"
                )
                effects.event(task, ["task.dead_lettered"], {"reason": reason})
            cancelled |= {task.id for task in siblings}
            dead = batches
        return cancelled

    async def _lock_below(
        self, connection: Connection, ids: list[str], without: set[str]
    ) -> list[LockedTask]:
        """All live tasks below these."""
        known: set[str] = set()
        locked: dict[str, LockedTask] = {}
        # Spawning locks the parent: once these are locked, the set can't grow.
        while not (found := await self._descendants(connection, ids, without)) <= known:
            known = found
            locked = await self._locks.lock(connection, sorted(found))
        return list(locked.values())

    async def _descendants(self, connection: Connection, ids: list[str], without: set[str]) -> set[str]:
        """Children of these tasks, and their children; without those below the ones left out."""
        found: set[str] = set()
        while ids:
            children = await self._locks.children(connection, ids)
            ids = [name for name in children if name not in found and name not in without]
            found |= set(ids)
        return found


def _other_models(task: LockedTask, decision: _Decision) -> Sequence[str] | None:
    """The models of the next attempt, once fallback models apply; None: as before."""
    if isinstance(decision, retry.RetryDecision) and list(decision.models) != task.model_preferences:
        return decision.models
    return None


def _process(task: LockedTask) -> str | None:
    """The process that holds a task: a lost one counts once for a breaker."""
    return None if task.agent_id is None else f"{task.agent_id}#{task.incarnation}"


def _system_failure(task: LockedTask, reason: retry.SystemReason) -> Failure:
    error: str = reason.value
    if reason is retry.SystemReason.EXECUTION_LIMIT and task.limit_at and task.started_at:
        error = retry.timed_out((task.limit_at - task.started_at).total_seconds())
    return Failure(ClaimRef(task.id, task.epoch), error, reason.value)


def _crashed(failure: Failure) -> bool:
    return failure.kind == retry.FailureCategory.CRASH


def _with_crash_cost(task: LockedTask, failure: Failure, fraction: Decimal) -> Failure:
    """A crashed attempt may have spent more than it could report, unless it has handed in its output."""
    if not fraction or not _crashed(failure) or task.status == Status.VALIDATING:
        return failure
    least = budget.money(task.reserved_usd * fraction, "cost_usd")
    return replace(failure, spent=failure.spent.most(Spent(least)))


def _overdrawn(task: LockedTask, failure: Failure) -> Failure:
    """However an attempt failed: if it cost more than its limits, it isn't retried."""
    over = over_own_limit(task, failure.spent)
    if failure.kind == retry.FailureCategory.BUDGET_EXCEEDED or over is None:
        return failure
    error = f"{over}; and: {failure.error}"
    return replace(failure, error=error, category=retry.FailureCategory.BUDGET_EXCEEDED)


def over_own_limit(task: LockedTask, spent: Spent) -> str | None:
    """The limit of the task that an attempt which has spent this much is over, as an error; None: none."""
    cost = spent.cost(task)
    if budget.over_task_limit(cost, task.max_cost_usd):
        return f"cost {cost} USD, more than max_cost_usd {task.max_cost_usd}"
    total = task.cost_usd + cost
    if budget.over_total_limit(total, task.max_total_cost_usd):
        return f"cost {total} USD in all, more than max_total_cost_usd {task.max_total_cost_usd}"
    return None


def _delay(decision: _Decision) -> float | None:
    match decision:
        case retry.RetryDecision():
            return decision.delay_sec
        case ratelimit.WaitForLimit():
            return decision.wait_sec
    return None


def _record_failure(
    effects: Effects,
    task: LockedTask,
    failure: Failure,
    decision: _Decision,
    lane_id: int,
    *,
    ended_by: str | None,
) -> Status:
    text = failure.error
    category = replace_unstorable(failure.kind)
    over = (
        isinstance(decision, retry.DeadLetterDecision)
        and decision.reason is retry.DeadLetterReason.BUDGET_EXCEEDED
    )
    if over and category != retry.FailureCategory.BUDGET_EXCEEDED:
        # However the attempt failed: it is not retried because of the money.
        category = retry.FailureCategory.BUDGET_EXCEEDED.value
        total = task.cost_usd + failure.spent.cost(task)
        text = f"cost {total} USD in all, of max_total_cost_usd {task.max_total_cost_usd}; and: {text}"
    error = replace_unstorable(text[:MAX_ERROR]) or "no message"
    traceback = None if failure.traceback is None else replace_unstorable(end_of(failure.traceback))
    spent = failure.spent
    data: dict[str, Any] = {"category": category, "error": error}
    if isinstance(decision, ratelimit.WaitForLimit):
        effects.requeue(
            task,
            Status.RETRYING,
            delay_sec=decision.wait_sec,
            spent=spent,
            rate_limits=decision.waits,
            long_waits=decision.long_waits,
            lane_id=lane_id,
        )
        effects.attempt(
            task,
            "rate_limited",
            spent=spent,
            category="rate_limit",
            error=error,
            traceback=traceback,
            ended_by=ended_by,
        )
        named = {} if task.account is None else {"account": task.account}
        effects.event(task, ["task.rate_limited"], data | {"wait_sec": decision.wait_sec, **named})
        return Status.RETRYING
    effects.attempt(
        task,
        "failed",
        spent=spent,
        category=category,
        error=error,
        traceback=traceback,
        ended_by=ended_by,
    )
    data["attempt"] = task.attempts + 1
    if isinstance(decision, retry.RetryDecision):
        effects.requeue(
            task,
            Status.RETRYING,
            delay_sec=decision.delay_sec,
            spent=spent,
            attempts=task.attempts + 1,
            rate_limits=0,
            long_waits=0,
            lane_id=lane_id,
            category=category,
        )
        data["delay_sec"] = decision.delay_sec
        effects.event(task, ["task.failed", "task.retry_scheduled"], data)
        return Status.RETRYING
    effects.end(
        task,
        Status.DEAD_LETTERED,
        spent=spent,
        reason=error,
        category=category,
        attempts=task.attempts + 1,
        poison_pill=decision.poison_pill,
    )
    data |= {"because": decision.reason, "poison_pill": decision.poison_pill}
    effects.event(task, ["task.failed", "task.dead_lettered"], data)
    return Status.DEAD_LETTERED
