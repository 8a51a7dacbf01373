"""Rows of DAGs and edges, written as part of another operation's transaction."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lineshaft.engine.caller import caller
from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.copy import Column, copy_all, copy_of
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_row
from lineshaft.engine.submit.drafts import DagDraft
from lineshaft.types import Submitted, SubmittedDag

_SQL = catalog.load(__name__)
_EDGE_DEFAULTS = {"satisfied": False}


class _KnownDag(NamedTuple):
    dag_id: str
    tasks: str


async def insert_dag(connection: Connection, now: Mapping[str, Any], dag: DagDraft, total: int) -> None:
    values = {**now, **dag.parameters(), "created_by_token": caller().token, "total": total}
    await connection.execute(_SQL["insert_dag"], values)


async def log_dag_created(connection: Connection, now: Mapping[str, Any], dag_id: str) -> None:
    await connection.execute(_SQL["log_dag_created"], {**now, "id": dag_id})


async def give_dag_a_row(connection: Connection, now: Mapping[str, Any], task: LockedTask) -> None:
    """Turn the virtual DAG of a standalone task into a real one."""
    await give_dags_rows(connection, now, [task.id])


async def give_dags_rows(connection: Connection, now: Mapping[str, Any], task_ids: Collection[str]) -> None:
    """Turn the virtual DAGs of standalone tasks, which are locked, into real ones."""
    await connection.execute(_SQL["give_dags_rows"], {**now, "ids": list(task_ids)})
    await connection.execute(_SQL["mark_real_dags"], {"ids": list(task_ids)})


async def take_dag_key(
    connection: Connection, dag: DagDraft, task_ids: Mapping[str, str]
) -> SubmittedDag | None:
    """The DAG that owns the key; None: there is no key, or the new DAG owns it now."""
    if dag.key is None:
        return None
    cursor = await connection.execute(
        _SQL["take_dag_key"],
        {"key": dag.key, "dag_id": dag.id, "tasks": msgspec.json.encode(task_ids).decode()},
    )
    if await cursor.fetchone() is not None:
        return None
    known = await fetch_row(connection, _KnownDag, _SQL["read_dag_key"], {"key": dag.key})
    if known is None:
        raise AssertionError("a key that can't be inserted exists")
    ids: dict[str, str] = msgspec.json.decode(known.tasks)
    return SubmittedDag(
        known.dag_id,
        {name: Submitted(task_id, duplicate=True) for name, task_id in ids.items()},
        duplicate=True,
    )


async def insert_edges(
    connection: Connection,
    edges: Sequence[tuple[str, str]],
    satisfied: Collection[str],
    *,
    copy: bool = False,
) -> None:
    """Each edge is a task and the task that it depends on. `copy` is not possible in a pipeline."""
    if not edges:
        return
    task_ids, depends_on = map(list, zip(*edges, strict=True))
    flags = [name in satisfied for name in depends_on]
    if copy:
        columns: dict[str, Column] = {"task_id": task_ids, "depends_on": depends_on, "satisfied": flags}
        await copy_all(connection, [lambda: copy_of("edge", columns, _EDGE_DEFAULTS)])
    else:
        await connection.execute(
            _SQL["insert_edges"], {"task_ids": task_ids, "depends_on": depends_on, "satisfied": flags}
        )
