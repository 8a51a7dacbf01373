"""Statements of sources that run per tick, event, delivery or page: by index, however much there is."""

import re
from typing import Any

import psycopg
import pytest

from tests.engine.postgres.test_event_plans import explain, pages

FILL = """
INSERT INTO lineshaft.source
    (created_at, updated_at, next_tick, next_at, cursor, name, kind, origin, definition)
SELECT now(), now(), tick, tick, CASE WHEN mod(i, 100) = 1 THEN 'c' END, 'source' || i,
    CASE mod(i, 100) WHEN 1 THEN 'event' WHEN 2 THEN 'observer' WHEN 3 THEN 'files' ELSE 'schedule' END,
    'api', '{}'
FROM generate_series(1, 10000) AS i
CROSS JOIN LATERAL (
    SELECT CASE WHEN mod(i, 100) > 3 THEN now() + (i - 5) * interval '1 minute' END
) AS times (tick);
INSERT INTO lineshaft.source_tally (source_id, firings, last_at, outcome)
SELECT i, 10, now(), outcome
FROM generate_series(1, 10000) AS i, unnest('{created,failed}'::text[]) AS outcome;
INSERT INTO lineshaft.firing (source_id, at, outcome, task_ids)
SELECT 1 + mod(i, 50), now() - i * interval '1 second', 'created', ARRAY['task_' || i]
FROM generate_series(1, 50000) AS i;
INSERT INTO lineshaft.source_key (source_id, key, expires_at)
SELECT 1 + mod(i, 50), 'delivery:' || i,
    CASE WHEN mod(i, 2) = 0 THEN now() + (i - 20) * interval '1 minute' END
FROM generate_series(1, 50000) AS i;
INSERT INTO lineshaft.source_work (source_id, created_at, is_task, is_open, id, dag_id)
SELECT 1 + mod(i, 50), now() - i * interval '1 minute', true, i <= 100, 'task_' || i, 'dag_' || i
FROM generate_series(1, 50000) AS i;
INSERT INTO lineshaft.task (id, dag_id, type, title)
SELECT 'task_' || i, 'dag_' || i, 'report', 't' FROM generate_series(1, 20000) AS i;
INSERT INTO lineshaft.file_seen (source_id, seen_at, watcher, path, digest)
SELECT 3 + 100 * mod(i, 10), now(), 'server', 'file' || i, 'd' FROM generate_series(1, 20000) AS i;
"""

SOURCE: dict[str, Any] = {"now": None, "source_id": 7, "name": "source7"}
KEYS = {"keys": ["delivery:56", "delivery:new"], "ttls": [60.0, None]}
RECORD = {"outcome": "created", "task_ids": ["task_1"], "dag_id": None, "error": None, "alert": None}
SEEN = {"source_id": 3, "watcher": "server", "path": "file10", "digest": "e"}
OLD = {"now": None, "older_than": 864_000.0, "limit": 100}
#: Statement, parameters, an index that it uses, and the pages it may read.
CASES: list[tuple[str, str, dict[str, Any], str, int]] = [
    ("sources/firing", "share_source", SOURCE, "source_name", 20),
    ("sources/firing", "take_keys", SOURCE | KEYS, "source_key_pkey", 60),
    ("sources/firing", "close_ended", SOURCE, "source_work_open", 100),
    ("sources/firing", "open_work", SOURCE, "source_work_open", 30),
    ("sources/firing", "add_task", SOURCE | {"depth": 0, "id": "task_1"}, "task_pkey", 60),
    ("sources/firing", "record", SOURCE | RECORD, "source_tally_pkey", 60),
    ("sources/schedules", "lock_due", SOURCE, "source_due", 20),
    ("sources/schedules", "next_due", SOURCE, "source_due", 20),
    ("sources/event_sources", "list_event_sources", {}, "source_of_events", 300),
    ("sources/event_sources", "lock_at", {"now": None, "name": "source1", "cursor": "c"}, "source_", 20),
    ("sources/event_sources", "depth", {"dag_id": "dag_7", "task_id": None}, "source_work_of_dag", 30),
    ("sources/event_sources", "depth", {"dag_id": None, "task_id": "task_7"}, "source_work_of_dag", 30),
    ("sources/file_sources", "list_file_sources", {}, "source_of_files", 300),
    ("sources/file_sources", "see", SOURCE | SEEN, "file_seen_pkey", 60),
    ("sources/observers", "list_observers", {}, "source_of_observers", 300),
    ("sources/observers", "cooling", SOURCE | KEYS, "source_key_pkey", 30),
    ("sources/registry", "read_source", SOURCE, "source_name", 200),
    ("sources/registry", "list_sources", OLD | {"after": "", "kind": None}, "source_name", 3_000),
    ("sources/registry", "list_firings", SOURCE | {"before": 2**62, "limit": 50}, "firing_pkey", 200),
    ("sources/registry", "lag", SOURCE, "source_due", 20),
    ("sources/registry", "forget_firings", OLD, "firing_by_age", 50),
    ("sources/registry", "forget_orphans", OLD, "firing_pkey", 1_000),
    ("sources/registry", "forget_orphaned_keys", OLD, "source_key_pkey", 1_000),
    ("sources/registry", "forget_keys", OLD, "source_key_expiry", 200),
    (
        "feed/outbox",
        "dags_of_sources",
        {"dag_ids": [f"dag_{n}" for n in range(100)], "sources": ["source7"]},
        "source_work_of_dag",
        1_000,
    ),
]  # fmt: skip


@pytest.mark.slow("thousands of rows")
@pytest.mark.parametrize("analysed", [False, True])
def test_statements_of_sources_use_their_indexes(connection: psycopg.Connection, analysed: bool) -> None:
    """R-246: with and without statistics."""
    connection.execute(FILL)
    if analysed:
        connection.execute("VACUUM ANALYZE")
    faults = []
    for stem, name, values, index, most in CASES:
        plan = explain(connection, stem, name, values)
        if found := re.search(r"Seq Scan on (source\w*|firing|file_seen|task\w*)\b", plan):
            faults.append(f"{name}: {found[0]}:\n{plan}")
        if index not in plan:
            faults.append(f"{name} doesn't use {index}:\n{plan}")
        # A list of one source reads only its own rows, however seldom it fires.
        if "Rows Removed by Filter" in plan and name == "list_firings":
            faults.append(f"{name} reads firings of others:\n{plan}")
        if pages(plan) > most:
            faults.append(f"{name}: {pages(plan)} pages:\n{plan}")
    assert not faults, "\n".join(faults)
