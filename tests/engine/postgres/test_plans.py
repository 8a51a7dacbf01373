"""The hot statements use their indexes, whatever the tables hold and whatever the statistics say."""

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import PLAN_BY_INDEX

_PLACEHOLDER = re.compile(r"%\((\w+)\)s::((?:double precision|[a-z_.]+)(?:\[\])?)")

FILL = """
INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute)
SELECT 'lane' || i, '{}', '{}', 0.1 FROM generate_series(1, 20) AS i;
INSERT INTO lineshaft.agent (id, registered_at, incarnation) VALUES ('a', now(), 1);
INSERT INTO lineshaft.instance (agent_id, registered_at, last_heartbeat, incarnation, max_concurrent_tasks)
VALUES ('a', now(), now(), 1, 1000);
INSERT INTO lineshaft.task (id, dag_id, type, title)
SELECT 'task_' || i, 'dag_' || i, 'lane' || 1 + mod(i, 20), 't' FROM generate_series(1, 100000) AS i;
INSERT INTO lineshaft.task_live
    (id, status, lane_id, rank, ready_at, generation, epoch, agent_id, incarnation, claimed_at, started_at,
    lease_until)
SELECT
    'task_' || i, CASE WHEN mod(i, 10) = 0 THEN 'RUNNING' ELSE 'READY' END::lineshaft.task_status,
    1 + mod(i, 20), 50, now(), 1, 1, CASE WHEN mod(i, 10) = 0 THEN 'a' END,
    CASE WHEN mod(i, 10) = 0 THEN 1 END, now(), now(),
    CASE WHEN mod(i, 10) = 0 THEN now() + i * interval '1 second' END
FROM generate_series(1, 90000) AS i;
INSERT INTO lineshaft.task_end (id, status, ended_at, epoch)
SELECT 'task_' || i, 'COMPLETED', now(), 1 FROM generate_series(90001, 100000) AS i;
INSERT INTO lineshaft.edge (task_id, depends_on)
SELECT 'task_' || i, 'task_' || i - 1 FROM generate_series(2, 50000) AS i;
"""

NOW = {"now": None}
IDS: dict[str, Any] = {"ids": [f"task_{10 * i}" for i in range(1, 101)], "epochs": [1] * 100}
SPENT = {"costs": [None] * 100, "tokens_in": [None] * 100, "tokens_out": [None] * 100}
CLAIM: dict[str, Any] = NOW | {
    "limit": 100, "agent_id": "a", "incarnation": 1, "types": None, "task_id": None, "start": True,
    "lock_ttl": 600.0, "ahead": 0, "passed_over": [], "turns": False, "idle_lanes": [],
    "probing": None, "follows": None, "follows_epoch": None,
}  # fmt: skip
COMPLETE = (
    NOW
    | IDS
    | SPENT
    | {"outputs": [None] * 100, "artifacts": [None] * 100, "reports": [None] * 100}
    | {"output_types": [None] * 100, "accepted": False}
)
HEARTBEAT: dict[str, Any] = (
    NOW
    | IDS
    | SPENT
    | {"holders": ["a"] * 100, "progress": [None] * 100, "lock_ttl": 600.0}
    | {"agents": ["a"], "incarnations": [1]}
)
TAKE: dict[str, Any] = {"limit": 100, "lease": 60.0, "methods": ["test-pass", "llm-judge"]}
RENEW: dict[str, Any] = IDS | {"lease": 60.0, "gate_nos": [0] * 100, "runs": [1] * 100}
WAITING: dict[str, Any] = {"since": None, "after": None, "limit": 100}

