"""What one transition does to a set of tasks, collected first and then written in one go.

A transition locks its tasks, decides in Python, and describes the result here. `write` sends it all in one
pipeline, in the order in which rows are locked everywhere: tasks, agents, document locks, DAGs. Whatever must
see what others committed meanwhile (dependents, waiters for a lock, the verdict on a DAG) comes last, under
snapshots newer than the locks.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.model.breaker import counts_against
from lineshaft.model.error_pattern import error_pattern
from lineshaft.model.states import Status
from lineshaft.model.storable import check_json
from lineshaft.types.work import NOTHING, Spent


@dataclass(frozen=True, slots=True)
class LockedTask:
    """A live task as `lock_tasks` reads it: all that decides what becomes of it."""

    id: str
    epoch: int
    status: str
    dag_id: str | None
    agent_id: str | None
    reserved_usd: Decimal
    cost_usd: Decimal
    attempt_cost_usd: Decimal
    tokens_input: int
    tokens_output: int
    attempts: int
    rate_limits: int
    revivals: int
    claimed_at: datetime | None
    started_at: datetime | None
    first_started_at: datetime | None
    ready_at: datetime | None
    lease_until: datetime | None
    limit_at: datetime | None
    lock_key: str | None
    lock_owner: str | None
    lane_id: int
    model: str | None
    is_batch: bool
    blocked: int
    progress: bytes | None
    is_gated: bool
    type: str
    title: str
    parent_id: str | None
    task_dag_id: str
    preset: str
    retry: bytes | None
    max_attempts: int
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    required_capabilities: list[str]
    model_preferences: list[str]
    fallback_models: list[str]
    priority_boost_per_minute: float
    gates: bytes | None
    require_decision_report: bool
    idempotency_key: str | None
    heartbeat_sec: float


@dataclass(slots=True)
class _Share:
    count: int = 0
    reserved: Decimal = NOTHING
    actual: Decimal = NOTHING
    added: int = 0
    completed: int = 0
    cancelled: int = 0
    dead: int = 0


@dataclass(slots=True)
class Changes:
    now: dict[str, Any]
    _requeued: list[tuple[Any, ...]] = field(default_factory=list)
    _ended: list[tuple[Any, ...]] = field(default_factory=list)
    _attempts: list[tuple[Any, ...]] = field(default_factory=list)
    _events: list[tuple[Any, ...]] = field(default_factory=list)
    _dead_letters: list[tuple[Any, ...]] = field(default_factory=list)
    _freed_keys: list[tuple[str, str]] = field(default_factory=list)
    _agents: defaultdict[str, _Share] = field(default_factory=lambda: defaultdict(_Share))
    _dags: defaultdict[str, _Share] = field(default_factory=lambda: defaultdict(_Share))
    _locks: list[tuple[str, str]] = field(default_factory=list)
    _ended_ids: list[str] = field(default_factory=list)
    #: Claims that ended without telling anything about their type: if one was a breaker's probe, another may.
    _blameless: list[str] = field(default_factory=list)
    #: Whatever waits for these can't run any more, or can again.
    _prospects: list[str] = field(default_factory=list)

    def requeue(
        self,
        task: LockedTask,
        status: Status,
        *,
        delay_sec: float | None = None,
        spent: Spent,
        attempts: int | None = None,
        rate_limits: int | None = None,
        lane_id: int | None = None,
        blocked: int = 0,
        category: str | None = None,
    ) -> None:
        """Out of an agent's hands, but not ended."""
        self._requeued.append(
            (
                task.id,
                status,
                delay_sec,
                task.lane_id if lane_id is None else lane_id,
                task.attempts if attempts is None else attempts,
                task.rate_limits if rate_limits is None else rate_limits,
                blocked,
                spent.cost(task),
                spent.tokens_input,
                spent.tokens_output,
                category,
            )
        )
        self._settle(task, spent.cost(task))
        if task.lock_key is not None and task.lock_owner is None:
            self._locks.append((task.lock_key, task.id))

    def end(
        self,
        task: LockedTask,
        status: Status,
        *,
        spent: Spent,
        reason: str | None = None,
        category: str | None = None,
        attempts: int | None = None,
        output: bytes | None = None,
        poison_pill: bool = False,
    ) -> None:
        """CANCELLED, DEAD_LETTERED, or a batch COMPLETED."""
        cost = spent.cost(task)
        self._ended.append(
            (
                task.id,
                status,
                task.attempts if attempts is None else attempts,
                cost,
                spent.tokens_input,
                spent.tokens_output,
                reason,
                category,
                None if output is None else output.decode(),
            )
        )
        self._ended_ids.append(task.id)
        if status is not Status.COMPLETED:
            self._prospects.append(task.id)
        self._settle(task, cost)
        if task.dag_id is not None:
            share = self._dags[task.dag_id]
            share.completed += status is Status.COMPLETED
            share.cancelled += status is Status.CANCELLED
            share.dead += status is Status.DEAD_LETTERED
        if task.lock_key is not None:
            self._locks.append((task.lock_key, task.id))
        if status is Status.DEAD_LETTERED:
            self._dead_letters.append(
                (
                    task.id,
                    task.epoch,
                    task.revivals,
                    task.cost_usd + cost,
                    poison_pill,
                    category,
                    reason,
                    error_pattern(reason or ""),
                )
            )
        if status is not Status.COMPLETED and task.idempotency_key is not None:
            self._freed_keys.append((task.idempotency_key, task.id))

    def attempt(
        self,
        task: LockedTask,
        outcome: str,
        *,
        spent: Spent,
        category: str | None = None,
        error: str | None = None,
    ) -> None:
        """How the claim ended; nothing for a task that nobody had claimed."""
        if task.status not in {Status.CLAIMED, Status.RUNNING, Status.VALIDATING}:
            return
        if outcome != "failed" or not counts_against(category or ""):
            self._blameless.append(task.id)
        self._attempts.append(
            (
                task.id,
                task.epoch,
                task.attempts + 1,
                task.revivals,
                task.agent_id,
                task.model,
                task.claimed_at,
                task.started_at,
                outcome,
                category,
                error,
                spent.cost(task),
                spent.tokens_input,
                spent.tokens_output,
            )
        )

    def event(self, task: LockedTask, kinds: Sequence[str], data: Any = None) -> None:
        told = None if data is None else msgspec.json.encode(data)
        check_json(data=told)
        self._events.append(
            (
                "{" + ",".join(kinds) + "}",
                task.id,
                task.dag_id,
                task.agent_id,
                task.epoch,
                None if told is None else told.decode(),
            )
        )

    def touch_dag(self, dag_id: str, *, added: int = 0) -> None:
        self._dags[dag_id].added += added

    def revive(self, task_id: str, dag_id: str | None, status: Status) -> None:
        """A task that had ended has not ended any more."""
        self.reconsider(task_id, dag_id)
        if dag_id is not None:
            share = self._dags[dag_id]
            share.cancelled -= status is Status.CANCELLED
            share.dead -= status is Status.DEAD_LETTERED

    def give_up(self, task_id: str, dag_id: str | None) -> None:
        """A dead letter that a person cancelled: it has ended in another way now."""
        self.revive(task_id, dag_id, Status.DEAD_LETTERED)
        if dag_id is not None:
            self._dags[dag_id].cancelled += 1

    def reconsider(self, task_id: str, dag_id: str | None) -> None:
        """Judge the DAGs of a task, and of what waits for it, anew: it waits for more or less than before."""
        self._prospects.append(task_id)
        if dag_id is not None:
            self.touch_dag(dag_id)

    def lend_lock(self, task: LockedTask) -> None:
        """A part of a batch waits for others, which may need the document of the batch."""
        if task.lock_key is not None and task.lock_owner is not None:
            self._locks.append((task.lock_key, task.lock_owner))

    def hand_over(self, task: LockedTask) -> None:
        """Its output waits for a gate that runs elsewhere: slot, money and lock are free again."""
        self._settle(task, task.attempt_cost_usd)
        if task.lock_key is not None and task.lock_owner is None:
            self._locks.append((task.lock_key, task.id))
        # The wait may be long: if this was a breaker's probe, another may be one meanwhile.
        self._blameless.append(task.id)

    def charge(self, task: LockedTask, agent_id: str | None, cost: Decimal) -> None:
        """A gate has cost something, which is no part of what the attempt had reserved."""
        if agent_id is not None:
            self._agents[agent_id].actual += cost
        if task.dag_id is not None:
            self._dags[task.dag_id].actual += cost

    def _settle(self, task: LockedTask, cost: Decimal) -> None:
        # A gate that runs elsewhere gave the agent's slot and money back when it began.
        if task.agent_id is None:
            return
        shares = [self._agents[task.agent_id]]
        if task.dag_id is not None:
            shares.append(self._dags[task.dag_id])
        for share in shares:
            share.count += 1
            share.reserved += task.reserved_usd
            share.actual += cost

    async def write(self, connection: Connection) -> list[str]:
        """Write everything; gives the batches whose children are all done, which have to be finished next."""
        sql = catalog.load("transition/changes")
        async with connection.pipeline():
            send = _Sender(connection, sql, self.now)
            await send("requeue_tasks", _REQUEUE, self._requeued)
            await send("end_tasks", _END, self._ended)
            await send("record_attempts", _ATTEMPT, self._attempts)
            agents = [(name, s.count, s.reserved, s.actual) for name, s in sorted(self._agents.items())]
            await send("settle_agents", ("agent_ids", "counts", "reserved", "actual"), agents)
            dags = [
                (name, s.reserved, s.actual, s.added, s.completed, s.cancelled, s.dead)
                for name, s in sorted(self._dags.items())
            ]
            await send("release_locks", ("keys", "holders"), sorted(self._locks))
            names = [row[0] for row in dags]
            below = None
            if self._prospects:
                below = await connection.execute(
                    sql["lock_dags_below"], {"ids": self._prospects, "dag_ids": names}
                )
            await send("settle_dags", _DAG, dags)
            await send("free_keys", ("keys", "task_ids"), self._freed_keys)
            await send("insert_dead_letters", _LETTER, self._dead_letters)
            await send("insert_events", _EVENT, self._events)
            batches = None
            if self._ended_ids:
                batches = await connection.execute(
                    sql["unblock_dependents"], {**self.now, "ids": self._ended_ids}
                )
            if self._locks:
                keys = sorted({key for key, _ in self._locks})
                await connection.execute(sql["unpark_lock_waiters"], {"keys": keys})
            if dags:
                await connection.execute(sql["unpark_budget_waiters"], {"dag_ids": names})
            judged = names if below is None else [row[0] for row in await below.fetchall()]
            if judged:
                await connection.execute(sql["judge_dags"], {**self.now, "dag_ids": judged})
            ready = [row[0] for row in self._requeued if row[1] is Status.READY]
            if ready:
                await connection.execute(sql["wake_ready"], {"ids": ready})
            if self._blameless:
                free_probes = catalog.load("guards/breakers")["free_probes"]
                await connection.execute(free_probes, {"ids": self._blameless})
        if batches is None:
            return []
        return [row[0] for row in await batches.fetchall() if row[1]]


