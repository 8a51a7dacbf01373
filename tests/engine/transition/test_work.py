"""Batches of work: one result per item, in order, and no item affects another."""

from decimal import Decimal

import pytest

from lineshaft.errors import InvalidInputError, NotFoundError, StaleClaimError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import (
    Cancellation,
    ClaimedTask,
    ClaimRef,
    HeldTask,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Presence,
    Release,
    Spent,
)
from tests.world import World, decoded, ref, release_claims

UNKNOWN = ClaimRef("task_unknown", 1)


async def test_start(world: World) -> None:
    await world.one()
    task = await world.take(start=False)

    unknown, started = await world.engine.work.start([UNKNOWN, ref(task)])

    assert isinstance(unknown.error, NotFoundError)
    assert started.unwrap() is Status.RUNNING


async def test_record_steps(world: World) -> None:
    await world.one()
    task = await world.take()
    steps = [NewStep(ref(task), name, b"1", Decimal(1), Spent(Decimal(2))) for name in ("a", "b", "a")]
    late = NewStep(ClaimRef(task.id, task.epoch + 1), "a", b"3")

    *recorded, stale = await world.engine.work.record_steps([*steps, late])

    assert [step.unwrap() for step in recorded] == [b"1", b"1", b"1"]
    assert isinstance(stale.error, StaleClaimError)
    assert world.live(task.id)["attempt_cost_usd"] == 2


async def test_the_first_result_of_a_step_counts(world: World) -> None:
    await world.one()
    task = await world.take()

    first, second = await world.engine.work.record_steps(
        [NewStep(ref(task), "a", b"1"), NewStep(ref(task), "a", b"2")]
    )

    assert (first.data, second.data) == (b"1", b"1")


async def test_another_digest_under_a_later_claim_replaces_a_step(world: World) -> None:
    """Under the same claim, and where one of the digests is unknown, the first result counts."""
    await world.one()

    async def record(task: ClaimedTask, data: bytes, digest: str | None) -> bytes:
        step = NewStep(ref(task), "a", data, Decimal(1), digest=digest)
        (recorded,) = await world.engine.work.record_steps([step])
        return recorded.unwrap()

    async def claim_again(task: ClaimedTask) -> ClaimedTask:
        await release_claims(world.engine, [ref(task)])
        return await world.take()

    first = await world.take()
    assert await record(first, b"1", "x") == b"1"
    assert await record(first, b"2", "y") == b"1"
    second = await claim_again(first)
    assert await record(second, b"3", None) == b"1"
    assert await record(second, b"4", "x") == b"1"
    assert await record(second, b"5", "y") == b"5"
    assert await record(second, b"6", "z") == b"5"
    await release_claims(world.engine, [ref(second)])
    found = await world.claims(await world.agent())

    assert decoded(found.resumed[first.id].step_digests) == {"a": "y"}
    recorded = world.connection.execute("SELECT epoch, cost_usd FROM lineshaft.step").fetchall()
    assert recorded == [(2, 2)], "both runs were paid for"


@pytest.mark.parametrize("digest", ["", "x" * 201, "nul \0"])
def test_a_digest_must_be_short_and_storable(digest: str) -> None:
    with pytest.raises(InvalidInputError):
        NewStep(UNKNOWN, "a", b"1", digest=digest)


@pytest.mark.parametrize("name", ["", "x" * 1001, "nul \0"])
def test_a_step_needs_a_name_that_can_be_stored(name: str) -> None:
    with pytest.raises(InvalidInputError):
        NewStep(UNKNOWN, name, b"1")


async def test_save_checkpoints(world: World) -> None:
    await world.one()
    task = await world.take()

    unknown, saved = await world.engine.work.save_checkpoints(
        [NewCheckpoint(UNKNOWN, b"1"), NewCheckpoint(ref(task), b'{"page": 7}')]
    )

    assert isinstance(unknown.error, NotFoundError)
    assert saved.error is None
    assert world.row("SELECT data FROM lineshaft.checkpoint")["data"] == {"page": 7}


async def test_spawn(world: World) -> None:
    await world.one("parent")
    task = await world.take()
    items = [
        NewSpawn(UNKNOWN, [NewTask("child")]),
        NewSpawn(ref(task), [NewTask("child", depends_on=["task_unknown"])], key="bad"),
        NewSpawn(ref(task), [NewTask("child")], key="k"),
        NewSpawn(ref(task), [NewTask("child")], key="k"),
    ]

    unknown, bad, first, again = await world.engine.work.spawn(items)

    assert isinstance(unknown.error, NotFoundError)
    assert bad.error is not None
    assert first.unwrap() == again.unwrap()
    assert [child.duplicate for child in again.unwrap().submitted] == [True]
    assert len(world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s", task.id)) == 1


async def test_cancel_and_release(world: World) -> None:
    agent = await world.agent()
    await world.submit(NewTask("code"), NewTask("code"))
    one, other = await world.claim(agent, 2)
    work = world.engine.work

    unknown, cancelled = await work.cancel(
        [Cancellation(UNKNOWN, "no longer needed"), Cancellation(ref(one), "no longer needed")]
    )
    stale, released = await work.release([Release(ref(one)), Release(ref(other))])

    assert isinstance(unknown.error, NotFoundError)
    assert cancelled.unwrap() is Status.CANCELLED
    assert isinstance(stale.error, StaleClaimError)
    assert released.unwrap() is Status.READY


async def test_heartbeat(world: World) -> None:
    agent = await world.agent("a")
    await world.submit(NewTask("code"), NewTask("code"))
    held, lost = await world.claim(agent, 2)
    await world.release(lost)

    answers = await world.engine.work.heartbeat(
        [own := Presence("a", 1), Presence("b", 1)],
        [HeldTask(held.id, held.epoch, own), HeldTask(lost.id, lost.epoch, own)],
    )

    assert answers.agents == {own: "active"}
    assert [(ended.id, ended.answer) for ended in answers.over] == [(lost.id, "lost")]
