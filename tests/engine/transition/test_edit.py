"""R-167: people change the priority, the deadline and the tags of a task that has not ended."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.errors import InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.model.priority import PriorityInputs, rank, rekey_at
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types.changes import TaskChange
from tests.world import World

STATES = ["PENDING", "READY", "CLAIMED", "RUNNING", "VALIDATING", "RETRYING"]


async def in_state(world: World, state: str, **fields: Any) -> str:
    """A task that got into a live state by the engine's own hand."""
    later = world.clock.now() + timedelta(hours=2) if state == "PENDING" else None
    gate = OutputContract(validation="human" if state == "VALIDATING" else "none")
    task_id = await world.one("x", run_at=later, output=gate, **fields)
    if state not in {"PENDING", "READY"}:
        (task,) = await world.claim(await world.agent(), types=["x"], start=state != "CLAIMED")
        if state == "VALIDATING":
            await world.complete(task)
        if state == "RETRYING":
            await world.fail(task)
    assert world.status(task_id) == state
    return task_id


@pytest.mark.parametrize("state", STATES)
async def test_everything_can_be_changed_in_every_live_state(world: World, state: str) -> None:
    task_id = await in_state(world, state, tags=["a"], priority=80)
    world.age(minutes=5)
    now = world.clock.now()
    deadline = now + timedelta(hours=1)

    await world.engine.edit.edit(task_id, TaskChange(priority=20, deadline=deadline, tags=["b", "c", "b"]))

    task, live = world.task(task_id), world.live(task_id)
    assert (task["status"], task["priority"], task["deadline"], task["tags"]) == (
        state,
        20,
        deadline,
        ["b", "c"],
    )
    asked = world.row("SELECT priority, deadline, tags FROM lineshaft.task WHERE id = %s", task_id)
    assert asked == {"priority": 20, "deadline": deadline, "tags": ["b", "c"]}
    inputs = PriorityInputs(
        priority=20, boost_per_minute=0.1, ready_at=live["ready_at"] or now, deadline=deadline
    )
    assert live["rank"] == pytest.approx(rank(inputs, now))
    assert abs(live["rekey_at"] - (rekey_at(deadline, now) or now)) < timedelta(milliseconds=1)
    logged = world.row("SELECT data FROM lineshaft.events WHERE kind = 'task.changed'")["data"]
    assert logged["priority"] == {"from": 80, "to": 20}
    assert logged["deadline"]["from"] is None
    assert datetime.fromisoformat(logged["deadline"]["to"]) == deadline
    assert logged["tags"] == {"from": ["a"], "to": ["b", "c"]}


async def test_only_what_is_asked_changes(world: World) -> None:
    deadline = world.clock.now() + timedelta(hours=1)
    task_id = await world.one(priority=30, deadline=deadline, tags=["a"])

    await world.engine.edit.edit(task_id, TaskChange(priority=40))
    task = world.task(task_id)
    assert (task["priority"], task["deadline"], task["tags"]) == (40, deadline, ["a"])

    await world.engine.edit.edit(task_id, TaskChange(deadline=None))
    task = world.task(task_id)
    assert (task["priority"], task["deadline"], task["tags"]) == (40, None, ["a"])
    assert world.live(task_id)["rekey_at"] is None

    await world.engine.edit.edit(task_id, TaskChange(tags=[]))
    assert world.task(task_id)["tags"] == []
    logged = world.rows("SELECT data FROM lineshaft.events WHERE kind = 'task.changed' ORDER BY seq")
    assert [sorted(row["data"]) for row in logged] == [["priority"], ["deadline"], ["tags"]]


async def test_what_is_so_already_is_not_told(world: World) -> None:
    task_id = await world.one(priority=30, tags=["a"])
    before = world.everything()

    await world.engine.edit.edit(task_id, TaskChange())
    await world.engine.edit.edit(task_id, TaskChange(priority=30, deadline=None, tags=["a"]))

    assert world.everything() == before
    assert "task.changed" not in world.kinds(task_id)


