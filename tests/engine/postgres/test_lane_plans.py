"""What a claim reads grows with the lanes that have work, and with what it takes: with nothing else."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor

from lineshaft.engine.postgres.database import PLAN_BY_INDEX
from tests.engine.postgres.test_plans import CLAIM, NOW, WAITING, positional

AGENT = """
INSERT INTO lineshaft.agent (id, registered_at, incarnation, budget_usd) VALUES ('a', now(), 1, %s);
INSERT INTO lineshaft.instance (agent_id, registered_at, last_heartbeat, incarnation, max_concurrent_tasks)
VALUES ('a', now(), now(), 1, 1000)
"""
LANES = """
INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute)
SELECT %s || i, '{}', '{}', 0.1 FROM generate_series(1, %s) AS i
"""
#: One task for each lane of a kind.
TASKS = """
WITH new AS (
    INSERT INTO lineshaft.task (id, dag_id, type, title, lock_key)
    SELECT 'task_' || id, 'dag_' || id, type, 't', CASE WHEN %(locked)s THEN 'doc:' || id END
    FROM lineshaft.lane WHERE type LIKE %(kind)s
    RETURNING id, lock_key
)
INSERT INTO lineshaft.task_live (id, status, lane_id, rank, ready_at, generation, lock_key)
SELECT id, 'READY', substr(id, 6)::integer, 50, now(), 1, lock_key FROM new
"""
FAST = ("claim/fast_path", "claim_fast", CLAIM)
FULL = ("claim/claims", "claim_tasks", CLAIM)
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("guards/budgets", "report_unaffordable", NOW | {"limit": 100}),
    ("guards/budgets", "alert_daily_budget", NOW | {"left": 5, "day": None, "message": "m"}),
    ("review/approvals", "waiting_tasks", WAITING),
    ("review/approvals", "announce_waiting", NOW | {"limit": 100}),
    (
        "read/listing",
        "keys_of_ready",
        {"as_of": "2026-01-01", "types": None, "after_effective": None, "after_no": None, "limit": 100},
    ),
]
Statement = tuple[str, str, dict[str, Any]]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


def rows_visited(connection: psycopg.Connection, statement: Statement, **values: Any) -> float:
    """By all nodes of the plan, with those that conditions removed; the statement is rolled back."""
    stem, name, given = statement
    text, names, types = positional(stem, name)
    connection.execute("ANALYZE")
    connection.execute(PLAN_BY_INDEX)
    connection.execute(f"PREPARE hot {f'({types})' if types else ''} AS {text}".encode())
    listed = ClientCursor(connection).mogrify(
        ", ".join(["%s"] * len(names)), [(given | values)[name] for name in names]
    )
    with connection.transaction(force_rollback=True):
        explain = "EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) EXECUTE hot"
        found = connection.execute(f"{explain} {f'({listed})' if names else ''}".encode()).fetchone()
    connection.execute("DEALLOCATE hot")
    assert found is not None
    plan = found[0] if isinstance(found[0], list) else json.loads(found[0])
    removed = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter")
    visited: float = sum(
        node["Actual Loops"] * sum(node.get(kind, 0) for kind in removed) for node in nodes(plan[0]["Plan"])
    )
    return visited


def register(connection: psycopg.Connection, budget: int | None = None) -> None:
    connection.execute(ClientCursor(connection).mogrify(AGENT, [budget]).encode())


def fill(
    connection: psycopg.Connection, kind: str, lanes: int, *, work: bool = True, locked: bool = False
) -> None:
    connection.execute(LANES, [kind, lanes])
    if work:
        connection.execute(TASKS, {"kind": f"{kind}%", "locked": locked})


@pytest.mark.slow("ten thousand lanes")
@pytest.mark.parametrize("statement", [FAST, FULL, *OTHERS], ids=lambda found: found[1])
@pytest.mark.parametrize("lanes", [1, 200])
def test_lanes_without_work_cost_next_to_nothing(
    connection: psycopg.Connection, statement: Statement, lanes: int
) -> None:
    """R-246: ten thousand lanes that once had tasks, beside some that have."""
    register(connection, budget=None if statement == FAST else 100)
    fill(connection, "busy", lanes)
    before = rows_visited(connection, statement)

    fill(connection, "idle", 10_000, work=False)

    # Up to 250 lanes are read, to see that there are many; then those with work are found by another way.
    assert rows_visited(connection, statement) <= before + 600 + 4 * lanes


@pytest.mark.slow("thousands of lanes")
@pytest.mark.parametrize("statement", [FAST, FULL], ids=lambda found: found[1])
def test_work_of_other_types_costs_an_agent_next_to_nothing(
    connection: psycopg.Connection, statement: Statement
) -> None:
    register(connection)
    fill(connection, "mine", 1)
    before = rows_visited(connection, statement, types=["mine1"])

    fill(connection, "foreign", 2_000)

    assert rows_visited(connection, statement, types=["mine1"]) <= before + 10


@pytest.mark.slow("hundreds of lanes")
@pytest.mark.parametrize("statement", [FAST, FULL], ids=lambda found: found[1])
def test_a_claim_grows_with_the_lanes_that_have_work(
    connection: psycopg.Connection, statement: Statement
) -> None:
    """Not with their square, whether it takes one task or one from each lane."""
    register(connection)
    fill(connection, "a", 300)
    one, all_ = (rows_visited(connection, statement, limit=limit) for limit in (1, 300))

    fill(connection, "b", 600)

    assert rows_visited(connection, statement, limit=1) <= 4 * one
    assert rows_visited(connection, statement, limit=900) <= 4 * all_


@pytest.mark.slow("thousands of tasks")
def test_a_claim_of_tasks_with_document_locks_grows_with_their_number(connection: psycopg.Connection) -> None:
    register(connection)
    fill(connection, "a", 100, locked=True)
    before = rows_visited(connection, FULL, limit=100)

    fill(connection, "b", 300, locked=True)

    assert rows_visited(connection, FULL, limit=400) <= 5 * before


# The claim of one task, whose statements are inside a function.

CLAIM_ONE = """
SELECT verdict FROM lineshaft.complete_and_claim_1(
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false, 'a', 1, %s::text[], true, NULL
)
"""
READ = """
SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables
WHERE schemaname = 'lineshaft'
"""


def rows_read_by_one(connection: psycopg.Connection, types: list[str] | None = None) -> int:
    connection.execute("ANALYZE")
    connection.execute(PLAN_BY_INDEX)
    # Statements of a function keep the plans of their first run in a session.
    connection.execute("DISCARD PLANS")
    with connection.transaction(force_rollback=True):
        before = connection.execute(READ).fetchone()
        assert connection.execute(CLAIM_ONE, [types]).fetchone() == ("claimed",)
        after = connection.execute(READ).fetchone()
    assert before is not None
    assert after is not None
    return int(after[0]) - int(before[0] or 0)


def test_lanes_without_work_cost_a_claim_of_one_nothing(connection: psycopg.Connection) -> None:
    """R-246."""
    register(connection)
    fill(connection, "busy", 1)
    before = rows_read_by_one(connection)

    fill(connection, "idle", 10_000, work=False)

    assert rows_read_by_one(connection) <= before + 10


def test_work_of_other_types_costs_a_claim_of_one_nothing(connection: psycopg.Connection) -> None:
    register(connection)
    fill(connection, "mine", 1)
    before = rows_read_by_one(connection, ["mine1"])

    fill(connection, "foreign", 2_000)

    assert rows_read_by_one(connection, ["mine1"]) <= before + 10


def test_a_claim_of_one_grows_with_the_lanes_that_have_work(connection: psycopg.Connection) -> None:
    """Not with their square."""
    register(connection)
    fill(connection, "a", 100)
    before = rows_read_by_one(connection)

    fill(connection, "b", 300)

    assert rows_read_by_one(connection) <= 5 * before
