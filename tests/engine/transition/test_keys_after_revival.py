"""U8: a revived task has its key back, and still knows what it was asked for with it."""

import pytest

from lineshaft.errors import AlreadyExistsError
from lineshaft.model.tasks import NewTask
from tests.world import World


async def kill_and_revive(world: World, task_id: str) -> None:
    await world.fail(await world.take(types=["keyed"]), category="auth_failure")
    await world.engine.revive.retry(task_id)


@pytest.mark.parametrize("spec", [{"n": 1}, {"n": 1.0}, {"n": 1e16}, {"n": 1e-7}, {"b": 1, "a": [None]}])
async def test_the_same_content_is_no_mismatch_and_other_content_is(
    world: World, spec: dict[str, object]
) -> None:
    """Also where the database writes it in another way: 1e16 comes back as 10000000000000000."""
    task = NewTask("keyed", idempotency_key="k", spec=spec)
    (first,) = await world.engine.submission.submit([task])
    await kill_and_revive(world, first.id)

    (again,) = await world.engine.submission.submit([task])
    (other,) = await world.engine.submission.submit(
        [NewTask("keyed", idempotency_key="k", spec={"other": True})]
    )

    assert (again.id, again.duplicate, again.mismatch) == (first.id, True, False)
    assert (other.id, other.duplicate, other.mismatch) == (first.id, True, True)


async def test_references_by_key_are_no_mismatch(world: World) -> None:
    """They are stored as references by id, but asked for by key again."""
    tasks = (
        NewTask("source", key="source", idempotency_key="s"),
        NewTask("keyed", key="x", idempotency_key="k", spec={"context_refs": ["task:source:output"]}),
    )
    first = await world.dag(*tasks)
    await world.complete(await world.take(types=["source"]))
    await kill_and_revive(world, first.tasks["x"].id)

    again = await world.dag(*tasks)

    assert [(found.duplicate, found.mismatch) for found in again.tasks.values()] == [(True, False)] * 2


async def modified(world: World) -> str:
    """A task that a person has changed before it was revived."""
    (first,) = await world.engine.submission.submit(
        [NewTask("keyed", idempotency_key="k", spec={"prompt": "x"})]
    )
    await world.fail(await world.take(), category="auth_failure")
    world.connection.execute('UPDATE lineshaft.task SET spec = \'{"prompt": "better"}\'')
    await world.engine.revive.retry(first.id)
    return first.id


async def test_a_revival_with_another_spec_is_no_mismatch_for_the_original(world: World) -> None:
    task_id = await modified(world)

    (again,) = await world.engine.submission.submit(
        [NewTask("keyed", idempotency_key="k", spec={"prompt": "x"})]
    )

    assert (again.id, again.duplicate, again.mismatch) == (task_id, True, False)


async def test_a_revival_with_another_spec_is_no_mismatch_for_that_one(world: World) -> None:
    task_id = await modified(world)

    (again,) = await world.engine.submission.submit(
        [NewTask("keyed", idempotency_key="k", spec={"prompt": "better"})]
    )

    assert (again.id, again.duplicate, again.mismatch) == (task_id, True, False)


async def test_a_key_that_another_has_taken_meanwhile_stays_with_it(world: World) -> None:
    """... until that one gives it back too."""
    task = NewTask("keyed", idempotency_key="k")
    (first,) = await world.engine.submission.submit([task])
    await world.engine.cancel.cancel(first.id, "no")
    (second,) = await world.engine.submission.submit([task])
    assert not second.duplicate

    with pytest.raises(AlreadyExistsError, match="in use by a newer task"):
        await world.engine.revive.retry(first.id)
    await world.engine.cancel.cancel(second.id, "no")
    await world.engine.revive.retry(first.id)

    (again,) = await world.engine.submission.submit([task])
    assert (again.id, again.duplicate, again.mismatch) == (first.id, True, False)
