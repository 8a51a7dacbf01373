"""Who acts: recorded with acts by hand, and with nothing else."""

import asyncio
from datetime import timedelta

import pytest

from lineshaft.duties.on_demand import OnDemand
from lineshaft.engine.caller import caller
from lineshaft.engine.feed.actor import acting_as, with_actor
from lineshaft.errors import InvalidInputError, InvalidTransitionError
from lineshaft.types.request import MAX_REASON
from tests.engine.review.test_approvals import at_the_gate, yes
from tests.engine.sources.helpers import column, put, schedule
from tests.world import World, cancel_claim, ref

CANCELLED = "SELECT task_id, data FROM lineshaft.events WHERE kind = 'task.cancelled'"


def test_the_actor_holds_within_its_block() -> None:
    with acting_as("ann"):
        with acting_as(None):
            assert with_actor() == {}
        assert with_actor({"a": 1}, "tidy\0") == {"a": 1, "actor": "ann", "reason": "tidy\ufffd"}
    assert caller().actor is None
    with pytest.raises(InvalidInputError, match="reason: must have at most"):
        with_actor(reason="x" * (MAX_REASON + 1))


async def test_duties_that_a_caller_runs_have_no_actor(world: World) -> None:
    """An agent's call may run duties that are due; its token didn't cancel what they cancel."""
    await put(world.engine, schedule(max_open=1, overlap="cancel_oldest"))
    deadline = world.clock.now() + timedelta(seconds=90)
    expiring = await world.one(deadline=deadline, expire_at_deadline=True)

    on_demand = OnDemand(world.engine, lambda: None)
    with acting_as("agents"):
        for _ in range(2):
            world.clock.advance(60)
            await on_demand.run()
    await on_demand.close()

    cancelled = world.rows(CANCELLED)
    assert {row["data"]["reason"] for row in cancelled} == {
        "deadline missed",
        "superseded by a newer firing of source s",
    }
    assert expiring in {row["task_id"] for row in cancelled}
    assert not any("actor" in row["data"] for row in cancelled)


async def test_work_has_no_actor(world: World) -> None:
    with acting_as("agents"):
        agent = await world.agent()
        for end in ("complete", "fail", "release", "cancel"):
            await world.one()
            task = await world.take(agent)
            await world.heartbeat(agent.id, agent.incarnation, [ref(task)])
            match end:
                case "complete":
                    await world.complete(task)
                case "fail":
                    await world.fail(task, category="auth_failure")
                case "release":
                    await world.release(task)
                    await world.complete(await world.take(agent))
                case "cancel":
                    await cancel_claim(world.engine, ref(task), "enough")

    assert column(world, "SELECT kinds FROM lineshaft.event WHERE data ->> 'actor' IS NOT NULL") == []
    assert "task.cancelled" in column(world, "SELECT kind FROM lineshaft.events")


async def test_a_cancellation_by_hand_names_the_actor_in_all_of_its_tasks(world: World) -> None:
    first = await world.one()
    second = await world.one(depends_on=[first])

    with acting_as("ann"):
        await world.engine.cancel.cancel(first, "enough")

    events = world.rows(CANCELLED)
    assert {row["task_id"]: row["data"] for row in events} == {
        first: {"reason": "enough", "actor": "ann"},
        second: {"reason": f"Parent {first} cancelled", "actor": "ann"},
    }


async def test_of_two_decisions_about_an_output_one_is_recorded(world: World) -> None:
    task_id = await at_the_gate(world)

    async def decide(name: str) -> bool:
        with acting_as(name):
            try:
                await world.engine.approvals.decide(task_id, yes(name))
            except InvalidTransitionError:
                return False
            return True

    names = ("ann", "bob")
    won = await asyncio.gather(*map(decide, names))

    assert sorted(won) == [False, True]
    (data,) = column(world, "SELECT data FROM lineshaft.events WHERE kind = 'approval.decided'")
    winner = names[won.index(True)]
    assert data == {"approve": True, "reviewer": winner, "actor": winner}


async def test_a_token_is_revoked_once(world: World) -> None:
    tokens = world.engine.tokens
    made = await tokens.create("ci", "read")

    await asyncio.gather(*(tokens.revoke(made.id) for _ in range(3)))

    kinds = column(world, "SELECT kind FROM lineshaft.events WHERE kind LIKE 'token.%%' ORDER BY seq")
    assert kinds == ["token.created", "token.revoked"]
    (data,) = column(world, "SELECT data FROM lineshaft.events WHERE kind = 'token.revoked'")
    assert data == {"token_id": made.id, "name": "ci", "scope": "read"}
