"""Claims that choose accounts while one closes, and reports that are written at the same time."""

import asyncio
from datetime import timedelta

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimedTask, Completion, Failure
from tests.races.helpers import held, waiting
from tests.world import ref

Engines = tuple[Engine, Engine]
INSTANCE = "SELECT FROM lineshaft.instance WHERE agent_id = 'ann' FOR UPDATE"
ACCOUNTS = "SELECT FROM lineshaft.account FOR UPDATE"
AGENT = "SELECT FROM lineshaft.agent WHERE id = 'ann' FOR UPDATE"
ALERTS = "SELECT kinds[1] FROM lineshaft.event WHERE kinds[1] LIKE 'accounts.%' ORDER BY seq"


@pytest.fixture
async def coders(engines: Engines) -> Engines:
    """Two nodes, and an agent with two accounts."""
    await engines[0].fleet.register(
        NewAgent(id="ann", accounts=("team-1", "team-2"), max_concurrent_tasks=9, budget_usd=100)
    )
    return engines


async def submit(engine: Engine, n: int) -> None:
    await engine.submission.submit([NewTask("code") for _ in range(n)])


async def take(engine: Engine, limit: int = 1) -> list[ClaimedTask]:
    return (await engine.claims.claim("ann", 1, limit=limit, start=True)).tasks


def window(task: ClaimedTask, clock: MovableClock, hours: float = 5) -> Failure:
    return Failure(ref(task), "usage limit", "rate_limit", retry_at=clock.now() + timedelta(hours=hours))


@pytest.mark.parametrize("row", [INSTANCE, AGENT])
async def test_an_account_closes_while_claims_wait_for_a_row(
    coders: Engines, dsn: str, clock: MovableClock, row: str
) -> None:
    """Their statements began before it: they must not use it, though their snapshots don't show it."""
    one, two = coders
    await submit(one, 3)
    (task,) = await take(one)
    assert task.account == "team-1"
    with held(dsn, row) as holder, psycopg.connect(dsn, autocommit=True) as look:
        claims = [asyncio.ensure_future(take(engine)) for engine in coders]
        await waiting(look, 2)
        # As a failure does; its own transaction would wait for the row, too.
        look.execute(
            "INSERT INTO lineshaft.slowdown (key, signalled_at, until) VALUES ('account:team-1', %s, %s)",
            [clock.now(), clock.now() + timedelta(hours=5)],
        )
        holder.rollback()
        taken = [found for claim in claims for found in await claim]

    assert [found.account for found in taken] == ["team-2", "team-2"]
    # What was held before goes on.
    (moved,) = await two.work.complete([Completion(ref(task), b"1")])
    assert moved.status is Status.COMPLETED


@pytest.mark.parametrize("row", [INSTANCE, AGENT])
async def test_all_accounts_close_while_a_claim_waits(
    coders: Engines, dsn: str, clock: MovableClock, row: str
) -> None:
    """It claims nothing, and nothing is left half claimed: the invariants are checked afterwards."""
    one, _ = coders
    await submit(one, 3)
    with held(dsn, row) as holder, psycopg.connect(dsn, autocommit=True) as look:
        claiming = asyncio.ensure_future(take(one, 3))
        await waiting(look, 1)
        look.execute(
            "INSERT INTO lineshaft.slowdown (key, signalled_at, until)"
            " SELECT 'account:' || name, %s, %s FROM lineshaft.account",
            [clock.now(), clock.now() + timedelta(hours=5)],
        )
        holder.rollback()
        assert await claiming == []
        assert look.execute("SELECT count(*) FROM lineshaft.task_live WHERE status = 'READY'").fetchone() == (
            3,
        )


async def test_two_claims_at_once_take_accounts_in_turn(coders: Engines, dsn: str) -> None:
    """The second waits for the instance, and sees what the first chose."""
    one, _ = coders
    await submit(one, 2)
    with held(dsn, INSTANCE) as holder, psycopg.connect(dsn, autocommit=True) as look:
        claims = [asyncio.ensure_future(take(engine)) for engine in coders]
        await waiting(look, 2)
        holder.rollback()
        taken = [found.account for claim in claims for found in await claim]

    assert sorted(filter(None, taken)) == ["team-1", "team-2"]


async def test_a_claim_never_waits_for_an_account(coders: Engines, dsn: str) -> None:
    """Another claim that has it locked says the same about it."""
    one, _ = coders
    await submit(one, 1)
    with held(dsn, ACCOUNTS):
        assert len(await take(one)) == 1


async def test_two_failures_close_the_last_two_accounts(
    coders: Engines, dsn: str, clock: MovableClock
) -> None:
    """Neither transaction sees the other: they look after their commits, and one of them reports."""
    one, _ = coders
    await submit(one, 2)
    tasks = await take(one, 2)
    with held(dsn, INSTANCE) as holder, psycopg.connect(dsn, autocommit=True) as look:
        fails = [
            asyncio.ensure_future(engine.work.fail([window(task, clock)]))
            for engine, task in zip(coders, tasks, strict=True)
        ]
        await waiting(look, 2)
        holder.rollback()
        await asyncio.gather(*fails)
        await asyncio.gather(*(engine.slowdowns.report_outages() for engine in coders))
        assert look.execute(ALERTS).fetchall() == [("accounts.closed",)]
        clock.advance(timedelta(hours=5).total_seconds())
        await asyncio.gather(*(engine.slowdowns.report_outages() for engine in coders))
        assert look.execute(ALERTS).fetchall() == [("accounts.closed",), ("accounts.opened",)]


async def test_both_nodes_report_at_once(coders: Engines, dsn: str, clock: MovableClock) -> None:
    one, _ = coders
    await submit(one, 2)
    tasks = await take(one, 2)
    await one.work.fail([window(task, clock) for task in tasks])
    with psycopg.connect(dsn, autocommit=True) as look:
        look.execute("DELETE FROM lineshaft.account_outage")
        with held(
            dsn, "INSERT INTO lineshaft.account_outage (agent_id, since) VALUES ('ann', now())"
        ) as holder:
            reports = [asyncio.ensure_future(engine.slowdowns.report_outages()) for engine in coders]
            await waiting(look, 2)
            holder.rollback()
            await asyncio.gather(*reports)
        assert look.execute(ALERTS).fetchall() == [("accounts.closed",)] * 2
