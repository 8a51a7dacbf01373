"""Firing: an event becomes work once, within limits, and every outcome is recorded."""

import asyncio
from collections import Counter
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from lineshaft.engine.engine import Engine
from lineshaft.engine.sources.firing import Key, Occasion
from lineshaft.errors import CycleError, InvalidInputError, NotFoundError
from lineshaft.types.sources import FiringOutcome
from tests.engine.sources.helpers import column, outcomes, put, schedule, webhook
from tests.world import World


def on(event: dict[str, Any], *keys: Key) -> Occasion:
    return Occasion(event, keys)


async def test_a_task_is_created_with_its_label(world: World) -> None:
    engine = world.engine
    await put(
        engine,
        webhook(template={"task": {"type": "review", "title": "PR ${event.n}", "spec": {"n": "${event.n}"}}}),
    )

    fired = await engine.firings.fire("w", on({"n": 7}))

    assert (fired.outcome, fired.error) == (FiringOutcome.CREATED, None)
    assert isinstance(fired.task_ids, list)
    (task_id,) = fired.task_ids
    task = await engine.read.task(task_id)
    assert (task.status, task.title, task.spec, task.created_by) == ("READY", "PR 7", {"n": 7}, "event:w")
    source = await engine.sources.get("w")
    assert (source.last_outcome, source.open_tasks) == ("created", 1)
    await world.complete(await world.take(await world.agent()))
    assert (await engine.sources.get("w")).open_tasks == 0


async def test_a_dag_is_created_as_a_whole(world: World) -> None:
    tasks = [
        {"key": "a", "type": "a"},
        {"key": "b", "type": "b", "depends_on": ["a"], "spec": {"x": "${event.x}"}},
    ]
    await put(world.engine, webhook(template={"dag": {"title": "Build ${event.x}", "tasks": tasks}}))

    fired = await world.engine.firings.fire("w", on({"x": [1, 2]}))

    dag = await world.engine.read.dag(str(fired.dag_id))
    assert (dag.title, dag.created_by, len(dag.tasks)) == ("Build [1,2]", "event:w", 2)
    assert (await world.engine.read.task(dag.leaves[0])).spec == {"x": [1, 2]}
    assert (await world.engine.sources.get("w")).open_tasks == 2


async def test_a_source_replaces_what_waits(world: World) -> None:
    """The newest event counts; what runs is cancelled, if the template says so."""
    task = {"type": "sync", "idempotency_key": "sync ${event.doc}", "spec": {"n": "${event.n}"}}
    newest = {"on_conflict": "replace_waiting", "debounce_sec": 10}
    await put(world.engine, webhook(template={"task": task | newest}))
    await put(world.engine, webhook(name="x", template={"task": task | {"on_conflict": "cancel_running"}}))

    fired = [await world.engine.firings.fire("w", on({"doc": 7, "n": n})) for n in (1, 2)]
    world.clock.advance(11)
    held = await world.take()
    other = await world.engine.firings.fire("x", on({"doc": 7, "n": 3}))

    assert [one.outcome for one in (*fired, other)] == ["created"] * 3
    assert fired[0].task_ids == fired[1].task_ids == [held.id]
    assert bytes(held.spec) == b'{"n": 2}'
    assert (world.status(held.id), other.task_ids != [held.id]) == ("CANCELLED", True)
    assert (await world.engine.sources.get("w")).open_tasks == 0


async def test_a_schedule_of_an_agent_changes_no_tasks(world: World) -> None:
    """What steers tasks needs more than the scope that agents have."""
    task = {"type": "t", "idempotency_key": "k", "on_conflict": "cancel_running"}
    await put(world.engine, schedule(name="agent:a/x", template={"task": task}))

    fired = await world.engine.firings.fire("agent:a/x")

    assert (fired.outcome, "scope operate" in str(fired.error)) == ("failed", True)


async def test_a_key_fires_once_until_it_expires(world: World) -> None:
    engine = world.engine
    await put(engine, webhook())
    key, other = Key("delivery:1"), Key("body:abc", 3600.0)

    found = [(await engine.firings.fire("w", on({}, key, other))).outcome for _ in range(2)]
    found.append((await engine.firings.fire("w", on({}, Key("delivery:2"), other))).outcome)
    world.clock.advance(3601)
    found.append((await engine.firings.fire("w", on({}, Key("delivery:3"), other))).outcome)
    found.append((await engine.firings.fire("w", on({}, key))).outcome)

    assert found == ["created", "duplicate", "duplicate", "created", "duplicate"]
    # A dead letter frees the idempotency key of a task, but not what has fired.
    assert await outcomes(engine, "w") == found


async def test_twenty_deliveries_of_one_key_create_one_task(world: World) -> None:
    await put(world.engine, webhook(idempotency="pr-${event.n}"))

    fired = await asyncio.gather(*(world.engine.firings.fire("w", on({"n": 1})) for _ in range(20)))

    assert sorted(each.outcome for each in fired if each.outcome) == ["created"] + ["duplicate"] * 19
    assert column(world, "SELECT count(*) FROM lineshaft.task") == [1]


