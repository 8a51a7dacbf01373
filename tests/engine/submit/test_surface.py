"""Tasks of compatible APIs: their preset, and what they return unchanged."""

import math
from typing import Any

import pytest

from lineshaft.engine.submit.surface import SurfaceTask
from lineshaft.errors import InvalidInputError
from lineshaft.model.tasks import NewTask, TaskRules, resolve
from lineshaft.types import RetrySpec
from tests.world import World


def row(world: World, task_id: str) -> dict[str, Any]:
    (stored_row,) = world.rows("SELECT * FROM lineshaft.task WHERE id = %s", task_id)
    return stored_row


async def stored(world: World, task: NewTask, preset: str | None) -> dict[str, Any]:
    (submitted,) = await world.engine.submission.submit([task], preset=preset)
    return row(world, submitted.id)


async def test_the_preset_of_an_api_is_the_weakest(world: World) -> None:
    """U15: an explicit preset wins over that of the API, and an explicit field over both."""
    by_api = await stored(world, NewTask("x"), "officeplane")
    by_task = await stored(world, NewTask("x", preset="loki"), "officeplane")
    by_field = await stored(world, NewTask("x", preset="loki", max_attempts=9), "officeplane")
    by_default = await stored(world, NewTask("x"), None)

    named = [(row["preset"], row["max_attempts"]) for row in (by_api, by_task, by_field, by_default)]
    assert named == [("officeplane", 4), ("loki", 3), ("loki", 9), ("factory", 3)]


async def test_children_have_the_preset_of_the_api_or_their_parent(world: World) -> None:
    (batch,) = await world.engine.submission.submit(
        [NewTask("batch", children=[NewTask("a"), NewTask("b", preset="factory")])], preset="officeplane"
    )
    (inherits,) = await world.engine.submission.submit(
        [NewTask("batch", preset="loki", children=[NewTask("c")])], preset="officeplane"
    )

    presets = {
        row["type"]: row["preset"]
        for row in world.rows(
            "SELECT type, preset FROM lineshaft.task WHERE parent_id = ANY (%s)", [batch.id, inherits.id]
        )
    }
    assert presets == {"a": "officeplane", "b": "factory", "c": "loki"}


@pytest.mark.parametrize("number", [1, 3, 60])
async def test_each_task_keeps_what_its_api_received(world: World, number: int) -> None:
    """In one statement, in arrays, and where uniform tasks are copied."""
    tasks = [SurfaceTask("x", surface={"n": n}) for n in range(number)]
    submitted = await world.engine.submission.submit([*tasks, NewTask("x")] if number > 1 else tasks)

    surfaces = [row(world, one.id)["surface"] for one in submitted]
    assert surfaces[:number] == [{"n": n} for n in range(number)]
    assert surfaces[number:] == ([None] if number > 1 else [])


async def test_uniform_tasks_of_an_api_have_its_preset(world: World) -> None:
    submitted = await world.engine.submission.submit([NewTask("x")] * 60, preset="loki")

    rows = world.rows(
        "SELECT DISTINCT preset, require_decision_report FROM lineshaft.task WHERE id = ANY (%s)",
        [one.id for one in submitted],
    )
    assert rows == [{"preset": "loki", "require_decision_report": True}]


@pytest.mark.parametrize("value", ["\0", "\ud800", math.nan, {"a": [{"b": -math.inf}]}])
async def test_what_cannot_be_stored_is_refused(world: World, value: Any) -> None:
    tasks = [NewTask("fine"), SurfaceTask("x", surface={"a": value})]
    with pytest.raises(InvalidInputError) as refused:
        await world.engine.submission.submit(tasks)

    assert [place for place, _ in refused.value.errors] == ["tasks[1].surface"]


def test_the_retry_policy_of_an_api_is_the_base_of_a_partial_one() -> None:
    resolved = resolve(NewTask("x", retry=RetrySpec(jitter=True)), rules=TaskRules(preset="officeplane"))

    assert (resolved.preset, resolved.retry) == ("officeplane", b'{"jitter":true}')
