"""Tasks whose claim never reached the client go back at once."""

import asyncio
from typing import Any

import psycopg
import pytest

from lineshaft.errors import UnavailableError
from lineshaft.server.long_poll import DISCONNECT_WATCHER
from tests.server.conftest import Served, until

BLOCKED = b"SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
RELEASED = b"SELECT count(*) FROM lineshaft.events WHERE kind = 'task.released'"


def call_of(way: str, agent: Any, task: Any) -> tuple[str, Any]:
    """How the task is claimed in this way: path and body."""
    of_agent = {"agent_id": agent["id"], "incarnation": agent["incarnation"]}
    if way == "batch":
        return "/v1/work/claim", {"items": [{**of_agent, "start": True}], "wait_sec": 1, "view": "work"}
    if way == "by id":
        return f"/v1/tasks/{task['id']}/claim", of_agent
    wait_sec = 30 if way == "waiting" else 0
    return f"/v1/agents/{agent['id']}/claim", {"incarnation": agent["incarnation"], "wait_sec": wait_sec}


@pytest.mark.parametrize("way", ["waiting", "at once", "by id", "batch"])
async def test_the_client_has_left(
    served: Served, dsn: str, connection: psycopg.Connection, way: str
) -> None:
    client = served.client
    agent, task = await client.register(), await client.submit()
    with psycopg.connect(dsn) as locking:
        locking.execute("SELECT FROM lineshaft.instance WHERE agent_id = %s FOR UPDATE", [agent["id"]])
        _, writer = await client.send("POST", *call_of(way, agent, task))
        await until(lambda: connection.execute(BLOCKED).fetchone() is not None)
        writer.transport.abort()
        # The server has noticed before the claim goes on.
        await until(lambda: DISCONNECT_WATCHER not in {task.get_name() for task in asyncio.all_tasks()})

    await until(lambda: connection.execute(RELEASED).fetchone() == (1,))
    found = await client.task(task["id"])
    assert (found["status"], found["attempts"]) == ("READY", 0)


@pytest.mark.parametrize("way", ["at once", "by id", "batch", "history"])
async def test_the_database_goes_before_all_is_read(
    served: Served, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Twice: it is also away when they are to be handed back for the first time."""
    client, engine = served.client, served.service.engine
    agent, task = await client.register(), await client.submit()
    # It was started before, so there is a past to read.
    task_id, token = await client.hold(agent)
    await client.post(f"/v1/tasks/{task_id}/release", {"claim_token": token})
    history = (engine.claims, "_read_history")
    owner, name = {"batch": history, "history": history}.get(way, (engine.read, "tasks_by_id"))

    def go(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        async def gone(*_: Any) -> Any:
            monkeypatch.setattr(owner, name, real)
            raise UnavailableError("the database went away in this moment")

        monkeypatch.setattr(owner, name, gone)

    go(owner, name)
    go(engine.undelivered, "_release")
    reply = await client.post(*call_of(way, agent, task))

    assert (reply.status, reply.code) == (503, "unavailable")
    await until(lambda: connection.execute(RELEASED).fetchone() == (2,))
    found = await client.task(task["id"])
    assert (found["status"], found["attempts"]) == ("READY", 0)


async def test_a_defect_in_one_item_leaves_no_claim_of_another(
    served: Served, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, claims = served.client, served.service.engine.claims
    good, bad, task = await client.register("good"), await client.register("bad"), await client.submit()
    failed, real = asyncio.Event(), claims.claim

    async def claim(agent_id: str, *args: Any, **options: Any) -> Any:
        if agent_id == "bad":
            failed.set()
            raise RuntimeError("a defect")
        await failed.wait()
        return await real(agent_id, *args, **options)

    monkeypatch.setattr(claims, "claim", claim)
    items = [{"agent_id": agent["id"], "incarnation": agent["incarnation"]} for agent in (good, bad)]
    reply = await client.post("/v1/work/claim", {"items": items})

    assert reply.status == 500
    await until(lambda: connection.execute(RELEASED).fetchone() == (1,))
    assert (await client.task(task["id"]))["status"] == "READY"