async def test_a_change_outlives_a_revival(world: World) -> None:
    agent = await world.agent()
    task_id = await world.one(priority=30)
    await world.engine.edit.edit(task_id, TaskChange(priority=70))
    await world.kill(agent)

    await world.engine.revive.retry(task_id)

    assert world.live(task_id)["priority"] == 70


@pytest.mark.parametrize("end", ["COMPLETED", "DEAD_LETTERED", "CANCELLED"])
async def test_what_has_ended_stays_as_it_is(world: World, end: str) -> None:
    task_id = await world.one()
    if end == "CANCELLED":
        await world.engine.cancel.cancel(task_id, "no")
    elif end == "COMPLETED":
        await world.complete(await world.take())
    else:
        await world.kill(await world.agent())
    before = world.everything()

    with pytest.raises(InvalidTransitionError, match=f"{task_id}: it is {end}"):
        await world.engine.edit.edit(task_id, TaskChange(priority=1))

    assert world.everything() == before


async def test_there_is_no_such_task(world: World) -> None:
    with pytest.raises(NotFoundError, match="There is no task nope"):
        await world.engine.edit.edit("nope", TaskChange(priority=1))


@pytest.mark.parametrize(
    "bad",
    [
        {"priority": 101},
        {"priority": 1.5},
        {"priority": "high"},
        {"deadline": datetime(2026, 3, 1)},  # noqa: DTZ001 - without a zone: that is the fault
        {"deadline": "tomorrow"},
        {"tags": "a"},
        {"tags": ["\0"]},
        {"priority": -1, "tags": ["ok", ""]},
    ],
)
async def test_bad_values_are_refused_in_the_words_of_a_submission(world: World, bad: dict[str, Any]) -> None:
    task_id = await world.one()
    before = world.everything()

    with pytest.raises(InvalidInputError) as changed:
        await world.engine.edit.edit(task_id, TaskChange(**bad))
    with pytest.raises(InvalidInputError) as submitted:
        await world.one(**bad)

    assert changed.value.errors == submitted.value.errors
    assert world.everything() == before


@pytest.mark.parametrize("field", ["priority", "tags"])
async def test_only_a_deadline_can_be_none(world: World, field: str) -> None:
    task_id = await world.one()
    nothing: dict[str, Any] = {field: None}

    with pytest.raises(InvalidInputError, match=f"{field}: must be a .*got None"):
        await world.engine.edit.edit(task_id, TaskChange(**nothing))


async def test_a_deadline_that_is_past_is_told_once(world: World) -> None:
    """Each missed deadline is logged, whatever else changes in the meantime."""
    task_id = await world.one()
    past = world.clock.now() - timedelta(minutes=1)
    await world.engine.edit.edit(task_id, TaskChange(deadline=past))
    await world.engine.edit.edit(task_id, TaskChange(priority=10))

    assert await world.engine.maintenance.rekey_deadlines(10) == (1, 1)
    await world.engine.edit.edit(task_id, TaskChange(priority=20, deadline=past))
    assert await world.engine.maintenance.rekey_deadlines(10) == (0, 0)

    await world.engine.edit.edit(task_id, TaskChange(deadline=past - timedelta(minutes=1)))
    assert await world.engine.maintenance.rekey_deadlines(10) == (1, 1)
    assert world.kinds(task_id).count("task.deadline_missed") == 2


async def wait_for_a_lock(world: World) -> list[str]:
    """Three tasks that want one document; the first is done, and one of the others is in sight."""
    ids = [await world.one("edit", lock_key="doc:1", priority=priority) for priority in (10, 20, 30)]
    task = await world.take()
    assert await world.claim(await world.agent(), 3) == []
    await world.complete(task)
    return ids[1:]


async def wait_for_money(world: World) -> list[str]:
    """Three tasks of a DAG with money for one at a time; the first is done, and one is in sight."""
    dag = await world.dag(
        *(NewTask("edit", key=f"{p}", priority=p, max_cost_usd=2) for p in (10, 20, 30)), ceiling=3
    )
    task = await world.take()
    assert await world.claim(await world.agent(), 3) == []
    await world.complete(task, spent="1")
    return [dag.tasks["20"].id, dag.tasks["30"].id]


