"""Tasks, attempts and steps as the outside sees them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.postgres.pipeline import read_in_snapshot
from lineshaft.engine.read.snapshot import Reader, Row, in_snapshot
from lineshaft.model.admission import Admission, LockKey
from lineshaft.model.field_order import restored
from lineshaft.model.parts import INDEX, ITEM, Part
from lineshaft.model.priority import PriorityInputs, effective_priority, tier
from lineshaft.model.states import Status
from lineshaft.model.tasks import policy
from lineshaft.types import (
    Attempt,
    ClaimInfo,
    FailedAttempt,
    ForEachInfo,
    OutputGate,
    Task,
    TaskOutput,
    TokensUsed,
)
from lineshaft.types.data_refs import data_ref_in
from lineshaft.types.json import empty_list, raw
from lineshaft.types.work import decoded_inputs

#: Open edges upstream of a page of tasks that are followed in search of dead letters.
_MOST_UPSTREAM = 20_000
#: At most this many dead letters upstream of a task are named; one is enough to block it.
_NAMED = 20

_SQL = catalog.load(__name__)
#: The statements that read all parts of a task.
_PARTS = (_SQL["read_tasks"], _SQL["read_edges"], _SQL["read_failures"])

_COPIED = frozenset(Task.__struct_fields__) - {
    *("spec_json", "inputs", "for_each", "item_json", "index", "progress_json", "surface_json"),
    *("duplicate", "mismatch", "replaced"),
    *("status", "effective_priority", "tier", "depends_on", "blocked_by", "blocked_reason", "retry", "claim"),
    *("output", "failure_reason", "failure_category", "failure_history", "tokens_used"),
    *("completed_at", "cancelled_at", "cancel_reason", "lock_keys", "quota_keys", "fair_key"),
}


async def read_tasks_by_id(database: Database, ids: Sequence[str]) -> list[Task]:
    """The tasks with these ids, in this order; unknown ones are left out.

    Every call of an agent is answered with its task, so this takes one round trip, unless a task is blocked:
    then its upstream tasks are read too.
    """
    parameters = {**database.now, "ids": list(ids)}
    found, edges, failures = await database.run_alone(
        lambda own: read_in_snapshot(own, *((statement, parameters) for statement in _PARTS))
    )
    if not any(_is_blocked(row) for row in found):
        return _build_tasks(ids, found, edges, failures, {})

    async def read(reader: Reader) -> list[Task]:
        return await read_tasks(reader, ids)

    return await in_snapshot(database, read)


async def read_tasks(reader: Reader, ids: Sequence[str]) -> list[Task]:
    """The tasks with these ids, in this order; unknown ones are left out."""
    if not ids:
        return []
    sent = [await reader.send(statement, ids=list(ids)) for statement in _PARTS]
    found, edges, failures = [await cursor.fetchall() for cursor in sent]
    blocked = {row["id"] for row in found if _is_blocked(row)}
    upstream = await read_upstream(reader, sorted(blocked)) if blocked else []
    reasons = {
        name: _blocked_reason(above, status)
        for status in (Status.CANCELLED, Status.DEAD_LETTERED)
        for name, above in ended_above(upstream, status).items()
        if name in blocked
    }
    return _build_tasks(ids, found, edges, failures, reasons)


async def read_upstream(reader: Reader, ids: Sequence[str]) -> list[Row]:
    """All open edges above these tasks, with the status of the upstream task."""
    return await reader.rows(_SQL["upstream"], ids=list(ids), most=_MOST_UPSTREAM)


async def read_failed_attempts(reader: Reader, ids: Sequence[str]) -> dict[str, list[FailedAttempt]]:
    rows = await reader.rows(_SQL["read_failures"], ids=list(ids))
    failures: defaultdict[str, list[FailedAttempt]] = defaultdict(list)
    for row in rows:
        if row["outcome"] == "failed":
            failures[row["task_id"]].append(_failed_attempt(row))
    return failures


async def read_attempts(reader: Reader, task_id: str, *, outputs: bool = True) -> list[Attempt] | None:
    """All claims of a task, in order; None: unknown task."""
    rows = await _rows_of_task(reader, "attempts", task_id, outputs=outputs)
    return None if rows is None else [_attempt(row) for row in rows]


async def read_steps(reader: Reader, task_id: str) -> dict[str, Raw] | None:
    """Results of durable steps by name, in the order in which they were recorded; None: unknown task."""
    rows = await _rows_of_task(reader, "steps", task_id)
    return None if rows is None else {row["name"]: raw(row["data"]) for row in rows}


async def _rows_of_task(reader: Reader, statement: str, task_id: str, **parameters: bool) -> list[Row] | None:
    rows = await reader.rows(_SQL[statement], id=task_id, **parameters)
    if not rows and not await reader.rows(_SQL["task_exists"], id=task_id):
        return None
    return rows


def _is_blocked(row: Row) -> bool:
    return bool(row["status"] == Status.PENDING and row["blocked"])


def _build_tasks(
    ids: Sequence[str],
    found: Iterable[Row],
    edges: Iterable[Row],
    failures: Iterable[Row],
    blocked_reasons: Mapping[str, str],
) -> list[Task]:
    rows = {row["id"]: row for row in found}
    edges_of, failures_of = grouped(edges, "task_id"), grouped(failures, "task_id")
    return [
        _build_task(rows[name], edges_of[name], failures_of[name], blocked_reasons.get(name))
        for name in ids
        if name in rows
    ]


def grouped(rows: Iterable[Row], name: str) -> defaultdict[str, list[Row]]:
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[name]].append(row)
    return groups


def _build_task(row: Row, edges: list[Row], failures: list[Row], blocked_reason: str | None) -> Task:
    status = Status(row["status"])
    effective = None if status.ended else _effective_priority(row)
    reason, category = _failure(status, row, failures)
    return Task(
        **{name: row[name] for name in _COPIED},
        spec_json=Raw(row["spec"]),
        **_inputs(row),
        status=status,
        effective_priority=effective,
        tier=None if effective is None else tier(effective),
        **_admission(row["admission"]),
        depends_on=[edge["depends_on"] for edge in edges],
        blocked_by=[] if status.ended else [e["depends_on"] for e in edges if not e["satisfied"]],
        blocked_reason=blocked_reason,
        retry=policy(msgspec.json.decode(row["retry"]) if row["retry"] else None, row["preset"]).effective,
        claim=_claim(row),
        progress_json=raw(row["progress"]),
        output=_output(row),
        failure_reason=reason,
        failure_category=category,
        failure_history=[_failed_attempt(failure) for failure in failures if failure["outcome"] == "failed"],
        tokens_used=TokensUsed(row["tokens_input"], row["tokens_output"]),
        completed_at=row["ended_at"] if status is Status.COMPLETED else None,
        cancelled_at=row["ended_at"] if status is Status.CANCELLED else None,
        cancel_reason=row["reason"] if status is Status.CANCELLED else None,
        surface_json=UNSET if row["surface"] is None else Raw(row["surface"]),
    )


def _inputs(row: Row) -> dict[str, Any]:
    sources = decoded_inputs(raw(row["inputs"]))
    fields: dict[str, Any] = {
        "inputs": {
            name: [str(one) for one in of] if isinstance(of, list) else str(of)
            for name, of in sources.items()
            if not (isinstance(of, Part) and of.is_value)
        },
        "for_each": row["for_each"] and msgspec.json.decode(row["for_each"], type=ForEachInfo),
    }
    item, index = sources.get(ITEM), sources.get(INDEX)
    if isinstance(item, Part) and isinstance(index, Part) and item.is_value and isinstance(index.value, Raw):
        fields |= {"item_json": item.value, "index": msgspec.json.decode(index.value)}
    return fields


def _admission(stored: bytes | None) -> dict[str, Any]:
    if stored is None:
        return {}
    needs = msgspec.json.decode(stored, type=Admission)
    return {
        "lock_keys": [LockKey(key, shared) for key, shared in needs.locks.items()],
        "quota_keys": list(needs.keys),
        "fair_key": needs.fair,
    }


def _effective_priority(row: Row) -> float:
    inputs = PriorityInputs(
        priority=row["priority"],
        boost_per_minute=row["priority_boost_per_minute"],
        # Age counts from the first time the task was READY.
        ready_at=row["ready_at"] or row["now"],
        deadline=row["deadline"],
        downstream_length=row["downstream"],
    )
    return effective_priority(inputs, row["now"])


def _claim(row: Row) -> ClaimInfo:
    held = row["agent_id"] is not None
    return ClaimInfo(
        agent_id=row["agent_id"],
        claimed_at=row["claimed_at"] if held else None,
        heartbeat_at=row["heartbeat_at"] if held else None,
        heartbeat_interval_sec=row["heartbeat_in_force"],
        epoch=row["epoch"],
        instance=row["instance"],
    )


_GATES = msgspec.json.Decoder(tuple[OutputGate, ...])


def _output(row: Row) -> TaskOutput:
    gates = _GATES.decode(restored(row["gates"]) or b"[]")
    single = gates[0] if len(gates) == 1 else None
    large = data_ref_in(row["data"])
    return TaskOutput(
        type=row["output_type"],
        validation=single.method if single else gates or "none",
        validation_schema_json=single.schema_json if single else raw(None),
        require_decision_report=row["require_decision_report"],
        data_json=raw(row["data"] if large is None else None),
        data_ref=None if large is None else large.data_ref,
        size=None if large is None else large.size,
        artifacts_json=empty_list() if row["artifacts"] is None else raw(row["artifacts"]),
        decision_report_json=raw(row["decision_report"]),
    )


def _failure(status: Status, row: Row, attempts: Sequence[Row]) -> tuple[str | None, str | None]:
    """Reason and category of a dead letter or, of a live task, of the last attempt since its revival."""
    if status is Status.DEAD_LETTERED:
        return row["reason"], row["category"]
    recent = [attempt for attempt in attempts if attempt["revival"] == row["revivals"]]
    if status.ended or not recent:
        return None, None
    return recent[-1]["error"], recent[-1]["category"]


def _failed_attempt(row: Row) -> FailedAttempt:
    began = row["started_at"] or row["claimed_at"]
    return FailedAttempt(
        attempt=row["number"],
        agent=row["agent_id"],
        instance=row["instance"],
        category=row["category"],
        error=row["error"],
        started_at=row["started_at"],
        duration_sec=(row["ended_at"] - began).total_seconds(),
        cost_usd=row["cost_usd"],
        revival=row["revival"],
        version=row["version"],
        traceback=row["traceback"],
        tokens_used=TokensUsed(row["tokens_input"], row["tokens_output"]),
    )


def _attempt(row: Row) -> Attempt:
    used = TokensUsed(row.pop("tokens_input"), row.pop("tokens_output"))
    return Attempt(output_json=raw(row.pop("output")), tokens_used=used, **row)


def _blocked_reason(upstream: Sequence[str], status: Status) -> str:
    more = f" (and {len(upstream) - 1} more)" if len(upstream) > 1 else ""
    return f"Upstream {upstream[0]}{more} is {status}"


def ended_above(edges: Iterable[Row], status: Status) -> dict[str, list[str]]:
    """The tasks with this status that block each task, directly or not; `edges` are of `read_upstream`."""
    dependents: dict[str, list[str]] = {}
    ended: dict[str, None] = {}
    for edge in edges:
        dependents.setdefault(edge["depends_on"], []).append(edge["task_id"])
        if edge["status"] == status:
            ended[edge["depends_on"]] = None
    found: dict[str, list[str]] = {}
    for name in list(ended)[:_NAMED]:
        seen = {name}
        to_visit = [name]
        while to_visit:
            for below in dependents.get(to_visit.pop(), ()):
                if below not in seen:
                    seen.add(below)
                    to_visit.append(below)
                    found.setdefault(below, []).append(name)
    return found
