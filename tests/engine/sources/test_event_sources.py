"""Event sources: events of the queue create work once, with results, and loops end."""

import asyncio
from typing import Any

import msgspec
import pytest

from lineshaft.duties.event_watcher import EventWatcher
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from lineshaft.sources.definition import Definition
from lineshaft.types import TaskFilter
from lineshaft.types.sources import NewSource, SourceFields
from tests.engine.sources.helpers import column, outcomes, put
from tests.world import World


def source(name: str = "e", **fields: Any) -> NewSource:
    given = {"name": name, "kind": "event", "template": {"task": {"type": "next"}}, **fields}
    return msgspec.convert(given, NewSource)


async def run(world: World) -> dict[str, int]:
    return dict(await EventWatcher(world.engine.event_sources).run_once())


async def test_a_completed_dag_starts_the_next_with_its_results(world: World) -> None:
    """R-147, R-224."""
    template = {
        "dag": {
            "title": "Report on ${event.dag.title}",
            "tasks": [{"key": "r", "type": "report", "spec": {"rows": "${event.dag.outputs[0].data.rows}"}}],
        }
    }
    when = "event.dag.title == 'data pipeline'"
    await put(world.engine, source("report", on=["dag.completed"], when=when, template=template))
    for title in ("data pipeline", "another"):
        tasks = [NewTask("extract", key="a"), NewTask("load", key="b", depends_on=["a"])]
        await world.engine.submission.submit_dag(title, tasks)
    agent = await world.agent()
    assert await run(world) == {}
    for _ in range(4):
        await world.complete(await world.take(agent), {"rows": 42})

    assert await run(world) == {"events created": 1, "events filtered": 1}
    assert await run(world) == {}

    (made,) = (await world.engine.read.tasks(_of_type("report"))).items
    assert (made.spec, made.created_by) == ({"rows": 42}, "dag:report")
    assert (await world.engine.read.dag(made.dag_id)).title == "Report on data pipeline"
    assert await outcomes(world.engine, "report") == ["created"], "filtered events aren't kept"


async def test_a_dead_letter_is_triaged(world: World) -> None:
    task = {
        "task": {
            "type": "triage",
            "spec": {"error": "${event.task.failure_reason}", "id": "${event.task_id}"},
        }
    }
    await put(world.engine, source("triage", on=["task.dead_lettered"], template=task))
    failed = await world.one(max_attempts=1)
    await world.fail(await world.take(), "no access")

    assert await run(world) == {"events created": 1}

    (made,) = (await world.engine.read.tasks(_of_type("triage"))).items
    assert (made.spec, made.created_by) == ({"error": "no access", "id": failed}, "event:triage")


@pytest.mark.slow("hundreds of events")
async def test_each_event_fires_once_with_two_servers(world: World, dsn: str) -> None:
    await put(world.engine, source(on=["task.created"], when="event.task.type == 'code'"))
    for _ in range(50):
        await world.one()

    async with Engine(dsn, clock=world.clock) as other:
        watchers = [EventWatcher(engine.event_sources) for engine in (world.engine, other)] * 2
        for _ in range(3):
            await asyncio.gather(*(watcher.run_once() for watcher in watchers))

    assert column(world, "SELECT count(*) FROM lineshaft.task WHERE type = 'next'") == [50]


async def test_a_loop_ends_with_an_alert(world: World) -> None:
    await put(
        world.engine, source("ping", on=["task.created"], when="event.task.type == 'a'", template=_task("b"))
    )
    await put(
        world.engine, source("pong", on=["task.created"], when="event.task.type == 'b'", template=_task("a"))
    )
    await world.one("a")

    for _ in range(15):
        await run(world)

    assert column(world, "SELECT count(*) FROM lineshaft.task") == [11], "one by hand, ten by sources"
    assert column(world, "SELECT max(depth) FROM lineshaft.source_work") == [10]
    (alert,) = column(world, "SELECT data->>'message' FROM lineshaft.event WHERE 'alert' = ANY (kinds)")
    assert "10 event sources led to this event, one after another" in alert


async def test_alerts_about_sources_dont_fire_sources(world: World) -> None:
    await put(world.engine, source("on-alert", on=["alert"], template=_task("${event.missing}")))
    await put(world.engine, source("broken", on=["task.created"], template=_task("${event.missing}")))
    await world.one()

    assert await run(world) == {"events failed": 1}
    for _ in range(3):
        assert await run(world) == {}


async def test_a_source_sees_what_happens_after_it_was_enabled(world: World) -> None:
    await world.one()
    await put(world.engine, source(on=["task.created"], when="event.task.type == 'code'"))
    assert await run(world) == {}
    await world.engine.sources.patch("e", SourceFields(enabled=False))
    await world.one()
    assert await run(world) == {}
    await world.engine.sources.patch("e", SourceFields(enabled=True))
    assert await run(world) == {}
    await world.one()

    assert (await run(world))["events created"] == 1


async def test_open_work_is_limited_for_events_too(world: World) -> None:
    await put(
        world.engine,
        source(on=["task.created"], when="event.task.type == 'code'", max_open=1, overlap="cancel_oldest"),
    )
    for _ in range(3):
        await world.one()
        await run(world)

    assert await outcomes(world.engine, "e") == ["created"] * 3
    live = "SELECT count(*) FROM lineshaft.tasks WHERE type = 'next' AND status = 'READY'"
    assert column(world, live) == [1]


async def test_tasks_submitted_on_their_own_count_only_where_they_are_asked_for(world: World) -> None:
    await put(world.engine, source("dags", on=["dag.completed"], template=_task("a")))
    await put(world.engine, source("all", on=["dag.completed"], single=True, template=_task("b")))
    await world.one()
    await world.complete(await world.take())
    assert await run(world) == {"events created": 1}
    assert column(world, "SELECT type FROM lineshaft.task ORDER BY created_at") == ["code", "b"]

    await world.engine.submission.submit_dag("two", [NewTask("code", key="a"), NewTask("code", key="b")])
    for _ in range(3):
        await world.complete(await world.take())
    assert await run(world) == {"events created": 3}, "of the DAG both, of the task that it created one"
    assert await outcomes(world.engine, "dags") == ["created"]


async def test_breadth_is_limited_too(world: World) -> None:
    """One event can't lead to a thousand, and each of them to a thousand more."""
    made = await put(world.engine, source(on=["task.created"], when="event.task.type == 'code'"))
    assert (made.max_open, made.max_per_minute) == (1_000, 1_000)
    explicit = await put(world.engine, source("null", on=["alert"], max_open=None))
    assert explicit.max_open == 1_000
    stored = Definition(source("older", on=["alert"]))
    assert (stored.max_open, stored.max_per_minute) == (1_000, 1_000), "also those of older versions"
    await world.engine.sources.patch("e", SourceFields(max_per_minute=3))
    for _ in range(5):
        await world.one()

    assert (await run(world))["events created"] == 3
    assert await run(world) == {}
    assert "it has created 3 within a minute" in ((await world.engine.sources.get("e")).fault or "")
    world.clock.advance(61)
    assert (await world.engine.sources.get("e")).fault is None
    assert (await run(world))["events created"] == 2, "none was lost"


@pytest.mark.parametrize("on", [[], ["Not An Event"], ["dag.completed"] * 51])
async def test_kinds_are_checked(engine: Engine, on: list[str]) -> None:
    with pytest.raises(Exception, match=r"on(\[0\])?: must"):
        await put(engine, source(on=on))


def _task(type_: str) -> dict[str, Any]:
    return {"task": {"type": type_}}


def _of_type(type_: str) -> TaskFilter:
    return TaskFilter(type=(type_,))