@pytest.mark.parametrize("wait", [wait_for_a_lock, wait_for_money])
@pytest.mark.parametrize("change", ["the one out of sight comes first", "the one in sight comes last"])
async def test_a_task_out_of_sight_takes_its_new_turn(
    world: World, wait: Callable[[World], Awaitable[list[str]]], change: str
) -> None:
    """Only the best waiter is in sight of claims: after a change it may be another one."""
    second, third = await wait(world)
    assert world.rows("SELECT id FROM lineshaft.task_live WHERE parked IS NOT NULL") == [{"id": third}]

    if change == "the one out of sight comes first":
        await world.engine.edit.edit(third, TaskChange(priority=5))
    else:
        await world.engine.edit.edit(second, TaskChange(priority=90))

    assert (await world.take()).id == third


async def test_the_limits_of_a_dead_letter_are_raised_before_it_is_retried(world: World) -> None:
    """The revived task has them, and its event shows what was changed."""
    agent = await world.agent(budget_usd=1.5, max_concurrent_tasks=10, agent_id="ann")
    task_id = await world.one(max_cost_usd=1, max_total_cost_usd=1, max_attempts=1, max_duration_sec=60)
    await world.kill(agent, task_id)
    change = TaskChange(max_cost_usd=2, max_total_cost_usd=None, max_attempts=5, max_duration_sec=90)

    await world.engine.edit.edit(task_id, change)

    assert world.status(task_id) == "DEAD_LETTERED"
    assert world.kinds(task_id)[-1] == "task.changed"
    await world.engine.revive.retry(task_id)
    found = await world.engine.read.task(task_id)
    assert (found.max_cost_usd, found.max_total_cost_usd, found.max_attempts) == (Decimal(2), None, 5)
    assert found.max_duration_sec == 90
    assert await world.claim(agent) == [], "it costs more than the agent has"


async def test_the_limits_of_a_waiting_task_are_changed(world: World) -> None:
    """Also after failures, when its lane is that of the fallback models."""
    rich = await world.agent(models_available=["small", "large"], budget_usd=1, agent_id="ann")
    task_id = await world.one(max_cost_usd=5, model_preferences=["large"], fallback_models=["small"])
    assert await world.claim(rich) == []

    await world.engine.edit.edit(task_id, TaskChange(max_cost_usd=1, max_duration_sec=7))

    task = await world.take(rich)
    assert (task.model, world.live(task_id)["reserved_usd"], world.live(task_id)["limit_sec"]) == (
        "large",
        1,
        7,
    )
    with pytest.raises(InvalidTransitionError, match="limits"):
        await world.engine.edit.edit(task_id, TaskChange(max_attempts=9))
    for _ in range(2):
        await world.fail(task)
        await world.engine.revive.retry(task_id)
        await world.engine.edit.edit(task_id, TaskChange(max_cost_usd=0.5))
        task = await world.take(rich)
    assert (task.model, world.live(task_id)["reserved_usd"]) == ("small", Decimal("0.5"))


async def test_of_a_dead_letter_only_limits_are_changed(world: World) -> None:
    task_id = await world.one()
    await world.kill(await world.agent(), task_id)
    before = world.everything()

    with pytest.raises(InvalidTransitionError, match="priority"):
        await world.engine.edit.edit(task_id, TaskChange(priority=1, max_attempts=5))

    assert world.everything() == before


@pytest.mark.parametrize(
    "bad", [{"max_attempts": 0}, {"max_attempts": None}, {"max_duration_sec": 0}, {"max_cost_usd": -1}]
)
async def test_an_impossible_limit_is_refused(world: World, bad: dict[str, Any]) -> None:
    task_id = await world.one()

    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        await world.engine.edit.edit(task_id, TaskChange(**bad))
