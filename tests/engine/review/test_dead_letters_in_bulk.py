"""Decisions about many dead letters at once: by filter, in a few transactions."""

from typing import Any

import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.model.tasks import NewTask
from lineshaft.types import DeadLetterFilter
from lineshaft.types.work import Failure
from tests.engine.review.test_dead_letters import dead, decision, ids
from tests.world import World, ref

MANY = 230


async def dead_ones(world: World, n: int, **fields: Any) -> list[str]:
    """So many of one cause."""
    agent = await world.agent(max_concurrent_tasks=n)
    await world.submit(*(NewTask("code", max_attempts=1, **fields) for _ in range(n)))
    tasks = await world.claim(agent, n)
    await world.engine.work.fail([Failure(ref(task), "no access", "auth_failure") for task in tasks])
    return [task.id for task in tasks]


def transactions(world: World) -> list[int]:
    """How many decisions each of them wrote."""
    rows = world.rows("SELECT count(*) AS n FROM lineshaft.review GROUP BY xmin::text ORDER BY n DESC")
    return [row["n"] for row in rows]


async def test_many_at_once(world: World) -> None:
    """R-132: each separately; one that can't be resolved is reported and stays."""
    good = [await dead(world, error="timeout") for _ in range(3)]
    stuck = await dead(world, error="timeout", idempotency_key="k")
    await world.one(idempotency_key="k")
    other = await dead(world, "mail", error="no mailbox")
    dead_letters = world.engine.dead_letters

    result = await dead_letters.resolve_all(
        DeadLetterFilter(error_contains="TIME"), decision("retry", note="back")
    )

    assert sorted(result.resolved) == sorted(good)
    assert {item.task_id: item.code for item in result.refused} == {stuck: "already_exists"}
    assert not result.more
    assert await ids(world, reviewed=False) == [other, stuck]
    assert {(await dead_letters.get(name)).note for name in good} == {"back"}
    again = await dead_letters.resolve_all(DeadLetterFilter(task_ids=good), decision("retry"))
    assert (again.resolved, again.refused) == ([], [])


async def test_many_at_once_is_bounded(world: World) -> None:
    for _ in range(3):
        await dead(world)
    dead_letters = world.engine.dead_letters

    first = await dead_letters.resolve_all(DeadLetterFilter(), decision("delete"), limit=2)
    second = await dead_letters.resolve_all(DeadLetterFilter(), decision("delete"), limit=2)

    assert (len(first.resolved), first.more) == (2, True)
    assert (len(second.resolved), second.more) == (1, False)
    with pytest.raises(InvalidInputError, match="limit"):
        await dead_letters.resolve_all(DeadLetterFilter(), decision("delete"), limit=1_001)


async def test_many_at_once_counts_what_came_along(world: World) -> None:
    """A batch and its child are dead letters; one decision moves both, and neither is an error."""
    agent = await world.agent()
    await world.one("batch", children=[NewTask("one", max_attempts=1)])
    await world.fail(await world.take(agent))
    await world.engine.dead_letters.resolve((await ids(world))[0], decision("escalate"))

    result = await world.engine.dead_letters.resolve_all(DeadLetterFilter(), decision("cancel"))

    assert (len(result.resolved), result.refused) == (2, [])


@pytest.mark.slow("hundreds of dead letters")
@pytest.mark.parametrize(
    ("resolution", "status", "kinds"),
    [
        ("retry", "READY", ["task.resolved", "task.ready"]),
        ("cancel", "CANCELLED", ["task.resolved", "task.cancelled"]),
        ("escalate", "DEAD_LETTERED", ["task.resolved", "alert"]),
    ],
)
async def test_hundreds_take_a_few_transactions(
    world: World, resolution: str, status: str, kinds: list[str]
) -> None:
    """R-132: bounded transactions, so that locks are short; each dead letter has its event."""
    names = await dead_ones(world, MANY)

    result = await world.engine.dead_letters.resolve_all(DeadLetterFilter(), decision(resolution))

    assert sorted(result.resolved) == sorted(names)
    assert transactions(world) == [100, 100, 30]
    states = world.rows("SELECT status::text, count(*) AS n FROM lineshaft.tasks GROUP BY 1")
    assert states == [{"status": status, "n": MANY}]
    events = world.rows(
        "SELECT task_id, array_agg(kind ORDER BY seq, n) AS kinds FROM lineshaft.events"
        " WHERE data ->> 'resolution' = %s OR kind = 'task.ready' AND epoch > 0 GROUP BY task_id",
        resolution,
    )
    assert [row["kinds"] for row in events] == [kinds] * MANY


async def test_one_that_cant_be_resolved_is_found_among_many(world: World) -> None:
    """The others of its transaction are tried again, each for itself."""
    names = await dead_ones(world, 5)
    stuck = await dead(world, "other", idempotency_key="k")
    await world.one(idempotency_key="k")

    result = await world.engine.dead_letters.resolve_all(DeadLetterFilter(), decision("retry"))

    assert (sorted(result.resolved), [item.task_id for item in result.refused]) == (
        sorted(names),
        [stuck],
    )
    assert transactions(world) == [1] * 5


async def test_two_that_had_one_key(world: World) -> None:
    """The newest gets it; the other one is reported."""
    old = await dead(world, idempotency_key="k")
    new = await dead(world, idempotency_key="k")

    result = await world.engine.dead_letters.resolve_all(DeadLetterFilter(), decision("retry"))

    assert (result.resolved, {item.task_id: item.code for item in result.refused}) == (
        [new],
        {old: "already_exists"},
    )


async def test_a_new_spec_for_many(world: World) -> None:
    """Each with the diff to its own old one."""
    one, two = await dead(world, spec={"n": 1}), await dead(world, spec={"n": 2, "m": 1})
    changed = decision("modify_and_retry", spec={"n": 3})

    result = await world.engine.dead_letters.resolve_all(DeadLetterFilter(), changed)

    dead_letters = world.engine.dead_letters
    assert sorted(result.resolved) == sorted([one, two])
    assert [(await dead_letters.get(name)).reviews[0].spec_before for name in (one, two)] == [
        {"n": 1},
        {"m": 1, "n": 2},
    ]
    assert {world.task(name)["spec"]["n"] for name in (one, two)} == {3}


async def test_many_batches_and_what_comes_along(world: World) -> None:
    """Events of children name the batch that was decided about."""
    agent = await world.agent()
    parents = await world.submit(
        *(NewTask("batch", children=[NewTask("one", max_attempts=1), NewTask("two")]) for _ in range(2))
    )
    for task in await world.claim(agent, 2):
        await world.fail(task)
    on_the_desk = set(await ids(world))
    assert set(parents) <= on_the_desk

    result = await world.engine.dead_letters.resolve_all(
        DeadLetterFilter(task_ids=parents), decision("retry")
    )

    assert set(result.resolved) == set(parents)
    assert await ids(world, reviewed=False) == []
    came_with = {
        row["task_id"]: row["data"].get("with")
        for row in world.rows("SELECT task_id, data FROM lineshaft.events WHERE kind = 'task.resolved'")
    }
    children = dict.fromkeys(on_the_desk - set(parents))
    for child in children:
        assert came_with[child] == world.task(child)["parent_id"]
