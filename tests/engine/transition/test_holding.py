"""What an agent does with a claim until it ends: start, heartbeat, hand back."""

from decimal import Decimal

import pytest

from lineshaft.errors import (
    InvalidInputError,
    NotFoundError,
    StaleClaimError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import ClaimRef, EndedClaim, HeldTask, Presence, Spent
from tests.world import World, cost, only, ref, release_claims

ZERO = Decimal(0)


async def test_start(world: World) -> None:
    """R-070, F-18: RUNNING with a lease of three heartbeats, within the execution limit."""
    agent = await world.agent(heartbeat_interval_sec=20)
    await world.one(max_duration_sec=300)
    (task,) = await world.claim(agent, start=False)
    world.age(seconds=30)

    assert only(await world.engine.work.start([ref(task)])).unwrap() is Status.RUNNING

    live = world.live(task.id)
    now = world.clock.now()
    assert live["status"] == "RUNNING"
    assert live["started_at"] == live["first_started_at"] == live["heartbeat_at"] == now
    assert (live["lease_until"] - now).total_seconds() == 60
    assert (live["limit_at"] - now).total_seconds() == 300
    assert world.kinds(task.id)[-1] == "task.started"
    again = only(await world.engine.work.start([ref(task)]))
    assert again.unwrap() is Status.RUNNING
    assert world.kinds(task.id).count("task.started") == 1


async def test_a_batch_of_claims_is_answered_one_by_one(world: World) -> None:
    """R-100: one that is stale doesn't spoil the others."""
    agent = await world.agent()
    await world.submit(*[NewTask("code")] * 2)
    one, two = await world.claim(agent, 2, start=False)
    claims = [ref(one), ClaimRef(two.id, 7), ClaimRef("nope", 1)]

    moved = await world.engine.work.start(claims)

    assert [answer.id for answer in moved] == [one.id, two.id, "nope"]
    assert moved[0].status is Status.RUNNING
    assert isinstance(moved[1].error, StaleClaimError)
    assert isinstance(moved[2].error, NotFoundError)


async def test_a_heartbeat_renews_the_lease_within_the_limit(world: World) -> None:
    """R-071, R-028, R-074: progress is kept beside it."""
    agent = await world.agent(heartbeat_interval_sec=20)
    await world.one(max_duration_sec=100)
    task = await world.take(agent)
    world.age(seconds=30)

    answer = await world.heartbeat(agent.id, 1, [ref(task)], progress=b'{"percent": 50}')

    live = world.live(task.id)
    assert answer == {task.id: "continue"}
    assert live["progress"] == {"percent": 50}
    assert (live["lease_until"] - world.clock.now()).total_seconds() == 60
    assert world.kinds(task.id)[-1] == "task.progress"
    world.age(seconds=30)
    await world.heartbeat(agent.id, 1, [ref(task)])
    live = world.live(task.id)
    assert live["lease_until"] == live["limit_at"]
    assert live["progress"] == {"percent": 50}
    assert world.agent_row(agent)["last_heartbeat"] == world.clock.now()


async def test_what_a_task_has_cost_only_grows(world: World) -> None:
    """R-024, R-234: a heartbeat that comes late takes no money back; the end settles what was said last."""
    agent = await world.agent()
    await world.one()
    task = await world.take(agent)
    for amount in ("0.2", "0.5", "0.3"):
        await world.heartbeat(agent.id, 1, [ref(task)], spent=cost(amount))

    assert world.live(task.id)["attempt_cost_usd"] == Decimal("0.5")
    await world.complete(task)
    assert world.end(task.id)["cost_usd"] == world.agent_row(agent)["spent_usd"] == Decimal("0.5")


async def test_a_heartbeat_tells_what_became_of_the_claim(world: World) -> None:
    """R-071, R-175: go on, stop because it was cancelled, or stop because it is another's."""
    agent, other = await world.agent(), await world.agent()
    ids = await world.submit(*(NewTask("code", priority=n) for n in range(5)))
    running, cancelled, lost, done = await world.claim(agent, 4)
    (unstarted,) = await world.claim(agent, start=False)
    await world.engine.cancel.cancel(cancelled.id, "no")
    await world.release(lost)
    await world.take(other)
    await world.complete(done)

    answers = await world.heartbeat(
        agent.id, 1, [ref(task) for task in (running, cancelled, lost, done, unstarted)]
    )

    expected = ("continue", "cancel", "lost", "lost", "continue")
    assert answers == dict(zip(ids, expected, strict=True))
    # Only the start ends the wait for a start.
    assert world.live(unstarted.id)["lease_until"] == unstarted.lease_until
    foreign = await world.heartbeat(other.id, 1, [ref(running)])
    assert foreign == {running.id: "lost"}


async def test_a_superseded_agent_can_not_heartbeat(world: World) -> None:
    """R-071; and one that was thought dead is active again with its next sign of life (R-080)."""
    old = await world.agent("a")
    new = await world.agent("a")
    answers = await world.engine.work.heartbeat([Presence(old.id, old.incarnation)], [])
    assert answers.agents == {}
    world.age(minutes=5)
    assert await world.engine.fleet.mark_offline() == ["a"]
    assert (await world.engine.fleet.read("a")).status == "offline"

    assert await world.heartbeat(new.id, new.incarnation) == {}

    assert world.agent_row(new)["status"] == "active"


async def test_release(world: World) -> None:
    """R-081: back to READY at once, no attempt used, its place kept; with a delay, later."""
    agent = await world.agent()
    task_id = await world.one(max_cost_usd=1)
    ready_at = world.live(task_id)["ready_at"]
    world.age(minutes=5)
    task = await world.take(agent)

    assert await world.release(task) is Status.READY
    live = world.live(task_id)
    assert (live["attempts"], live["ready_at"], live["epoch"]) == (0, ready_at, 1)
    assert world.kinds(task_id)[-2:] == ["task.released", "task.ready"]
    (claimed,) = await world.claim(agent, start=False)
    assert claimed.epoch == 2

    assert await world.release(claimed, 30) is Status.PENDING
    assert world.waits(task_id) == 30
    assert world.kinds(task_id)[-1] == "task.released"
    assert [attempt["outcome"] for attempt in world.attempts(task_id)] == ["released", "released"]
    assert await world.claim(agent) == []
    world.age(seconds=30)
    assert await world.engine.maintenance.promote_due(10) == 1
    assert (await world.take(agent)).epoch == 3


async def test_registering_again_fails_what_was_held(world: World) -> None:
    """R-079, R-080: as a crash of `agent_restarted`, at once; what it spent stays spent."""
    agent = await world.agent("a", budget_usd=5)
    await world.submit(*[NewTask("code", max_cost_usd=1)] * 3)
    running, validating = await world.claim(agent, 2)
    (claimed,) = await world.claim(agent, start=False)
    await world.heartbeat(agent.id, 1, [ref(running)], spent=cost("0.5"))

    again = await world.agent("a", budget_usd=100)

    assert world.statuses([running.id, validating.id, claimed.id]) == ["RETRYING"] * 3
    assert {world.attempts(task.id)[0]["error"] for task in (running, claimed)} == {"agent_restarted"}
    assert world.live(running.id)["last_category"] == "crash"
    assert (again.current_tasks, again.reserved_usd, again.spent_usd) == (0, ZERO, Decimal("0.5"))
    assert again.budget_usd == 5
    assert world.kinds("a", column="agent_id").count("agent.registered") == 2


async def test_an_agent_is_checked(world: World) -> None:
    """R-079."""
    for fault in ({"max_concurrent_tasks": 0}, {"claim_ttl_sec": 0.01}, {"heartbeat_interval_sec": 1e9}):
        with pytest.raises(InvalidInputError, match=next(iter(fault))):
            await world.agent(**fault)
    agent = await world.agent()
    for change in ({"max_concurrent_tasks": 0}, {"status": "asleep"}, {"add_budget_usd": -1}):
        with pytest.raises(InvalidInputError, match=next(iter(change))):
            await world.engine.fleet.patch(agent.id, **change)
    with pytest.raises(NotFoundError):
        await world.engine.fleet.patch("nobody", status="active")


async def test_two_claims_of_one_task_in_one_process(world: World) -> None:
    """One agent of it lost the task, another one got it: each is answered for its own claim."""
    first, second = await world.agent("a"), await world.agent("b")
    await world.one()
    (lost,) = await world.claim(first)
    await release_claims(world.engine, [ref(lost)])
    (held,) = await world.claim(second)

    answers = await world.engine.work.heartbeat(
        [Presence("a", 1), Presence("b", 1)],
        [
            HeldTask(lost.id, lost.epoch, Presence("a", 1), progress=b'"old"', spent=Spent(Decimal(7))),
            HeldTask(held.id, held.epoch, Presence("b", 1), spent=Spent(Decimal(1))),
        ],
    )

    assert answers.over == [EndedClaim(lost.id, lost.epoch, "lost")]
    live = world.live(held.id)
    assert (live["attempt_cost_usd"], live["progress"]) == (1, None)


def test_progress_is_short() -> None:
    HeldTask("task_1", 1, Presence("a", 1), b'"' + b"x" * 60_000 + b'"')
    with pytest.raises(InvalidInputError, match="progress: must be at most 65536 bytes"):
        HeldTask("task_1", 1, Presence("a", 1), b'"' + b"x" * 70_000 + b'"')
