"""Defaults of types, with commands and agents in their own processes."""

import json
from decimal import Decimal
from pathlib import Path

import pytest

from lineshaft import Lineshaft
from tests.e2e.conftest import started

SPENDER = """
import sys
from lineshaft import Agent, TaskContext

agent = Agent("spender", budget_usd=0.10, max_concurrent_tasks=4)

@agent.task("pay", max_cost_usd=0.10, max_attempts=1)
async def pay(ctx: TaskContext) -> None:
    ctx.spend(0.10)

agent.main(sys.argv[1], until_idle=True)
"""


def command(*arguments: str, dsn: str, cwd: Path) -> str:
    with started(
        "lineshaft.cli.main", *arguments, cwd=cwd, LINESHAFT_DATABASE_URL=dsn, LINESHAFT_HOME=str(cwd)
    ) as process:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    return printed


@pytest.mark.slow("commands and agents in their own processes")
async def test_limits_of_a_handler_hold_for_tasks_from_the_command_line(dsn: str, tmp_path: Path) -> None:
    """The tasks are submitted before the agent ever ran: 0.10 USD pay for one of them."""
    (tmp_path / "spender.py").write_text(SPENDER)
    for _ in range(4):
        command("submit", "pay", dsn=dsn, cwd=tmp_path)

    with started("spender", dsn, cwd=tmp_path) as spender:
        assert spender.wait(60) == 0

    async with Lineshaft(dsn) as shaft:
        agent = await shaft.get_agent("spender")
        tasks = (await shaft.list()).items
        assert (agent.spent_usd, agent.reserved_usd) == (Decimal("0.1"), Decimal(0))
        assert sorted(task.status for task in tasks) == ["COMPLETED", "READY", "READY", "READY"]
        assert {(task.max_cost_usd, task.max_attempts) for task in tasks} == {(Decimal("0.1"), 1)}

    # And of a task that is submitted while the type is known, and of one that a person decides about.
    command("submit", "pay", dsn=dsn, cwd=tmp_path)
    assert '"max_cost_usd": 0.1' in command("types", "show", "pay", "--json", dsn=dsn, cwd=tmp_path)
    assert "declared by spender" in command("types", "show", "pay", dsn=dsn, cwd=tmp_path)
    changes = ("--max-cost", "0.05", "--max-attempts", "none", "--retry", '{"strategy": "fixed"}')
    assert "0.05 USD, set by hand" in command("types", "set", "pay", *changes, dsn=dsn, cwd=tmp_path)
    assert "0.05 USD" in command("types", dsn=dsn, cwd=tmp_path)
    async with Lineshaft(dsn) as shaft:
        newest = (await shaft.list()).items[0]
    assert (newest.max_cost_usd, newest.max_attempts) == (Decimal("0.05"), 1)
    assert newest.retry.strategy == "fixed"


@pytest.mark.slow("commands and agents in their own processes")
async def test_a_task_that_reserves_nothing_of_a_budget_is_warned_about(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "spender.py").write_text(SPENDER.replace('"pay", max_cost_usd=0.10', '"pay"'))
    for _ in range(2):
        command("submit", "pay", dsn=dsn, cwd=tmp_path)
    with started("spender", dsn, cwd=tmp_path) as spender:
        assert spender.wait(60) == 0

    report = json.loads(command("doctor", "--json", dsn=dsn, cwd=tmp_path))
    (warning,) = [advice for advice in report["advice"] if "budget" in advice]
    assert "Agent 'spender' has a budget, but claimed a task of type 'pay' without max_cost_usd" in warning
    assert report["problems"] == []
