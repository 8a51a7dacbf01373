"""Figures for people read few rows, by index: with a long history, and with many live tasks."""

import re
from datetime import date
from typing import Any

import psycopg
import pytest
from benchmarks.large_database import fill
from psycopg import ClientCursor

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import PLAN_BY_INDEX
from tests.engine.postgres.test_event_plans import pages

MOST = {"most": 100}
DAYS: dict[str, Any] = {"since": date(2020, 1, 1), "upto": date(2099, 1, 1)}
ALL: dict[str, Any] = DAYS | {"type": None, "model": None, "agent_id": None}

#: Statement, parameters, settings that are sent before it, and the pages that it may read.
CASES: list[tuple[str, str, dict[str, Any], str | None, int]] = [
    ("read.attention", "attention", MOST, None, 1_500),
    ("read.waiting", "table_size", MOST, None, 50),
    ("read.waiting", "indexed", MOST, "plan_by_index", 600),
    ("read.waiting", "gates", MOST | {"types": 20}, "plan_by_index", 600),
    ("read.waiting", "below_dead_letters", MOST | {"dead": 100}, "plan_by_index", 2_000),
    ("read.waiting", "lanes", {"ids": list(range(1, 21))}, "plan_by_index", 300),
    ("read.throughput", "minutes", DAYS, None, 3_000),
    ("read.throughput", "waits", MOST, None, 300),
    ("read.costs", "days", ALL, "plan_to_scan", 8_000),
    ("read.costs", "lines", ALL | MOST, "plan_to_scan", 8_000),
    ("read.costs", "hours", {"since": date(2020, 1, 1)}, "plan_to_scan", 3_000),
    ("read.costs", "dags", {"since": date(2020, 1, 1), "scanned": 100, "most": 20}, "plan_to_scan", 300),
]

LARGE = re.compile(r"Seq Scan on (task|task_live|task_end|attempt|edge|dag|dead_letter|event\w*)\b")


def explained(
    connection: psycopg.Connection, module: str, name: str, settings: str | None, values: Any
) -> str:
    statements = catalog.load(f"lineshaft.engine.{module}")
    with connection.transaction():
        connection.execute(catalog.load("lineshaft.engine.read.snapshot")["plan_for_filters"], {})
        if settings is not None:
            connection.execute(statements[settings], {})
        cursor = ClientCursor(connection)
        explain = b"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, COSTS OFF) " + statements[name].encode()
        cursor.execute(explain, {"now": None, **values})
        return "\n".join(row[0] for row in cursor.fetchall())


@pytest.mark.slow("fills a database with 20,000 tasks")
def test_no_figure_reads_the_history(connection: psycopg.Connection, dsn: str) -> None:
    """Without statistics and with them."""
    fill(dsn, ended=15_000, live=5_000, with_events=100)
    connection.execute(PLAN_BY_INDEX)
    for analysed in (False, True):
        if analysed:
            connection.execute("VACUUM ANALYZE")
        for module, name, values, settings, most in CASES:
            plan = explained(connection, module, name, settings, values)
            assert not LARGE.search(plan), f"{module} {name}:\n{plan}"
            assert pages(plan) <= most, f"{module} {name}: {pages(plan)} pages:\n{plan}"
