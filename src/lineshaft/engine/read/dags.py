"""DAGs as the outside sees them. A standalone task's DAG is virtual: it has no row."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader, Row
from lineshaft.engine.read.tasks import grouped
from lineshaft.model import graph
from lineshaft.model.states import Status
from lineshaft.types import Dag

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
    tasks = {member["id"]: depends_on.get(member["id"], ()) for member in members}
    finished = [m["id"] for m in members if m["status"] in {Status.COMPLETED, Status.CANCELLED}]
    counts = Counter(member["status"] for member in members)
    return Dag(
        **(_virtual_dag(dag_id, members[0]) if row is None else row),
        tasks=list(tasks),
        roots=graph.roots(tasks),
        leaves=graph.leaves(tasks),
        critical_path=graph.critical_path(tasks, finished=finished),
        counts={status: counts[status] for status in Status.in_order(counts)},
        virtual=row is None,
    )


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
