"""U8: a key names one task, however often it is submitted."""

import pytest

from lineshaft.engine.read.tally import Tally
from lineshaft.errors import AlreadyExistsError, InvalidInputError
from lineshaft.model.tasks import NewTask
from tests.world import World


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


@pytest.mark.parametrize("second_id", ["task-1", "task-2", None])
async def test_a_repeated_call_with_an_id_of_its_own_is_a_duplicate(
    world: World, second_id: str | None
) -> None:
    submit = world.engine.submission.submit
    (first,) = await submit([NewTask("code", id="task-1", idempotency_key="k")])

    (second,) = await submit([NewTask("code", id=second_id, idempotency_key="k")])

    assert (first.id, first.duplicate) == ("task-1", False)
    assert (second.id, second.duplicate, second.mismatch) == ("task-1", True, False)


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_a_key_twice_in_one_call(world: World, fillers: int) -> None:
    """U8: the second is the first, or the task that owns the key already."""
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
    await world.engine.cancel.cancel(cancelled.id, "no")

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


async def test_a_key_is_free_again_when_its_window_is_over(world: World) -> None:
    """U8, F-14: counted from completion, however long the task took."""
    task = NewTask("code", idempotency_key="k", idempotency_ttl_sec=3600)
    (first,) = await world.submit(task)
    world.age(hours=2)
    assert await world.submit(task) == [first]
    await world.finish_all()

    world.age(minutes=59)
    assert await world.submit(task) == [first]
    world.age(minutes=1)
    (second,) = await world.submit(NewTask("code", idempotency_key="k"))

    assert second != first
    assert world.row("SELECT * FROM lineshaft.task_key")["task_id"] == second
    await world.finish_all()
    world.age(days=1000)
    assert await world.submit(task) == [second]


async def test_a_window_of_nothing_frees_the_key_with_the_completion(world: World) -> None:
    """U8."""
    task = NewTask("code", idempotency_key="k", idempotency_ttl_sec=0)
    (first,) = await world.submit(task)
    assert await world.submit(task) == [first]
    await world.finish_all()

    assert await world.submit(task) != [first]


async def test_a_window_needs_a_key(world: World) -> None:
    """U8."""
    with pytest.raises(InvalidInputError, match="idempotency_ttl_sec"):
        await world.one(idempotency_ttl_sec=1)
    with pytest.raises(InvalidInputError, match="idempotency_ttl_sec"):
        await world.one(idempotency_ttl_sec=-1, idempotency_key="k")


async def test_a_revived_task_takes_its_key_from_one_whose_window_is_over(world: World) -> None:
    """U8: and keeps it, as long as it isn't used again."""
    old = await world.one(idempotency_key="k")
    await world.engine.cancel.cancel(old, "no")
    await world.one(idempotency_key="k", idempotency_ttl_sec=60)
    await world.finish_all()
    with pytest.raises(AlreadyExistsError):
        await world.engine.revive.retry(old)

    world.age(minutes=2)
    await world.engine.revive.retry(old)

    assert await world.one(idempotency_key="k") == old


async def test_a_duplicate_is_logged_and_counted(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """R-170: from wherever it comes; the first submission isn't one."""
    caplog.set_level("INFO", logger="lineshaft")
    tally = Tally(world.engine.database)
    keyed = [NewTask("x", idempotency_key="key-1"), NewTask("y", idempotency_key="key-2")]
    await world.submit(*keyed)
    assert (await tally.totals()).duplicates == 0

    await world.submit(keyed[0], NewTask("z"), keyed[1])
    await world.dag(keyed[0])

    assert (await tally.totals()).duplicates == 3
    logged = [record.getMessage() for record in caplog.records if "Duplicate" in record.getMessage()]
    assert logged == [f"Duplicate task detected: key-{n}" for n in (1, 2, 1)]
