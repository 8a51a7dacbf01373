"""What a crash of the server and a promoted standby do to the queue, without anything else going on."""

import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.events import NOW, Events
from lineshaft.engine.postgres import migrate
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from tests.chaos.cluster import Cluster

pytestmark = pytest.mark.slow("a primary and a standby are made and crash")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lineshaft-chaos-") as directory:
        # The server's account must be able to reach its data.
        Path(directory).chmod(0o711)
        yield Path(directory)


@pytest.fixture
async def cluster(place: Path) -> AsyncIterator[Cluster]:
    made = Cluster(place)
    await made.start(standby=True)
    yield made
    await made.stop()


async def test_what_becomes_ready_after_a_crash_can_be_claimed(cluster: Cluster) -> None:
    """A sequence may jump with a crash, or on a standby that takes over; claims must not look past it."""
    migrate.up(cluster.primary.dsn)

    async def submit_and_claim() -> list[str]:
        async with Engine(cluster.primary.dsn, max_connections=1) as engine:
            await engine.submission.submit([NewTask("t")])
            view = await engine.fleet.register(NewAgent(id="a", max_concurrent_tasks=100))
            return [task.type for task in (await engine.claims.claim("a", view.incarnation, limit=1)).tasks]

    async with Engine(cluster.primary.dsn, max_connections=1) as engine:
        assert await engine.maintenance.turn_generation(5)
    await cluster.restart(signal.SIGQUIT, 0)
    assert await submit_and_claim() == ["t"]

    await cluster.fail_over()
    assert await submit_and_claim() == ["t"]


@pytest.mark.parametrize("begins", ["before", NOW])
async def test_readers_miss_nothing_though_ids_of_transactions_come_again(
    cluster: Cluster, begins: str
) -> None:
    """What was rolled back just before a crash was never written down: its ids are given out again."""
    dsn = cluster.primary.dsn
    migrate.up(dsn)
    # Nothing is written before a commit.
    await cluster.primary.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
    await cluster.primary.execute("SELECT pg_reload_conf()")
    async with Engine(dsn, max_connections=1) as engine:
        await engine.submission.submit([NewTask("before")])
        _, cursor = await _read(engine, None)
        await _roll_back(dsn)
        seen, cursor = await _read(engine, NOW if begins == NOW else cursor)
        assert seen == []
        await cluster.primary.stop(signal.SIGQUIT)
    cluster.primary.start()
    await cluster.primary.answers()

    async with Engine(dsn, max_connections=1) as engine:
        await engine.submission.submit([NewTask("after")])
        seen, _ = await _read(engine, cursor)

    assert seen == ["task.created", "task.ready", "dag.created"]


async def _read(engine: Engine, after: str | None) -> tuple[list[str], str]:
    page = await Events(engine.database).read(after, limit=100)
    return [event.kind for event in page.items], page.next_cursor


async def _roll_back(dsn: str) -> None:
    """Transactions that have an id, wrote something, and left nothing behind."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        for _ in range(5):
            await connection.execute("INSERT INTO lineshaft.pause (since, type) VALUES (now(), 'x')")
            await connection.rollback()