_REQUEUE = (
    "ids",
    "statuses",
    "delays",
    "lane_ids",
    "attempts",
    "rate_limits",
    "blocked",
    "costs",
    "tokens_in",
    "tokens_out",
    "categories",
)
_END = ("ids", "statuses", "attempts", "costs", "tokens_in", "tokens_out", "reasons", "categories", "outputs")
_ATTEMPT = (
    "task_ids",
    "epochs",
    "numbers",
    "revivals",
    "agent_ids",
    "models",
    "claimed_at",
    "started_at",
    "outcomes",
    "categories",
    "errors",
    "costs",
    "tokens_in",
    "tokens_out",
)
_LETTER = ("task_ids", "epochs", "revivals", "costs", "poison", "categories", "errors", "patterns")
_EVENT = ("kinds", "task_ids", "dag_ids", "agent_ids", "epochs", "data")
_DAG = ("dag_ids", "reserved", "actual", "added", "completed", "cancelled", "dead")


@dataclass(frozen=True, slots=True)
class _Sender:
    connection: Connection
    sql: dict[str, Any]
    now: dict[str, Any]

    async def __call__(self, name: str, columns: Iterable[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Send one statement with a row an element; none, if there are no rows."""
        if rows:
            arrays = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
            await self.connection.execute(self.sql[name], {**self.now, **arrays})
