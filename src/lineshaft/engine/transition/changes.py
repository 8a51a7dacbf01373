"""Changes of one transition, collected first and then written together.

A transition locks its tasks, decides in Python, and describes the result here. `write` sends everything in
one pipeline, in the order in which rows are locked everywhere: tasks, instances, agents, document locks,
DAGs, the day.
Statements that must see what others have just committed (dependents, waiters for a lock, the status of a DAG)
come last, under snapshots newer than the locks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from msgspec import Struct, field
from psycopg.rows import scalar_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.transition.rows import (
    AgentShareRow,
    AttemptRow,
    DagShareRow,
    DeadLetterRow,
    EndedRow,
    FreedKeyRow,
    HeldLockRow,
    InstanceShareRow,
    NewEvent,
    RequeuedRow,
)
from lineshaft.model.breaker import counts_against
from lineshaft.model.error_pattern import error_pattern
from lineshaft.model.states import Status
from lineshaft.types.work import NOTHING, Spent

_SQL = catalog.load(__name__)
#: Follows a statement that ends tasks, in the same transaction. Its row is an `Unblocked`.
UNBLOCK_DEPENDENTS = _SQL["unblock_dependents"]


class LockedTask(Struct, frozen=True):
    """A live task as `lock_tasks` reads it: everything that decides about a transition."""

    id: str
    epoch: int
    status: str
    dag_id: str | None
    agent_id: str | None
    #: The instance of the agent that holds it.
    incarnation: int | None
    reserved_usd: Decimal
    #: Whether the reservation is part of the agent's reserved money, and of the day's.
    agent_reserved: bool
    day_reserved: bool
    cost_usd: Decimal
    attempt_cost_usd: Decimal
    attempt_tokens_input: int
    attempt_tokens_output: int
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
    lock_token: int | None
    lane_id: int
    model: str | None
    version: str | None
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


class Unblocked(NamedTuple):
    """The row of `UNBLOCK_DEPENDENTS`."""

    #: Batches whose children have all ended.
    batches_done: list[str]
    woken: int


class _Share(Struct):
    reserved: Decimal = NOTHING
    actual: Decimal = NOTHING
    added: int = 0
    completed: int = 0
    cancelled: int = 0
    dead: int = 0


class Changes(Struct):
    now: dict[str, Any]
    _requeued: list[RequeuedRow] = field(default_factory=list)
    _ended: list[EndedRow] = field(default_factory=list)
    _attempts: list[AttemptRow] = field(default_factory=list)
    _events: list[NewEvent] = field(default_factory=list)
    _dead_letters: list[DeadLetterRow] = field(default_factory=list)
    _freed_keys: list[FreedKeyRow] = field(default_factory=list)
    #: How many slots become free, by agent and incarnation.
    _slots: Counter[tuple[str, int]] = field(default_factory=Counter)
    _agents: defaultdict[str, _Share] = field(default_factory=lambda: defaultdict(_Share))
    _day: _Share = field(default_factory=_Share)
    _dags: defaultdict[str, _Share] = field(default_factory=lambda: defaultdict(_Share))
    _locks: list[HeldLockRow] = field(default_factory=list)
    #: Claims that ended without evidence about their type: if one was a breaker's probe, another task may be.
    _inconclusive: list[str] = field(default_factory=list)
    #: Tasks whose dependents can no longer run, or can again.
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
        """The claim ends, the task doesn't."""
        total = spent.total(task)
        cost = spent.cost(task)
        self._requeued.append(
            RequeuedRow(
                ids=task.id,
                statuses=status,
                delays=delay_sec,
                lane_ids=task.lane_id if lane_id is None else lane_id,
                attempts=task.attempts if attempts is None else attempts,
                rate_limits=task.rate_limits if rate_limits is None else rate_limits,
                blocked=blocked,
                costs=cost,
                tokens_in=total.tokens_input,
                tokens_out=total.tokens_output,
                categories=category,
            )
        )
        self._settle(task, cost)
        if task.lock_key is not None and task.lock_owner is None:
            self._locks.append(HeldLockRow(task.lock_key, task.id))

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
        total = spent.total(task)
        cost = spent.cost(task)
        self._ended.append(
            EndedRow(
                ids=task.id,
                statuses=status,
                attempts=task.attempts if attempts is None else attempts,
                costs=cost,
                tokens_in=total.tokens_input,
                tokens_out=total.tokens_output,
                reasons=reason,
                categories=category,
                outputs=None if output is None else output.decode(),
            )
        )
        if status is not Status.COMPLETED:
            self._prospects.append(task.id)
        self._settle(task, cost)
        if task.dag_id is not None:
            share = self._dags[task.dag_id]
            share.completed += status is Status.COMPLETED
            share.cancelled += status is Status.CANCELLED
            share.dead += status is Status.DEAD_LETTERED
        if task.lock_key is not None:
            self._locks.append(HeldLockRow(task.lock_key, task.id))
        if status is Status.DEAD_LETTERED:
            self._dead_letters.append(
                DeadLetterRow(
                    task_ids=task.id,
                    epochs=task.epoch,
                    revivals=task.revivals,
                    costs=task.cost_usd + cost,
                    poison=poison_pill,
                    categories=category,
                    errors=reason,
                    patterns=error_pattern(reason or ""),
                )
            )
        if status is not Status.COMPLETED and task.idempotency_key is not None:
            self._freed_keys.append(FreedKeyRow(task.idempotency_key, task.id))

    def attempt(
        self,
        task: LockedTask,
        outcome: str,
        *,
        spent: Spent,
        category: str | None = None,
        error: str | None = None,
        traceback: str | None = None,
        ended_by: str | None = None,
    ) -> None:
        """How the claim ended; nothing for a task without a claim.

        `ended_by`: the call with the claim's token that ended it; None: something else.
        """
        if task.status not in {Status.CLAIMED, Status.RUNNING, Status.VALIDATING}:
            return
        if outcome != "failed" or not counts_against(category or ""):
            self._inconclusive.append(task.id)
        total = spent.total(task)
        self._attempts.append(
            AttemptRow(
                task_ids=task.id,
                epochs=task.epoch,
                numbers=task.attempts + 1,
                revivals=task.revivals,
                agent_ids=task.agent_id,
                incarnations=task.incarnation,
                models=task.model,
                versions=task.version,
                claimed_at=task.claimed_at,
                started_at=task.started_at,
                outcomes=outcome,
                categories=category,
                errors=error,
                tracebacks=traceback,
                ended_by=ended_by,
                costs=spent.cost(task),
                tokens_in=total.tokens_input,
                tokens_out=total.tokens_output,
            )
        )

    def event(self, task: LockedTask, kinds: Sequence[str], data: Any = None) -> None:
        self._events.append(
            NewEvent.of(kinds, task.id, task.dag_id, agent_id=task.agent_id, epoch=task.epoch, data=data)
        )

    def touch_dag(self, dag_id: str, *, added: int = 0) -> None:
        self._dags[dag_id].added += added

    def revive(self, task_id: str, dag_id: str | None, status: Status) -> None:
        """A task that ended is live again."""
        self.reconsider(task_id, dag_id)
        if dag_id is not None:
            share = self._dags[dag_id]
            share.cancelled -= status is Status.CANCELLED
            share.dead -= status is Status.DEAD_LETTERED

    def cancel_dead_letter(self, task_id: str, dag_id: str | None) -> None:
        """A dead letter that a person cancelled."""
        self.revive(task_id, dag_id, Status.DEAD_LETTERED)
        if dag_id is not None:
            self._dags[dag_id].cancelled += 1

    def reconsider(self, task_id: str, dag_id: str | None) -> None:
        """Update the status of the DAGs of a task and of its dependents: its dependencies have changed."""
        self._prospects.append(task_id)
        if dag_id is not None:
            self.touch_dag(dag_id)

    def release_batch_lock(self, task: LockedTask) -> None:
        """A part of a batch waits for other tasks, which may need the document lock of the batch."""
        if task.lock_key is not None and task.lock_owner is not None:
            self._locks.append(HeldLockRow(task.lock_key, task.lock_owner))

    def release_resources(self, task: LockedTask) -> None:
        """Its output waits for a gate that runs elsewhere: slot, money and lock are free again."""
        self._settle(task, task.attempt_cost_usd)
        if task.lock_key is not None and task.lock_owner is None:
            self._locks.append(HeldLockRow(task.lock_key, task.id))
        # The wait may be long: if this was a breaker's probe, another task may be in the meantime.
        self._inconclusive.append(task.id)

    def charge(self, task: LockedTask, agent_id: str | None, cost: Decimal) -> None:
        """The cost of a gate, which isn't part of the attempt's reservation."""
        if agent_id is not None:
            self._agents[agent_id].actual += cost
        if task.dag_id is not None:
            self._dags[task.dag_id].actual += cost
        self._day.actual += cost

    def _settle(self, task: LockedTask, cost: Decimal) -> None:
        # A gate that runs elsewhere returned the agent's slot and money when it began.
        if task.agent_id is None or task.incarnation is None:
            return
        self._slots[task.agent_id, task.incarnation] += 1
        shares = [(self._agents[task.agent_id], task.agent_reserved), (self._day, task.day_reserved)]
        if task.dag_id is not None:
            shares.append((self._dags[task.dag_id], True))
        for share, has_reserved in shares:
            reserved = task.reserved_usd if has_reserved else NOTHING
            share.reserved += reserved
            # What was above the reservation is booked already (spending.sql).
            share.actual += cost - max(task.attempt_cost_usd - reserved, NOTHING)

    async def write(self, connection: Connection) -> list[str]:
        """Write everything; returns the batches whose children have all ended, which must be ended next."""
        async with connection.pipeline():
            await self._write_rows(connection)
            dags = self._dag_shares()
            names = [share.dag_ids for share in dags]
            below = None
            if self._prospects:
                below = connection.cursor(row_factory=scalar_row)
                await below.execute(_SQL["lock_dags_below"], {"ids": self._prospects, "dag_ids": names})
            await self._send(connection, "settle_dags", dags)
            if self._day.reserved or self._day.actual:
                day = {"reserved": self._day.reserved, "actual": self._day.actual}
                await connection.execute(_SQL["settle_day"], {**self.now, **day})
            await self._send(connection, "free_keys", self._freed_keys)
            await self._send(connection, "insert_dead_letters", self._dead_letters)
            await self._send(connection, "insert_events", self._events)
            unblocked = None
            if self._ended:
                unblocked = connection.cursor()
                ids = [task.ids for task in self._ended]
                await unblocked.execute(UNBLOCK_DEPENDENTS, {**self.now, "ids": ids})
            if self._locks:
                await unpark_lock_waiters(connection, sorted({lock.keys for lock in self._locks}))
            if names:
                await unpark_budget_waiters(connection, names)
            judged = names if below is None else await below.fetchall()
            if judged:
                await judge_dags(connection, self.now, judged)
            if ready := [task.ids for task in self._requeued if task.statuses is Status.READY]:
                await wake_ready(connection, ready)
            if self._inconclusive:
                await connection.execute(_SQL["free_probes"], {"ids": self._inconclusive})
        if unblocked is None:
            return []
        return finished_batches(await unblocked.fetchall())

    async def _write_rows(self, connection: Connection) -> None:
        """The rows of tasks, their claims and agents, and document locks."""
        await self._send(connection, "requeue_tasks", self._requeued)
        await self._send(connection, "end_tasks", self._ended)
        await self._send(connection, "record_attempts", self._attempts)
        slots = [InstanceShareRow(*instance, count) for instance, count in sorted(self._slots.items())]
        await self._send(connection, "free_slots", slots)
        # Without money the agent's row isn't written: its instances don't wait for each other.
        agents = [
            AgentShareRow(name, share.reserved, share.actual)
            for name, share in sorted(self._agents.items())
            if share.reserved or share.actual
        ]
        await self._send(connection, "settle_agents", agents)
        await self._send(connection, "release_locks", sorted(self._locks))

    def _dag_shares(self) -> list[DagShareRow]:
        return [
            DagShareRow(
                name,
                share.reserved,
                share.actual,
                share.added,
                share.completed,
                share.cancelled,
                share.dead,
            )
            for name, share in sorted(self._dags.items())
        ]

    async def _send(self, connection: Connection, name: str, rows: Sequence[NamedTuple]) -> None:
        """Send one statement with an element per row; nothing, if there are no rows."""
        if rows:
            await connection.execute(_SQL[name], {**self.now, **_columns(rows)})


