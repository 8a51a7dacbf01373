"""Lists: everything that fits, once, in order, and without reading the whole history."""

import random
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import PLAN_BY_INDEX
from lineshaft.engine.read import listing
from lineshaft.errors import InvalidInputError
from lineshaft.model.states import Status
from lineshaft.types import DagFilter, Page, Task, TaskFilter
from tests.factory import Factory
from tests.world import Actions, World, every


@pytest.fixture
async def engine(dsn: str, clock: MovableClock) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, max_connections=3) as opened:
        yield opened


async def listed(engine: Engine, *, limit: int = 500, order: str = "created_at", **filters: Any) -> list[str]:
    return await every(
        lambda cursor: engine.read.tasks(TaskFilter(**filters), order=order, limit=limit, cursor=cursor),
        limit,
    )


@pytest.fixture
def crowd(factory: Factory, clock: MovableClock) -> list[dict[str, Any]]:
    """Tasks of all states with many equal creation times; each as the filters should see it."""
    rng = random.Random(7)
    states = [s for s in Status if s not in {Status.CREATED, Status.FAILED}]
    made = []
    for n in range(120):
        status = rng.choice(states)
        asked = {
            "type": rng.choice(["code", "review"]),
            "dag_id": f"dag_{rng.randrange(12)}",
            "parent_id": rng.choice([None, "task_p", "task_q"]),
            "tags": rng.sample(["red", "green", "blue"], rng.randrange(3)),
            "created_by": rng.choice([None, "me", "you"]),
            "lock_key": rng.choice([None, "doc:a", "doc:b"]),
            "priority": rng.choice([5, 20, 29, 30, 70]),
            "is_batch": rng.random() < 0.2 and status in {Status.PENDING, Status.COMPLETED},
            "title": rng.choice(["Fix 100% of it", "fix 100 of it", "a_b", "aXb", "back\\slash"]),
            "created_at": clock.now() - timedelta(minutes=rng.randrange(20)),
        }
        state = (
            {"agent_id": rng.choice(["ann", "bob"])} if status in {Status.COMPLETED, Status.RUNNING} else {}
        )
        task_id = factory.task(
            status, task={**asked, "id": f"task_{rng.randrange(10**9):09}_{n}"}, state=state
        )
        made.append({"id": task_id, "status": status, "agent_id": None, **asked, **state})
    return made


def newest_first(tasks: list[dict[str, Any]]) -> list[str]:
    return [t["id"] for t in sorted(tasks, key=lambda t: (t["created_at"], t["id"]), reverse=True)]


FILTERS: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
    ({}, lambda _: True),
    ({"status": ["ready"]}, lambda t: t["status"] == "READY"),
    ({"status": ["RUNNING", "COMPLETED"]}, lambda t: t["status"] in {"RUNNING", "COMPLETED"}),
    ({"status": ["DEAD_LETTERED", "PENDING"]}, lambda t: t["status"] in {"DEAD_LETTERED", "PENDING"}),
    ({"status": ["RETRYING"]}, lambda t: t["status"] == "RETRYING"),
    ({"status": ["VALIDATING", "CLAIMED"]}, lambda t: t["status"] in {"VALIDATING", "CLAIMED"}),
    ({"status": ["FAILED"]}, lambda _: False),
    ({"type": ["review"]}, lambda t: t["type"] == "review"),
    ({"type": ["nothing"]}, lambda _: False),
    ({"dag_id": ["dag_3", "dag_4"]}, lambda t: t["dag_id"] in {"dag_3", "dag_4"}),
    ({"parent_id": ["task_p"]}, lambda t: t["parent_id"] == "task_p"),
    ({"tag": ["red", "blue"]}, lambda t: bool({"red", "blue"} & {*t["tags"]})),
    ({"lock_key": ["doc:a"]}, lambda t: t["lock_key"] == "doc:a"),
    ({"priority_from": 10, "priority_to": 29}, lambda t: t["priority"] in {20, 29}),
    ({"priority_from": 60, "status": ["READY"]}, lambda t: t["priority"] == 70 and t["status"] == "READY"),
    ({"batches": True}, lambda t: t["is_batch"]),
    ({"batches": True, "status": ["PENDING"]}, lambda t: t["is_batch"] and t["status"] == "PENDING"),
    ({"created_by": ["me"]}, lambda t: t["created_by"] == "me"),
    ({"agent_id": ["ann"]}, lambda t: t["agent_id"] == "ann"),
    (
        {"agent_id": ["ann"], "status": ["RUNNING"]},
        lambda t: (t["agent_id"], t["status"]) == ("ann", "RUNNING"),
    ),
    ({"q": ["100%"]}, lambda t: "100%" in t["title"]),
    ({"q": ["FIX"]}, lambda t: "fix" in t["title"].lower()),
    ({"q": ["a_b", "\\"]}, lambda t: t["title"] in {"a_b", "back\\slash"}),
    (
        {"tag": ["green"], "status": ["READY", "COMPLETED"], "type": ["code"], "q": ["fix"]},
        lambda t: (
            "green" in t["tags"]
            and t["status"] in {"READY", "COMPLETED"}
            and t["type"] == "code"
            and "fix" in t["title"].lower()
        ),
    ),
]


