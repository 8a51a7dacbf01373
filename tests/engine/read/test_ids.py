"""Tasks and DAGs by a short form or a prefix of their id, without reading more than a few rows."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.ids import MOST_IDS
from lineshaft.model.short_ids import ranges, short_id
from lineshaft.model.tasks import NewTask
from tests.world import World

BASE = "task_01J8K2M3N4P5Q6R7S8T9V0"


async def test_a_task_and_its_dag(world: World) -> None:
    find = world.engine.read.find_ids
    task_id = await world.one()
    # Ids of the same millisecond differ at the end only.
    assert await find(task_id[:-2], "task") == [task_id]
    dag = await world.dag(NewTask("code"), NewTask("code"))

    assert await find(short_id(task_id), "task") == [task_id]
    assert await find(task_id) == [task_id]
    assert await find(short_id(dag.id), "dag") == [dag.id]
    assert await find(short_id(dag.id), "task") == []
    virtual = "dag" + task_id.removeprefix("task")
    assert await find(short_id(task_id)) == [task_id, virtual]
    assert await find("nothing") == await find("") == await find("a\0b") == []


async def test_ids_that_callers_chose(world: World) -> None:
    await world.one(id="report-1")
    await world.one(id="report-10")

    find = world.engine.read.find_ids
    assert await find("report-1", "task") == ["report-1"], "a complete id means only itself"
    assert await find("report", "task") == ["report-1", "report-10"]
    assert await find("report-10") == ["report-10"]


async def test_many_of_one_millisecond(world: World) -> None:
    ids = [f"{BASE}{number:04d}" for number in range(30)]
    await world.submit(*(NewTask("code", id=name) for name in ids))

    find = world.engine.read.find_ids
    assert await find("J8K2M3N4-0017", "task") == [ids[17]]
    assert await find("J8K2M3N4", "task") == ids[:MOST_IDS]
    assert await find("J8K2M3N4-7", "task") == [ids[7], ids[17], ids[27]]


@pytest.mark.slow("a large table")
@pytest.mark.parametrize(("statement", "index"), [("task_ids", "task_pkey"), ("dag_ids", "task_of_dag")])
@pytest.mark.parametrize("text", ["00012345-W1X2", "0001", "task_01"])
def test_a_large_table_is_read_by_index(
    connection: psycopg.Connection, statement: str, index: str, text: str
) -> None:
    """Though it was never analysed."""
    connection.execute(
        "INSERT INTO lineshaft.task (id, dag_id, type, title, created_at)"
        " SELECT 'task_01' || lpad(n::text, 8, '0') || lpad('', 12, '0') || 'W1X2',"
        " 'dag_01' || lpad(n::text, 8, '0') || lpad('', 12, '0') || 'W1X2', 'x', 'x', now()"
        " FROM generate_series(1, 30000) AS n"
    )
    kind = statement.partition("_")[0]
    places = ranges(kind, text)
    parameters = {
        "text": text,
        "lows": [place.low for place in places],
        "highs": [place.high for place in places],
        "ends": [place.end for place in places],
        "most": MOST_IDS,
    }
    with connection.transaction():
        statements = catalog.load("lineshaft.engine.read.ids")
        connection.execute(statements["plan_by_index"])
        explain = "EXPLAIN (ANALYZE, FORMAT JSON) " + statements[statement]
        row = connection.execute(explain, parameters).fetchone()
    assert row is not None
    nodes = list(_nodes(row[0][0]["Plan"]))

    assert index in {node.get("Index Name") for node in nodes}
    most = 1_000 if statement == "task_ids" or text.endswith("W1X2") else 100_000
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in nodes) < most


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for below in node.get("Plans", ()):
        yield from _nodes(below)
