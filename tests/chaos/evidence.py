"""What the checker looks at: the histories of all processes, and what the database says in the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg.rows import class_row, dict_row

from tests.chaos import history
from tests.chaos.history import Record
from tests.invariants import RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFact:
    id: str
    dag_id: str
    status: str
    epoch: int
    parent_id: str | None = None
    is_batch: bool = False
    lock_key: str | None = None
    max_cost_usd: Decimal | None = None
    cost_usd: Decimal = Decimal(0)
    #: Who held it last.
    agent_id: str | None = None
    parked: str | None = None
    output: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFact:
    seq: int
    n: int
    #: It is the last one of its row.
    last: bool
    kind: str
    task_id: str | None = None
    dag_id: str | None = None
    agent_id: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFact:
    task_id: str
    depends_on: str
    kind: str = "success"
    satisfied: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFact:
    task_id: str
    epoch: int
    outcome: str
    agent_id: str | None = None
    incarnation: int | None = None
    error: str | None = None
    cost_usd: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    task_id: str
    name: str
    epoch: int
    data: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PurseFact:
    """What an agent or a DAG has spent, and may spend."""

    id: str
    spent_usd: Decimal
    reserved_usd: Decimal = Decimal(0)
    limit_usd: Decimal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFact:
    task_id: str
    agent_id: str | None
    amount_usd: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class DisputeFact:
    """A claim that reported more than its ceiling."""

    task_id: str
    epoch: int
    agent_id: str
    ceiling_usd: Decimal


@dataclass(kw_only=True)
class Evidence:
    #: In the order of time.
    records: Sequence[Record] = ()
    tasks: dict[str, TaskFact] = field(default_factory=dict)
    edges: Sequence[EdgeFact] = ()
    attempts: Sequence[AttemptFact] = ()
    steps: Sequence[StepFact] = ()
    #: In the order of seq, n.
    events: Sequence[EventFact] = ()
    agents: Sequence[PurseFact] = ()
    dags: Sequence[PurseFact] = ()
    corrections: Sequence[CorrectionFact] = ()
    disputes: Sequence[DisputeFact] = ()
    #: What was spent on all days; None: unknown.
    spent_usd: Decimal | None = None
    #: Rules of tests/invariants.py that don't hold, with the rows that break them.
    broken_rules: dict[str, list[Any]] = field(default_factory=dict)


_TASKS: LiteralString = """
    SELECT task.id, task.dag_id, task.parent_id, task.is_batch, task.lock_key, task.max_cost_usd,
        coalesce(live.status, ended.status)::text AS status, coalesce(live.epoch, ended.epoch) AS epoch,
        coalesce(live.cost_usd, ended.cost_usd) AS cost_usd,
        coalesce(live.agent_id, ended.agent_id) AS agent_id, live.parked, ended.output
    FROM lineshaft.task
    LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
    LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
    WHERE live.id IS NOT NULL OR ended.id IS NOT NULL
"""
_EVENTS: LiteralString = """
    SELECT seq, n::integer, n = max(n) OVER (PARTITION BY seq) AS last, kind, task_id, dag_id, agent_id, epoch
    FROM lineshaft.events
    ORDER BY seq, n
"""
_AGENTS: LiteralString = "SELECT id, spent_usd, reserved_usd, budget_usd AS limit_usd FROM lineshaft.agent"
_DAGS: LiteralString = (
    "SELECT id, spent_usd, reserved_usd, budget_ceiling_usd AS limit_usd FROM lineshaft.dag"
)


def gather(directory: Path, dsn: str) -> Evidence:
    with psycopg.connect(dsn, autocommit=True) as connection:

        def rows(kind: type[Any], query: LiteralString) -> list[Any]:
            with connection.cursor(row_factory=class_row(kind)) as cursor:
                return cursor.execute(query).fetchall()

        broken = {rule: found for rule, query in RULES.items() if (found := _dicts(connection, query))}
        return Evidence(
            records=history.read(directory),
            tasks={task.id: task for task in rows(TaskFact, _TASKS)},
            edges=rows(
                EdgeFact, "SELECT task_id, depends_on, kind::text AS kind, satisfied FROM lineshaft.edge"
            ),
            attempts=rows(
                AttemptFact,
                "SELECT task_id, epoch, outcome, agent_id, incarnation, error, cost_usd"
                " FROM lineshaft.attempt",
            ),
            steps=rows(StepFact, "SELECT task_id, name, epoch, data FROM lineshaft.step"),
            events=rows(EventFact, _EVENTS),
            agents=rows(PurseFact, _AGENTS),
            dags=rows(PurseFact, _DAGS),
            corrections=rows(
                CorrectionFact, "SELECT task_id, agent_id, amount_usd FROM lineshaft.cost_correction"
            ),
            disputes=rows(
                DisputeFact, "SELECT task_id, epoch, agent_id, ceiling_usd FROM lineshaft.cost_dispute"
            ),
            spent_usd=_dicts(connection, "SELECT coalesce(sum(spent_usd), 0) AS usd FROM lineshaft.spend")[0][
                "usd"
            ],
            broken_rules=broken,
        )


def _dicts(connection: psycopg.Connection, query: LiteralString) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query).fetchall()
