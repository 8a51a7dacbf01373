"""Tasks, DAGs and attempts as the outside sees them. JSON stays as the database has it, in bytes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

import msgspec
from msgspec import Struct

from lineshaft.engine.read.reading import Row
from lineshaft.model import graph
from lineshaft.model.priority import PriorityInputs, Tier, effective_priority, tier
from lineshaft.model.retry import RetryPolicy
from lineshaft.model.states import Status
from lineshaft.model.tasks import policy

#: So many dead letters above a task are named; one is enough to hold it up.
_NAMED = 20


class ClaimView(Struct, frozen=True):
    agent_id: str
    claimed_at: datetime | None
    heartbeat_at: datetime | None
    heartbeat_interval_sec: float
    epoch: int


class GateView(Struct, frozen=True):
    method: str
    schema: bytes | None


class OutputView(Struct, frozen=True, kw_only=True):
    type: str | None
    #: `none`, one method with its schema beside it, or several gates in order.
    validation: str | tuple[GateView, ...]
    validation_schema: bytes | None
    require_decision_report: bool
    #: While VALIDATING this is what was handed in; it counts once the task is COMPLETED.
    data: bytes | None
    artifacts: bytes | None
    decision_report: bytes | None


class FailureView(Struct, frozen=True, kw_only=True):
    attempt: int
    agent: str | None
    category: str
    error: str
    started_at: datetime | None
    duration_sec: float
    cost_usd: Decimal
    #: How often the task had been revived by then: attempts count from 1 after each time.
    revival: int


class TokensView(Struct, frozen=True):
    input: int
    output: int


class TaskView(Struct, frozen=True, kw_only=True):
    id: str
    dag_id: str
    parent_id: str | None
    idempotency_key: str | None
    type: str
    title: str
    spec: bytes
    preset: str
    required_capabilities: list[str]
    model_preferences: list[str]
    fallback_models: list[str]
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    max_duration_sec: float | None
    heartbeat_interval_sec: float | None
    status: Status
    priority: int
    #: By 004's formula, now; None once it has ended. Claims go by it to half a point (deadlines).
    effective_priority: float | None
    tier: Tier | None
    priority_boost_per_minute: float
    deadline: datetime | None
    run_at: datetime | None
    depends_on: list[str]
    blocked_by: list[str]
    #: Set while a dead letter somewhere upstream holds it up, for ever if nobody looks after it (U6).
    blocked_reason: str | None
    lock_key: str | None
    #: READY, but out of the claims' sight: `lock` or `dag_budget`.
    parked: str | None
    is_batch: bool
    max_attempts: int
    attempts: int
    #: How often it was revived by hand.
    revivals: int
    retry: RetryPolicy
    retry_at: datetime | None
    #: The one that holds it, or under which it ended.
    claim: ClaimView | None
    lease_until: datetime | None
    model: str | None
    progress: bytes | None
    output: OutputView
    failure_reason: str | None
    failure_category: str | None
    failure_history: list[FailureView]
    cost_usd: Decimal
    reserved_usd: Decimal
    tokens_used: TokensView
    tags: list[str]
    created_by: str | None
    created_at: datetime
    ready_at: datetime | None
    started_at: datetime | None
    #: When it ended, in whatever way.
    ended_at: datetime | None
    completed_at: datetime | None
    cancelled_at: datetime | None
    cancel_reason: str | None
    #: What a compatible surface was sent and must echo.
    surface: bytes | None


_TAKEN_AS_THEY_ARE = frozenset(TaskView.__struct_fields__) - {
    *("status", "effective_priority", "tier", "depends_on", "blocked_by", "blocked_reason", "retry", "claim"),
    *("output", "failure_reason", "failure_category", "failure_history", "tokens_used"),
    *("completed_at", "cancelled_at", "cancel_reason"),
}


def task_view(
    row: Row, edges: Iterable[Row], failures: Iterable[Row], dead_upstream: Sequence[str]
) -> TaskView:
    """Put one together, from a row of read_tasks and the rows of other statements that belong to it."""
    status = Status(row["status"])
    effective = None if status.ended else _effective(row)
    all_edges = list(edges)
    told = list(failures)
    reason, category = _failure(status, row, told)
    return TaskView(
        **{name: row[name] for name in _TAKEN_AS_THEY_ARE},
        status=status,
        effective_priority=effective,
        tier=None if effective is None else tier(effective),
        depends_on=[edge["depends_on"] for edge in all_edges],
        blocked_by=[] if status.ended else [e["depends_on"] for e in all_edges if not e["satisfied"]],
        blocked_reason=blocked_reason(dead_upstream),
        retry=policy(msgspec.json.decode(row["retry"]) if row["retry"] else None, row["preset"]),
        claim=_claim(row),
        output=_output(row),
        failure_reason=reason,
        failure_category=category,
        failure_history=[failure_view(attempt) for attempt in told if attempt["outcome"] == "failed"],
        tokens_used=TokensView(row["tokens_input"], row["tokens_output"]),
        completed_at=row["ended_at"] if status is Status.COMPLETED else None,
        cancelled_at=row["ended_at"] if status is Status.CANCELLED else None,
        cancel_reason=row["reason"] if status is Status.CANCELLED else None,
    )


def _effective(row: Row) -> float:
    inputs = PriorityInputs(
        priority=row["priority"],
        boost_per_minute=row["priority_boost_per_minute"],
        # Age counts from the first time it was READY.
        ready_at=row["ready_at"] or row["now"],
        deadline=row["deadline"],
        downstream_length=row["downstream"],
    )
    return effective_priority(inputs, row["now"])


def _claim(row: Row) -> ClaimView | None:
    if row["agent_id"] is None:
        return None
    return ClaimView(
        row["agent_id"], row["claimed_at"], row["heartbeat_at"], row["heartbeat_in_force"], row["epoch"]
    )


class _Gate(Struct, frozen=True):
    method: str
    schema: msgspec.Raw = msgspec.Raw(b"null")


_GATES = msgspec.json.Decoder(tuple[_Gate, ...])


def _output(row: Row) -> OutputView:
    gates = tuple(
        GateView(gate.method, None if bytes(gate.schema) == b"null" else bytes(gate.schema))
        for gate in (_GATES.decode(row["gates"]) if row["gates"] else ())
    )
    single = gates[0] if len(gates) == 1 else None
    return OutputView(
        type=row["output_type"],
        validation=single.method if single else gates or "none",
        validation_schema=single.schema if single else None,
        require_decision_report=row["require_decision_report"],
        data=row["data"],
        artifacts=row["artifacts"],
        decision_report=row["decision_report"],
    )


def _failure(status: Status, row: Row, attempts: Sequence[Row]) -> tuple[str | None, str | None]:
    """Why it ended badly or, while it goes on, how the last attempt failed since it was last revived."""
    if status is Status.DEAD_LETTERED:
        return row["reason"], row["category"]
    recent = [attempt for attempt in attempts if attempt["revival"] == row["revivals"]]
    if status.ended or not recent:
        return None, None
    return recent[-1]["error"], recent[-1]["category"]


def failure_view(row: Row) -> FailureView:
    began = row["started_at"] or row["claimed_at"]
    return FailureView(
        attempt=row["number"],
        agent=row["agent_id"],
        category=row["category"],
        error=row["error"],
        started_at=row["started_at"],
        duration_sec=(row["ended_at"] - began).total_seconds(),
        cost_usd=row["cost_usd"],
        revival=row["revival"],
    )


def blocked_reason(dead: Sequence[str]) -> str | None:
    if not dead:
        return None
    more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
    return f"Upstream {dead[0]}{more} is DEAD_LETTERED"


def dead_above(edges: Iterable[Row]) -> dict[str, list[str]]:
    """The dead letters that hold up each task, directly or not; `edges` are rows of `upstream`."""
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


class AttemptView(Struct, frozen=True):
    """A row of the statement attempts, in its order."""

    #: The fencing number of its claim.
    epoch: int
    #: Counts from 1 after every revival.
    number: int
    revival: int
    agent_id: str | None
    model: str | None
    #: running, validating, completed, failed, rate_limited, released, waiting or cancelled.
    outcome: str
    category: str | None
    error: str | None
    claimed_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    cost_usd: Decimal
    tokens_input: int
    tokens_output: int
    #: {data, artifacts, decision_report}, if one was handed in.
    output: bytes | None


class DagView(Struct, frozen=True, kw_only=True):
    id: str
    title: str
    #: pending, running, completed, failed or cancelled.
    status: str
    created_by: str | None
    tasks: list[str]
    roots: list[str]
    leaves: list[str]
    #: The longest chain that is still to be done, from root to leaf. A dead letter is still to be done.
    critical_path: list[str]
    #: How many tasks are in each state that any is in.
    counts: dict[str, int]
    budget_ceiling_usd: Decimal | None
    reserved_usd: Decimal
    spent_usd: Decimal
    created_at: datetime
    completed_at: datetime | None
    #: A standalone task's: it has no row of its own yet.
    virtual: bool


_DAG_STATUS = {Status.COMPLETED: "completed", Status.CANCELLED: "cancelled", Status.DEAD_LETTERED: "failed"}


def dag_view(
    dag_id: str, row: Row | None, members: Sequence[Row], depends_on: Mapping[str, Sequence[str]]
) -> DagView:
    """`row` is None for a virtual one, whose only member tells everything."""
    tasks = {member["id"]: depends_on.get(member["id"], ()) for member in members}
    finished = [m["id"] for m in members if m["status"] in {Status.COMPLETED, Status.CANCELLED}]
    counts = Counter(member["status"] for member in members)
    return DagView(
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


class LockView(Struct, frozen=True):
    key: str
    holder_task_id: str
    agent_id: str | None
    #: The fencing number of this grant.
    token: int
    acquired_at: datetime
    expires_at: datetime
    #: READY tasks that want it, counted up to 10,000.
    waiting: int


class BreakerView(Struct, frozen=True):
    key: str
    state: str
    failures: int
    last_failure: datetime | None
    opened_at: datetime | None
    half_open_at: datetime | None
    probe_task_id: str | None
    forced: bool


class SlowdownView(Struct, frozen=True):
    #: model:NAME; provider:NAME for all models NAME/…; * for all.
    key: str
    until: datetime
    reason: str | None
    signalled_at: datetime


class PauseView(Struct, frozen=True):
    #: * is all.
    type: str
    since: datetime
