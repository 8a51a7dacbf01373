"""What a crash of the server and a promoted standby do to the queue, without anything else going on."""

import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lineshaft.model.tasks import NewTask
from lineshaft.sql import migrate
from lineshaft.store.engine import Engine
from lineshaft.store.fleet import NewAgent
from tests.chaos.cluster import Cluster


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
        assert await engine.upkeep.turn_generation(5)
    await cluster.restart(signal.SIGQUIT, 0)
    assert await submit_and_claim() == ["t"]

    await cluster.fail_over()
    assert await submit_and_claim() == ["t"]
