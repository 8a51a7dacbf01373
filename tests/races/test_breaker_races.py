"""Breakers under concurrency: one probe however many claim, and every failure is counted."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.model.breaker import BreakerConfig, BreakerPolicy
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimRef, Completion
from tests.invariants import check_invariants
from tests.races.helpers import DONE, held, patient, race, running, status, waiting
from tests.world import Actions, release_claims

ROW = "SELECT FROM lineshaft.breaker WHERE key = 'code' FOR UPDATE"
CLAIMERS = 16


@pytest.fixture
async def engine(dsn: str, clock: MovableClock) -> AsyncIterator[Engine]:
    rules = Rules(BreakerPolicy(BreakerConfig(failure_threshold=2)))
    async with Engine(patient(dsn), clock=clock, max_connections=CLAIMERS, rules=rules) as opened:
        for n in range(CLAIMERS):
            await opened.fleet.register(NewAgent(id=f"a{n}", max_concurrent_tasks=10))
        yield opened
    check_invariants(dsn)


async def open_breaker(engine: Engine, clock: MovableClock) -> None:
    await engine.submission.submit([NewTask("code", max_attempts=1) for _ in range(2)])
    for task in await running(engine, 2):
        await Actions(engine).fail(task)
    clock.advance(61)


def row(connection: psycopg.Connection) -> tuple[str, str | None, int]:
    found = connection.execute(
        "SELECT state::text, probe_task_id, failures FROM lineshaft.breaker WHERE key = 'code'"
    ).fetchone()
    assert found is not None
    return found


async def test_sixteen_claimers_get_one_probe(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-181: exactly one, round after round, whether it fails or is handed back."""
    await open_breaker(engine, clock)
    await engine.submission.submit([NewTask("code", max_attempts=1) for _ in range(40)])
    for n in range(10):
        claims = await asyncio.gather(
            *(engine.claims.claim(f"a{k}", 1, limit=3, start=True) for k in range(CLAIMERS))
        )
        (probe,) = [task for claim in claims for task in claim.tasks]
        assert row(connection)[:2] == ("half_open", probe.id)
        if n % 2:
            await Actions(engine).fail(probe)
            clock.advance(61)
        else:
            await release_claims(engine, [ClaimRef(probe.id, probe.epoch)])
    (probe,) = await running(engine)
    await engine.work.complete([Completion(ClaimRef(probe.id, probe.epoch), DONE)])

    assert row(connection) == ("closed", None, 0)
    assert len(await running(engine, 9)) == 9


@pytest.mark.parametrize("forced", [False, True])
async def test_a_person_is_quicker_than_the_probe(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock, dsn: str, forced: bool
) -> None:
    """The breaker is reset, or opened permanently, while a claim takes the probe: there is no probe."""
    await open_breaker(engine, clock)
    (task,) = await engine.submission.submit([NewTask("code")])
    by_hand = engine.breakers.open if forced else engine.breakers.reset
    with held(dsn, ROW) as holder:
        person = asyncio.ensure_future(by_hand("code"))
        (claim, _) = await race(connection, holder, engine.claims.claim("a1", 1, start=True), person)

    if claim.tasks:
        # The claim was first in line after all.
        assert row(connection)[0] == ("open" if forced else "closed")
        return
    assert status(connection, task.id) == "READY"
    assert row(connection)[:2] == ("open" if forced else "closed", None)
    assert connection.execute("SELECT held FROM lineshaft.instance WHERE agent_id = 'a1'").fetchone() == (0,)


async def test_a_claim_that_waits_for_the_breaker_keeps_others_out(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock, dsn: str
) -> None:
    await open_breaker(engine, clock)
    await engine.submission.submit([NewTask("code") for _ in range(3)])
    with held(dsn, ROW) as holder:
        first = asyncio.ensure_future(engine.claims.claim("a1", 1, start=True))
        await waiting(connection, 1)
        assert (await engine.claims.claim("a2", 1, limit=3, start=True)).tasks == []
        (claim,) = await race(connection, holder, first)

    assert row(connection)[:2] == ("half_open", claim.tasks[0].id)


async def test_failures_at_once_open_it_once(
    engine: Engine, connection: psycopg.Connection, dsn: str
) -> None:
    """R-185: each is counted, one alert is given."""
    await engine.submission.submit([NewTask("code") for _ in range(4)])
    tasks = await running(engine, 4)
    await Actions(engine).fail(tasks[0])
    with held(dsn, ROW) as holder:
        await race(connection, holder, *(Actions(engine).fail(task) for task in tasks[1:]))

    assert row(connection) == ("open", None, 4)
    alerts = connection.execute("SELECT count(*) FROM lineshaft.events WHERE kind = 'alert'").fetchone()
    assert alerts == (1,)


async def test_the_first_failures_of_a_type_at_once(engine: Engine, connection: psycopg.Connection) -> None:
    """The row doesn't exist yet."""
    await engine.submission.submit([NewTask("code") for _ in range(CLAIMERS)])
    tasks = [task for n in range(2) for task in await running(engine, 8, f"a{n}")]
    await asyncio.gather(*(Actions(engine).fail(task) for task in tasks))

    assert row(connection) == ("open", None, CLAIMERS)


async def test_a_success_beside_a_failure(engine: Engine, connection: psycopg.Connection, dsn: str) -> None:
    """In whatever order they get there, the count is one that some order gives."""
    await engine.submission.submit([NewTask("code") for _ in range(3)])
    first, second, third = await running(engine, 3)
    await Actions(engine).fail(first)
    done = Completion(ClaimRef(third.id, third.epoch), DONE)
    with held(dsn, ROW) as holder:
        await race(connection, holder, engine.work.complete([done]), Actions(engine).fail(second))

    assert row(connection) in {("closed", None, 1), ("open", None, 2)}


async def test_two_reapers_find_the_tasks_of_one_lost_process(
    engines: tuple[Engine, Engine], clock: MovableClock, dsn: str
) -> None:
    """F-4: the breaker's row decides, so that the loss counts once."""
    one, two = engines
    await one.submission.submit([NewTask("code") for _ in range(8)])
    assert len(await running(one, 8)) == 8
    clock.advance(200)
    with psycopg.connect(dsn, autocommit=True) as look:
        look.execute("INSERT INTO lineshaft.breaker (key) VALUES ('code')")
        with held(dsn, "SELECT FROM lineshaft.breaker FOR UPDATE") as holder:
            first = asyncio.ensure_future(one.maintenance.reap(4))
            await waiting(look, 1)
            # The second one waits for the agent, which the first has locked, and then for the breaker.
            (second,) = await race(look, holder, two.maintenance.reap(4), already=1)
            assert sum((await first).values()) == sum(second.values()) == 4

        found = look.execute("SELECT state::text, failures FROM lineshaft.breaker").fetchall()
        assert found == [("closed", 1)]
