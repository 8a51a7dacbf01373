"""Regular work on the queue, in bounded batches, called by the duties."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lineshaft.engine.guards.breakers import Breakers
from lineshaft.engine.guards.budgets import Budgets
from lineshaft.engine.guards.slowdowns import Slowdowns
from lineshaft.engine.lane_removal import remove_lanes
from lineshaft.engine.live.parking import unpark_budget_waiters, unpark_lock_waiters
from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows, fetch_value
from lineshaft.engine.transition.cancel import Cancellations
from lineshaft.engine.transition.fail import Failures
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.model.retry import SystemReason
from lineshaft.model.states import Status

#: The number of recently closed generations that are checked for lost tasks.
_LOOK_BACK = 3

_SQL = catalog.load(__name__)
_log = logging.getLogger("lineshaft.engine")


class _DueTask(NamedTuple):
    id: str
    status: str
    is_batch: bool
    notified: int


class _ExpiredLease(NamedTuple):
    id: str
    agent_id: str | None
    #: The name of the agent's process.
    instance: str | None
    silent_sec: float | None

    def log(self, reason: str) -> None:
        _log.warning(
            "Took task %s back from agent %s, instance %r: %s; last heartbeat or start %.1f s ago",
            *(self.id, self.agent_id, self.instance or "", reason, self.silent_sec or 0.0),
            extra={
                "task_id": self.id,
                "agent_id": self.agent_id,
                "instance": self.instance,
                "reason": reason,
                "silent_sec": self.silent_sec,
            },
        )


class _RekeyedTask(NamedTuple):
    id: str
    missed: bool


class StuckTasksError(LineshaftError):
    """One of these tasks can't be moved; see the cause."""

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__(f"One of these tasks can't be moved: {', '.join(ids)}")
        self.ids = ids


