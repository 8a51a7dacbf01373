"""A DAG's own idempotency key: the same call again gives the same DAG."""

import asyncio

import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.model.tasks import NewTask
from lineshaft.types import SubmittedDag
from tests.world import World

TASKS = [NewTask("code", key="a"), NewTask("code", key="b", depends_on=["a"])]


async def submit(world: World, key: str | None = "k", fillers: int = 0) -> SubmittedDag:
    return await world.engine.submission.submit_dag(
        "a DAG", [*TASKS, *[NewTask("code")] * fillers], idempotency_key=key
    )


def tasks(world: World) -> int:
    return int(world.row("SELECT count(*) AS n FROM lineshaft.task")["n"])


@pytest.mark.parametrize("fillers", [0, 60], ids=["insert", "copy"])
async def test_the_second_call_is_answered_as_the_first(world: World, fillers: int) -> None:
    first = await submit(world, fillers=fillers)
    again = await submit(world)

    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.id == first.id
    assert {key: again.tasks[key].id for key in "ab"} == {key: first.tasks[key].id for key in "ab"}
    assert all(task.duplicate for task in again.tasks.values())
    assert tasks(world) == 2 + fillers
    assert world.row("SELECT idempotency_key FROM lineshaft.dag")["idempotency_key"] == "k"


async def test_without_a_key_and_with_another_one_it_is_another_dag(world: World) -> None:
    found = [await submit(world, key) for key in (None, None, "k", "other")]
    assert len({dag.id for dag in found}) == 4


async def test_twenty_at_once_make_one(world: World) -> None:
    found = await asyncio.gather(*(submit(world) for _ in range(20)))
    assert len({dag.id for dag in found}) == 1
    assert sum(not dag.duplicate for dag in found) == 1
    assert tasks(world) == 2


async def test_a_cancelled_dag_gives_its_key_back(world: World) -> None:
    first = await submit(world)
    await world.engine.cancel.cancel_dag(first.id, "no longer wanted")
    second = await submit(world)
    assert (second.duplicate, second.id != first.id) == (False, True)
    assert (await submit(world)).id == second.id


async def test_retention_deletes_the_key_with_the_last_task(world: World) -> None:
    first = await submit(world)
    agent = await world.agent()
    for _ in TASKS:
        await world.complete(await world.take(agent))
    world.clock.advance(2 * 86_400)
    for _ in TASKS:
        await world.engine.maintenance.delete_finished(86_400, 1)

    assert world.rows("SELECT * FROM lineshaft.dag") == []
    assert world.rows("SELECT * FROM lineshaft.dag_key") == []
    assert (await submit(world)).id != first.id


async def test_a_refused_call_takes_no_key(world: World) -> None:
    with pytest.raises(InvalidInputError):
        await submit(world, "")
    with pytest.raises(InvalidInputError):
        await world.engine.submission.submit_dag("x", [NewTask("")], idempotency_key="k")
    assert not (await submit(world)).duplicate
