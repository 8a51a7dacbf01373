"""Money beyond a single claim (R-230 to R-238): ceilings changed by hand, and what the promoter watches.

Claims reserve and ends settle in their own statements. What all spend in a day is the sum of what each agent
spends: its row is written by each claim and end anyway, so there is no row that all would wait for.
"""

from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from psycopg.rows import class_row

from lineshaft.engine.guards.rules import CostVelocity, Rules
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.submit.dags import give_dag_a_row
from lineshaft.engine.transition.changes import unpark_budget_waiters
from lineshaft.engine.transition.task_locks import TaskLocks
from lineshaft.errors import InvalidTransitionError, NotFoundError
from lineshaft.model.budget import money
from lineshaft.model.storable import is_storable


@dataclass(frozen=True, slots=True)
class Day:
    """A UTC day, for all agents together."""

    day: date
    spent_usd: Decimal
    reserved_usd: Decimal


class Budgets:
    def __init__(self, database: Database, locks: TaskLocks, rules: Rules) -> None:
        self._database = database
        self._locks = locks
        self._rules = rules
        self._sql = catalog.load(__name__)

    # By hand.

    async def set_dag_budget(self, dag_id: str, ceiling_usd: Decimal | float | None) -> None:
        """What all tasks of a DAG may cost; None: no limit. What it can afford now is to be had at once."""
        ceiling = None if ceiling_usd is None else money(ceiling_usd, "budget_ceiling_usd")
        await self._change(dag_id, ceiling=ceiling)

    async def add_dag_budget(self, dag_id: str, usd: Decimal | float) -> None:
        """One without a ceiling stays without."""
        await self._change(dag_id, add=money(usd, "add_usd"))

    async def _change(
        self, dag_id: str, *, ceiling: Decimal | None = None, add: Decimal | None = None
    ) -> None:
        if not is_storable(dag_id):
            raise NotFoundError(f"There is no DAG {dag_id!r}.")
        values = {**self._database.now, "id": dag_id, "ceiling": ceiling, "add": add}

        async def work(connection: Connection) -> None:
            cursor = await connection.execute(self._sql["set_dag_budget"], values)
            if await cursor.fetchone() is None:
                await self._make_real(connection, dag_id)
                await connection.execute(self._sql["set_dag_budget"], values)
            await unpark_budget_waiters(connection, [dag_id])

        await self._database.run(work)

    async def _make_real(self, connection: Connection, dag_id: str) -> None:
        """A standalone task's DAG gets a row when it gets a ceiling."""
        cursor = await connection.execute(self._sql["task_of_virtual_dag"], {"dag_id": dag_id})
        found = await cursor.fetchone()
        if found is None:
            raise NotFoundError(f"There is no DAG {dag_id}.")
        task = (await self._locks.lock(connection, [found[0]])).get(found[0])
        if task is None:
            raise InvalidTransitionError(f"DAG {dag_id} is over: its only task has ended.")
        if task.dag_id is None:
            await give_dag_a_row(connection, self._database.now, task)

    # What the promoter watches.

    async def tell_blocked(self, limit: int) -> int:
        """Tell of READY tasks that nobody can afford, once each (R-236)."""
        async with self._database.connection() as connection:
            cursor = await connection.execute(
                self._sql["report_unaffordable"], {**self._database.now, "limit": limit}
            )
            return int((await cursor.fetchall())[0][0])

    async def watch(self) -> int:
        """Pause everything if money goes too fast, and tell once a day that the day's is used up.

        Gives the number of alerts.
        """
        alerts = 0
        if self._rules.cost_velocity is not None:
            alerts += await self._watch_velocity(self._rules.cost_velocity)
        if self._rules.daily_budget_usd is not None:
            alerts += await self._watch_day(self._rules.daily_budget_usd)
        return alerts

    async def _watch_velocity(self, velocity: CostVelocity) -> int:
        async def work(connection: Connection) -> int:
            window = velocity.window.total_seconds()
            cursor = await connection.execute(
                self._sql["sample_spend"], {**self._database.now, "window": window}
            )
            spent = (await cursor.fetchall())[0][0]
            if spent <= velocity.limit_usd:
                return 0
            reason = (
                f"{_usd(spent)} were spent within {window / 60:g} minutes, more than "
                f"{_usd(velocity.limit_usd)}: everything is paused until somebody resumes it"
            )
            cursor = await connection.execute(
                self._sql["stop_spending"], {**self._database.now, "reason": reason}
            )
            return int((await cursor.fetchall())[0][0])

        return await self._database.run(work)

    async def _watch_day(self, ceiling: Decimal) -> int:
        day = await self.day()
        message = (
            f"{_usd(day.spent_usd)} of the {_usd(ceiling)} for {day.day:%Y-%m-%d} (UTC) are spent: tasks "
            "wait for the next day, or for a higher daily budget"
        )
        values = {"left": ceiling - day.spent_usd, "day": day.day, "message": message}
        async with self._database.connection() as connection:
            cursor = await connection.execute(
                self._sql["alert_daily_budget"], {**self._database.now, **values}
            )
            return int((await cursor.fetchall())[0][0])

    # Reading.

    async def day(self) -> Day:
        """What was spent today, by UTC (R-237)."""
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(Day)) as cursor,
        ):
            await cursor.execute(self._sql["day"], self._database.now)
            return (await cursor.fetchall())[0]


def _usd(amount: Decimal) -> str:
    return f"{amount.normalize():f} USD"
