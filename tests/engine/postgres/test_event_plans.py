"""Statements on the event log after 1,100 days: a few pages of each partition's index."""

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor

from lineshaft.clock import MovableClock
from lineshaft.engine.feed.partitions import Partitions, Period
from lineshaft.engine.postgres.database import PLAN_BY_INDEX, Database
from tests.engine.postgres.test_plans import positional

DAYS = 1_100
PER_DAY = 100
FEED: dict[str, Any] = {
    "until": None,
    "dag_id": None,
    "kinds": None,
    "dag_kinds": None,
    "limit": 100,
    "most": 1000,
    "span": 1000,
}

#: The partitions that the janitor has made, and how many there are with the default one.
LAYOUTS = [
    pytest.param(Period.for_retention(None), DAYS, 38, id="all in months"),
    pytest.param(Period.for_retention(timedelta(days=60)), 60, 62, id="60 days"),
]


@pytest.fixture
async def partitions(dsn: str, clock: MovableClock) -> AsyncIterator[Partitions]:
    async with Database(dsn, clock=clock, max_connections=1) as database:
        yield Partitions(database)


def explain(connection: psycopg.Connection, stem: str, name: str, values: dict[str, Any]) -> str:
    """The generic plan, as it was executed; nothing stays of it."""
    text, names, types = positional(stem, name)
    connection.execute(PLAN_BY_INDEX)
    given = ClientCursor(connection).mogrify(", ".join(["%s"] * len(names)), [values[name] for name in names])
    types, given = (f"({types})", f"({given})") if names else ("", "")
    connection.execute(f"PREPARE hot {types} AS {text}".encode())
    with connection.transaction(force_rollback=True):
        rows = connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, COSTS OFF) EXECUTE hot {given}".encode()
        ).fetchall()
    connection.execute("DEALLOCATE hot")
    return "\n".join(row[0] for row in rows)


def pages(plan: str) -> int:
    """Pages of the whole statement, without those that planning reads."""
    # Those of other tests on the same server may have taken the place of some in memory.
    found = re.search(r"Buffers: shared(?: hit=(\d+))?(?: read=(\d+))?", plan)
    assert found is not None
    return int(found[1] or 0) + int(found[2] or 0)


@pytest.mark.slow("years of events")
@pytest.mark.parametrize(("period", "days", "number"), LAYOUTS)
async def test_the_event_log_stays_cheap_after_years(
    partitions: Partitions, connection: psycopg.Connection, period: Period, days: int, number: int
) -> None:
    """For a reader that keeps up, for one task's history, and for a new event."""
    await partitions.ensure_partitions(days, period=period)
    connection.execute(
        "INSERT INTO lineshaft.event (at, kinds, task_id)"
        " SELECT timestamptz '2026-02-08 09:00Z' + day * interval '1 day', '{task.created}', 'task_' || day"
        f" FROM generate_series(0, {days - 1}) AS day CROSS JOIN generate_series(1, {PER_DAY})"
    )
    connection.execute("VACUUM ANALYZE lineshaft.event")
    # Without transactions in progress: other tests on the same server have any number of them.
    xmax = "SELECT format('%1$s:%1$s:', pg_snapshot_xmax(pg_current_snapshot()))"
    (since,) = connection.execute(xmax).fetchone() or ("",)
    connection.execute("INSERT INTO lineshaft.event (kinds, task_id) VALUES ('{task.ready}', 'task_1')")
    row = connection.execute("SELECT max(seq), count(DISTINCT tableoid) FROM lineshaft.event").fetchone()
    assert row is not None
    last, used = row
    assert used >= number - 3
    reader = FEED | {"since": since, "seq": 0, "task_id": None}

    for stem, name, values, index in (
        ("feed/events", "read_recent", reader, "xid_idx"),
        ("feed/events", "find_first", reader | {"until": since}, "xid_idx"),
        ("feed/events", "read_task", reader | {"since": None, "task_id": "task_7"}, "task_id_idx"),
        ("feed/events", "read_span", reader | {"since": None, "seq": last - 100}, "seq_idx"),
        ("read/tally", "tally", {"now": None, "most": 1000, "groups": 500}, "xid_idx"),
    ):
        plan = explain(connection, stem, name, values)
        assert not re.search(r"Seq Scan on event_(\d|default)", plan), f"{name}:\n{plan}"
        assert plan.count(index) >= number, f"{name} doesn't use {index} everywhere:\n{plan}"
        # A few pages of each index: far less than the partitions have.
        if name != "tally":
            assert pages(plan) <= 12 * number + 100, f"{name}: {pages(plan)} pages:\n{plan}"

    connection.execute("PREPARE new AS INSERT INTO lineshaft.event (kinds) VALUES ('{alert}')")
    rows = connection.execute("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, COSTS OFF) EXECUTE new").fetchall()
    plan = "\n".join(row[0] for row in rows)
    assert pages(plan) <= 30, plan
