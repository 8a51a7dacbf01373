"""Limits while servers of two versions run: what a person sets stays, whichever of them starts."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pytest

from lineshaft import Lineshaft
from lineshaft.engine.postgres import migrate
from tests.e2e.conftest import address
from tests.ports import reserved_port
from tests.upgrade.versions import Version, previous_version, this_version


@contextmanager
def serving(version: Version, dsn: str, folder: Path, budget: int) -> Iterator[str]:
    settings = {"LINESHAFT_DATABASE_URL": dsn, "LINESHAFT_DAILY_BUDGET_USD": str(budget)}
    up = ("-m", "lineshaft.cli.main", "up", "--json", "--port", str(reserved_port()))
    with version.started(*up, cwd=folder, settings=settings) as server:
        yield address(server)


@pytest.mark.slow("servers of two versions in their own processes")
async def test_what_a_person_sets_stays_beside_servers_of_the_previous_version(
    empty_dsn: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    old, new = previous_version(pytestconfig.cache), this_version()
    await asyncio.to_thread(migrate.up, empty_dsn)
    async with Lineshaft(empty_dsn) as shaft:

        async def daily() -> int:
            limit = (await shaft.limits()).daily_budget_usd
            assert limit is not None
            return int(limit)

        with serving(old, empty_dsn, tmp_path, 50) as url:
            assert await daily() == 50
            async with Lineshaft(url) as over_old:
                await over_old.change_limits(daily_budget_usd=1)
        with serving(new, empty_dsn, tmp_path, 40):
            assert await daily() == 1, "set by hand, with the previous version"
        await shaft.change_limits(daily_budget_usd=2)
        with serving(old, empty_dsn, tmp_path, 60):
            assert await daily() == 2, "set by hand, with this version"
        with serving(new, empty_dsn, tmp_path, 40):
            limits = await shaft.limits()
            assert (limits.daily_budget_usd, limits.by_hand) == (Decimal(2), ["daily_budget_usd"])
        await shaft.change_limits(from_settings=["daily_budget_usd"])
        with serving(new, empty_dsn, tmp_path, 40):
            assert await daily() == 40
        with serving(old, empty_dsn, tmp_path, 50):
            assert await daily() == 50
