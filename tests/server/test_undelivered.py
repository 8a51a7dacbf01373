"""Tasks whose claim never reached the client go back at once."""

import asyncio
import time
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


@pytest.mark.parametrize("way", ["waiting", "at once", "by id", "batch", "next"])
async def test_an_answer_that_took_longer_than_the_lease_is_not_sent(
    served: Served,
    dsn: str,
    connection: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """The database was slow, or the server was frozen: others may have the task by then."""

    class Clock:
        ahead_sec = 0.0

        def clock_gettime(self, which: int) -> float:
            return time.clock_gettime(which) + self.ahead_sec

    clock = Clock()
    monkeypatch.setattr("lineshaft.clock.time", clock)
    client = served.client
    agent, task = await client.register(), await client.submit()
    path, body = call_of(way, agent, task)
    if way == "next":
        before, token = await client.hold(agent)
        task = await client.submit()
        path, body = f"/v1/tasks/{before}/complete", {"claim_token": token, "next": True}
    with psycopg.connect(dsn) as locking:
        locking.execute("SELECT FROM lineshaft.instance WHERE agent_id = %s FOR UPDATE", [agent["id"]])
        answering = asyncio.ensure_future(client.post(path, body))
        await until(lambda: connection.execute(BLOCKED).fetchone() is not None)
        clock.ahead_sec += 100
    reply = await answering

    assert (reply.status, reply.code) == (503, "unavailable")
    assert f"longer than the lease of task {task['id']}" in reply.json["detail"]
    await until(lambda: connection.execute(RELEASED).fetchone() == (1,))
    found = await client.task(task["id"])
    assert (found["status"], found["attempts"]) == ("READY", 0)
    if way == "next":
        # The output is recorded; a repeated call has the same answer, without the claim that was released.
        again = await client.post(path, body)
        assert (again.json["status"], again.json["next_claim"]) == ("COMPLETED", None)
    else:
        assert (await client.post(*call_of("batch", agent, task))).json["items"][0]["waited_sec"] >= 0


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
