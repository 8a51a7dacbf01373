"""READY tasks that a claim parked because they need a held document lock, or money that their DAG lacks."""

from collections.abc import Sequence

from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection

_SQL = catalog.load(__name__)


async def unpark_lock_waiters(connection: Connection, keys: Sequence[str]) -> None:
    """The best waiters for these document locks can be claimed again."""
    await connection.execute(_SQL["unpark_lock_waiters"], {"keys": list(keys)})


async def unpark_budget_waiters(connection: Connection, dag_ids: Sequence[str]) -> None:
    """Tasks that these DAGs can pay for again can be claimed again."""
    await connection.execute(_SQL["unpark_budget_waiters"], {"dag_ids": list(dag_ids)})


async def reorder_parked(connection: Connection, task: LockedTask) -> None:
    """Only the best waiters for a lock, or for a DAG's money, can be claimed: these may be other tasks now.

    A task that could be claimed needs no notification: there was one when it became READY.
    """
    if task.lock_key is not None:
        await unpark_lock_waiters(connection, [task.lock_key])
    if task.dag_id is not None:
        await unpark_budget_waiters(connection, [task.dag_id])
