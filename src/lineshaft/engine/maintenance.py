"""What keeps the queue going without anybody asking, in bounded batches. The duties call it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lineshaft.engine.guards.breakers import Breakers
from lineshaft.engine.guards.budgets import Budgets
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.transition.changes import LockedTask, unpark_budget_waiters, unpark_lock_waiters
from lineshaft.engine.transition.fail import Fail
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.model.retry import SystemReason
from lineshaft.model.states import Status

#: So many generations that were closed last are looked through for tasks that should not be there.
_LOOK_BACK = 3


class StuckTasksError(LineshaftError):
    """One of these tasks can't be moved; the cause tells why."""

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__(f"One of these tasks can't be moved: {', '.join(ids)}")
        self.ids = ids


class Maintenance:
    def __init__(self, transitions: Transitions, fail: Fail, breakers: Breakers, budgets: Budgets) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._fail = fail
        self._breakers = breakers
        self._budgets = budgets
        self._sql = catalog.load(__name__)

    async def reap(self, limit: int, without: Sequence[str] = ()) -> dict[str, int]:
        """Take back what nobody works on any more; counts by reason."""
        ids: list[str] = []

        async def work(connection: Connection) -> dict[str, int]:
            cursor = await connection.execute(
                self._sql["lock_expired"], {**self._database.now, "limit": limit, "without": list(without)}
            )
            ids[:] = [row[0] for row in await cursor.fetchall()]
            return Counter(await self._fail.expire(connection, ids, _expiry_reason))

        with _naming(ids):
            return await self._database.run(work)

    async def promote_due(self, limit: int, without: Sequence[str] = ()) -> int:
        """Make READY what has waited long enough; gives how many were due."""
        ids: list[str] = []

        async def work(connection: Connection) -> int:
            cursor = await connection.execute(
                self._sql["promote_due"], {**self._database.now, "limit": limit, "without": list(without)}
            )
            rows = await cursor.fetchall()
            ids[:] = [row[0] for row in rows]
            await self._transitions.finish_batches(
                connection, [row[0] for row in rows if row[2] and row[1] == Status.PENDING]
            )
            return len(rows)

        with _naming(ids):
            return await self._database.run(work)

    async def rekey_deadlines(self, limit: int) -> tuple[int, int]:
        """Move tasks up whose deadline comes nearer; gives how many, and how many deadlines were missed."""
        async with self._database.connection() as connection:
            cursor = await connection.execute(
                self._sql["rekey_deadlines"], {**self._database.now, "limit": limit}
            )
            rows = await cursor.fetchall()
        return len(rows), sum(row[1] for row in rows)

    async def expire_locks(self) -> int:
        async def work(connection: Connection) -> int:
            return await self._unpark_waiters(connection, "expire_locks", **self._database.now)

        return await self._database.run(work)

    async def recheck_parked(self, limit: int) -> None:
        """Bring back what is parked though its lock is free or its DAG has money again."""

        async def work(connection: Connection) -> None:
            await self._unpark_waiters(connection, "free_locks_with_parked", limit=limit)
            cursor = await connection.execute(self._sql["dags_with_parked"], {"limit": limit})
            dags = [row[0] for row in await cursor.fetchall()]
            if dags:
                await unpark_budget_waiters(connection, dags)

        await self._database.run(work)

    async def watch_guards(self, limit: int) -> dict[str, int]:
        """Tell what nobody can afford, stop spending that goes too fast, mend breakers; counts by outcome."""
        return {
            "probes freed": await self._breakers.free_lost_probes(),
            "tasks nobody can afford": await self._budgets.tell_blocked(limit),
            "money alerts": await self._budgets.watch(),
        }

    async def _unpark_waiters(self, connection: Connection, statement: str, **parameters: Any) -> int:
        """Let the best waiters for the locks that a statement gives come back; gives how many locks."""
        cursor = await connection.execute(self._sql[statement], parameters)
        keys = [row[0] for row in await cursor.fetchall()]
        if keys:
            await unpark_lock_waiters(connection, keys)
        return len(keys)

    async def turn_generation(self, left: int) -> bool:
        """Open a new generation if few tasks remain in the current one, compared to those that have left it.

        What remains is moved along: at most one row for every five that were claimed.
        """
        few = left // 5

        async def announce(connection: Connection) -> bool:
            if not await self._ask(connection, "try_turn"):
                return False
            if await self._ask(connection, "remaining", limit=few + 1) > few:
                return False
            await connection.execute(self._sql["announce_generation"], {})
            return True

        async def open_it(connection: Connection) -> bool:
            if not await self._ask(connection, "try_turn"):
                return False
            await connection.execute(self._sql["open_generation"], {})
            await connection.execute(self._sql["date_generation"], {})
            await connection.execute(self._sql["move_stragglers"], {"limit": few})
            return True

        return await self._database.run(announce) and await self._database.run(open_it)

    async def close_generations(self, limit: int) -> int:
        """Stop looking into drained generations; gives how many are left besides the current one."""

        async def work(connection: Connection) -> int:
            if not await self._ask(connection, "try_turn"):
                return 0
            await connection.execute(self._sql["repair_generation"], {})
            await connection.execute(self._sql["date_generation"], {})
            await connection.execute(self._sql["move_stragglers"], {"limit": limit})
            await connection.execute(self._sql["close_generations"], {})
            await connection.execute(self._sql["sweep_generations"], {"limit": limit, "last": _LOOK_BACK})
            return await self._ask(connection, "count_generations") - 1

        return await self._database.run(work)

    async def sweep_generations(self, limit: int) -> None:
        """Bring back what became READY in any generation that is closed, should there ever be such a task."""

        async def work(connection: Connection) -> None:
            await connection.execute(self._sql["sweep_generations"], {"limit": limit, "last": None})

        await self._database.run(work)

    async def delete_finished(self, older_than_sec: float, limit: int) -> int:
        async def work(connection: Connection) -> int:
            if not await self._ask(connection, "try_lead", duty="lineshaft.janitor"):
                return 0
            return await self._ask(
                connection, "delete_finished", **self._database.now, older_than=older_than_sec, limit=limit
            )

        return await self._database.run(work)

    async def _ask(self, connection: Connection, name: str, **parameters: Any) -> int:
        """The one number, or yes or no, that a statement answers with."""
        cursor = await connection.execute(self._sql[name], parameters)
        return int((await cursor.fetchall())[0][0])


@contextmanager
def _naming(ids: Sequence[str]) -> Iterator[None]:
    """An error names the tasks that were to be moved. That the database is away is no fault of theirs."""
    try:
        yield
    except UnavailableError:
        raise
    except Exception as error:
        raise StuckTasksError(ids) from error


def _expiry_reason(task: LockedTask) -> SystemReason:
    if task.status == Status.CLAIMED:
        return SystemReason.CLAIM_EXPIRED
    # A lease never goes past the execution limit: if it ended there, the limit is the reason.
    if task.limit_at is not None and task.lease_until is not None and task.lease_until >= task.limit_at:
        return SystemReason.EXECUTION_LIMIT
    return SystemReason.HEARTBEAT_TIMEOUT
