"""Handing a claim over: no other agent can have the task in between."""

import asyncio

from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import ClaimRef, Presence
from tests.world import World


async def offered(world: World) -> tuple[str, ClaimRef, Presence]:
    task_id = await world.one(lock_key="doc:1")
    holder, other = await world.agent("loki"), await world.agent("shell-1")
    (task,) = await world.claim(holder, start=False)
    return task_id, ClaimRef(task.id, task.epoch), Presence(other.id, other.incarnation)


async def test_the_task_is_started_by_the_other_agent(world: World) -> None:
    task_id, claim, to = await offered(world)

    taken = await world.engine.work.transfers.hand_over(claim, to)

    assert taken is not None
    assert taken.epoch > claim.epoch
    assert (world.status(task_id), world.live(task_id)["agent_id"], world.task(task_id)["attempts"]) == (
        "RUNNING",
        "shell-1",
        0,
    )
    assert [attempt["outcome"] for attempt in world.attempts(task_id)] == ["released"]
    assert await world.engine.work.transfers.hand_over(claim, to) is None, "the claim has ended"


async def test_nothing_changes_if_the_other_agent_can_not_have_it(world: World) -> None:
    task_id, claim, to = await offered(world)
    await world.engine.pauses.pause(None)
    before = world.live(task_id)

    assert await world.engine.work.transfers.hand_over(claim, to) is None

    assert world.live(task_id) == before


async def test_no_agent_is_faster(world: World, dsn: str) -> None:
    """Agents on other connections claim all the time, and never get the task while it is handed over."""
    thief = await world.agent("thief")
    async with Engine(dsn, clock=world.clock, max_connections=2) as other:
        stop, stolen = asyncio.Event(), list[str]()

        async def steal() -> None:
            while not stop.is_set():
                found = await other.claims.claim(thief.id, thief.incarnation, types=["code"])
                stolen.extend(task.id for task in found.tasks)

        holder, shell = await world.agent("loki"), await world.agent("shell")
        tasks = await world.submit(*[NewTask("code") for _ in range(20)])
        claims = [ClaimRef(task.id, task.epoch) for task in await world.claim(holder, 20, start=False)]
        stealing = asyncio.create_task(steal())
        to = Presence(shell.id, shell.incarnation)
        for claim in claims:
            assert await world.engine.work.transfers.hand_over(claim, to) is not None
        made = [
            await world.engine.work.transfers.submit_claimed(NewTask("code", id=f"new{number}"), to)
            for number in range(20)
        ]
        stop.set()
        await stealing

    assert stolen == []
    assert all(made)
    assert world.statuses(tasks) == ["RUNNING"] * 20


async def test_a_task_that_exists_is_not_submitted_again(world: World) -> None:
    agent = await world.agent("shell")
    await world.one(idempotency_key="k")

    made = await world.engine.work.transfers.submit_claimed(
        NewTask("code", id="new", idempotency_key="k"), Presence(agent.id, agent.incarnation)
    )

    assert made is None
    assert world.rows("SELECT id FROM lineshaft.task WHERE id = 'new'") == []
