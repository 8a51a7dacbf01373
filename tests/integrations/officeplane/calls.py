"""Calls of OfficePlane's API that tests share, over a real server."""

from typing import Any

from tests.server.client import Client


async def create(client: Client, **fields: Any) -> dict[str, Any]:
    reply = await client.post("/api/tasks", {"taskType": "edit", **fields})
    assert reply.status == 201, reply
    made: dict[str, Any] = reply.json
    return made


async def look(client: Client, task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/api/tasks/{task_id}")).json
    return found


async def ids(client: Client, **query: Any) -> list[str]:
    reply = await client.get("/api/tasks", **query)
    assert reply.status == 200, reply
    return [task["id"] for task in reply.json]


async def fail(client: Client, agent: dict[str, Any], category: str = "crash", **claim: Any) -> str:
    task_id, token = await client.hold(agent, **claim)
    body = {"claim_token": token, "error": "it broke", "category": category}
    assert (await client.post(f"/v1/tasks/{task_id}/fail", body)).status == 200
    return task_id


async def complete(client: Client, agent: dict[str, Any], data: Any = None) -> str:
    task_id, token = await client.hold(agent)
    body = {"claim_token": token, "output": {"data": data}}
    assert (await client.post(f"/v1/tasks/{task_id}/complete", body)).status == 200
    return task_id
