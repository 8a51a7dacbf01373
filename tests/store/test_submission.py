"""Submitting: all or nothing, the same rows by either path, one task a key, children in order."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from lineshaft.errors import (
    AlreadyExistsError,
    CycleError,
    DependencyNotFoundError,
    InvalidInputError,
    NotFoundError,
)
from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec
from lineshaft.store.engine import Engine
from lineshaft.store.submission import MAX_BATCH
from tests.store.world import World


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
        NewTask("loki", preset="loki", surface={"priority": 9}),
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


async def test_both_paths_store_the_same(world: World) -> None:
    """R-241: what COPY writes is what INSERT writes, ranks and times of re-keying included."""
    small = [found.id for found in await world.engine.submission.submit(varied(world, "small"))]
    filler = [NewTask("filler") for _ in range(60)]
    large = [found.id for found in await world.engine.submission.submit([*varied(world, "large"), *filler])]

    def stored(ids: list[str]) -> list[dict[str, Any]]:
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

    by_insert, by_copy = stored(small), stored(large[: len(small)])
    assert len(by_insert) == len(varied(world, "x")) + 4
    assert by_copy == by_insert


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
        NewTask("code", spec={"context_refs": [f"task:{live}:output", "artifact:x"]}),
    )

    assert world.statuses([one, two, three, four]) == ["READY", "PENDING", "PENDING", "PENDING"]
    assert world.live(three)["blocked"] == world.live(four)["blocked"] == 1
    assert world.task(three)["blocked_by"] == [live]
    assert world.task(three)["depends_on"] == sorted([done, live])


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_dependencies_that_can_never_be_met_are_refused(world: World, fillers: int) -> None:
    """R-010: unknown and cancelled upstream; nothing of the call is written."""
    cancelled = await world.one()
    await world.engine.operations.cancel(cancelled, "not needed")
    before = world.everything()
    others = [NewTask("code", idempotency_key=f"k{n}") for n in range(fillers + 1)]

    with pytest.raises(
        DependencyNotFoundError, match=f"tasks\\[{len(others)}\\].depends_on names 'task_nope'"
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


async def test_children_count_towards_the_limit(world: World) -> None:
    """The limit is on tasks, not on the list's length."""
    families = [NewTask("batch", children=[NewTask("code")] * 100)] * (MAX_BATCH // 100)

    with pytest.raises(InvalidInputError, match="at most 10000"):
        await world.submit(*families)


# Own ids.


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
    await world.engine.operations.cancel(task_id, "no")

    with pytest.raises(AlreadyExistsError):
        await world.one(id="once")


async def test_a_parent_must_exist(world: World) -> None:
    """R-012."""
    parent = await world.one()

    child = await world.one(parent_id=parent)

    assert world.task(child)["parent_id"] == parent
    with pytest.raises(NotFoundError, match="task_nope"):
        await world.one(parent_id="task_nope")


# Idempotency.


async def test_a_known_key_gives_the_existing_task(world: World) -> None:
    """R-003, R-170, U8: one task a key, and other content is flagged."""
    submit = world.engine.submission.submit
    (first,) = await submit([NewTask("code", idempotency_key="k", spec={"a": 1, "b": 2})])

    (again,) = await submit(
        [NewTask("code", idempotency_key="k", spec={"b": 2, "a": 1}, title="other title")]
    )
    (other,) = await submit([NewTask("code", idempotency_key="k", spec={"a": 2})])

    assert (first.duplicate, first.mismatch) == (False, False)
    assert (again.id, again.duplicate, again.mismatch) == (first.id, True, False)
    assert (other.id, other.duplicate, other.mismatch) == (first.id, True, True)
    assert len(world.rows("SELECT * FROM lineshaft.task")) == 1
    assert world.kinds(first.id) == ["task.created", "task.ready"]


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_a_key_twice_in_one_call(world: World, fillers: int) -> None:
    """U8: the second stands for the first, or for whatever task has the key already."""
    submit = world.engine.submission.submit
    twice = [
        NewTask("code", idempotency_key="k", spec={"n": 1}),
        NewTask("code", idempotency_key="k", spec={"n": 1}),
        NewTask("code", idempotency_key="k", spec={"n": 2}),
        *[NewTask("code")] * fillers,
    ]

    first, second, third, *_ = await submit(twice)
    later = await submit([twice[2], twice[2], twice[0]])

    assert (first.duplicate, second.duplicate, third.duplicate) == (False, True, True)
    assert {first.id, second.id, third.id} == {first.id}
    assert (second.mismatch, third.mismatch) == (False, True)
    assert [found.id for found in later] == [first.id] * 3
    assert [found.mismatch for found in later] == [True, True, False]
    assert world.row("SELECT count(*) AS n FROM lineshaft.task")["n"] == 1 + fillers


async def test_a_completed_task_keeps_its_key_the_others_free_it(world: World) -> None:
    """U8: unique among live and COMPLETED tasks."""
    submit = world.engine.submission.submit
    agent = await world.agent()
    (done,) = await submit([NewTask("code", idempotency_key="done")])
    await world.complete(await world.take(agent))
    (dead,) = await submit([NewTask("code", idempotency_key="dead")])
    await world.kill(agent)
    (cancelled,) = await submit([NewTask("code", idempotency_key="cancelled")])
    await world.engine.operations.cancel(cancelled.id, "no")

    again = await submit(
        [NewTask("code", idempotency_key=key) for key in ("done", "dead", "cancelled")],
    )

    assert [found.duplicate for found in again] == [True, False, False]
    assert again[0].id == done.id
    assert {again[1].id, again[2].id}.isdisjoint({dead.id, cancelled.id})


async def test_a_duplicate_inside_a_dag_stands_for_the_existing_task(world: World) -> None:
    """U8: dependents wait for the existing one, and the DAG counts only its own."""
    agent = await world.agent()
    await world.one("done", idempotency_key="done")
    await world.complete(await world.take(agent))
    live = await world.one("live", idempotency_key="live")

    dag = await world.dag(
        NewTask("done", key="a", idempotency_key="done"),
        NewTask("live", key="b", idempotency_key="live"),
        NewTask("code", key="c", depends_on=["a"]),
        NewTask("code", key="d", depends_on=["a", "b", live]),
    )

    assert [found.duplicate for found in dag.tasks.values()] == [True, True, False, False]
    assert world.status(dag.tasks["c"].id) == "READY"
    assert world.task(dag.tasks["d"].id)["blocked_by"] == [live]
    assert world.dag_row(dag.id)["total"] == 2


async def test_a_dag_of_duplicates_only_makes_no_dag(world: World) -> None:
    """U8, U7: a DAG without tasks could never end."""
    await world.one(idempotency_key="k")

    dag = await world.dag(NewTask("code", key="a", idempotency_key="k"))

    assert dag.tasks["a"].duplicate
    assert world.rows("SELECT * FROM lineshaft.dag") == []


async def test_a_duplicate_batch_brings_no_children(world: World) -> None:
    """U8, R-190: the existing batch has its own."""
    batch = NewTask("batch", idempotency_key="k", children=[NewTask("one"), NewTask("two")])
    (first,) = await world.engine.submission.submit([batch])

    (again,) = await world.engine.submission.submit([batch])

    assert (again.id, again.duplicate) == (first.id, True)
    assert world.row("SELECT count(*) AS n FROM lineshaft.task")["n"] == 3


async def test_a_child_can_not_have_a_key_of_its_own(world: World) -> None:
    """R-190: a batch is created as a whole or found as a whole, never in part."""
    with pytest.raises(InvalidInputError, match=r"children\[1\]\.idempotency_key"):
        await world.one(children=[NewTask("one"), NewTask("two", idempotency_key="k")])


async def test_keys_that_are_out_of_their_window_are_taken_over(world: World) -> None:
    """U8: optional window."""
    first = await world.one(idempotency_key="k")
    until = world.clock.now() + timedelta(hours=1)
    world.connection.execute("UPDATE lineshaft.task_key SET expires_at = %s", [until])
    assert await world.one(idempotency_key="k") == first

    world.age(hours=1, seconds=1)

    second = await world.one(idempotency_key="k")
    assert second != first
    assert world.row("SELECT * FROM lineshaft.task_key")["task_id"] == second


# Time.


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


# Children in order.


async def test_children_run_in_the_listed_order(world: World) -> None:
    """R-190, R-191, R-192: a chain under a parent that has no work of its own."""
    agent = await world.agent()
    batch = await world.one("batch", children=[NewTask("one"), NewTask("two"), NewTask("three")])
    assert world.status(batch) == "PENDING"
    seen = []

    while claimed := await world.claim(agent, 10):
        (task,) = claimed
        seen.append(task.type)
        assert task.parent_id == batch
        assert world.status(batch) == "PENDING"
        await world.complete(task, {"from": task.type})

    assert seen == ["one", "two", "three"]
    assert world.status(batch) == "COMPLETED"
    assert world.end(batch)["output"] == [{"from": "one"}, {"from": "two"}, {"from": "three"}]
    assert world.kinds(batch)[-1] == "task.completed"
    assert world.dag_row(world.task(batch)["dag_id"])["status"] == "completed"


async def test_children_inherit_what_they_leave_out(world: World) -> None:
    """R-190, U15: document, priority, attempts and preset."""
    batch = await world.one(
        "batch",
        preset="officeplane",
        priority=20,
        lock_key="doc:1",
        max_attempts=2,
        children=[
            NewTask("heir"),
            NewTask("own", preset="loki", priority=5, lock_key="doc:2", max_attempts=7),
        ],
    )

    heir, own = world.rows(
        "SELECT task.*, live.lock_owner FROM lineshaft.task JOIN lineshaft.task_live AS live USING (id)"
        " WHERE parent_id = %s ORDER BY id",
        batch,
    )
    named = ("preset", "priority", "lock_key", "max_attempts", "priority_boost_per_minute")
    assert [heir[name] for name in named] == ["officeplane", 20, "doc:1", 2, 0.0]
    assert [own[name] for name in named] == ["loki", 5, "doc:2", 7, 0.0]
    # Under the batch's lock only if it is the batch's document.
    assert (heir["lock_owner"], own["lock_owner"]) == (batch, None)


async def test_nested_batches_run_in_order_too(world: World) -> None:
    """R-191, R-195: what stands under a later child waits for the earlier one."""
    agent = await world.agent()
    batch = await world.one(
        "batch",
        lock_key="doc:1",
        children=[
            NewTask("one"),
            NewTask("inner", children=[NewTask("two"), NewTask("three")]),
            NewTask("inner", children=[NewTask("innermost", children=[NewTask("four")])]),
            NewTask("five"),
        ],
    )
    seen = []

    while claimed := await world.claim(agent, 10):
        seen.append([task.type for task in claimed])
        for task in claimed:
            await world.complete(task, task.type)

    assert seen == [["one"], ["two"], ["three"], ["four"], ["five"]]
    assert world.end(batch)["output"] == ["one", ["two", "three"], [["four"]], "five"]
    assert world.lock("doc:1") is None


async def test_a_batch_that_depends_on_a_task_waits_with_all_its_children(world: World) -> None:
    """R-191, R-142: in a DAG a batch is one step like any other."""
    agent = await world.agent()
    at = world.clock.now() + timedelta(hours=1)
    dag = await world.dag(
        NewTask("first", key="first"),
        NewTask("batch", key="batch", depends_on=["first"], children=[NewTask("one"), NewTask("two")]),
        NewTask("last", key="last", depends_on=["batch"]),
    )
    later = await world.one("later", run_at=at, children=[NewTask("scheduled")])
    seen = []

    while claimed := await world.claim(agent, 10):
        seen.append([task.type for task in claimed])
        for task in claimed:
            await world.complete(task)

    assert seen == [["first"], ["one"], ["two"], ["last"]]
    assert world.dag_row(dag.id)["status"] == "completed"
    (scheduled,) = world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s", later)
    assert world.live(scheduled["id"])["due_at"] == at


async def test_children_have_dependencies_of_their_own(world: World) -> None:
    """R-190, R-008: a child may wait for an existing task, by id or by reference."""
    agent = await world.agent()
    upstream = await world.one("upstream")
    await world.one(
        "batch",
        children=[
            NewTask("one", spec={"context_refs": [f"task:{upstream}:output"]}),
            NewTask("two", depends_on=[upstream]),
        ],
    )

    (first,) = await world.claim(agent, 10)
    assert first.type == "upstream"
    await world.complete(first, {"n": 7})

    (one,) = (found := await world.claims(agent, 10)).tasks
    assert one.type == "one"
    assert found.inputs == {upstream: b'{"n": 7}'}
    (two,) = world.rows("SELECT * FROM lineshaft.tasks WHERE type = 'two'")
    assert upstream in two["depends_on"]


async def test_children_nest_ten_deep_at_most(world: World) -> None:
    """R-195."""

    def nested(depth: int) -> NewTask:
        return NewTask("code", children=[nested(depth - 1)] if depth else [])

    await world.submit(nested(10))
    with pytest.raises(InvalidInputError, match="nested deeper than 10"):
        await world.submit(nested(11))


# References to other tasks' outputs.


async def test_a_reference_by_key_reaches_the_worker_as_an_output(world: World) -> None:
    """R-008: inside one call tasks are known by key only; also where the key stands for an existing task."""
    agent = await world.agent()
    known = await world.one("known", idempotency_key="known")
    await world.complete(await world.take(agent), "old")
    dag = await world.dag(
        NewTask("known", key="a", idempotency_key="known"),
        NewTask("code", key="b"),
        NewTask("code", key="c", spec={"context_refs": ["task:a:output", "task:b:output", "artifact:x"]}),
    )
    b = await world.take(agent)
    await world.complete(b, "new")

    found = await world.claims(agent)

    assert [task.id for task in found.tasks] == [dag.tasks["c"].id]
    assert found.inputs == {known: b'"old"', b.id: b'"new"'}
    assert world.task(dag.tasks["c"].id)["spec"] == {
        "context_refs": [f"task:{known}:output", f"task:{b.id}:output", "artifact:x"]
    }


# Inside the caller's own transaction.


async def test_submission_is_part_of_the_callers_transaction(dsn: str, world: World) -> None:
    """R-038: with his commit it is there, with his rollback it never was, and its lanes neither."""
    submission = world.engine.submission
    async with await AsyncConnection.connect(dsn) as caller:
        await submission.submit([NewTask("rolled back", idempotency_key="k")], connection=caller)
        await submission.submit_dag("a DAG", [NewTask("rolled back")], connection=caller)
        await submission.submit([NewTask("rolled back")] * 60, connection=caller)
        await caller.rollback()
    assert world.rows("SELECT * FROM lineshaft.task") == []
    assert world.rows("SELECT * FROM lineshaft.lane") == []

    async with await AsyncConnection.connect(dsn) as caller:
        await caller.execute("CREATE TABLE public.mine (id text)")
        (found,) = await submission.submit([NewTask("rolled back")], connection=caller)
        await caller.execute("INSERT INTO public.mine VALUES (%s)", [found.id])
        assert world.rows("SELECT * FROM lineshaft.task") == []

    assert world.row("SELECT id FROM public.mine")["id"] == found.id
    assert world.status(found.id) == "READY"
    # The lane that was rolled back is not remembered: the new task has one that exists.
    assert [task.id for task in await world.claim(await world.agent())] == [found.id]


async def test_a_refused_submission_leaves_the_callers_transaction_as_it_was(dsn: str, world: World) -> None:
    """U8, R-142: nothing of it stays, not even the key, and the caller can go on."""
    submission = world.engine.submission
    await world.one(id="taken")
    async with await AsyncConnection.connect(dsn) as caller:
        for tasks in (
            [NewTask("code", idempotency_key="k", depends_on=["nope"])],
            [NewTask("code", idempotency_key="k", id="taken")],
            [NewTask("code", idempotency_key="k", id="taken"), *[NewTask("code")] * 60],
        ):
            with pytest.raises((DependencyNotFoundError, AlreadyExistsError)):
                await submission.submit(tasks, connection=caller)
        await caller.execute("CREATE TABLE public.mine (id text)")

    assert world.rows("SELECT * FROM public.mine") == []
    assert world.rows("SELECT * FROM lineshaft.task_key") == []
    (found,) = await submission.submit([NewTask("code", idempotency_key="k")])
    assert not found.duplicate


async def test_the_callers_connection_is_left_as_it_was(dsn: str, world: World) -> None:
    """Submitting on a connection changes nothing about how it answers its owner."""
    async with await AsyncConnection.connect(dsn, row_factory=dict_row, autocommit=True) as caller:
        await world.one(idempotency_key="k")
        (found,) = await world.engine.submission.submit(
            [NewTask("code", idempotency_key="k"), NewTask("other", depends_on=[])][:1], connection=caller
        )
        cursor = await caller.execute("SELECT '{\"a\": 1}'::jsonb AS data")
        assert await cursor.fetchone() == {"data": {"a": 1}}
        assert caller.prepare_threshold == 5

    assert found.duplicate


async def test_bad_input_reaches_no_database(engine: Engine, connection: psycopg.Connection) -> None:
    """R-009: each fault with its place."""
    with pytest.raises(InvalidInputError) as caught:
        await engine.submission.submit(
            [NewTask("code"), NewTask("code", children=[NewTask("x"), NewTask("y", priority=101)])]
        )

    assert [place for place, _ in caught.value.errors] == ["tasks[1].children[1].priority"]
    assert connection.execute("SELECT count(*) FROM lineshaft.task").fetchone() == (0,)