@pytest.mark.slow("hundreds of pages")
@pytest.mark.parametrize("way", ["sorted", "walked"])
async def test_filters_and_pages_show_everything_once_newest_first(
    engine: Engine, crowd: list[dict[str, Any]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either way, in pages of any size, the list is what a plain filter and sort would give."""
    if way == "walked":
        monkeypatch.setattr(listing.task_keys, "__kwdefaults__", {"few": -1})
        monkeypatch.setattr(listing, "SCAN", 7)
        monkeypatch.setattr(listing, "PARTS", 2)
    for filters, fits in FILTERS:
        expected = newest_first([task for task in crowd if fits(task)])
        for limit in (3, 500):
            assert await listed(engine, limit=limit, **filters) == expected, (filters, limit)


async def test_a_walk_gives_short_pages_rather_than_long_waits(
    engine: Engine, crowd: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "SCAN", 10)
    monkeypatch.setattr(listing, "PARTS", 2)

    page = await engine.read.tasks(TaskFilter(type=["nothing"]))

    assert page.items == []
    assert page.next_cursor is not None, f"20 of {len(crowd)} tasks were looked at"


async def test_lists_are_stable_while_tasks_arrive(world: World, clock: MovableClock) -> None:
    ids = [await world.one() for _ in range(6)]
    first = await world.engine.read.tasks(limit=3)
    clock.advance(1)
    await world.one()
    second = await world.engine.read.tasks(limit=3, cursor=first.next_cursor)

    assert [t.id for t in [*first.items, *second.items]] == sorted(ids, reverse=True)


def by_priority(tasks: list[Task]) -> list[str]:
    """As 004's formula has it; equals in the order of submission."""
    return [t.id for t in sorted(tasks, key=lambda t: (round(t.effective_priority or 0, 6), t.id))]


@pytest.mark.parametrize("few", [10_000, -1], ids=["sorted", "by lane"])
async def test_order_by_priority_is_that_of_claims(
    world: World, clock: MovableClock, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """READY tasks are listed in the order in which an agent would be given them, time going on or not."""
    monkeypatch.setattr(listing.task_keys, "__kwdefaults__", {"few": few})
    rng = random.Random(3)
    for _ in range(40):
        await world.one(
            rng.choice(["code", "review"]),
            priority=rng.randrange(0, 100, 10),
            priority_boost_per_minute=rng.choice([0.0, 0.1, 1.0]),
        )
        clock.advance(rng.randrange(90))

    everything = await world.engine.read.tasks(TaskFilter(status=["READY"]), limit=500)
    expected = by_priority(everything.items)
    # All pages are sorted as of the first: nothing is shown twice, or never, because time goes on.
    ids = await every(
        lambda cursor: _later(world.engine, clock, TaskFilter(status=["READY"]), cursor),
        7,
    )

    assert len(expected) == 40
    assert ids == expected
    codes = await listed(world.engine, order="priority", status=["READY"], type=["code"], limit=3)
    assert codes == await claimed(world.engine, ["code"])


async def _later(engine: Engine, clock: MovableClock, filters: TaskFilter, cursor: str | None) -> Page[Task]:
    page = await engine.read.tasks(filters, order="priority", limit=7, cursor=cursor)
    clock.advance(600)
    return page


async def claimed(engine: Engine, types: list[str]) -> list[str]:
    agent = await Actions(engine).agent("ann", max_concurrent_tasks=100)
    claim = await engine.claims.claim(agent.id, agent.incarnation, limit=100, types=types)
    return [task.id for task in claim.tasks]


async def test_order_by_priority_has_parked_tasks_and_all_live_states(world: World) -> None:
    ann = await world.agent("ann")
    await world.one(lock_key="doc", priority=1)
    holder = await world.take(ann)
    parked = await world.one(lock_key="doc", priority=10)
    assert (await world.engine.claims.claim("ann", ann.incarnation)).tasks == []
    assert (await world.engine.read.task(parked)).parked == "lock"
    free = await world.one(priority=20)
    waiting = await world.one(priority=5, depends_on=[free])
    cancelled = await world.one(priority=0)
    await world.engine.cancel.cancel(cancelled, "x")

    assert await listed(world.engine, order="priority") == [holder.id, waiting, parked, free]
    ready = TaskFilter(status=["READY"])
    page = await world.engine.read.tasks(ready, order="priority")
    assert [task.id for task in page.items] == [parked, free]


async def test_parked_tasks_have_their_place_in_a_long_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing.task_keys, "__kwdefaults__", {"few": 0})
    ann = await world.agent("ann")
    await world.one(lock_key="doc", priority=1)
    await world.take(ann)
    parked = [await world.one(lock_key="doc", priority=p) for p in (10, 30)]
    assert (await world.engine.claims.claim("ann", ann.incarnation)).tasks == []
    free = [await world.one(priority=p) for p in (5, 20, 40)]

    found = await listed(world.engine, order="priority", status=["READY"], limit=2)

    assert found == [free[0], parked[0], free[1], parked[1], free[2]]


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 501}, "limit"),
        ({"order": "title"}, "order"),
        ({"cursor": "nonsense"}, "cursor"),
        ({"cursor": "ä"}, "cursor"),
        ({"cursor": "WyJ0YXNrIl0"}, "cursor"),
        ({"filters": TaskFilter(q=["a\0b"])}, "q"),
        ({"filters": TaskFilter(status=["COMPLETED"]), "order": "priority"}, "order"),
    ],
)
async def test_what_makes_no_sense_is_refused(engine: Engine, options: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await engine.read.tasks(**options)
    assert [name for name, _ in caught.value.errors] == [place]


async def test_a_cursor_is_good_for_its_own_list_only(
    world: World, factory: Factory, clock: MovableClock
) -> None:
    for n in range(3):
        await world.one()
        factory.insert("breaker", {"key": f"k{n}"})
        factory.insert(
            "slowdown",
            {"key": f"k{n}", "signalled_at": clock.now(), "until": datetime.max.replace(tzinfo=UTC)},
        )
    tasks = (await world.engine.read.tasks(limit=1)).next_cursor
    ordered = (await world.engine.read.tasks(limit=1, order="priority")).next_cursor
    breakers = (await world.engine.read.breakers(limit=1)).next_cursor
    assert None not in {tasks, ordered, breakers}

    for read in (
        lambda: world.engine.read.tasks(cursor=ordered),
        lambda: world.engine.read.tasks(cursor=tasks, order="priority"),
        lambda: world.engine.read.dags(cursor=tasks),
        lambda: world.engine.read.slowdowns(cursor=breakers),
    ):
        with pytest.raises(InvalidInputError, match="next_cursor"):
            await read()


async def test_an_unknown_state_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="Unknown task state 'odd'"):
        await engine.read.tasks(TaskFilter(status=["odd"]))
    with pytest.raises(InvalidInputError, match="status: must be one of pending"):
        await engine.read.dags(DagFilter(status=["odd"]))


