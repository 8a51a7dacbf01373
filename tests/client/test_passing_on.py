"""A wake-up passes from an agent that can't take the task to one that can, without a server."""

import asyncio
from typing import Any

import pytest

from lineshaft import NewTask
from lineshaft.client.backend import WorkWaiter
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.operations import agents
from lineshaft.settings import Settings
from lineshaft.types import AgentInfo, NewAgent, RegisteredAgent
from lineshaft.types.work import ClaimRef, Failure

TYPES = ["code"]


async def register(backend: DatabaseBackend, agent: NewAgent) -> RegisteredAgent:
    return await backend.call(agents.register_agent, agents.RegisterAgent(agent=agent))


@pytest.mark.parametrize(
    "constraint",
    [{"max_concurrent_tasks": 1}, {"budget_usd": 1}, {"models_available": ("m1",)}],
    ids=["slot", "money", "model"],
)
async def test_a_wake_up_is_passed_on_by_an_agent_that_cant_use_it(
    dsn: str, constraint: dict[str, Any]
) -> None:
    backend = DatabaseBackend(Settings(database_url=dsn))
    await backend.open()
    try:
        await backend.submit([NewTask("code", max_cost_usd=1)], connection=None)
        constrained = await register(backend, NewAgent(id="constrained", types=("code",), **constraint))
        able = await register(backend, NewAgent(id="able", types=("code",), models_available=("m2",)))
        (held,) = await backend.claim(constrained.id, constrained.incarnation, limit=1, types=TYPES)
        if "models_available" in constraint:
            claim = ClaimRef(held.task.id, held.task.epoch)
            await backend.fail([Failure(claim, "429 Too Many Requests", retry_after_sec=600)])

        async def works(agent: AgentInfo, waiter: WorkWaiter) -> None:
            while not await backend.claim(agent.id, agent.incarnation, limit=2, types=TYPES):
                await waiter.wait(60, types=TYPES, limit=2)

        async def waiting(agents: int) -> None:
            assert backend._wakeups is not None
            while backend._wakeups.waiting < agents:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)

        async with (
            backend.waiter(constrained.id, constrained.own) as one,
            backend.waiter(able.id, able.own) as two,
        ):
            async with asyncio.timeout(60):
                first = asyncio.create_task(works(constrained, one))
                await waiting(1)
                second = asyncio.create_task(works(able, two))
                await waiting(2)

                await backend.submit([NewTask("code", max_cost_usd=1)], connection=None)

                await second
                assert not first.done()
                first.cancel()
    finally:
        await backend.close()
