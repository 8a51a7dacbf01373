"""A person changes an agent while its instances claim."""

import asyncio

import psycopg

from lineshaft.engine.engine import Engine
from tests.races.helpers import blocked_by, held

#: What a claim locks first, and what it locks next where there is a budget.
INSTANCE = "SELECT FROM lineshaft.instance WHERE agent_id = %s FOR NO KEY UPDATE"
AGENT = "SELECT FROM lineshaft.agent WHERE id = %s FOR NO KEY UPDATE NOWAIT"


async def test_a_change_of_money_does_not_wait_for_claims(engines: tuple[Engine, Engine], dsn: str) -> None:
    one, _ = engines
    await one.fleet.patch("a1", budget_usd=1)
    with held(dsn, INSTANCE, "a1"):
        changed = await asyncio.wait_for(one.fleet.patch("a1", add_budget_usd=1), 60)

    assert changed.budget_usd == 2


async def test_a_change_of_status_waits_for_a_claim_without_the_agent_that_the_claim_needs(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    one, _ = engines
    with held(dsn, INSTANCE, "a1") as claim, psycopg.connect(dsn, autocommit=True) as look:
        changing = asyncio.ensure_future(one.fleet.patch("a1", status="draining"))
        await blocked_by(look, claim)
        claim.execute(AGENT.encode(), ["a1"])
        claim.commit()
        changed = await changing

    assert (changed.status, changed.instances[0].status) == ("draining", "draining")
