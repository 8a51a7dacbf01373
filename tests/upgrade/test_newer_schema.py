"""Processes of this version while a newer one migrates their database, and after it."""

import asyncio
import re
from itertools import chain

import pytest

from lineshaft import Agent, Lineshaft
from lineshaft.engine.postgres import describe, migrate
from lineshaft.engine.postgres.migrate import Migration
from tests.http_server import ServerThread
from tests.upgrade.supply import all_ended, check_ends, submit
from tests.upgrade.worker import HANDLERS

_TABLE = re.compile(r"^CREATE TABLE lineshaft\.(\w+)", re.MULTILINE)


def next_migrations() -> list[Migration]:
    """Those of this version and an additive one of each table, as the next version may have them."""
    now = migrate.bundled()
    tables = _TABLE.findall(describe.expected())
    assert "task_live" in tables
    return now + [
        Migration(number, f"next_{table}", _ADD.format(table))
        for number, table in enumerate(tables, len(now) + 1)
    ]


_ADD = """ALTER TABLE lineshaft.{} ADD COLUMN added_later text COLLATE "C" NOT NULL DEFAULT 'later';"""


def employ(name: str) -> Agent:
    agent = Agent(name, max_concurrent_tasks=3)
    for handler in HANDLERS:
        agent.task(handler.__name__)(handler)
    return agent


@pytest.mark.slow("migrates every table under load")
async def test_work_goes_on_while_a_newer_version_migrates_and_after_it(
    dsn: str, server_thread: ServerThread
) -> None:
    """Statements that are prepared, and those of processes that start later, don't mind new columns."""
    agents = [employ("on-database"), employ("over-http")]
    with server_thread.serving(dsn) as url:
        async with Lineshaft(dsn) as shaft, Lineshaft(url) as remote, asyncio.TaskGroup() as running:
            for agent, client in zip(agents, (shaft, remote), strict=True):
                running.create_task(agent.run(client, handle_signals=False))
            # Often enough that connections have prepared their statements.
            for where in chain.from_iterable([(dsn, url)] * 3):
                await submit(where)
            await all_ended(dsn)
            await submit(url)
            migrating = asyncio.to_thread(migrate.up, dsn, next_migrations())
            supplying = asyncio.gather(*(submit(where) for where in (dsn, url)))
            assert len(await migrating) > 1
            await supplying
            for where in (dsn, url):
                await submit(where)
            await all_ended(dsn)
            for agent in agents:
                agent.stop()
    with server_thread.serving(dsn) as later:
        async with Lineshaft(later) as shaft:
            assert (await shaft.list(limit=1)).items[0].status == "COMPLETED"
    check_ends(dsn)