CASES = [
    (
        "claim/claims",
        "claim_tasks",
        CLAIM,
        ["task_live_claimable", "task_live_pkey", "task_pkey", "instance_pkey"],
    ),
    (
        "claim/fast_path",
        "claim_fast",
        CLAIM,
        ["task_live_claimable", "task_pkey", "instance_pkey", "dag_pkey"],
    ),
    ("transition/complete", "complete_fast", COMPLETE, ["task_live_pkey", "instance_pkey", "agent_pkey"]),
    ("live/task_locks", "lock_dependents", IDS, ["edge_dependents", "task_live_pkey"]),
    (
        "transition/complete",
        "complete_tasks",
        COMPLETE,
        ["task_live_pkey", "instance_pkey", "agent_pkey", "dag_pkey", "lock_pkey"],
    ),
    (
        "transition/effects",
        "unblock_dependents",
        NOW | IDS,
        ["edge_dependents", "task_live_pkey", "task_end_pkey"],
    ),
    ("heartbeats", "heartbeat", HEARTBEAT, ["task_live_pkey", "task_end_pkey", "instance_pkey"]),
    ("live/task_locks", "lock_tasks", IDS, ["task_live_pkey", "task_pkey"]),
    ("maintenance", "lock_expired", NOW | {"limit": 100, "without": []}, ["task_live_leased"]),
    ("review/gates", "take_gates", NOW | TAKE, ["attempt_gated", "attempt_pkey", "task_pkey"]),
    ("review/gates", "renew_gates", NOW | RENEW, ["attempt_pkey"]),
    ("review/gate_runs", "due_runs", NOW | TAKE, ["attempt_gated", "task_live_pkey", "task_pkey"]),
    ("review/gate_runs", "lost_runs", NOW | {"limit": 100}, ["gate_run_lost"]),
    ("review/gates", "read_in_validation", IDS, ["task_live_pkey", "attempt_pkey", "task_pkey"]),
    ("review/approvals", "waiting_tasks", WAITING, ["task_live_claimable", "task_pkey"]),
    ("review/approvals", "announce_waiting", NOW | {"limit": 100}, ["task_live_claimable"]),
    ("review/approvals", "waiting_gates", WAITING, ["attempt_to_approve", "task_pkey"]),
    (
        "maintenance",
        "promote_due",
        NOW | {"limit": 100, "without": [], "only": None},
        ["task_live_due", "task_live_pkey"],
    ),
    ("maintenance", "rekey_deadlines", NOW | {"limit": 100}, ["task_live_rekey", "task_live_pkey"]),
]


def positional(stem: str, name: str) -> tuple[str, list[str], str]:
    """The statement as PREPARE wants it, the names of its parameters, and their types."""
    names: list[str] = []
    types: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
            types.append(found[2])
        return f"${names.index(found[1]) + 1}"

    text = _PLACEHOLDER.sub(number, catalog.load(f"lineshaft.engine.{stem.replace('/', '.')}")[name]).replace(
        "%%", "%"
    )
    return text, names, ", ".join(types)


def generic_plan(
    connection: psycopg.Connection, stem: str, name: str, values: dict[str, Any], explain: str = "EXPLAIN"
) -> str:
    """The plan that the statement gets on the pool's connections."""
    text, names, types = positional(stem, name)
    connection.execute(PLAN_BY_INDEX)
    connection.execute(f"PREPARE hot ({types}) AS {text}".encode())
    given = ClientCursor(connection).mogrify(", ".join(["%s"] * len(names)), [values[name] for name in names])
    rows = connection.execute(f"{explain} EXECUTE hot ({given})".encode()).fetchall()
    connection.execute("DEALLOCATE hot")
    return "\n".join(row[0] for row in rows)


def test_hot_statements_use_their_indexes_on_empty_tables(connection: psycopg.Connection) -> None:
    """R-246, R-073."""
    check_hot_plans(connection)


@pytest.mark.slow("a hundred thousand tasks")
def test_hot_statements_use_their_indexes(connection: psycopg.Connection) -> None:
    """R-246, R-073: on a hundred thousand rows without statistics, and with statistics."""
    connection.execute("SET synchronous_commit = off")
    connection.execute(FILL.encode())
    check_hot_plans(connection)
    connection.execute("ANALYZE")
    check_hot_plans(connection)


def check_hot_plans(connection: psycopg.Connection) -> None:
    for stem, name, values, indexes in CASES:
        plan = generic_plan(connection, stem, name, values)
        assert "Seq Scan on task" not in plan, f"{name}:\n{plan}"
        assert "Seq Scan on edge" not in plan, f"{name}:\n{plan}"
        for index in indexes:
            assert index in plan, f"{name} doesn't use {index}:\n{plan}"


#: Called only where quotas concern the lane or the task.
OF_QUOTAS = frozenset(
    {"admit_1", "take_slots_1", "room_for_1", "quota_of_lane_1", "quotas_of_1", "quota_patterns_1"}
)


@pytest.mark.parametrize(
    ("stem", "name", "values"),
    [
        ("claim/claims", "claim_tasks", CLAIM),
        ("claim/fast_path", "claim_fast", CLAIM),
        ("transition/complete", "complete_tasks", COMPLETE),
        ("transition/complete", "complete_fast", COMPLETE),
    ],
)
def test_the_rules_of_claims_are_inlined(
    connection: psycopg.Connection, stem: str, name: str, values: dict[str, Any]
) -> None:
    """A call of each for every lane and task would cost a multiple. Some aren't part of the common case."""
    plan = generic_plan(connection, stem, name, values, "EXPLAIN (VERBOSE)")

    rare = {"first_model_1", "is_writable_1", "take_locks_1", "release_locks_1", "has_locks_1", "lock_keys_1"}
    # For an instance with accounts, once for each claim.
    of_accounts = {"open_accounts_1", "chosen_accounts_1", "accounts_until_1"}
    assert set(re.findall(r"\b(\w+_1)\(", plan)) <= rare | of_accounts | OF_QUOTAS


