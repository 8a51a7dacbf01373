"""The last dollar, and two who want it: of the day, and of a ceiling that is just being raised."""

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimRef, Completion
from tests.invariants import check_invariants
from tests.races.helpers import DONE, held, patient, race, running
from tests.world import release_claims

DAY = "SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.day', 0))"
RULES = Rules(limits={"daily_budget_usd": Decimal(3)})


@pytest.fixture
async def engines(dsn: str, clock: MovableClock) -> AsyncIterator[tuple[Engine, Engine]]:
    place = patient(dsn)
    async with Engine(place, clock=clock, rules=RULES) as one, Engine(place, clock=clock, rules=RULES) as two:
        for agent in ("a1", "a2"):
            await one.fleet.register(NewAgent(id=agent, max_concurrent_tasks=100))
        yield one, two
    check_invariants(dsn)


async def test_two_claims_dont_get_the_days_last_dollar_twice(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """F-27, R-237: also when they come from two nodes, for two agents."""
    one, two = engines
    await one.submission.submit([NewTask("code", max_cost_usd=2) for _ in range(2)])
    with held(dsn, DAY) as holder:
        claims = await race(
            connection,
            holder,
            one.claims.claim("a1", 1, limit=2, start=True),
            two.claims.claim("a2", 1, limit=2, start=True),
        )

    assert sorted(len(claim.tasks) for claim in claims) == [0, 1]
    assert (await one.budgets.day()).reserved_usd == 2


async def test_many_claims_and_ends_at_once_stay_within_the_day(engines: tuple[Engine, Engine]) -> None:
    """Sixteen rounds of both nodes: what is reserved and spent never exceeds the ceiling."""
    one, two = engines
    await one.submission.submit([NewTask("code", max_cost_usd=0.5) for _ in range(40)])

    async def work(engine: Engine, agent: str) -> int:
        done = 0
        for _ in range(8):
            tasks = await running(engine, 3, agent)
            await engine.work.complete([Completion(ClaimRef(t.id, t.epoch), DONE) for t in tasks[:2]])
            spent = await engine.budgets.day()
            assert spent.spent_usd + spent.reserved_usd <= 3
            done += len(tasks[:2])
            await release_claims(engine, [ClaimRef(t.id, t.epoch) for t in tasks[2:]])
        return done

    assert sum(await asyncio.gather(work(one, "a1"), work(two, "a2"))) == 32


async def test_a_ceiling_is_raised_while_a_claim_parks(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """Whichever is first: the task is available afterwards, at the latest after the promoter's next run."""
    one, two = engines
    tasks = [NewTask("code", max_cost_usd=2, key="a"), NewTask("x", key="b")]
    dag = await one.submission.submit_dag("a DAG", tasks, budget_ceiling_usd=1)
    task_id = dag.tasks["a"].id
    with held(dsn, "SELECT FROM lineshaft.dag WHERE id = %s FOR UPDATE", dag.id) as holder:
        claim = asyncio.ensure_future(two.claims.claim("a2", 1, types=["code"], start=True))
        await race(connection, holder, one.budgets.set_dag_budget(dag.id, 3))
        await claim

    if not claim.result().tasks:
        await one.maintenance.recheck_parked(10)
        assert [task.id for task in await running(one)] == [task_id]
