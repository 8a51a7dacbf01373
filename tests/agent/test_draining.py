"""`until_idle`: when there is nothing left to do, and not before."""

from collections.abc import AsyncIterator, Sequence

import pytest

from lineshaft import Agent, Lineshaft, NewTask, TaskContext
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.settings import Settings
from tests.agent.helpers import AT_ONCE, drain


class Overtaken(DatabaseBackend):
    """Another process makes due tasks READY, just before an agent asks whether any will be."""

    async def retry_within(self, types: Sequence[str], within_sec: float) -> float | None:
        await self.maintain()
        return await super().retry_within(types, within_sec)


@pytest.fixture
async def overtaken(dsn: str) -> AsyncIterator[Lineshaft]:
    backend = Overtaken(Settings(database_url=dsn), max_connections=4)
    async with Lineshaft(backend=backend) as opened:
        yield opened


async def test_a_retry_that_becomes_ready_between_two_polls_is_done(overtaken: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        if ctx.attempt == 1:
            raise RuntimeError
        return "done"

    submitted = await overtaken.submit(NewTask("t", retry=AT_ONCE))
    await drain(overtaken, agent)

    assert (await overtaken.get(submitted)).result == "done"


async def test_a_handler_with_a_limit_gets_its_share(shaft: Lineshaft) -> None:
    """One slot and a backlog of other types: the best task still comes first."""
    agent = Agent("a", max_concurrent_tasks=1)
    order: list[str] = []

    @agent.task("common")
    async def common() -> None:
        order.append("common")

    @agent.task("rare", concurrency=1)
    async def rare() -> None:
        order.append("rare")

    await shaft.submit_many([NewTask("common", priority=90) for _ in range(5)])
    await shaft.submit(NewTask("rare", priority=0))
    await drain(shaft, agent)

    assert order == ["rare", *["common"] * 5]
