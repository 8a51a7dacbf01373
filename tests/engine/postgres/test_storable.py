"""Characters that PostgreSQL cannot store are replaced, or refused by name: never the driver's error."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.model.storable import json_fault
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import ClaimedTask, Completion
from tests.examples import examples
from tests.world import World, record_step, ref, save_checkpoint

NUL, HALF = '{"a": "x\\u0000"}', '{"a": "\\ud800x"}'
MARK = "\N{REPLACEMENT CHARACTER}"


def fault(name: str, character: str) -> str:
    return f"^{name}: must not contain .*{character}.*; remove it"


@pytest.mark.parametrize(("text", "character"), [(NUL, "U[+]0000"), (HALF, "ud800")])
@pytest.mark.parametrize("field", ["output", "artifacts", "decision_report"])
async def test_an_output_is_refused_alone(world: World, field: str, text: str, character: str) -> None:
    """The others of the same call are not refused with it, and the task can still be completed."""
    await world.one()
    task = await world.take()
    bad: dict[str, Any] = {field: text.encode()}

    with pytest.raises(InvalidInputError, match=fault(field, character)):
        Completion(ref(task), **bad)

    await world.complete(task, {"a": "x"})


async def checkpoint(world: World, task: ClaimedTask, data: bytes) -> object:
    await save_checkpoint(world.engine, ref(task), data)
    return None


async def step(world: World, task: ClaimedTask, data: bytes) -> object:
    return await record_step(world.engine, ref(task), "search", data)


async def progress(world: World, task: ClaimedTask, data: bytes) -> object:
    assert task.epoch == 1
    agent = world.live(task.id)["agent_id"]
    return await world.heartbeat(agent, 1, [ref(task)], progress=data)


@pytest.mark.parametrize(("text", "character"), [(NUL, "U[+]0000"), (HALF, "ud800")])
@pytest.mark.parametrize(("save", "field"), [(checkpoint, "data"), (step, "data"), (progress, "progress")])
async def test_what_a_running_task_saves_is_refused_by_name(
    world: World,
    save: Callable[[World, ClaimedTask, bytes], Awaitable[object]],
    field: str,
    text: str,
    character: str,
) -> None:
    await world.one()
    task = await world.take()
    before = world.everything()

    with pytest.raises(InvalidInputError, match=fault(field, character)):
        await save(world, task, text.encode())

    assert world.everything() == before
    # The same with the text that only looks like it.
    await save(world, task, text.replace("\\u", "\\\\u").encode())


async def test_a_reason_is_mended(world: World) -> None:
    """It is for people: nothing is refused for a character of it."""
    task_id = await world.one()

    await world.engine.cancel.cancel(task_id, "no\0t \ud800needed")

    assert world.task(task_id)["cancel_reason"] == f"no{MARK}t ?needed"
    event = world.row("SELECT data FROM lineshaft.events WHERE kind = 'task.cancelled'")
    assert event["data"] == {"reason": f"no{MARK}t ?needed"}


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
async def test_a_name_that_nothing_can_have_is_refused(world: World, name: str) -> None:
    await world.one()
    task = await world.take()

    for call in (
        world.engine.cancel.cancel(name, "no"),
        world.engine.revive.retry(name),
        record_step(world.engine, ref(task), name, b"1"),
    ):
        with pytest.raises(InvalidInputError, match=r"a character that PostgreSQL can't store.*Remove it"):
            await call


#: Few enough characters, but too many bytes for an index; all different, so that none are compressed away.
LONG = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(1_000))


async def test_a_text_that_no_index_can_hold_is_refused(world: World) -> None:
    await world.one()
    task = await world.take()

    for call in (
        world.engine.submission.submit([NewTask(type="t", idempotency_key=LONG)]),
        world.engine.submission.submit([NewTask(type=LONG)]),
    ):
        with pytest.raises(InvalidInputError, match=r"too long.*Shorten it; nothing was changed"):
            await call
    with pytest.raises(InvalidInputError, match="at most 2000 bytes of UTF-8, got 3000"):
        await record_step(world.engine, ref(task), LONG, b"1")


ESCAPES = [
    "\\u0000",
    "\\ud83d",
    "\\ude00",
    "\\uD83D\\uDE00",
    "\\\\",
    '\\"',
    "\\n",
    "u0000",
    "x",
    "é",
    "\\u00e9",
]


@given(st.lists(st.sampled_from(ESCAPES), max_size=6))
@settings(
    max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_what_passes_is_what_postgresql_takes(connection: psycopg.Connection, parts: list[str]) -> None:
    text = f'"{"".join(parts)}"'
    json.loads(text)
    try:
        connection.execute("SELECT %s::jsonb", [text])
        takes = True
    except psycopg.DataError:
        takes = False

    assert (json_fault(text.encode()) is None) == takes
