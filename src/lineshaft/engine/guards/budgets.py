"""Budgets beyond a single claim: DAG budgets, and the checks of the promoter.

Claims reserve money and ends settle it in their own statements. What is spent on a day has a row of its own,
which only attempts that cost something touch.
"""

from datetime import date
from decimal import Decimal
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from lineshaft.engine.feed.actor import act_json
from lineshaft.engine.guards.limits import InstallationLimits
from lineshaft.engine.live import velocity
from lineshaft.engine.live.parking import unpark_budget_waiters
from lineshaft.engine.live.task_locks import TaskLocks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows, fetch_value
from lineshaft.engine.submit.dags import give_dag_a_row
from lineshaft.errors import InvalidTransitionError, NotFoundError
from lineshaft.model.budget import money
from lineshaft.model.fields import check_fields
from lineshaft.model.storable import is_storable

_SQL = catalog.load(__name__)


class Day(Struct, frozen=True):
    """A UTC day, for all agents together."""

    day: date
    spent_usd: Decimal
    reserved_usd: Decimal
    #: None: no limit.
    budget_usd: Decimal | None


class Budgets:
    def __init__(self, database: Database, locks: TaskLocks, limits: InstallationLimits) -> None:
        self._database = database
        self._locks = locks
        self._limits = limits

    async def set_dag_budget(self, dag_id: str, ceiling_usd: Decimal | float | None) -> None:
        """Limit the cost of a DAG; None: no limit. Tasks within the budget are claimable at once."""
        await self.change_dag(dag_id, ceiling_usd=ceiling_usd)

    async def add_dag_budget(self, dag_id: str, usd: Decimal | float) -> None:
        """A DAG without a budget stays without."""
        await self.change_dag(dag_id, add_usd=usd)

    async def change_dag(
        self,
        dag_id: str,
        *,
        ceiling_usd: Decimal | float | UnsetType | None = UNSET,
        add_usd: Decimal | float | None = None,
        title: str | None = None,
    ) -> None:
        """Change the budget of a DAG, its title, or both."""
        ceiling = None
        if ceiling_usd is not UNSET and ceiling_usd is not None:
            ceiling = money(ceiling_usd, "budget_ceiling_usd")
        if title is not None:
            check_fields(title=title)
        if not is_storable(dag_id):
            raise NotFoundError(f"There is no DAG {dag_id!r}.")
        values = {
            **self._database.now,
            "id": dag_id,
            "ceiling": ceiling,
            "set_ceiling": ceiling_usd is not UNSET,
            "add": None if add_usd is None else money(add_usd, "add_usd"),
            "title": title,
            "act": act_json(),
        }

        async def work(connection: Connection) -> None:
            if not await fetch_column(connection, _SQL["change_dag"], values):
                await self._give_row(connection, dag_id)
                await connection.execute(_SQL["change_dag"], values)
            await unpark_budget_waiters(connection, [dag_id])

        await self._database.run(work)

    async def _give_row(self, connection: Connection, dag_id: str) -> None:
        """A virtual DAG gets a row when it gets a budget or a title of its own."""
        task_id = await fetch_value(connection, _SQL["task_of_virtual_dag"], {"dag_id": dag_id})
        if task_id is None:
            raise NotFoundError(f"There is no DAG {dag_id}.")
        task = (await self._locks.lock(connection, [task_id])).get(task_id)
        if task is None:
            raise InvalidTransitionError(f"DAG {dag_id} has ended, with its only task.")
        if task.dag_id is None:
            await give_dag_a_row(connection, self._database.now, task)

    # Checks of the promoter.

    async def report_unaffordable(self, limit: int) -> int:
        """Log an event for each READY task that no agent or DAG can afford, once; returns their number."""
        return await self._count("report_unaffordable", limit=limit)

    async def watch(self) -> int:
        """Pause everything if the cost velocity is too high; alert once a day if the daily budget is used up.

        Returns the number of alerts.
        """
        alerts = 0
        limits = await self._limits.read()
        if limits.velocity_usd is not None:
            alerts += await self._watch_velocity()
        if limits.daily_budget_usd is not None:
            alerts += await self._watch_day(limits.daily_budget_usd)
        return alerts

    async def _watch_velocity(self) -> int:
        async def work(connection: Connection) -> int:
            stopped = await velocity.look(connection, self._database.now)
            await velocity.forget_old_samples(connection, self._database.now)
            return int(stopped)

        return await self._database.run(work)

    async def _watch_day(self, ceiling: Decimal) -> int:
        day = await self.day()
        message = (
            f"{_usd(day.spent_usd)} of the {_usd(ceiling)} for {day.day:%Y-%m-%d} (UTC) are spent: tasks "
            "wait for the next day, or for a higher daily budget"
        )
        left = ceiling - day.spent_usd
        return await self._count("alert_daily_budget", left=left, day=day.day, message=message)

    async def day(self) -> Day:
        """The spend of today, in UTC."""
        async with self._database.connection() as connection:
            (day,) = await fetch_rows(connection, Day, _SQL["day"], self._database.now)
        return day

    async def _count(self, statement: str, **values: Any) -> int:
        async with self._database.connection() as connection:
            return int(await fetch_value(connection, _SQL[statement], {**self._database.now, **values}))


def _usd(amount: Decimal) -> str:
    return f"{amount.normalize():f} USD"
