"""A wake-up reaches one who can use it, also if it comes first to an agent that can't."""

import asyncio
from typing import Any

import pytest

from tests.server.client import Client
from tests.server.conftest import Served, until
from tests.server.test_waiting import claiming, waiting

CONSTRAINTS: dict[str, dict[str, Any]] = {
    "slot": {"max_concurrent_tasks": 1},
    "money": {"budget_usd": 1},
    "model": {"models_available": ["m1"]},
    "handler": {},
}


async def constrained(served: Served, by: str) -> Any:
    """An agent that can't take a task of the type "code" now."""
    client = served.client
    await client.submit("code", max_cost_usd=1)
    # Nothing of the past wakes anybody later on.
    await until(lambda: served.service.wakeups.moves == 1)
    agent = await client.register("constrained", **CONSTRAINTS[by])
    task_id, token = await client.hold(agent)
    if by == "model":
        limit = {"claim_token": token, "error": "429 Too Many Requests", "retry_after_sec": 600}
        await client.post(f"/v1/tasks/{task_id}/fail", limit)
    return agent


async def working(client: Client, agent: Any, types: list[str]) -> None:
    """As an agent in Python does: claims the types that have a handler with room."""
    item = {"agent_id": agent["id"], "incarnation": agent["incarnation"], "types": types, "limit": 2}
    while True:
        claimed = await client.post("/v1/work/claim", {"items": [item], "wait_sec": 60, "view": "work"})
        if claimed.json["items"][0]["tasks"]:
            return


@pytest.mark.parametrize("by", CONSTRAINTS)
async def test_of_agents_in_python(served: Served, by: str) -> None:
    client = served.client
    agent = await constrained(served, by)
    first = asyncio.create_task(working(client, agent, ["review"] if by == "handler" else ["code", "review"]))
    await waiting(served, 1)
    able = await client.register("able", models_available=["m2"])
    second = asyncio.create_task(working(client, able, ["code", "review"]))
    await waiting(served, 2)

    await client.submit("code", max_cost_usd=1)

    async with asyncio.timeout(60):
        await second
    assert not first.done()
    first.cancel()


@pytest.mark.parametrize("by", ["money", "model"])
async def test_of_agents_elsewhere(served: Served, by: str) -> None:
    client = served.client
    first = claiming(client, await constrained(served, by))
    await waiting(served, 1)
    second = claiming(client, await client.register("able", models_available=["m2"]))
    await waiting(served, 2)

    await client.submit("code", max_cost_usd=1)

    async with asyncio.timeout(60):
        assert (await second).json["tasks"]
    assert not first.done()
    first.cancel()
