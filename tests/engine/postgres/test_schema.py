"""The schema itself: states and timestamps are tied together, and the view answers for every state."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.model.priority import PriorityInputs, effective_priority
from lineshaft.model.states import ENDED, LIVE, Status
from tests.engine.postgres.test_plans import FILL
from tests.factory import Factory


@pytest.mark.parametrize("status", sorted(LIVE | ENDED))
def test_the_view_shows_a_task_in_every_state(
    connection: psycopg.Connection, factory: Factory, status: Status
) -> None:
    """R-240: one SELECT answers where a task is, whichever table it lives in."""
    others = [factory.task(other) for other in (LIVE | ENDED) - {status}]
    task = factory.task(status)

    found = connection.execute("SELECT id FROM lineshaft.tasks WHERE status = %s", [status]).fetchall()

    assert found == [(task,)]
    assert connection.execute("SELECT count(*) FROM lineshaft.tasks").fetchone() == (len(others) + 1,)


def test_the_states_are_those_of_the_model(connection: psycopg.Connection) -> None:
    labels = connection.execute("SELECT unnest(enum_range(NULL::lineshaft.task_status))::text").fetchall()

    assert [label for (label,) in labels] == list(Status)


def test_looking_for_live_tasks_doesnt_scan_the_history(
    connection: psycopg.Connection, factory: Factory
) -> None:
    factory.task(Status.COMPLETED)
    plan = "\n".join(
        line
        for (line,) in connection.execute(
            "EXPLAIN SELECT * FROM lineshaft.tasks WHERE status = 'RUNNING'"
        ).fetchall()
    )

    assert "task_end_not_completed" in plan
    assert "Seq Scan on task_end" not in plan


@pytest.mark.slow("a hundred thousand tasks")
def test_looking_for_stale_and_due_tasks_reads_only_held_and_retrying_ones(
    connection: psycopg.Connection,
) -> None:
    """R-240, R-241: by an index, without those that wait and without the history."""
    connection.execute(FILL.encode())
    connection.execute("UPDATE lineshaft.task_live SET heartbeat_at = now() WHERE lease_until IS NOT NULL")
    connection.execute(
        "UPDATE lineshaft.task_live SET status = 'RETRYING', due_at = now(), ready_at = now(), epoch = 1"
        " WHERE id IN (SELECT 'task_' || 100 * i + 1 FROM generate_series(1, 100) AS i)"
    )
    connection.execute("ANALYZE")

    for condition, index in [
        # As 004 has them.
        ("status IN ('CLAIMED', 'RUNNING') AND heartbeat_at < now() - interval '90 seconds'", "leased"),
        ("status = 'RETRYING' AND retry_at <= now()", "due"),
        ("heartbeat_at < now() - interval '90 seconds'", "leased"),
        ("retry_at <= now()", "due"),
    ]:
        query = f"EXPLAIN SELECT * FROM lineshaft.tasks WHERE {condition}"
        plan = "\n".join(line for (line,) in connection.execute(query.encode()).fetchall())

        assert f"task_live_{index}" in plan, condition
        assert "Seq Scan on task" not in plan, plan


def test_the_view_has_the_names_of_the_documents(connection: psycopg.Connection, factory: Factory) -> None:
    """R-240: a query that was written to 004 works."""
    held, dead = factory.task(Status.RUNNING), factory.task(Status.DEAD_LETTERED)
    done = factory.task(Status.COMPLETED)
    rows = connection.execute(
        "SELECT id, claim_agent_id, required_capabilities, failure_reason, completed_at FROM lineshaft.tasks"
    ).fetchall()

    found = {row[0]: row[1:] for row in rows}
    assert found[held][0] is not None
    assert (found[held][1], found[held][2], found[held][3]) == ([], None, None)
    assert found[dead][2] is not None
    assert (found[dead][3], found[done][3] is not None) == (None, True)


def test_attempts_dags_and_agents_are_views(connection: psycopg.Connection, factory: Factory) -> None:
    running, done = factory.task(Status.RUNNING), factory.task(Status.COMPLETED)
    rows = connection.execute("SELECT task_id, outcome FROM lineshaft.attempts").fetchall()

    assert set(rows) >= {(running, "running")}
    assert {outcome for task_id, outcome in rows if task_id == done} <= {"completed"}
    for view in ("dags", "agents"):
        connection.execute(f"SELECT * FROM lineshaft.{view}".encode())


def test_every_column_has_a_comment(connection: psycopg.Connection) -> None:
    """R-240: psql shows them."""
    bare = connection.execute(
        "SELECT class.relname, attribute.attname FROM pg_class AS class"
        " JOIN pg_attribute AS attribute ON attribute.attrelid = class.oid"
        " WHERE class.relnamespace = 'lineshaft'::regnamespace AND class.relkind IN ('r', 'p', 'v')"
        " AND NOT class.relispartition AND attribute.attnum > 0 AND NOT attribute.attisdropped"
        " AND col_description(class.oid, attribute.attnum) IS NULL"
    ).fetchall()

    assert bare == []


def test_effective_priority_in_the_view_is_the_models(
    connection: psycopg.Connection, factory: Factory, clock: MovableClock
) -> None:
    """R-160: the same formula in SQL and in Python, to a thousandth (the view reads the real clock)."""
    task = factory.task(task={"priority": 90, "priority_boost_per_minute": 0.25})

    row = connection.execute(
        "SELECT effective_priority, now() FROM lineshaft.tasks WHERE id = %s", [task]
    ).fetchone()

    assert row is not None
    inputs = PriorityInputs(priority=90, boost_per_minute=0.25, ready_at=clock.now() - timedelta(minutes=5))
    assert row[0] == pytest.approx(effective_priority(inputs, row[1]), abs=0.001)


@pytest.mark.parametrize(
    ("constraint", "status", "columns"),
    [
        ("held_or_free", "READY", {"status": "COMPLETED"}),
        ("held_or_free", "READY", {"status": "CREATED"}),
        ("held_or_free", "READY", {"status": "FAILED"}),
        ("held_or_free", "READY", {"blocked": 1}),
        ("strict_status", "READY", {"ready_at": None}),
        ("held_or_free", "PENDING", {"due_at": None}),
        ("held_or_free", "RETRYING", {"due_at": None}),
        ("held_or_free", "RUNNING", {"lease_until": None}),
        ("held_or_free", "CLAIMED", {"agent_id": None, "lease_until": None}),
        ("held_or_free", "READY", {"agent_id": "a"}),
        ("strict_status", "READY", {"reserved_usd": 1}),
        ("strict_status", "RUNNING", {"started_at": None}),
        ("strict_status", "RUNNING", {"parked": "lock"}),
        ("strict_status", "CLAIMED", {"epoch": 0}),
        ("strict_status", "PENDING", {"blocked": -1}),
        ("strict_status", "READY", {"parked": "elsewhere"}),
        ("strict_status", "RUNNING", {"reserved_usd": -1}),
        ("over", "COMPLETED", {"status": "RUNNING"}),
        ("strict_end", "DEAD_LETTERED", {"category": None}),
        ("strict_end", "CANCELLED", {"output": {"x": 1}}),
    ],
)
def test_an_impossible_state_is_refused_by_the_database(
    factory: Factory, constraint: str, status: str, columns: dict[str, Any]
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        factory.task(Status(status), state=columns)

    assert caught.value.diag.constraint_name == constraint


@pytest.mark.parametrize(
    ("constraint", "columns"),
    [
        ("possible_task", {"priority": 101}),
        ("strict_task", {"priority_boost_per_minute": -0.1}),
        ("strict_task", {"type": ""}),
        ("possible_task", {"max_attempts": 0}),
        ("strict_task", {"max_cost_usd": -1}),
    ],
)
def test_an_impossible_task_is_refused_by_the_database(
    factory: Factory, constraint: str, columns: dict[str, Any]
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        factory.task(task=columns)

    assert caught.value.diag.constraint_name == constraint


@pytest.mark.parametrize(
    ("constraint", "table", "columns"),
    [
        ("edge_is_no_loop", "edge", {"task_id": "a", "depends_on": "a"}),
        ("counters_fit", "dag", {"id": "d", "title": "", "total": 1, "completed": 1, "cancelled": 1}),
        ("strict_end", "dag", {"id": "d", "title": "", "status": "completed"}),
        ("open_since", "breaker", {"key": "code", "state": "open"}),
        ("probe_only_half_open", "breaker", {"key": "code", "probe_task_id": "t"}),
        ("forced_is_open", "breaker", {"key": "code", "forced": True}),
    ],
)
def test_impossible_rows_of_other_tables_are_refused(
    factory: Factory, constraint: str, table: str, columns: dict[str, Any]
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        factory.insert(table, columns)

    assert caught.value.diag.constraint_name == constraint


def test_an_idempotency_key_is_in_force_once(factory: Factory) -> None:
    """U8: by a unique index, not by looking first."""
    key = {"key": "pr-123-lint", "content_hash": b"x"}
    factory.insert("task_key", {**key, "task_id": "a"})

    with pytest.raises(psycopg.errors.UniqueViolation):
        factory.insert("task_key", {**key, "task_id": "b"})


def test_a_lane_exists_once_also_where_no_cost_is_given(
    connection: psycopg.Connection, factory: Factory
) -> None:
    assert factory.lane("code", 0.1) == factory.lane("code", 0.1)
    assert factory.lane("code", 0.1) != factory.lane("code", 0.2)
    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute(
            "INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute)"
            " VALUES ('code', '{}', '{}', 0.1)"
        )


def test_an_event_always_finds_a_partition(connection: psycopg.Connection) -> None:
    """No transition may fail because a partition was not made in time."""
    row = connection.execute(
        "INSERT INTO lineshaft.event (kinds, at) VALUES ('{task.created}', '2999-01-01')"
        " RETURNING seq, xid::text::bigint"
    ).fetchone()

    assert row is not None
    assert row[0] == 1
    assert row[1] > 0
