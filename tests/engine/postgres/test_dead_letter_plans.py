"""Lists of dead letters walk in order and stop; ids are looked up. On tables without statistics."""

from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import PLAN_BY_INDEX
from lineshaft.engine.review.dead_letters import filter_parameters
from lineshaft.types import DeadLetterFilter

FILL = """
INSERT INTO lineshaft.task (id, dag_id, type, title)
SELECT 'task_' || n, 'dag_' || n, 'code', 't' FROM generate_series(1, 20000) AS n;
INSERT INTO lineshaft.task_end (id, status, ended_at, epoch, reason, category)
SELECT 'task_' || n, 'DEAD_LETTERED', now(), 1, 'x', 'crash' FROM generate_series(1, 20000) AS n;
INSERT INTO lineshaft.dead_letter (
    task_id, epoch, dead_lettered_at, total_cost_usd, category, error, pattern,
    reviewed, resolution, reviewed_at
)
SELECT 'task_' || n, 1, now() - n * interval '1 second', 0, 'crash', 'x', 'x', n > 100,
    CASE WHEN n > 100 THEN 'escalate' END, CASE WHEN n > 100 THEN now() END
FROM generate_series(1, 20000) AS n
"""


@pytest.mark.slow("thousands of dead letters")
@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (DeadLetterFilter(), "dead_letter_by_age"),
        (DeadLetterFilter(reviewed=False), "dead_letter_to_review"),
        (DeadLetterFilter(task_ids=["task_7"]), "dead_letter_pkey"),
    ],
)
def test_each_list_has_its_index(
    connection: psycopg.Connection, wanted: DeadLetterFilter, index: str
) -> None:
    connection.execute(FILL)
    connection.execute(PLAN_BY_INDEX)
    connection.execute(catalog.load("lineshaft.engine.read.snapshot")["plan_for_filters"], {})
    start: dict[str, Any] = {
        "after_at": None,
        "after_id": None,
        "after_revival": None,
        "open": None,
        "limit": 51,
    }

    # Written out, so that it is planned for these values, as the reader's statements are.
    with ClientCursor(connection) as cursor:
        statement = catalog.load("lineshaft.engine.review.dead_letters")["list_dead_letters"]
        rows = cursor.execute(f"EXPLAIN {statement}".encode(), filter_parameters(wanted) | start).fetchall()
    plan = "\n".join(row[0] for row in rows)

    assert f"{index} " in plan, plan
    assert "Seq Scan" not in plan, plan


@pytest.mark.slow("thousands of dead letters")
@pytest.mark.parametrize("statement", ["count_dead_letters", "recent_dead_letters"])
def test_counts_of_open_letters_read_only_those(connection: psycopg.Connection, statement: str) -> None:
    connection.execute(FILL)
    connection.execute(PLAN_BY_INDEX)
    connection.execute(catalog.load("lineshaft.engine.read.snapshot")["plan_for_filters"], {})
    wanted = filter_parameters(DeadLetterFilter(reviewed=False, pattern="x"))
    values: dict[str, Any] = wanted | {"open": True, "limit": 100_000, "now": None, "hours": 24}

    with ClientCursor(connection) as cursor:
        text = catalog.load("lineshaft.engine.review.dead_letters")[statement]
        rows = cursor.execute(f"EXPLAIN {text}".encode(), values).fetchall()
    plan = "\n".join(row[0] for row in rows)

    assert "dead_letter_to_review " in plan, plan
    assert "Seq Scan" not in plan, plan
