"""Builds tasks, attempts and DAGs from rows of the database."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import UNSET, Raw

from lineshaft.engine.read.snapshot import Row
from lineshaft.model import graph
from lineshaft.model.priority import PriorityInputs, effective_priority, tier
from lineshaft.model.states import Status
from lineshaft.model.tasks import policy
from lineshaft.types import Attempt, ClaimInfo, Dag, FailedAttempt, OutputGate, Task, TaskOutput, TokensUsed
from lineshaft.types.json import raw

#: At most this many dead letters upstream of a task are named; one is enough to block it.
_NAMED = 20

_COPIED = frozenset(Task.__struct_fields__) - {
    *("spec_json", "progress_json", "surface_json", "duplicate", "mismatch"),
    *("status", "effective_priority", "tier", "depends_on", "blocked_by", "blocked_reason", "retry", "claim"),
    *("output", "failure_reason", "failure_category", "failure_history", "tokens_used"),
    *("completed_at", "cancelled_at", "cancel_reason"),
}


def task_from_rows(
    row: Row, edges: Iterable[Row], failures: Iterable[Row], dead_upstream: Sequence[str]
) -> Task:
    """From a row of read_tasks and the rows of other statements that belong to it."""
    status = Status(row["status"])
    effective = None if status.ended else _effective(row)
    all_edges = list(edges)
    attempts = list(failures)
    reason, category = _failure(status, row, attempts)
    return Task(
        **{name: row[name] for name in _COPIED},
        spec_json=Raw(row["spec"]),
        status=status,
        effective_priority=effective,
        tier=None if effective is None else tier(effective),
        depends_on=[edge["depends_on"] for edge in all_edges],
        blocked_by=[] if status.ended else [e["depends_on"] for e in all_edges if not e["satisfied"]],
        blocked_reason=blocked_reason(dead_upstream),
        retry=policy(msgspec.json.decode(row["retry"]) if row["retry"] else None, row["preset"]),
        claim=_claim(row),
        progress_json=raw(row["progress"]),
        output=_output(row),
        failure_reason=reason,
        failure_category=category,
        failure_history=[failed_attempt(attempt) for attempt in attempts if attempt["outcome"] == "failed"],
        tokens_used=TokensUsed(row["tokens_input"], row["tokens_output"]),
        completed_at=row["ended_at"] if status is Status.COMPLETED else None,
        cancelled_at=row["ended_at"] if status is Status.CANCELLED else None,
        cancel_reason=row["reason"] if status is Status.CANCELLED else None,
        surface_json=UNSET if row["surface"] is None else Raw(row["surface"]),
    )


def _effective(row: Row) -> float:
    inputs = PriorityInputs(
        priority=row["priority"],
        boost_per_minute=row["priority_boost_per_minute"],
        # Age counts from the first time the task was READY.
        ready_at=row["ready_at"] or row["now"],
        deadline=row["deadline"],
        downstream_length=row["downstream"],
    )
    return effective_priority(inputs, row["now"])


def _claim(row: Row) -> ClaimInfo | None:
    if row["agent_id"] is None:
        return None
    return ClaimInfo(
        row["agent_id"], row["claimed_at"], row["heartbeat_at"], row["heartbeat_in_force"], row["epoch"]
    )


_GATES = msgspec.json.Decoder(tuple[OutputGate, ...])


def _output(row: Row) -> TaskOutput:
    gates = _GATES.decode(row["gates"]) if row["gates"] else ()
    single = gates[0] if len(gates) == 1 else None
    return TaskOutput(
        type=row["output_type"],
        validation=single.method if single else gates or "none",
        validation_schema_json=single.schema_json if single else raw(None),
        require_decision_report=row["require_decision_report"],
        data_json=raw(row["data"]),
        artifacts_json=raw(row["artifacts"]),
        decision_report_json=raw(row["decision_report"]),
    )


def _failure(status: Status, row: Row, attempts: Sequence[Row]) -> tuple[str | None, str | None]:
    """Why the task ended badly or, while it hasn't ended, how the last attempt since its revival failed."""
    if status is Status.DEAD_LETTERED:
        return row["reason"], row["category"]
    recent = [attempt for attempt in attempts if attempt["revival"] == row["revivals"]]
    if status.ended or not recent:
        return None, None
    return recent[-1]["error"], recent[-1]["category"]


def failed_attempt(row: Row) -> FailedAttempt:
    began = row["started_at"] or row["claimed_at"]
    return FailedAttempt(
        attempt=row["number"],
        agent=row["agent_id"],
        category=row["category"],
        error=row["error"],
        started_at=row["started_at"],
        duration_sec=(row["ended_at"] - began).total_seconds(),
        cost_usd=row["cost_usd"],
        revival=row["revival"],
    )


def attempt_from_row(row: Row) -> Attempt:
    used = TokensUsed(row.pop("tokens_input"), row.pop("tokens_output"))
    return Attempt(output_json=raw(row.pop("output")), tokens_used=used, **row)


def blocked_reason(dead: Sequence[str]) -> str | None:
    if not dead:
        return None
    more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
    return f"Upstream {dead[0]}{more} is DEAD_LETTERED"


def dead_above(edges: Iterable[Row]) -> dict[str, list[str]]:
    """The dead letters that block each task, directly or not; `edges` are rows of `upstream`."""
    dependents: dict[str, list[str]] = {}
    dead: dict[str, None] = {}
    for edge in edges:
        dependents.setdefault(edge["depends_on"], []).append(edge["task_id"])
        if edge["status"] == Status.DEAD_LETTERED:
            dead[edge["depends_on"]] = None
    found: dict[str, list[str]] = {}
    for name in list(dead)[:_NAMED]:
        seen = {name}
        to_visit = [name]
        while to_visit:
            for below in dependents.get(to_visit.pop(), ()):
                if below not in seen:
                    seen.add(below)
                    to_visit.append(below)
                    found.setdefault(below, []).append(name)
    return found


_DAG_STATUS = {Status.COMPLETED: "completed", Status.CANCELLED: "cancelled", Status.DEAD_LETTERED: "failed"}


def dag_from_rows(
    dag_id: str, row: Row | None, members: Sequence[Row], depends_on: Mapping[str, Sequence[str]]
) -> Dag:
    """`row` is None for a virtual DAG, which is derived from its only member."""
    tasks = {member["id"]: depends_on.get(member["id"], ()) for member in members}
    finished = [m["id"] for m in members if m["status"] in {Status.COMPLETED, Status.CANCELLED}]
    counts = Counter(member["status"] for member in members)
    return Dag(
        **(_virtual(dag_id, members[0]) if row is None else row),
        tasks=list(tasks),
        roots=graph.roots(tasks),
        leaves=graph.leaves(tasks),
        critical_path=graph.critical_path(tasks, finished=finished),
        counts={status: counts[status] for status in Status if status in counts},
        virtual=row is None,
    )


def _virtual(dag_id: str, task: Row) -> Row:
    status = _DAG_STATUS.get(task["status"], "running" if task["epoch"] else "pending")
    return {
        "id": dag_id,
        "title": task["title"],
        "status": status,
        "created_by": task["created_by"],
        "budget_ceiling_usd": None,
        "reserved_usd": task["reserved_usd"],
        "spent_usd": task["spent_usd"],
        "created_at": task["created_at"],
        "completed_at": task["ended_at"],
    }