# Plans.


@pytest.mark.slow("a long history")
@pytest.mark.parametrize(
    ("statement", "filters", "index"),
    [
        ("keys_by_age", {}, "task_by_age"),
        ("keys_by_age", {"type": ["code"]}, "task_by_age"),
        ("keys_by_age", {"status": ["COMPLETED"]}, "task_by_age"),
        ("dag_keys_by_age", {}, "task_by_age"),
        ("ids_held", {"status": ["RUNNING"]}, "task_live_leased"),
        ("ids_retrying", {"status": ["RETRYING"]}, "task_live_due"),
        ("ids_of_dags", {"dag_id": ["dag_5"]}, "task_of_dag"),
        ("ids_of_documents", {"lock_key": ["doc:5"]}, "task_of_document"),
        ("ids_tagged", {"tag": ["red"]}, "task_by_tag"),
        ("ids_ended_badly", {"status": ["DEAD_LETTERED"]}, "task_end_not_completed"),
    ],
)
def test_a_page_of_a_long_history_is_read_by_index(
    connection: psycopg.Connection, statement: str, filters: dict[str, Any], index: str
) -> None:
    """No more rows are touched than a page has, though the tables were never analysed."""
    connection.execute(
        "INSERT INTO lineshaft.task (id, dag_id, type, title, created_at)"
        " SELECT 'task_' || n, 'dag_' || n, 'code', 'x', now() - n * interval '1 second'"
        " FROM generate_series(1, 30000) AS n"
    )
    connection.execute(
        "INSERT INTO lineshaft.task_end (id, status, ended_at, epoch, attempts)"
        " SELECT 'task_' || n, 'COMPLETED', now(), 1, 0 FROM generate_series(1, 30000) AS n"
    )
    sql = {
        name: statement
        for module in ("snapshot", "listing", "stats")
        for name, statement in catalog.load(f"lineshaft.engine.read.{module}").items()
    }
    place = {"after_at": None, "after_id": None, "limit": 51, "scan": listing.SCAN, "most": listing.FEW}
    with connection.transaction():
        connection.execute(PLAN_BY_INDEX)
        connection.execute(sql["plan_for_filters"], {})
        if "keys_by_age" in statement:
            connection.execute(sql["plan_to_walk"], {})
        row = connection.execute(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + sql[statement],
            {
                **listing.dag_parameters(DagFilter()),
                **listing.task_parameters(TaskFilter(**filters)),
                **place,
                "statuses": None,
            },
        ).fetchone()
    assert row is not None
    nodes = list(_nodes(row[0][0]["Plan"]))

    assert index in {node.get("Index Name") for node in nodes}
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in nodes) < 1_000


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for below in node.get("Plans", ()):
        yield from _nodes(below)
