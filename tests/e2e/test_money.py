"""Money, with a server and agents in their own processes."""

from decimal import Decimal
from pathlib import Path

import pytest

from lineshaft import Lineshaft, NewTask
from tests.e2e.conftest import address, started

AGENT = """
import asyncio, sys
from lineshaft import Agent, Lineshaft

async def main():
    agent = Agent(sys.argv[2], max_concurrent_tasks=1)

    @agent.task("t")
    async def t(ctx):
        ctx.spend(0.3)

    async with Lineshaft(sys.argv[1], max_connections=2) as shaft:
        await agent.run(shaft, until_idle=True)

asyncio.run(main())
"""


@pytest.mark.slow("a server and agents in their own processes")
async def test_agents_without_the_variable_obey_the_daily_budget(dsn: str, tmp_path: Path) -> None:
    """R-237: row 1; one agent over HTTP, one on the database, neither knows of the limit."""
    (tmp_path / "spender.py").write_text(AGENT)
    settings = {"LINESHAFT_DATABASE_URL": dsn, "LINESHAFT_DAILY_BUDGET_USD": "1"}
    up = ("lineshaft.cli.main", "up", "--json", "--port", "0")
    with started(*up, cwd=tmp_path, **settings) as server:
        url = address(server)
        async with Lineshaft(url) as shaft:
            await shaft.submit_many([NewTask("t") for _ in range(20)])
            with (
                started("spender", url, "over-http", cwd=tmp_path) as one,
                started("spender", dsn, "on-database", cwd=tmp_path) as two,
            ):
                assert [one.wait(60), two.wait(60)] == [0, 0]
            limits = await shaft.limits()

    assert limits.daily_budget_usd == 1
    # Each of the two may have been in the middle of a task.
    assert 1 <= limits.spent_today_usd <= Decimal("1.5")


@pytest.mark.slow("a server and agents in their own processes")
async def test_a_bound_token_carries_its_agents_budget(dsn: str, tmp_path: Path) -> None:
    """R-231: row 10; what the agent declares doesn't count, and it can't be another agent."""
    up = ("lineshaft.cli.main", "up", "--json", "--port", "0")
    with started(*up, cwd=tmp_path, LINESHAFT_DATABASE_URL=dsn) as server:
        url = address(server)
        async with Lineshaft(dsn) as admin:
            token = await admin.create_token("worker", "agent", agent_id="bob", budget_usd=0.5)
            await admin.submit_many([NewTask("t") for _ in range(9)])
            (tmp_path / "spender.py").write_text(
                AGENT.replace("concurrent_tasks=1", "concurrent_tasks=1, budget_usd=99")
            )
            with started("spender", url, "bob", cwd=tmp_path, LINESHAFT_TOKEN=token.token) as bob:
                assert bob.wait(60) == 0
            with started("spender", url, "eve", cwd=tmp_path, LINESHAFT_TOKEN=token.token) as eve:
                assert eve.wait(60) != 0
            agents = {agent.id: agent for agent in (await admin.agents()).items}

    assert set(agents) == {"bob"}
    assert (agents["bob"].budget_usd, agents["bob"].spent_usd) == (Decimal("0.5"), Decimal("0.6"))
