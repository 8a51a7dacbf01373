"""Limits, with servers whose settings differ, in their own processes."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from pathlib import Path

import pytest

from lineshaft import Lineshaft
from lineshaft.errors import InvalidInputError
from tests.e2e.conftest import address, started
from tests.ports import reserved_port

UP = ("lineshaft.cli.main", "up", "--json", "--port")
NAME = "daily_budget_usd"
BREAKERS = "defaults: {{failureThreshold: {}}}"


@contextmanager
def serving(dsn: str, folder: Path, port: int, budget: int) -> Iterator[str]:
    """A server with this budget, and a file of breakers with the same figure; ended as an operator does."""
    file = folder / f"breakers-{budget}.yaml"
    file.write_text(BREAKERS.format(budget))
    variables = {
        "LINESHAFT_DATABASE_URL": dsn,
        "LINESHAFT_DAILY_BUDGET_USD": str(budget),
        "LINESHAFT_CIRCUIT_BREAKERS": str(file),
    }
    with started(*UP, str(port), cwd=folder, **variables) as server:
        yield address(server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def command(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    with started("lineshaft.cli.main", *words, cwd=folder, **variables) as process:
        out, _ = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out)


@pytest.mark.slow("servers in their own processes")
async def test_an_emergency_limit_survives_restarts_of_servers_that_disagree(
    dsn: str, tmp_path: Path
) -> None:
    """Without it they flip the limit at each restart, which `doctor` names; by command and over HTTP."""
    one, two = reserved_port(), reserved_port()
    on_database = {"LINESHAFT_DATABASE_URL": dsn}

    def run(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return command(tmp_path, *words, **(variables or on_database))

    async with Lineshaft(dsn) as shaft:
        with ExitStack() as servers:
            first = servers.enter_context(serving(dsn, tmp_path, one, 50))
            servers.enter_context(serving(dsn, tmp_path, two, 40))
            assert (await shaft.limits()).daily_budget_usd == 40, "the one that started last"
            for where in (on_database, {"LINESHAFT_URL": first}):
                doctor = await asyncio.to_thread(run, "doctor", "--json", **where)
                report = json.loads(doctor.stdout)
                budgets, breakers = report["problems"]
                assert f":{two} says 40" in budgets
                assert f":{one} says 50" in budgets
                assert "LINESHAFT_DAILY_BUDGET_USD differs" in budgets
                assert "LINESHAFT_CIRCUIT_BREAKERS differs" in breakers
                assert len(report["servers"]) == 2
                assert doctor.returncode == 1
            emergency = await asyncio.to_thread(run, "limits", "set", "--daily-budget", "1")
            assert "Set by hand" in emergency.stdout
        assert (await shaft.limits()).servers == []
        for budget in (50, 40):
            with serving(dsn, tmp_path, one, budget):
                limits = await shaft.limits()
                assert (limits.daily_budget_usd, limits.by_hand) == (Decimal(1), [NAME])
        with ExitStack() as servers:
            servers.enter_context(serving(dsn, tmp_path, two, 40))
            url = servers.enter_context(serving(dsn, tmp_path, one, 50))
            async with Lineshaft(url) as over_http:
                with pytest.raises(InvalidInputError, match="unknown limit"):
                    await over_http.change_limits(from_settings=["everything"])
                returned = await over_http.change_limits(from_settings=[NAME], reason="it is over")
            assert (returned.daily_budget_usd, returned.by_hand) == (Decimal(50), [])
        await shaft.change_limits(daily_budget_usd=2)
        cleared = await asyncio.to_thread(run, "limits", "set", "--from-settings", NAME, "--json")
        assert json.loads(cleared.stdout)["daily_budget_usd"] == 2, "no server says anything: it stays"

        kinds = ["limits.changed"]
        changes = [event.data async for event in shaft.events(None, kinds=kinds, follow=False)]
    by_settings = [
        (change["limits"][NAME]["to"], change.get("actor") == "settings")
        for change in changes
        if NAME in change["limits"]
    ]
    assert by_settings == [
        *(("50", True), ("40", True), ("1", False)),
        *(("50", False), ("2", False)),
    ]
