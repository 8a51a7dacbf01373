"""READY tasks that a claim parked: they need a held document lock, room of a quota, or money of their DAG."""

from collections.abc import Mapping, Sequence
from typing import Any

from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, after_commit
from lineshaft.engine.postgres.rows import fetch_column

_SQL = catalog.load(__name__)


async def unpark_lock_waiters(connection: Connection, keys: Sequence[str]) -> None:
    """The best waiters for these document locks can be claimed again."""
    await connection.execute(_SQL["unpark_lock_waiters"], {"keys": list(keys)})


async def unpark_budget_waiters(connection: Connection, dag_ids: Sequence[str]) -> None:
    """Tasks that these DAGs can pay for again can be claimed again."""
    await connection.execute(_SQL["unpark_budget_waiters"], {"dag_ids": list(dag_ids)})


def look_at_quotas(
    connection: Connection, now: Mapping[str, Any], *, names: Sequence[str] = (), ids: Sequence[str] = ()
) -> None:
    """After the commit, let tasks be claimed that wait for quotas with room.

    `names` are of what quotas count (`quota_name_1`). `ids` are tasks whose slots don't count any more, or
    that left the queue.
    """
    parameters = {**now, "names": list(names), "ids": list(ids)}

    async def look(connection: Connection) -> None:
        await connection.execute(_SQL["look_at_quotas"], parameters)

    after_commit(connection, look)


async def quota_names(connection: Connection, ids: Sequence[str]) -> list[str]:
    """What quotas count for the tags and the own keys of these tasks."""
    return await fetch_column(connection, _SQL["quota_names"], {"ids": list(ids)}) if ids else []


async def reorder_parked(connection: Connection, task: LockedTask, now: Mapping[str, Any]) -> None:
    """Only the best waiters for a lock, a quota or a DAG's money can be claimed: now perhaps other ones.

    A task that could be claimed needs no notification: there was one when it became READY.
    """
    if task.lock_key is not None:
        await unpark_lock_waiters(connection, [task.lock_key])
    if task.dag_id is not None:
        await unpark_budget_waiters(connection, [task.dag_id])
    if task.concerns_quotas:
        look_at_quotas(connection, now, ids=[task.id])