def _columns(rows: Sequence[NamedTuple]) -> dict[str, list[Any]]:
    return dict(zip(rows[0]._fields, map(list, zip(*rows, strict=True)), strict=True))


def finished_batches(unblocked: Iterable[Sequence[Any]]) -> list[str]:
    """Batches whose children have all ended, from the row of `UNBLOCK_DEPENDENTS`."""
    return [name for found in map(Unblocked._make, unblocked) for name in found.batches_done]


async def log_events(connection: Connection, now: dict[str, Any], events: Sequence[NewEvent]) -> None:
    if events:
        await connection.execute(_SQL["insert_events"], {**now, **_columns(events)})


async def unpark_lock_waiters(connection: Connection, keys: Sequence[str]) -> None:
    """The best waiters for these document locks can be claimed again."""
    await connection.execute(_SQL["unpark_lock_waiters"], {"keys": list(keys)})


async def unpark_budget_waiters(connection: Connection, dag_ids: Sequence[str]) -> None:
    """Tasks that these DAGs can pay for again can be claimed again."""
    await connection.execute(_SQL["unpark_budget_waiters"], {"dag_ids": list(dag_ids)})


async def judge_dags(connection: Connection, now: dict[str, Any], dag_ids: Sequence[str]) -> None:
    """Update the status of DAGs from their counters; their rows are locked."""
    await connection.execute(_SQL["judge_dags"], {**now, "dag_ids": list(dag_ids)})


async def wake_ready(connection: Connection, ids: Sequence[str]) -> None:
    """Notify processes that wait for work about tasks that have just become READY."""
    await connection.execute(_SQL["wake_ready"], {"ids": list(ids)})


async def wake_all(connection: Connection) -> None:
    """Notify all processes that wait for work."""
    await connection.execute(_SQL["wake_all"], {})
