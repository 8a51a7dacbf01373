"""What is submitted is stored whole, placed in its graph, or refused."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.engine.submit.drafts import MAX_BATCH
from lineshaft.engine.submit.surface import SurfaceTask
from lineshaft.errors import (
    AlreadyExistsError,
    CycleError,
    DependencyNotFoundError,
    InvalidInputError,
    NotFoundError,
)
from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec
from lineshaft.types.assignments import assignments
from lineshaft.types.work import decoded_inputs
from tests.world import World


async def test_a_task_is_ready_at_once(world: World) -> None:
    """R-001, R-013, R-031: created and READY in one transaction, in a virtual DAG of its own."""
    task_id = await world.one("research", title="Look it up", spec={"prompt": "why"}, tags=["a:b"])

    task = world.task(task_id)
    assert task_id.startswith("task_")
    assert (task["status"], task["type"], task["title"]) == ("READY", "research", "Look it up")
    assert (task["spec"], task["tags"], task["priority"]) == ({"prompt": "why"}, ["a:b"], 50)
    assert task["ready_at"] == task["created_at"] == world.clock.now()
    assert task["dag_id"] == task_id.replace("task_", "dag_")
    assert world.rows("SELECT * FROM lineshaft.dag") == []
    assert world.kinds(task_id) == ["task.created", "task.ready"]


async def test_ids_grow_and_numbers_follow_the_order_of_submission(world: World) -> None:
    """R-002, U1: first come, first served, by either path."""
    few = await world.submit(*(NewTask("code") for _ in range(5)))
    many = await world.submit(*(NewTask("code") for _ in range(60)))

    submitted = [*few, *many]
    assert submitted == sorted(submitted)
    stored = world.rows("SELECT id FROM lineshaft.task_live ORDER BY submission_no")
    assert [row["id"] for row in stored] == submitted


def varied(world: World, suffix: str) -> list[NewTask]:
    now = world.clock.now()
    return [
        NewTask("plain"),
        NewTask(
            "titled", title='quotes " and \\ and , and {}', spec={"goal": "häß→lich", "n": [1, None, 2.5]}
        ),
        NewTask("urgent", priority=0, priority_boost_per_minute=3, deadline=now + timedelta(minutes=17)),
        NewTask("soon", deadline=now + timedelta(hours=30), heartbeat_interval_sec=7),
        NewTask("over", deadline=now - timedelta(hours=2), heartbeat_interval_sec=7.5),
        NewTask("later", run_at=now + timedelta(hours=1)),
        NewTask("now", run_at=now),
        NewTask("past", run_at=now - timedelta(hours=1)),
        NewTask(
            "limits",
            max_cost_usd=0.1234567,
            max_total_cost_usd=3,
            max_duration_sec=0.05,
            max_attempts=9,
            required_capabilities=["b", "a", "b"],
            model_preferences=["x", 'y"', "a,b"],
            fallback_models=["{}"],
        ),
        NewTask("locked", lock_key="doc:ü", tags=["a", "NULL", ""[:0] or "z"], created_by="human:eve"),
        NewTask("gated", output=OutputContract(type="json", validation=(Gate("regex", "^a"), Gate("human")))),
        NewTask("retried", retry=RetrySpec(strategy="fixed", max_delay_sec=None, retry_on=("timeout",))),
        SurfaceTask("loki", preset="loki", surface={"priority": 9}),
        NewTask("office", preset="officeplane", idempotency_key=f"key-{suffix}"),
        NewTask(
            "batch",
            lock_key="doc:batch",
            children=[
                NewTask("one"),
                NewTask("two", priority=3),
                NewTask("three", children=[NewTask("deep")]),
            ],
        ),
    ]


def stored(world: World, ids: list[str]) -> list[dict[str, Any]]:
    """The tasks and their children, without what must differ."""
    rows = world.rows(
        "SELECT task.*, live.*, parent.type AS parent_type, owner.type AS owner_type,"
        " task.created_at AS created, task.max_cost_usd AS cost, event.kinds, event.at,"
        " event.dag_id IS NULL AS event_without_dag,"
        " ARRAY(SELECT upstream.type FROM lineshaft.edge JOIN lineshaft.task AS upstream"
        "  ON upstream.id = edge.depends_on WHERE edge.task_id = task.id ORDER BY 1) AS upstream"
        " FROM lineshaft.task JOIN lineshaft.task_live AS live ON live.id = task.id"
        " LEFT JOIN lineshaft.task AS parent ON parent.id = task.parent_id"
        " LEFT JOIN lineshaft.task AS owner ON owner.id = live.lock_owner"
        " JOIN lineshaft.event ON event.task_id = task.id"
        " WHERE task.id = ANY (%s) OR task.parent_id = ANY (%s) OR parent.parent_id = ANY (%s)"
        " ORDER BY live.submission_no",
        *[ids] * 3,
    )
    own = ("id", "dag_id", "parent_id", "lock_owner", "submission_no", "idempotency_key")
    for row in rows:
        for name in own:
            row[name] = row[name] is not None
        for name in ("rank", "rekey_at"):
            value = row.pop(name)
            row[f"{name} (rounded)"] = value and (
                round(value, 6) if name == "rank" else value.replace(microsecond=0)
            )
    return rows


async def test_every_way_to_store_a_task_stores_the_same(world: World) -> None:
    """R-241: by COPY, by a statement for several or for one, ranks and times of re-keying included."""
    submit = world.engine.submission.submit
    several = [found.id for found in await submit(varied(world, "several"))]
    filler = [NewTask("filler") for _ in range(60)]
    mixed = [found.id for found in await submit([*varied(world, "mixed"), *filler])]
    single = [(await submit([task]))[0].id for task in varied(world, "single")]
    copies = [await submit([task] * 60) for task in varied(world, "alike")[:-2]]
    alike = [found[n].id for n, found in enumerate(copies)]

    by_insert = stored(world, several)
    assert len(by_insert) == len(varied(world, "x")) + 4
    assert stored(world, mixed[: len(several)]) == by_insert
    assert stored(world, single) == by_insert
    assert stored(world, alike) == by_insert[: len(alike)]


async def test_alike_tasks_are_all_there_in_their_order(world: World) -> None:
    """R-241: in several parts, each with its own spec, whatever characters it has."""
    texts = ["plain", "new\nline", "back\\slash", "tab\t", 'quote"', "ü\u2028", "\\N"]
    tasks = [NewTask("code", spec={"n": n, "text": texts[n % len(texts)]}) for n in range(601)]

    submitted = await world.engine.submission.submit(tasks)

    rows = world.rows(
        "SELECT task.id, spec, task.dag_id FROM lineshaft.task JOIN lineshaft.task_live AS live USING (id)"
        " ORDER BY submission_no"
    )
    assert [row["id"] for row in rows] == [found.id for found in submitted]
    assert [row["spec"] for row in rows] == [task.spec for task in tasks]
    assert {row["dag_id"] for row in rows} == {found.id.replace("task_", "dag_") for found in submitted}


@pytest.mark.parametrize("number", [0, 1, 300, 599])
async def test_one_bad_spec_among_many_alike_refuses_them_all(world: World, number: int) -> None:
    """R-143: it is named, nothing is written, and the connection goes on."""
    tasks = [NewTask("code", spec={"n": n}) for n in range(600)]
    tasks[number] = NewTask("code", spec={"n": "\0"})

    with pytest.raises(InvalidInputError, match=rf"tasks\[{number}\].spec.*U\+0000"):
        await world.engine.submission.submit(tasks)

    assert world.rows("SELECT id FROM lineshaft.task") == []
    assert world.rows("SELECT id FROM lineshaft.task_live") == []
    assert len(await world.engine.submission.submit([NewTask("code")] * 60)) == len(
        world.rows("SELECT id FROM lineshaft.task_live")
    )


async def test_a_dag_by_keys(world: World) -> None:
    """R-142, R-031, R-163: one call, dependencies by key, the critical path counted."""
    dag = await world.dag(
        NewTask("research", key="research"),
        NewTask("design", key="design"),
        NewTask("implement", key="implement", depends_on=["research", "design", "research"]),
        NewTask("test", key="test", depends_on=["implement"]),
    )

    ids = {key: found.id for key, found in dag.tasks.items()}
    assert list(ids) == ["research", "design", "implement", "test"]
    assert world.statuses([*ids.values()]) == ["READY", "READY", "PENDING", "PENDING"]
    assert world.task(ids["implement"])["depends_on"] == sorted([ids["research"], ids["design"]])
    assert [world.live(ids[key])["downstream"] for key in ids] == [2, 2, 1, 0]
    assert {world.task(task_id)["dag_id"] for task_id in ids.values()} == {dag.id}
    row = world.dag_row(dag.id)
    assert (row["status"], row["total"], row["title"]) == ("pending", 4, "a DAG")
    assert world.dag_kinds(dag.id) == ["dag.created"]
    assert world.kinds(ids["test"]) == ["task.created"]


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_a_cycle_is_refused_and_named_by_keys(world: World, fillers: int) -> None:
    """R-142, R-143: nothing is written."""
    with pytest.raises(CycleError) as caught:
        await world.dag(
            NewTask("code", key="a", depends_on=["c"]),
            NewTask("code", key="b", depends_on=["a"]),
            NewTask("code", key="c", depends_on=["b"]),
            NewTask("code", key="d", depends_on=["c"]),
            *(NewTask("code", key=f"f{n}") for n in range(fillers)),
        )

    cycle = caught.value.cycle
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"a", "b", "c"}
    assert world.rows("SELECT * FROM lineshaft.task") == []
    assert world.rows("SELECT * FROM lineshaft.dag") == []


async def test_a_task_can_not_depend_on_itself(world: World) -> None:
    """R-010."""
    with pytest.raises(CycleError):
        await world.dag(NewTask("code", key="a", depends_on=["a"]))
    with pytest.raises(CycleError):
        await world.submit(NewTask("code", id="a", depends_on=["a"]))


async def test_a_key_can_not_be_used_twice_in_a_dag(world: World) -> None:
    """R-142: otherwise `depends_on` would be ambiguous."""
    with pytest.raises(InvalidInputError, match=r"tasks\[1\].key.*'a' is used twice"):
        await world.dag(NewTask("code", key="a"), NewTask("code", key="a"))


async def test_dependencies_on_existing_tasks(world: World) -> None:
    """R-010, F-39: live ones and dead letters are waited for, completed ones are not."""
    agent = await world.agent()
    done = await world.one()
    await world.complete(await world.take(agent))
    dead = await world.one()
    await world.kill(agent)
    live = await world.one()

    one, two, three, four = await world.submit(
        NewTask("code", depends_on=[done]),
        NewTask("code", depends_on=[dead]),
        NewTask("code", depends_on=[live, done, live]),
        NewTask("code", spec={"context_refs": [f"task:{live}:output"]}),
    )

    assert world.statuses([one, two, three, four]) == ["READY", "PENDING", "PENDING", "PENDING"]
    assert world.live(three)["blocked"] == world.live(four)["blocked"] == 1
    assert world.task(three)["blocked_by"] == [live]
    assert world.task(three)["depends_on"] == sorted([done, live])


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_dependencies_that_can_never_be_met_are_refused(world: World, fillers: int) -> None:
    """R-010: unknown and cancelled upstream; nothing of the call is written."""
    cancelled = await world.one()
    await world.engine.cancel.cancel(cancelled, "not needed")
    before = world.everything()
    others = [NewTask("code", idempotency_key=f"k{n}") for n in range(fillers + 1)]

    with pytest.raises(
        DependencyNotFoundError, match=f"tasks\\[{len(others)}\\].depends_on: 'task_nope' is neither"
    ):
        await world.submit(*others, NewTask("code", depends_on=["task_nope"]))
    with pytest.raises(InvalidInputError, match="was cancelled and will never complete"):
        await world.dag(*others, NewTask("code", depends_on=[cancelled]))
    with pytest.raises(DependencyNotFoundError):
        await world.submit(*others, NewTask("code", spec={"context_refs": ["task:nope:output"]}))

    assert world.everything() == before


async def test_an_empty_or_nameless_dag_is_refused(world: World) -> None:
    """R-142."""
    with pytest.raises(InvalidInputError, match="at least one task"):
        await world.dag()
    with pytest.raises(InvalidInputError, match="title"):
        await world.engine.submission.submit_dag("  ", [NewTask("code")])
    assert await world.submit() == []


@pytest.mark.slow("ten thousand tasks")
async def test_a_call_has_at_most_ten_thousand_tasks(world: World) -> None:
    """The limit of the HTTP contract; just below it one call is enough."""
    too_many = [NewTask("code")] * (MAX_BATCH + 1)
    with pytest.raises(InvalidInputError, match="at most 10000"):
        await world.submit(*too_many)
    with pytest.raises(InvalidInputError, match="at most 10000"):
        await world.dag(*too_many)

    ids = await world.submit(*too_many[:MAX_BATCH])

    assert len(set(ids)) == MAX_BATCH
    assert world.row("SELECT count(*) AS n FROM lineshaft.task_live WHERE status = 'READY'")["n"] == MAX_BATCH


@pytest.mark.slow("ten thousand tasks")
async def test_children_count_towards_the_limit(world: World) -> None:
    """The limit is on tasks, not on the list's length."""
    families = [NewTask("batch", children=[NewTask("code")] * 100)] * (MAX_BATCH // 100)

    with pytest.raises(InvalidInputError, match="at most 10000"):
        await world.submit(*families)


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_an_own_id_is_kept_and_can_not_be_taken_twice(world: World, fillers: int) -> None:
    """R-001: 409 for a second one, and nothing of that call is written."""
    assert await world.one(id="eng-001") == "eng-001"
    before = world.everything()
    others = [NewTask("code")] * fillers

    with pytest.raises(AlreadyExistsError, match="eng-001"):
        await world.submit(NewTask("code"), *others, NewTask("code", id="eng-001"))
    with pytest.raises(AlreadyExistsError, match="eng-001"):
        await world.dag(NewTask("code"), *others, NewTask("code", id="eng-001"))

    assert world.everything() == before
    with pytest.raises(AlreadyExistsError, match="twin"):
        await world.submit(NewTask("code", id="twin"), *others, NewTask("code", id="twin"))


async def test_an_ended_task_keeps_its_id(world: World) -> None:
    """R-001: ids are never used again."""
    task_id = await world.one(id="once")
    await world.engine.cancel.cancel(task_id, "no")

    with pytest.raises(AlreadyExistsError):
        await world.one(id="once")


async def test_a_parent_must_exist(world: World) -> None:
    """R-012."""
    parent = await world.one()

    child = await world.one(parent_id=parent)

    assert world.task(child)["parent_id"] == parent
    with pytest.raises(NotFoundError, match="task_nope"):
        await world.one(parent_id="task_nope")


async def test_a_task_for_later_waits(world: World) -> None:
    """R-017, R-056: PENDING until `run_at`, and its age counts from when it becomes READY."""
    at = world.clock.now() + timedelta(hours=1)

    task_id = await world.one(run_at=at)

    live = world.live(task_id)
    assert (live["status"], live["due_at"], live["ready_at"]) == ("PENDING", at, None)
    assert world.kinds(task_id) == ["task.created"]
    assert await world.claim(await world.agent()) == []


async def test_a_dependent_for_later_waits_for_both(world: World) -> None:
    """R-056, F-21."""
    agent = await world.agent()
    upstream = await world.one("up")
    at = world.clock.now() + timedelta(hours=1)
    task_id = await world.one(run_at=at, depends_on=[upstream])

    await world.complete(await world.take(agent))

    live = world.live(task_id)
    assert (live["status"], live["due_at"], live["blocked"]) == ("PENDING", at, 0)


async def test_a_reference_by_key_reaches_the_worker_as_an_output(world: World) -> None:
    """R-008: inside one call tasks are known by key only, even if the key belongs to an existing task."""
    agent = await world.agent()
    known = await world.one("known", idempotency_key="known")
    await world.complete(await world.take(agent), "old")
    dag = await world.dag(
        NewTask("known", key="a", idempotency_key="known"),
        NewTask("code", key="b"),
        NewTask("code", key="c", spec={"context_refs": ["task:a:output", "task:b:output"]}),
    )
    b = await world.take(agent)
    await world.complete(b, "new")

    found = await world.claims(agent)

    assert [task.id for task in found.tasks] == [dag.tasks["c"].id]
    assert found.inputs == {known: b'"old"', b.id: b'"new"'}
    (assignment,) = assignments(found)
    assert assignment.inputs == {"task:a:output": "old", "task:b:output": "new"}
    stored = decoded_inputs(found.tasks[0].inputs)
    assert stored == {"task:a:output": known, "task:b:output": b.id}


async def test_bad_input_reaches_no_database(engine: Engine, connection: psycopg.Connection) -> None:
    """R-009: each fault with its place."""
    with pytest.raises(InvalidInputError) as caught:
        await engine.submission.submit(
            [NewTask("code"), NewTask("code", children=[NewTask("x"), NewTask("y", priority=101)])]
        )

    assert [place for place, _ in caught.value.errors] == ["tasks[1].children[1].priority"]
    assert connection.execute("SELECT count(*) FROM lineshaft.task").fetchone() == (0,)


NASTY = "\\ \t \n \r \\N \\. \\t \" ' {} , € \u2028 \x7f"


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_whatever_the_text_it_comes_back_as_it_was(world: World, fillers: int) -> None:
    """COPY has signs of its own; none of them may be taken for one, nor lost."""
    tasks = [
        NewTask(
            "t" + text,
            title=text,
            spec={"text": text, text: [None, 1.5, -0.1]},
            tags=[text, "NULL"],
            required_capabilities=[text],
            lock_key=text,
            created_by=f"human:{text}",
        )
        for text in (NASTY, "\\N", "\\.", "plain")
    ]
    ids = await world.submit(*tasks, *[NewTask("code")] * fillers)

    for asked, task_id in zip(tasks, ids, strict=False):
        row = world.row("SELECT * FROM lineshaft.task WHERE id = %s", task_id)
        assert (row["type"], row["title"], row["spec"]) == (asked.type, asked.title, asked.spec)
        assert (row["tags"], row["required_capabilities"]) == (asked.tags, asked.required_capabilities)
        assert (row["lock_key"], row["created_by"]) == (asked.lock_key, asked.created_by)
        assert world.live(task_id)["lock_key"] == asked.lock_key


async def test_tasks_that_are_submitted_one_by_one_have_a_critical_path_too(world: World) -> None:
    """R-163: as a DAG has it; tasks that have ended, and those beside the path, get nothing."""
    first = await world.one("first")
    second = await world.one("second", depends_on=[first])
    beside = await world.one("beside", depends_on=[first])
    third, other = await world.submit(
        NewTask("third", depends_on=[second]), NewTask("other", depends_on=[second])
    )
    await world.dag(
        NewTask("x", key="x", depends_on=[third]),
        NewTask("y", key="y", depends_on=["x", other]),
        NewTask("z", key="z"),
    )

    lengths = {name: world.live(name)["downstream"] for name in (first, second, beside, third, other)}
    assert lengths == {first: 4, second: 3, beside: 0, third: 2, other: 1}
    shown = await world.engine.read.task(first)
    assert shown.effective_priority == 46
    await world.engine.cancel.cancel(third, "no")
    assert world.live(first)["downstream"] == 2
    long = first
    for _ in range(12):
        long = await world.one("long", depends_on=[long])
    assert world.live(first)["downstream"] == 10, "the boost stops there"
