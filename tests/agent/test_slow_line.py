"""A line that is slow, but works."""

import asyncio

import pytest

from lineshaft import Agent, Lineshaft, NewTask, TaskContext
from lineshaft.engine.engine import Engine
from tests.agent.helpers import PATIENCE, at_work, with_heartbeats
from tests.proxy import proxied


@pytest.mark.slow("waits for heartbeats on a slow line")
async def test_heartbeats_arrive_over_slow_new_connections(dsn: str) -> None:
    """Found by chaos on a busy machine: each heartbeat timed out, and the next opened a new connection."""
    agent = Agent("a", heartbeat_interval_sec=4.0)
    leases: set[object] = set()

    async with proxied(dsn) as (through, proxy), Engine(dsn, max_connections=1) as near:

        @agent.task("t")
        async def handler(ctx: TaskContext) -> str:
            # The heart has no connection yet: five round trips and more, of 0.28 s each.
            proxy.delay_sec = 0.14
            async with with_heartbeats(ctx):
                while len(leases) < 3:
                    leases.add((await near.read.task(submitted.id)).lease_until)
                    await asyncio.sleep(0.05)
            return "done"

        async with Lineshaft(through, max_connections=4) as shaft:
            submitted = await shaft.submit(NewTask("t"))
            async with at_work(agent, shaft=shaft):
                ended = await shaft.wait(submitted, PATIENCE)

    assert (ended.result, ended.attempts) == ("done", 0)
