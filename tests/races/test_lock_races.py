"""Several locks and shared ones: claims, completions and releases that meet."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.errors import NotFoundError
from lineshaft.model.admission import LockKey
from lineshaft.model.tasks import NewTask, RetrySpec
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimedTask, Completion, Failure
from tests.invariants import check_invariants
from tests.races.helpers import DONE, held, race, running
from tests.world import ref, release_claims

Engines = tuple[Engine, Engine]
KEYS = ("a", "b", "c")


def sharing(*keys: str) -> list[LockKey]:
    return [LockKey(key, shared=True) for key in keys]


async def test_claims_with_keys_in_opposite_order(engines: Engines, dsn: str) -> None:
    """Both are in front of the first lock, and neither has the other one's second."""
    one, two = engines
    await one.submission.submit([NewTask("x", lock_keys=["a", "b"]), NewTask("y", lock_keys=["b", "a"])])
    nobody = (
        "INSERT INTO lineshaft.lock (key, holder_task_id, acquired_at, expires_at)"
        " VALUES ('a', 'x', now(), now())"
    )
    with held(dsn, nobody) as holder, psycopg.connect(dsn, autocommit=True) as look:
        claims = await race(
            look, holder, two.claims.claim("a2", 1, start=True), one.claims.claim("a1", 1, start=True)
        )
    first = [task for claim in claims for task in claim.tasks]
    assert len(first) == 1
    await one.work.complete([Completion(ref(first[0]), DONE)])
    assert len(await running(one, 2)) == 1


@pytest.mark.parametrize("waiter", ["writer", "reader"])
async def test_a_waiter_that_arrives_as_the_last_reader_goes_is_not_forgotten(
    engines: Engines, dsn: str, waiter: str
) -> None:
    one, two = engines
    await one.submission.submit([NewTask("r", lock_keys=sharing("a"))])
    (reader,) = await running(one)
    if waiter == "writer":
        await one.submission.submit([NewTask("w", lock_keys=["a", "b"])])
        release: Awaitable[object] = one.work.complete([Completion(ref(reader), DONE)])
    else:
        # Behind a writer, which is cancelled in the meantime.
        (writer,) = await one.submission.submit([NewTask("w", lock_key="a")])
        assert await running(one) == []
        await one.submission.submit([NewTask("r", lock_keys=sharing("a", "b"))])
        release = one.cancel.cancel(writer.id, "no")
    with (
        held(dsn, "SELECT FROM lineshaft.lock WHERE key = 'a' FOR UPDATE") as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        claimed, _ = await race(look, holder, two.claims.claim("a2", 1, start=True), release)
    later = (await two.claims.claim("a2", 1, start=True)).tasks
    assert len(claimed.tasks) + len(later) == 1


async def end(engine: Engine, task: ClaimedTask, dice: random.Random) -> None:
    match dice.choice(["done", "done", "done", "failed", "released", "stolen"]):
        case "done":
            await engine.work.complete([Completion(ref(task), DONE)])
        case "failed":
            await engine.work.fail([Failure(ref(task), "bad", "timeout")])
        case "released":
            await release_claims(engine, [ref(task)])
        case _:
            # An operator takes one of its locks: the claim has to go.
            with contextlib.suppress(NotFoundError):
                await engine.locks.release(dice.choice(task.lock_keys), holder=task.id)
            await release_claims(engine, [ref(task)])


@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_is_left_waiting_when_clients_with_several_locks_meet(
    engines: Engines, dsn: str, clock: MovableClock, seed: int
) -> None:
    """No deadlock reaches a caller, and each release wakes those that wait for it, without the promoter."""
    dice = random.Random(seed)

    def some() -> NewTask:
        locks = [LockKey(key, shared=dice.random() < 0.5) for key in dice.sample(KEYS, dice.randint(1, 3))]
        return NewTask(
            dice.choice("xyz"), lock_keys=locks, max_attempts=100, retry=RetrySpec(strategy="immediate")
        )

    async def client(number: int, engine: Engine) -> None:
        for _ in range(15):
            claimed = await running(engine, dice.randint(1, 3), f"a{number}")
            await asyncio.sleep(0)
            for task in claimed:
                await end(engine, task, dice)

    one, two = engines
    for n in (0, *range(3, 8)):
        await one.fleet.register(NewAgent(id=f"a{n}", max_concurrent_tasks=100))
    await one.submission.submit([some() for _ in range(60)])
    await asyncio.gather(*(client(n, (one, two)[n % 2]) for n in range(8)))
    check_invariants(dsn)
    clock.advance(600)
    await one.maintenance.promote_due(100)
    for type_ in "xyz":
        await one.breakers.reset(type_)
    while claimed := await running(one, 5, "a0"):
        await one.work.complete([Completion(ref(task), DONE) for task in claimed])
    with psycopg.connect(dsn) as look:
        assert look.execute("SELECT * FROM lineshaft.task_live WHERE status = 'READY'").fetchall() == []