async def test_a_failed_rendering_creates_nothing_and_is_an_alert(world: World) -> None:
    engine = world.engine
    await put(engine, webhook(template={"task": {"type": "${event.type}"}}, idempotency="${event.id}"))

    fired = await engine.firings.fire("w", on({"type": 5, "id": "x"}))
    again = await engine.firings.fire("w", on({"type": "ok", "id": "x"}))

    assert fired.outcome == "failed"
    assert "template.task.type" in str(fired.error)
    assert again.outcome == "created", "the key wasn't used up by the failure"
    assert column(world, "SELECT data->>'key' FROM lineshaft.event WHERE 'alert' = ANY (kinds)") == [
        "source:w"
    ]
    assert (await engine.sources.get("w")).is_enabled
    assert await engine.sources.totals() == [("w", "created", 1), ("w", "failed", 1)]


async def test_refused_work_is_a_failure(world: World) -> None:
    cycle = [
        {"key": "a", "type": "a", "depends_on": ["${event.on}"]},
        {"key": "b", "type": "b", "depends_on": ["a"]},
    ]
    await put(world.engine, webhook(template={"dag": {"title": "x", "tasks": cycle}}))

    for event, error in (({"on": "b"}, "cycle"), ({"on": "task_nope"}, "task_nope")):
        fired = await world.engine.firings.fire("w", on(event))
        assert fired.outcome == "failed"
        assert error in str(fired.error)
    assert column(world, "SELECT count(*) FROM lineshaft.task, lineshaft.source_work") == [0]


async def test_a_template_with_a_cycle_of_inputs_or_a_key_twice_is_refused_when_it_is_stored(
    world: World,
) -> None:
    cases: list[tuple[list[dict[str, Any]], str]] = [
        (
            [
                {"key": "a", "type": "t", "inputs": {"x": "b"}},
                {"key": "b", "type": "t", "inputs": {"all": ["a"]}},
            ],
            r"template\.dag\.tasks: .* a cycle: .* → ",
        ),
        (
            [{"key": "a", "type": "t"}, {"key": "a", "type": "t"}],
            r"template\.dag\.tasks\[1\]\.key: 'a' is used twice",
        ),
    ]
    for tasks, error in cases:
        with pytest.raises(InvalidInputError, match=error):
            await put(world.engine, webhook(template={"dag": {"title": "x", "tasks": tasks}}))


async def test_a_template_with_a_cycle_is_refused_when_it_is_stored(world: World) -> None:
    tasks = [
        {"key": "a", "type": "a", "spec": {"n": "${event.n}"}, "depends_on": ["c"]},
        {"key": "b", "type": "b", "depends_on": ["a"]},
        {"key": "c", "type": "c", "depends_on": ["b"]},
    ]
    with pytest.raises(InvalidInputError, match=r"template\.dag\.tasks: depends_on forms a cycle: .* → "):
        await put(world.engine, webhook(template={"dag": {"title": "x", "tasks": tasks}}))
    with pytest.raises(NotFoundError):
        await world.engine.sources.get("w")


async def test_a_dry_run_reports_a_cycle_that_depends_on_the_event(world: World) -> None:
    tasks = [{"key": "a", "type": "a", "depends_on": ["${event.on}"]}]
    await put(world.engine, webhook(template={"dag": {"title": "x", "tasks": tasks}}))

    with pytest.raises(CycleError, match="a → a"):
        await world.engine.firings.preview("w", {"on": "a"})


async def test_an_existing_idempotency_key_of_the_task_is_a_duplicate(world: World) -> None:
    await put(world.engine, webhook(template={"task": {"type": "a", "idempotency_key": "k"}}))

    first, second = [await world.engine.firings.fire("w", on({})) for _ in range(2)]

    assert (first.outcome, second.outcome) == ("created", "duplicate")
    assert first.task_ids == second.task_ids


async def test_a_condition_filters(world: World) -> None:
    await put(world.engine, webhook(when="event.action == 'opened'"))

    assert (await world.engine.firings.fire("w", on({"action": "closed"}))).outcome == "filtered"
    assert (await world.engine.firings.fire("w", on({"action": "opened"}))).outcome == "created"


async def test_open_work_is_limited(world: World) -> None:
    engine = world.engine
    await put(engine, webhook(max_open=2))

    fired = await asyncio.gather(*(engine.firings.fire("w", on({})) for _ in range(5)))
    assert sorted(str(each.outcome) for each in fired) == ["created"] * 2 + ["skipped"] * 3
    skipped = next(each for each in fired if each.outcome == "skipped")
    assert skipped.error == "2 tasks or DAGs of this source are open, and max_open is 2"

    await world.complete(await world.take(await world.agent()))
    assert (await engine.firings.fire("w", on({}))).outcome == "created"


