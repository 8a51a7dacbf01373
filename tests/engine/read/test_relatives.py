"""What is around a task: dependencies, dependents, children, recorded steps; every list is bounded."""

import pytest

from lineshaft.engine.read import relatives
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import NewStep
from tests.world import World, decoded, ref, save_checkpoint, spawn_children


async def test_relatives_have_their_states(world: World) -> None:
    first = await world.one("a", title="First")
    await world.complete(await world.take())
    second = await world.one("b", depends_on=[first])
    third = await world.one("c", depends_on=[second])

    found = await world.engine.read.relatives(second)

    assert [(each.id, each.title, each.status) for each in found.upstream] == [
        (first, "First", Status.COMPLETED)
    ]
    assert [(each.id, each.status) for each in found.downstream] == [(third, Status.PENDING)]
    assert (found.children, found.steps, found.checkpoint) == ([], [], None)


async def test_what_is_cancelled_with_a_task_is_what_a_cancellation_cancels(world: World) -> None:
    top = await world.one("top")
    task = await world.take()
    child = NewTask("child", key="one")
    await spawn_children(world.engine, ref(task), [child, NewTask("child", depends_on=["one"])])
    below = await world.one("below", depends_on=[top])
    await world.one("far-below", depends_on=[below])
    done = await world.one("done")
    await world.complete(await world.take(types=["done"]))
    await world.one("after", depends_on=[top, done])

    before = await world.engine.read.relatives(top)
    assert (await world.engine.read.relatives(done)).cancelled_with == 0, "it has ended"
    cancelled = await world.engine.cancel.cancel(top, "no")

    assert before.cancelled_with == len(cancelled) - 1 == 5
    assert (await world.engine.read.relatives(top)).cancelled_with == 0


async def test_lists_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relatives, "MOST_RELATIVES", 3)
    monkeypatch.setattr(relatives, "MOST_CANCELLED", 4)
    top = await world.one()
    await world.submit(*(NewTask("below", depends_on=[top]) for _ in range(9)))

    found = await world.engine.read.relatives(top)

    assert len(found.downstream) == 3
    assert found.cancelled_with == 4


async def test_steps_have_their_times_and_large_data_is_left_out(world: World) -> None:
    await world.one()
    task = await world.take()
    await world.engine.work.record_steps([NewStep(ref(task), "plan", b'{"n": 1}')])
    await world.engine.work.record_steps([NewStep(ref(task), "draft", b'"' + b"x" * 30_000 + b'"')])
    await save_checkpoint(world.engine, ref(task), b'{"page": 7}')

    found = await world.engine.read.relatives(task.id)

    steps = {step.name: step for step in found.steps}
    assert decoded(steps["plan"].data_json) == {"n": 1}
    assert (steps["draft"].data_json, steps["draft"].size) == (None, 30_002)
    assert all(step.epoch == task.epoch for step in found.steps)
    assert found.checkpoint is not None
    assert decoded(found.checkpoint.data_json) == {"page": 7}
    (attempt,) = await world.engine.read.attempts(task.id, outputs=False)
    assert attempt.output is None