class Maintenance:
    def __init__(
        self,
        transitions: Transitions,
        fail: Failures,
        cancel: Cancellations,
        breakers: Breakers,
        budgets: Budgets,
        *,
        slowdowns: Slowdowns,
    ) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._fail = fail
        self._cancel = cancel
        self._breakers = breakers
        self._budgets = budgets
        self._slowdowns = slowdowns

    async def reap(self, limit: int, without: Sequence[str] = ()) -> dict[str, int]:
        """End claims whose lease has expired; counts by reason."""
        ids: list[str] = []
        expired: list[_ExpiredLease] = []

        async def work(connection: Connection) -> dict[str, str]:
            parameters = {**self._database.now, "limit": limit, "without": list(without)}
            expired[:] = await fetch_rows(connection, _ExpiredLease, _SQL["lock_expired"], parameters)
            ids[:] = [lease.id for lease in expired]
            return await self._fail.expire(connection, ids, _expiry_reason)

        with _naming(ids):
            reasons = await self._database.run(work)
        for lease in expired:
            if lease.id in reasons:
                lease.log(reasons[lease.id])
        return Counter(reasons.values())

    async def report_outages(self) -> None:
        """Alert people when all accounts of an agent are closed, and when one opens."""
        await self._slowdowns.report_outages()

    async def promote_due(self, limit: int, without: Sequence[str] = (), *, only: str | None = None) -> int:
        """Make tasks READY that are due, or only this one; returns how many were due."""
        ids: list[str] = []

        async def work(connection: Connection) -> int:
            parameters = {**self._database.now, "limit": limit, "without": list(without), "only": only}
            due = await fetch_rows(connection, _DueTask, _SQL["promote_due"], parameters)
            ids[:] = [task.id for task in due]
            await self._transitions.finish_batches(
                connection, [task.id for task in due if task.is_batch and task.status == Status.PENDING]
            )
            return len(due)

        with _naming(ids):
            return await self._database.run(work)

    async def promote_for_claim(self, limit: int, task_id: str | None = None) -> int:
        """As `promote_due`, but tasks that can't be moved are left to the promoter, which finds out which."""
        try:
            return await self.promote_due(limit, only=task_id)
        except StuckTasksError:
            return 0

    async def rekey_deadlines(self, limit: int) -> tuple[int, int]:
        """Raise tasks near their deadline; returns how many, and how many deadlines were missed."""
        parameters = {**self._database.now, "limit": limit}
        async with self._database.connection() as connection:
            rows = await fetch_rows(connection, _RekeyedTask, _SQL["rekey_deadlines"], parameters)
        return len(rows), sum(row.missed for row in rows)

    async def expire_tasks(self, limit: int) -> int:
        """Cancel tasks that missed the deadline at which they expire; returns how many there were."""
        parameters = {**self._database.now, "limit": limit}
        async with self._database.connection() as connection:
            ids = await fetch_column(connection, _SQL["expired_tasks"], parameters)
        with _naming(ids):
            await self._cancel.expire(ids)
        return len(ids)

    async def expire_task(self, task_id: str) -> None:
        """Cancel this task if it missed the deadline at which it expires."""
        await self._cancel.expire([task_id])

    async def expire_locks(self) -> int:
        async def work(connection: Connection) -> int:
            return await self._unpark_waiters(connection, "expire_locks", **self._database.now)

        return await self._database.run(work)

    async def recheck_parked(self, limit: int) -> None:
        """Unpark tasks whose lock is free or whose DAG has money again."""

        async def work(connection: Connection) -> None:
            await self._unpark_waiters(connection, "free_locks_with_parked", limit=limit)
            dags = await fetch_column(connection, _SQL["dags_with_parked"], {"limit": limit})
            if dags:
                await unpark_budget_waiters(connection, dags)

        await self._database.run(work)

    async def watch_guards(self, limit: int) -> dict[str, int]:
        """Report unaffordable tasks, check the cost velocity, repair breakers; counts by outcome."""
        return {
            "probes freed": await self._breakers.free_lost_probes(),
            "unaffordable tasks": await self._budgets.report_unaffordable(limit),
            "money alerts": await self._budgets.watch(),
        }

    async def _unpark_waiters(self, connection: Connection, statement: str, **parameters: Any) -> int:
        """Unpark the best waiters for the locks that a statement returns; returns the number of locks."""
        keys = await fetch_column(connection, _SQL[statement], parameters)
        if keys:
            await unpark_lock_waiters(connection, keys)
        return len(keys)

    async def turn_generation(self, left: int) -> bool:
        """Open a new generation if few tasks remain in the current one, compared to those that have left it.

        The remaining tasks are moved to it: at most one row for every five that were claimed.
        """
        few = left // 5

        async def announce(connection: Connection) -> bool:
            if not await self._ask(connection, "try_turn"):
                return False
            if await self._ask(connection, "remaining", limit=few + 1) > few:
                return False
            await connection.execute(_SQL["announce_generation"], {})
            return True

        async def open_it(connection: Connection) -> bool:
            if not await self._ask(connection, "try_turn"):
                return False
            await connection.execute(_SQL["open_generation"], {})
            await connection.execute(_SQL["date_generation"], {})
            await connection.execute(_SQL["move_stragglers"], {"limit": few})
            return True

        return await self._database.run(announce) and await self._database.run(open_it)

    async def close_generations(self, limit: int) -> int:
        """Close drained generations; returns how many are left besides the current one."""

        async def work(connection: Connection) -> int:
            if not await self._ask(connection, "try_turn"):
                return 0
            await connection.execute(_SQL["repair_generation"], {})
            await connection.execute(_SQL["date_generation"], {})
            await connection.execute(_SQL["move_stragglers"], {"limit": limit})
            await connection.execute(_SQL["close_generations"], {})
            await connection.execute(_SQL["sweep_generations"], {"limit": limit, "last": _LOOK_BACK})
            return await self._ask(connection, "count_generations") - 1

        return await self._database.run(work)

    async def sweep_generations(self, limit: int) -> None:
        """Move READY tasks out of closed generations, in case there ever are any."""

        async def work(connection: Connection) -> None:
            await connection.execute(_SQL["sweep_generations"], {"limit": limit, "last": None})

        await self._database.run(work)

    async def delete_finished(self, older_than_sec: float, limit: int) -> int:
        async def work(connection: Connection) -> int:
            if not await self._ask(connection, "try_lead", duty="lineshaft.janitor"):
                return 0
            return await self._ask(
                connection, "delete_finished", **self._database.now, older_than=older_than_sec, limit=limit
            )

        return await self._database.run(work)

    async def remove_lanes(self) -> int:
        """Delete lanes that no task has used for some hours; returns how many."""

        async def work(connection: Connection) -> int:
            if not await self._ask(connection, "try_lead", duty="lineshaft.lanes"):
                return 0
            return await remove_lanes(connection, self._database.now)

        return await self._database.run(work)

    async def _ask(self, connection: Connection, name: str, **parameters: Any) -> int:
        """The number, or the boolean, that a statement returns."""
        return int(await fetch_value(connection, _SQL[name], parameters))


@contextmanager
def _naming(ids: Sequence[str]) -> Iterator[None]:
    """An error names the tasks that it concerns, unless the database is unavailable."""
    try:
        yield
    except UnavailableError:
        raise
    except Exception as error:
        raise StuckTasksError(ids) from error


def _expiry_reason(task: LockedTask) -> SystemReason:
    if task.status == Status.CLAIMED:
        return SystemReason.CLAIM_EXPIRED
    # A lease never exceeds the execution limit: if it ended there, the limit is the reason.
    if task.limit_at is not None and task.lease_until is not None and task.lease_until >= task.limit_at:
        return SystemReason.EXECUTION_LIMIT
    return SystemReason.HEARTBEAT_TIMEOUT