async def test_the_oldest_work_makes_room(world: World) -> None:
    engine = world.engine
    dag = {"dag": {"title": "x", "tasks": [{"key": "a", "type": "a"}, {"key": "b", "type": "b"}]}}
    await put(engine, webhook(max_open=1, overlap="cancel_oldest", template=dag))

    first, second = [await engine.firings.fire("w", on({})) for _ in range(2)]

    assert (first.outcome, second.outcome) == ("created", "created")
    assert (await engine.read.dag(str(first.dag_id))).status == "cancelled"
    assert (await engine.read.dag(str(second.dag_id))).status == "pending"
    assert (await engine.sources.get("w")).open_tasks == 2
    reason = (await engine.read.task((first.task_ids or [""])[0])).cancel_reason
    assert reason == "superseded by a newer firing of source w"


async def test_a_dry_run_creates_nothing(world: World) -> None:
    engine = world.engine
    await put(engine, schedule())

    preview = await engine.firings.preview("s", {"tick": "T"})

    assert preview.tasks == [{"type": "report", "spec": {"tick": "T"}, "created_by": "cron:s"}]
    assert (await engine.firings.preview("s")).tasks[0]["spec"] == {"tick": "2026-02-08T09:00:00Z"}  # type: ignore[index]
    await put(engine, webhook(template={"task": {"type": "${event.x}"}}))
    with pytest.raises(InvalidInputError, match=r"template\.task\.type"):
        await engine.firings.preview("w", {})
    with pytest.raises(NotFoundError, match="no source 'nope'"):
        await engine.firings.preview("nope")
    assert column(world, "SELECT count(*) FROM lineshaft.task, lineshaft.firing") == [0]


async def test_history_and_keys_are_kept_for_a_while(world: World) -> None:
    engine = world.engine
    await put(engine, webhook())
    await put(engine, webhook("gone"))
    await engine.firings.fire("w", on({}, Key("old", 60.0), Key("forever")))
    await engine.firings.fire("gone", on({}, Key("x")))
    await engine.sources.delete("gone")
    world.clock.advance(timedelta(days=31).total_seconds())
    await engine.firings.fire("w", on({}))

    await engine.sources.forget(timedelta(days=30).total_seconds(), 1)

    assert await outcomes(engine, "w") == ["created"]
    assert column(world, "SELECT key FROM lineshaft.source_key") == ["forever"]
    assert column(world, "SELECT count(*) FROM lineshaft.firing") == [1]
    assert column(world, "SELECT count(*) FROM lineshaft.source_work WHERE is_open") == [3], "all are open"
    agent = await world.agent(max_concurrent_tasks=3)
    for _ in range(3):
        await world.complete(await world.take(agent))
    await engine.sources.forget(timedelta(days=30).total_seconds(), 1)
    assert column(world, "SELECT is_open FROM lineshaft.source_work") == [False]
    assert await engine.sources.totals() == [("w", "created", 2)]


async def test_a_deleted_source_waits_for_a_firing(engine: Engine) -> None:
    await put(engine, webhook())
    await engine.sources.delete("w")

    with pytest.raises(NotFoundError, match="no source 'w'"):
        await engine.firings.fire("w", on({}))


async def test_whatever_the_events_are_only_created_firings_have_tasks(world: World) -> None:
    """Random events for a template with many ways to fail: what isn't `created` leaves nothing behind."""
    template = {
        "task": {
            "type": "${event.type}",
            "priority": "${event.priority}",
            "tags": "${event.tags}",
            "depends_on": "${event.after}",
            "spec": {"x": "${sort(event.list)}"},
        }
    }
    await put(
        world.engine, webhook(template=template, when="event.go != `false`", idempotency="${event.key}")
    )
    choices: dict[str, list[Any]] = {
        "type": ["a", "b", 5, None, "", {"x": 1}],
        "priority": [1, 50, None, 1_000, "high"],
        "tags": [["x"], [], None, "x", [1]],
        "after": [[], [], None, ["task_nope"]],
        "list": [[2, 1], ["b", "a"], [], [1, "a"], None],
        "key": ["k1", "k2", "k3", "", None, 7],
        "go": [True, True, False, None],
    }
    random = Random(7)
    found: Counter[str] = Counter()
    for _ in range(150):
        event = {name: random.choice(values) for name, values in choices.items() if random.random() < 0.95}
        found[str((await world.engine.firings.fire("w", on(event))).outcome)] += 1

    assert set(found) >= {"created", "failed", "filtered"}
    for table in ("task", "task_live", "source_work"):
        assert column(world, f"SELECT count(*) FROM lineshaft.{table}") == [found["created"]], table
    assert dict(Counter(await outcomes(world.engine, "w"))) == dict(found)
    assert column(world, "SELECT count(*) <= 4 FROM lineshaft.source_key") == [True], (
        "only keys that have fired"
    )
