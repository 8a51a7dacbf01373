"""Claims that meet at a quota: nobody counts what another is about to change, and no wake-up is lost."""

import asyncio

import psycopg
import pytest

from lineshaft.duties.quota_keeper import QuotaKeeper
from lineshaft.engine.engine import Engine
from lineshaft.errors import QuotaFullError
from lineshaft.model.tasks import NewTask
from lineshaft.operations.quotas import SetQuota
from lineshaft.types.work import ClaimRef, Completion
from tests.races.helpers import DONE, held, race, running, waiting
from tests.world import ref

Engines = tuple[Engine, Engine]
#: What claims of the key lock.
COUNT = "SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.quota q' || chr(31) || 'k:a', 0))"


async def quota(engine: Engine, max_running: int, match: str = "k:*", name: str = "q") -> None:
    await engine.quotas.set(SetQuota(name=name, match=match, max_running=max_running))


async def submit(engine: Engine, n: int, *keys: str) -> list[str]:
    tasks = [NewTask("x", quota_keys=keys or ("k:a",)) for _ in range(n)]
    return [found.id for found in await engine.submission.submit(tasks)]


async def test_two_claims_race_for_the_last_slot(engines: Engines, dsn: str) -> None:
    one, two = engines
    await quota(one, 2)
    await submit(one, 3)
    await running(one)
    with held(dsn, COUNT) as holder, psycopg.connect(dsn, autocommit=True) as look:
        first, second = await race(look, holder, running(one), running(two, agent="a2"))
        assert len(first) + len(second) == 1
        assert look.execute("SELECT count(*) FROM lineshaft.slot").fetchone() == (2,)


async def test_a_slot_is_released_while_a_claim_parks_what_waits_for_it(engines: Engines, dsn: str) -> None:
    """The release looks before the claim has committed: the claim's own look finds the slot."""
    one, two = engines
    await quota(one, 1)
    _, waiter = await submit(one, 2)
    (task,) = await running(one)
    # The claim has counted, and is held up before it commits.
    blocker = "INSERT INTO lineshaft.quota_wake (quota, key, at) VALUES ('q', 'k:a', now())"
    with held(dsn, blocker) as holder, psycopg.connect(dsn, autocommit=True) as look:
        claiming = asyncio.ensure_future(running(two, agent="a2"))
        await waiting(look, 1)
        await one.work.complete([Completion(ref(task), DONE)])
        holder.rollback()
        assert [task.id for task in await claiming] == [waiter]


async def test_a_slot_is_released_once_what_waits_for_it_is_parked(engines: Engines, dsn: str) -> None:
    one, two = engines
    await quota(one, 1)
    _, waiter = await submit(one, 2)
    (task,) = await running(one)
    assert await running(two, agent="a2") == []
    with psycopg.connect(dsn, autocommit=True) as look:
        (channel,) = look.execute("SELECT lineshaft.channel()").fetchone() or ("",)
        look.execute(f"LISTEN {channel}")
        await one.work.complete([Completion(ref(task), DONE)])
        row = look.execute("SELECT lane_id::text FROM lineshaft.task_live WHERE id = %s", [waiter]).fetchone()
        assert row is not None
        assert row[0] in [notice.payload for notice in look.notifies(timeout=60, stop_after=1)]
    assert [task.id for task in await running(two, agent="a2")] == [waiter]


@pytest.mark.parametrize("keys", ["the task's own", "the type's"])
async def test_a_process_dies_before_its_look(engines: Engines, dsn: str, keys: str) -> None:
    """The duty finds the slot that doesn't count, and wakes what waits for it."""
    one, two = engines
    await quota(one, 1, "k:*" if keys == "the task's own" else "type:x")
    _, waiter = await submit(one, 2)
    (task,) = await running(one)
    assert await running(two, agent="a2") == []
    with psycopg.connect(dsn, autocommit=True) as look:
        name = "lineshaft.look_at_quotas_1(text[], text[], boolean, timestamptz)"
        look.execute(f"ALTER FUNCTION {name} RENAME TO gone")
        await one.work.complete([Completion(ref(task), DONE)])
        look.execute(f"ALTER FUNCTION {name.replace('look_at_quotas_1', 'gone')} RENAME TO look_at_quotas_1")
        assert look.execute("SELECT count(*) FROM lineshaft.slot").fetchone() == (1,)
        await QuotaKeeper(two.quotas).run_once()
        assert look.execute("SELECT count(*) FROM lineshaft.slot").fetchone() == (0,)
    assert [task.id for task in await running(two, agent="a2")] == [waiter]


async def test_tasks_with_keys_in_opposite_order(engines: Engines) -> None:
    one, two = engines
    await quota(one, 1)
    await submit(one, 10, "k:a", "k:b")
    await submit(one, 10, "k:b", "k:a")
    done: list[str] = []

    async def work(engine: Engine, agent: str) -> None:
        while len(done) < 20:
            for task in await running(engine, 3, agent):
                await engine.work.complete([Completion(ref(task), DONE)])
                done.append(task.id)

    await asyncio.gather(work(one, "a1"), work(two, "a2"), work(one, "a2"))

    assert len({*done}) == 20


async def test_submissions_of_a_key_take_turns(engines: Engines, dsn: str) -> None:
    """Neither counts what the other is about to write."""
    one, two = engines
    await one.quotas.set(SetQuota(name="q", match="k:*", max_waiting=3))
    turn = "SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.queue q' || chr(31) || 'k:a', 0))"
    with held(dsn, turn) as holder, psycopg.connect(dsn, autocommit=True) as look:
        outcomes = await race(look, holder, submit(one, 2), submit(two, 2))
        assert [type(outcome) for outcome in sorted(outcomes, key=str)] == [QuotaFullError, list]
        assert look.execute("SELECT count(*) FROM lineshaft.task").fetchone() == (2,)


async def test_a_quota_is_set_while_a_claim_is_under_way(engines: Engines, dsn: str) -> None:
    """The claim began before there was a quota: its task counts once the duty has looked."""
    one, two = engines
    first, second = await submit(one, 2)
    with (
        held(dsn, "SELECT FROM lineshaft.instance WHERE agent_id = 'a1' FOR UPDATE") as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        # By the long way, which reads first.
        await one.pauses.pause("something else")
        claiming = asyncio.ensure_future(running(one))
        await waiting(look, 1)
        await quota(two, 1)
        holder.rollback()
        assert [task.id for task in await claiming] == [first]
    await QuotaKeeper(two.quotas).run_once()
    assert await running(two, agent="a2") == []
    await one.work.complete([Completion(ClaimRef(first, 1), DONE)])
    assert [task.id for task in await running(two, agent="a2")] == [second]