#: Tables without a bound.
GROWING = frozenset({
    "task", "task_live", "task_end", "edge", "event", "event_default", "attempt", "step", "checkpoint", "dag",
    "task_key", "dag_key", "dead_letter", "artifact", "artifact_ref", "content",
})  # fmt: skip
#: Statements that start at one end of an index and stop after a row or so; or that read what few agents hold.
MAY_SCAN = frozenset({"free_locks_with_parked", "dags_with_parked", "openings", "held_by", "read_held"})
HOT = (
    "claim/claims",
    "claim/fast_path",
    "transition/start",
    "transition/steps",
    "live/parking",
    "live/task_locks",
    "live/waking",
    "transition/complete",
    "transition/fail",
    "transition/effects",
    "transition/revive",
    "submit/dags",
    "submit/lanes",
    "submit/submission",
    "transition/cancel",
    "transition/edit",
    "transition/dependencies",
    "transition/spawn",
    "transition/transitions",
    "maintenance",
    "agents",
    "heartbeats",
    "guards/slowdowns",
    "artifacts/artifacts",
    "artifacts/references",
    "artifacts/store_identity",
)


def scans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Nodes that read a table that grows, or one of its indexes, from one end to the other."""
    reads_table = plan.get("Relation Name") in GROWING and plan["Node Type"] != "Bitmap Heap Scan"
    of_index = plan["Node Type"] == "Bitmap Index Scan" and plan["Index Name"].startswith(tuple(GROWING))
    is_scan = (reads_table or of_index) and "Scan" in plan["Node Type"]
    if is_scan and "Index Cond" not in plan and "TID Cond" not in plan:
        yield plan
    for below in plan.get("Plans", ()):
        yield from scans(below)


@pytest.mark.parametrize("stem", HOT)
def test_a_plan_made_on_empty_tables_does_no_harm_later(connection: psycopg.Connection, stem: str) -> None:
    """It is made once per connection: a plan that is cheap on a fresh database must not stay a scan."""
    for name in catalog.load(f"lineshaft.engine.{stem.replace('/', '.')}"):
        if name in MAY_SCAN:
            continue
        text, names, types = positional(stem, name)
        connection.execute(PLAN_BY_INDEX)
        connection.execute(f"PREPARE hot {f'({types})' if types else ''} AS {text}".encode())
        given = f"({', '.join(['NULL'] * len(names))})" if names else ""
        found = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE hot {given}".encode()).fetchone()
        connection.execute("DEALLOCATE hot")
        assert found is not None
        assert not list(scans(found[0][0]["Plan"])), f"{name} reads a whole table"


@pytest.mark.slow("a hundred thousand tasks")
def test_the_cost_of_a_claim_doesnt_grow_with_the_queue(connection: psycopg.Connection) -> None:
    """R-246: the number of rows it reads is the number it takes, and one head a lane."""
    connection.execute(FILL.encode())
    connection.execute(PLAN_BY_INDEX)
    statement = (
        b"EXPLAIN (ANALYZE, TIMING OFF, COSTS OFF) "
        + catalog.load("lineshaft.engine.claim.claims")["claim_tasks"].encode()
    )

    plan = "\n".join(row[0] for row in connection.execute(statement, CLAIM).fetchall())

    reads = [
        float(rows) * float(loops)
        for rows, loops in re.findall(r"task_live_claimable.*?\(actual rows=([\d.]+) loops=(\d+)\)", plan)
    ]
    assert reads
    # A head of each of 20 lanes, up to 100 of each lane for the merge, and the 100 that are taken.
    assert sum(reads) <= 20 + 20 * 100 + 200, plan


_OURS = re.compile(r"\b(rank|rekey_at|minutes)\(")


def test_our_functions_are_inlined(connection: psycopg.Connection) -> None:
    """One that isn't is read from the catalog and planned by every statement that calls it, at each call."""
    connection.execute(PLAN_BY_INDEX)
    for stem in HOT:
        for name, statement in catalog.load(f"lineshaft.engine.{stem.replace('/', '.')}").items():
            if not _OURS.search(statement):
                continue
            text, names, types = positional(stem, name)
            connection.execute(f"PREPARE hot ({types}) AS {text}".encode())
            nothing = ", ".join(["NULL"] * len(names))
            rows = connection.execute(f"EXPLAIN (VERBOSE) EXECUTE hot ({nothing})".encode()).fetchall()
            connection.execute("DEALLOCATE hot")
            called = _OURS.findall("\n".join(row[0] for row in rows))
            assert not called, f"{stem}.{name} calls {called}"
