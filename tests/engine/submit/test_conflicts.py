"""`on_conflict`: what a submission does whose idempotency key is in use."""

from lineshaft.model.tasks import NewTask
from tests.world import World


async def test_a_waiting_task_becomes_what_the_newest_submission_says(world: World) -> None:
    submit = world.engine.submission.submit
    task = NewTask("code", idempotency_key="k", on_conflict="replace_waiting", spec={"n": 1})
    (first,) = await submit([task])

    (second,) = await submit([task.with_options(spec={"n": 2}, priority=7)])

    assert (second.id, second.replaced, second.duplicate) == (first.id, True, False)
    row = world.task(first.id)
    assert (row["spec"], row["priority"], row["status"]) == ({"n": 2}, 7, "READY")
    assert world.kinds(first.id) == ["task.created", "task.ready", "task.replaced", "task.ready"]
