"""DAGs as the outside sees them. A standalone task's DAG is virtual: it has no row."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader, Row
from lineshaft.engine.read.tasks import grouped, read_tasks
from lineshaft.model import graph
from lineshaft.model.states import Status
from lineshaft.types import Dag, Task
from lineshaft.types.dags import ListItems

_SQL = catalog.load(__name__)


async def read_dags(reader: Reader, ids: Sequence[str]) -> list[Dag]:
    """The DAGs with these ids, in this order; unknown ones are left out."""
    if not ids:
        return []
    statements = (_SQL["read_dags"], _SQL["dag_members"], _SQL["dag_edges"])
    sent = [await reader.send(statement, ids=list(ids)) for statement in statements]
    found, members, edges = [await cursor.fetchall() for cursor in sent]
    rows = {row["id"]: row for row in found}
    members_of = grouped(members, "dag_id")
    depends_on: defaultdict[str, list[str]] = defaultdict(list)
    for edge in edges:
        depends_on[edge["task_id"]].append(edge["depends_on"])
    return [
        _build_dag(name, rows.get(name), members_of[name], depends_on)
        for name in ids
        if name in rows or members_of[name]
    ]


_DAG_STATUS = {Status.COMPLETED: "completed", Status.CANCELLED: "cancelled", Status.DEAD_LETTERED: "failed"}


def _build_dag(
    dag_id: str, row: Row | None, members: Sequence[Row], depends_on: Mapping[str, Sequence[str]]
) -> Dag:
    """`row` is None for a virtual DAG, which is derived from its only member."""
    tasks = _graph(members, depends_on)
    finished = [m["id"] for m in members if m["status"] in {Status.COMPLETED, Status.CANCELLED}]
    counts = Counter(member["status"] for member in members)
    return Dag(
        **(_virtual_dag(dag_id, members[0]) if row is None else row),
        tasks=[member["id"] for member in members],
        roots=graph.roots(tasks),
        leaves=graph.leaves(tasks),
        critical_path=graph.critical_path(tasks, finished=finished),
        counts={status: counts[status] for status in Status.in_order(counts)},
        virtual=row is None,
    )


def _graph(members: Sequence[Row], depends_on: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """What each task waits for. The children of a list come after what its task waited for."""
    parents = {member["id"]: member["parent_id"] for member in members}
    lists = {
        member["id"]: frozenset(depends_on.get(member["id"], ())) for member in members if member["has_list"]
    }
    above = {
        name: [other for other in waits_for if parents.get(other) != name]
        for name, waits_for in lists.items()
    }
    return {
        name: [*depends_on.get(name, ()), *above.get(parent, ())]
        for name, parent in parents.items()
        # Without those of a list that was replaced.
        if parent not in lists or name in lists[parent]
    }


class DagTasks(NamedTuple):
    """The tasks of a DAG for a page about it, at most some of them."""

    tasks: list[Task]
    #: The children of lists, by the id of their task.
    lists: dict[str, ListItems]


async def read_dag_tasks(reader: Reader, dag_id: str, opened: Collection[str], most: int) -> DagTasks:
    """The children of lists are counted; those of `opened` ones are among the tasks too."""
    parameters = {"id": dag_id, "opened": list(opened), "most": most}
    (found,) = await reader.rows(_SQL["dag_tasks"], **parameters)
    lists: defaultdict[str, ListItems] = defaultdict(ListItems)
    for row in await reader.rows(_SQL["list_items"], id=dag_id):
        lists[row["id"]].counts[Status(row["status"])] += row["n"]
        lists[row["id"]].cost_usd += row["cost_usd"]
    return DagTasks(await read_tasks(reader, found["ids"]), dict(lists))


def _virtual_dag(dag_id: str, task: Row) -> Row:
    status = _DAG_STATUS.get(task["status"], "running" if task["epoch"] else "pending")
    return {
        "id": dag_id,
        "title": task["title"],
        "status": status,
        "created_by": task["created_by"],
        "created_by_token": task["created_by_token"],
        "budget_ceiling_usd": None,
        "reserved_usd": task["reserved_usd"],
        "spent_usd": task["spent_usd"],
        "created_at": task["created_at"],
        "completed_at": task["ended_at"],
    }
