"""Behind a pooler in transaction mode nothing may rely on a session."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lineshaft import Agent, Lineshaft, NewTask, TaskContext
from lineshaft.engine.postgres import migrate
from lineshaft.settings import Settings
from tests.chaos.cluster import Cluster
from tests.chaos.faults import pgbouncer
from tests.chaos.pooler import Pooler

pytestmark = pytest.mark.skipif(pgbouncer() is None, reason="needs PgBouncer (apt-get install pgbouncer)")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lineshaft-chaos-") as directory:
        # The accounts of the servers must be able to reach their files.
        Path(directory).chmod(0o711)
        yield Path(directory)


@pytest.fixture
async def pooled(place: Path) -> AsyncIterator[Settings]:
    cluster = Cluster(place)
    await cluster.start(standby=False)
    migrate.up(cluster.primary.dsn)
    program = pgbouncer()
    assert program is not None
    pooler = Pooler(program, place, cluster.account, lambda: cluster.primary.port)
    await pooler.start()
    yield Settings(database_url=pooler.dsn, pooler="transaction")
    pooler.stop()
    await cluster.stop()


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
