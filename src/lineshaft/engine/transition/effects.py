"""The effects of one transition, collected first and then written together.

A transition locks its tasks, decides in Python, and describes the result here. `write` sends everything in
one pipeline, in the order in which rows are locked everywhere ("Lock order" in docs/architecture.md).
Statements that must see what others have just committed (dependents, waiters for a lock, the status of a DAG)
come last, under snapshots newer than the locks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, Protocol

from msgspec import Struct, field
from psycopg.rows import scalar_row

from lineshaft.engine.live import velocity
from lineshaft.engine.live.parking import look_at_quotas, unpark_budget_waiters, unpark_lock_waiters
from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.live.waking import wake_ready
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import send
from lineshaft.engine.transition.rows import (
    AttemptRow,
    DeadLetterRow,
    EndedRow,
    FreedKeyRow,
    HeldLockRow,
    InstanceShareRow,
    NewEvent,
    RequeuedRow,
    ShareRow,
)
from lineshaft.model.breaker import counts_against
from lineshaft.model.error_pattern import error_pattern
from lineshaft.model.states import Status
from lineshaft.types.work import Spent

_SQL = catalog.load(__name__)
#: Follows a statement that ends tasks, in the same transaction; see `Unblocked`.
UNBLOCK_DEPENDENTS = _SQL["unblock_dependents"]


class Unblocked(Protocol):
    """What is read of the only row of `UNBLOCK_DEPENDENTS`."""

    #: Batches whose children have all ended.
    batches_done: list[str]


class Effects(Struct):
    now: dict[str, Any]
    _requeued: list[RequeuedRow] = field(default_factory=list)
    _ended: list[EndedRow] = field(default_factory=list)
    _attempts: list[AttemptRow] = field(default_factory=list)
    _events: list[NewEvent] = field(default_factory=list)
    _dead_letters: list[DeadLetterRow] = field(default_factory=list)
    _freed_keys: list[FreedKeyRow] = field(default_factory=list)
    #: How many slots become free, by agent and incarnation.
    _slots: Counter[tuple[str, int]] = field(default_factory=Counter)
    #: What the ledgers settle, and what DAGs count. The statements do the arithmetic, as in a completion.
    _shares: list[ShareRow] = field(default_factory=list)
    _locks: list[HeldLockRow] = field(default_factory=list)
    #: Claims that ended without evidence about their type: if one was a breaker's probe, another task may be.
    _inconclusive: list[str] = field(default_factory=list)
    #: Tasks whose slots of quotas become free, or which leave the queue.
    _freed: list[str] = field(default_factory=list)
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
        long_waits: int | None = None,
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
                long_waits=task.long_waits if long_waits is None else long_waits,
                blocked=blocked,
                costs=cost,
                tokens_in=total.tokens_input,
                tokens_out=total.tokens_output,
                categories=category,
                accounts=task.account,
            )
        )
        self._settle(task, cost)
        self._release_locks(task)

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
            self._count(task.dag_id, status)
        # Of a task without a claim too: the next waiter takes its place.
        self._locks += [HeldLockRow(key, task.id) for key in task.locks]
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
                accounts=task.account,
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
        self._shares.append(ShareRow(dag_ids=dag_id, added=added))

    def revive(self, task_id: str, dag_id: str | None, status: Status) -> None:
        """A task that ended is live again."""
        self.reconsider(task_id, dag_id)
        if dag_id is not None:
            self._count(dag_id, status, -1)

    def cancel_dead_letter(self, task_id: str, dag_id: str | None) -> None:
        """A dead letter that a person cancelled."""
        self.revive(task_id, dag_id, Status.DEAD_LETTERED)
        if dag_id is not None:
            self._count(dag_id, Status.CANCELLED)

    def reconsider(self, task_id: str, dag_id: str | None) -> None:
        """Update the status of the DAGs of a task and of its dependents: its dependencies have changed."""
        self._prospects.append(task_id)
        if dag_id is not None:
            self.touch_dag(dag_id)

    def release_batch_lock(self, task: LockedTask) -> None:
        """A batch or a part of it waits for other tasks, which may need the document locks of the batch."""
        if task.is_batch or task.lock_owner is not None:
            self._locks += [HeldLockRow(*lock) for lock in task.locks.items()]

    def release_resources(self, task: LockedTask) -> None:
        """Its output waits for a gate that runs elsewhere: slot, money and lock are free again."""
        self._settle(task, task.attempt_cost_usd)
        self._release_locks(task)
        # The wait may be long: if this was a breaker's probe, another task may be in the meantime.
        self._inconclusive.append(task.id)

    def charge(
        self,
        agent_id: str | None,
        dag_id: str | None,
        cost: Decimal,
        *,
        reserved: Decimal,
        agent_reserved: bool,
        day_reserved: bool,
    ) -> None:
        """The cost of a gate, which has a reservation of its own, if any."""
        self._shares.append(ShareRow(agent_id, dag_id, reserved, agent_reserved, day_reserved, costs=cost))

    def _release_locks(self, task: LockedTask) -> None:
        """Those that no batch holds for it."""
        self._locks += [HeldLockRow(key, holder) for key, holder in task.locks.items() if holder == task.id]

    def _count(self, dag_id: str, status: Status, n: int = 1) -> None:
        self._shares.append(
            ShareRow(
                dag_ids=dag_id,
                completed=n * (status is Status.COMPLETED),
                cancelled=n * (status is Status.CANCELLED),
                dead=n * (status is Status.DEAD_LETTERED),
            )
        )

    def _settle(self, task: LockedTask, cost: Decimal) -> None:
        if task.concerns_quotas:
            self._freed.append(task.id)
        # A gate that runs elsewhere returned the agent's slot and money when it began.
        if task.agent_id is None or task.incarnation is None:
            return
        self._slots[task.agent_id, task.incarnation] += 1
        self._shares.append(
            ShareRow(
                task.agent_id,
                task.dag_id,
                task.reserved_usd,
                task.agent_reserved,
                task.day_reserved,
                task.attempt_cost_usd,
                cost,
            )
        )

    async def write(self, connection: Connection) -> list[str]:
        """Write everything; returns the batches whose children have all ended, which must be ended next."""
        async with connection.pipeline():
            await self._write_rows(connection)
            dags = [share for share in self._shares if share.dag_ids is not None]
            names = sorted({share.dag_ids for share in dags if share.dag_ids is not None})
            below = None
            if self._prospects:
                below = connection.cursor(row_factory=scalar_row)
                await below.execute(_SQL["lock_dags_below"], {"ids": self._prospects, "dag_ids": names})
            await self._send(connection, "settle_dags", dags)
            await self._send(connection, "settle_day", self._paid)
            await self._send(connection, "free_keys", self._freed_keys)
            await self._send(connection, "insert_dead_letters", self._dead_letters)
            await self._send(connection, "insert_events", self._events)
            unblocked = None
            if self._ended:
                ids = [task.ids for task in self._ended]
                unblocked = await send(connection, UNBLOCK_DEPENDENTS, {**self.now, "ids": ids})
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
            if any(share.costs for share in self._paid):
                await velocity.look_if_due(connection, self.now)
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
        await self._send(connection, "settle_agents", self._paid)
        await self._send(connection, "release_locks", sorted(self._locks))
        if self._freed:
            look_at_quotas(connection, self.now, ids=self._freed)

    @property
    def _paid(self) -> list[ShareRow]:
        return [share for share in self._shares if share.has_money]

    async def _send(self, connection: Connection, name: str, rows: Sequence[NamedTuple]) -> None:
        """Send one statement with an element per row; nothing, if there are no rows."""
        if rows:
            await connection.execute(_SQL[name], {**self.now, **_columns(rows)})


def _columns(rows: Sequence[NamedTuple]) -> dict[str, list[Any]]:
    return dict(zip(rows[0]._fields, map(list, zip(*rows, strict=True)), strict=True))


def finished_batches(unblocked: Iterable[Unblocked]) -> list[str]:
    """Batches whose children have all ended, from the row of `UNBLOCK_DEPENDENTS`."""
    return [name for row in unblocked for name in row.batches_done]


async def log_events(connection: Connection, now: dict[str, Any], events: Sequence[NewEvent]) -> None:
    if events:
        await connection.execute(_SQL["insert_events"], {**now, **_columns(events)})


async def judge_dags(connection: Connection, now: dict[str, Any], dag_ids: Sequence[str]) -> None:
    """Update the status of DAGs from their counters; their rows are locked."""
    await connection.execute(_SQL["judge_dags"], {**now, "dag_ids": list(dag_ids)})
