"""Behind a pooler in transaction mode nothing may rely on a session."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lineshaft import Agent, Lineshaft, NewTask, TaskContext
from lineshaft.cli.main import main
from lineshaft.engine.postgres import migrate
from lineshaft.errors import SettingsError
from lineshaft.settings import Settings
from tests.chaos.cluster import Cluster
from tests.chaos.faults import pgbouncer
from tests.chaos.pooler import SERVER_CONNECTIONS, Pooler

pytestmark = pytest.mark.skipif(pgbouncer() is None, reason="needs PgBouncer (apt-get install pgbouncer)")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lineshaft-chaos-") as directory:
        # The accounts of the servers must be able to reach their files.
        Path(directory).chmod(0o711)
        yield Path(directory)


@pytest.fixture
def mode() -> str:
    return "transaction"


@pytest.fixture
async def pooled(place: Path, mode: str) -> AsyncIterator[Settings]:
    cluster = Cluster(place)
    await cluster.start(standby=False)
    migrate.up(cluster.primary.dsn)
    program = pgbouncer()
    assert program is not None
    pooler = Pooler(program, place, cluster.account, lambda: cluster.primary.port, mode)
    await pooler.start()
    yield Settings(database_url=pooler.dsn, pooler="transaction")
    pooler.stop()
    await cluster.stop()


async def test_a_pooler_in_transaction_mode_is_recognised(
    pooled: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it isn't set, every process says so before it fails in stranger ways."""
    dsn = str(pooled.database_url)
    with pytest.raises(SettingsError, match="LINESHAFT_POOLER=transaction"):
        async with Lineshaft(settings=replace(pooled, pooler="none")):
            pass
    with pytest.raises(SettingsError, match="LINESHAFT_POOLER=transaction"):
        migrate.up(dsn, sessions=True)
    migrate.check_ready(dsn)
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    assert await asyncio.to_thread(main, ["doctor"]) == 1
    assert "a pooler in transaction mode" in capsys.readouterr().out
    monkeypatch.setenv("LINESHAFT_POOLER", "transaction")
    assert await asyncio.to_thread(main, ["doctor"]) == 0


async def test_sql_reads_behind_a_pooler_and_changes_nothing(
    pooled: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", str(pooled.database_url))
    monkeypatch.setenv("LINESHAFT_POOLER", "transaction")
    assert await asyncio.to_thread(main, ["sql", "DELETE FROM task_live"]) == 1
    assert "read-only" in capsys.readouterr().err
    # The pooler's connections are as they were before.
    async with Lineshaft(settings=pooled, max_connections=SERVER_CONNECTIONS) as shaft:
        await asyncio.gather(*(shaft.submit(NewTask("x")) for _ in range(20)))
    assert await asyncio.to_thread(main, ["sql", "SELECT count(*) AS waiting FROM tasks"]) == 0
    assert capsys.readouterr().out.split() == ["waiting", "20"]


@pytest.mark.parametrize("mode", ["session"])
async def test_a_pooler_in_session_mode_needs_no_setting(pooled: Settings, mode: str) -> None:  # noqa: ARG001 - of the fixture
    async with Lineshaft(settings=replace(pooled, pooler="none")) as shaft:
        assert (await shaft.submit(NewTask("x"))).id


async def test_agents_work_behind_pgbouncer(pooled: Settings) -> None:
    """More connections than the pooler has, so that each statement may meet another session."""
    agents = [Agent(f"a{n}") for n in range(3)]

    async def double(ctx: TaskContext, n: int) -> int:
        ctx.progress("which makes it send a heartbeat")
        return await ctx.step("double", lambda: 2 * n)

    shafts = [Lineshaft(settings=pooled, max_connections=3) for _ in agents]
    for agent, shaft in zip(agents, shafts, strict=True):
        agent.task("double")(double)
        await shaft.open()
    running = [
        asyncio.create_task(agent.run(shaft, handle_signals=False))
        for agent, shaft in zip(agents, shafts, strict=True)
    ]
    tasks = await shafts[0].submit_many([NewTask("double", spec={"n": n}) for n in range(60)])
    ended = [await shafts[0].wait(task, 60) for task in tasks]
    for agent in agents:
        agent.stop()
    await asyncio.gather(*running)
    for shaft in shafts:
        await shaft.close()

    assert [task.result for task in ended] == [2 * n for n in range(60)]
    assert {task.attempts for task in ended} == {0}
