"""OfficePlane's WebSockets, with a real client: every transition, and no client is delayed by the slowest."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from lineshaft.integrations.officeplane import sockets, updates
from lineshaft.integrations.officeplane.sockets import PATHS
from lineshaft.server.framework import streams
from tests.server.client import Client
from tests.server.conftest import Serve, Served


@asynccontextmanager
async def listening(
    client: Client, path: str = "/ws", *, headers: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[ClientConnection]:
    url = f"ws://127.0.0.1:{client.port}{path}"
    async with connect(url, additional_headers=headers, proxy=None, close_timeout=1, **options) as socket:
        yield socket


async def heard(socket: ClientConnection, kind: str) -> dict[str, Any]:
    """The next message of this kind; others are passed over."""
    while True:
        message: dict[str, Any] = json.loads(await socket.recv())
        assert message["timestamp"].endswith("Z")
        if message["type"] == kind:
            return message


async def states(socket: ClientConnection, task_id: str, *, until: str) -> list[str]:
    """The states of a task in messages, up to this one; each message is checked."""
    found: list[str] = []
    while not found or found[-1] != until:
        message = await heard(socket, "task_update")
        assert message.keys() == {"type", "data", "payload", "timestamp"}
        assert message["data"] == message["payload"]
        if message["data"]["id"] == task_id:
            found.append(message["data"]["state"])
    return found


async def refusal(client: Client, **options: Any) -> InvalidStatus:
    with pytest.raises(InvalidStatus) as refused:
        async with listening(client, **options):
            pass
    return refused.value


@pytest.mark.parametrize("path", PATHS)
async def test_every_change_is_told_once(client: Client, path: str) -> None:
    """R-037, R-245: also those that are over before anybody could look, and no state twice in a row."""
    agent = await client.register()
    async with listening(client, path) as socket:
        made = (await client.post("/api/tasks", {"taskType": "x", "maxRetries": 1})).json
        task_id, token = await client.hold(agent)
        await client.post(f"/v1/tasks/{task_id}/fail", {"claim_token": token, "error": "boom"})
        shown = await states(socket, made["id"], until="RETRYING")
        assert shown == ["QUEUED", "RUNNING", "RETRYING"]

        await client.post(f"/api/tasks/{task_id}/retry")
        task_id, token = await client.hold(agent)
        await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": 7}})
        message: dict[str, Any] = {}
        shown = []
        while message.get("state") != "COMPLETED":
            message = (await heard(socket, "task_update"))["data"]
            shown.append(message["state"])
            assert (message["result"] is not None) == (message["state"] == "COMPLETED")
        assert shown == ["QUEUED", "RUNNING", "COMPLETED"]
        assert message["result"] == 7
        assert message == (await client.get(f"/api/tasks/{task_id}")).json


async def test_the_end_of_a_task_that_timed_out_or_was_cancelled(client: Client) -> None:
    agent = await client.register()
    async with listening(client) as socket:
        await client.post("/api/tasks", {"taskType": "x", "maxRetries": 0})
        task_id, token = await client.hold(agent)
        failed = {"claim_token": token, "error": "too long", "category": "timeout"}
        await client.post(f"/v1/tasks/{task_id}/fail", failed)
        assert await states(socket, task_id, until="TIMEOUT") == ["QUEUED", "RUNNING", "TIMEOUT"]
        other = await client.submit()
        await client.post(f"/v1/tasks/{other['id']}/cancel", {})
        assert await states(socket, other["id"], until="CANCELLED") == ["QUEUED", "CANCELLED"]
        await client.post(f"/api/tasks/{task_id}/retry")
        assert await states(socket, task_id, until="QUEUED") == ["QUEUED"]


async def test_a_batch_is_told_to_run_when_its_first_child_does(client: Client) -> None:
    """R-192."""
    agent = await client.register()
    async with listening(client) as socket:
        body = {"taskType": "x", "children": [{"taskType": "a"}, {"taskType": "b"}]}
        made = (await client.post("/api/tasks", body)).json
        for _ in range(2):
            task_id, token = await client.hold(agent)
            await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token})
        assert await states(socket, made["id"], until="COMPLETED") == ["QUEUED", "RUNNING", "COMPLETED"]


async def test_a_client_that_comes_later_is_told_changes_only(client: Client) -> None:
    """A change that 003's states don't show sends no message: READY is QUEUED, a started task was RUNNING."""
    agent = await client.register()
    first = await client.submit("a")
    second = await client.submit("b", depends_on=[first["id"]])
    (item,) = await client.claim(agent)
    started = {"claim_token": item["claim_token"]}
    async with listening(client) as socket:
        await client.post(f"/v1/tasks/{first['id']}/start", started)
        await client.post(f"/v1/tasks/{first['id']}/complete", started)
        assert await states(socket, first["id"], until="COMPLETED") == ["COMPLETED"]
        task_id, token = await client.hold(agent)
        assert task_id == second["id"]
        await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token})
        assert await states(socket, task_id, until="COMPLETED") == ["RUNNING", "COMPLETED"]


async def test_a_greeting_a_heartbeat_and_pongs(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sockets.HEARTBEAT_SEC == 30
    monkeypatch.setattr(sockets, "HEARTBEAT_SEC", 0.01)
    async with listening(client) as socket:
        greeting = json.loads(await socket.recv())
        assert (greeting["type"], greeting["status"]) == ("connection", "connected")
        await heard(socket, "heartbeat")
        await heard(socket, "heartbeat")
    monkeypatch.undo()
    async with listening(client) as socket:
        for ping in ("ping", '{"type": "ping"}'):
            await socket.send(ping)
            assert (await heard(socket, "pong")).keys() == {"type", "timestamp"}


async def test_what_clients_say_is_ignored_but_not_at_any_length(client: Client) -> None:
    async with listening(client) as socket:
        await socket.send("hello")
        await socket.send(b"\0")
        task = await client.submit()
        assert await states(socket, task["id"], until="QUEUED")
        await socket.send("x" * 100_000)
        with pytest.raises(ConnectionClosed) as closed:
            await states(socket, task["id"], until="never")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1"])
async def test_pages_of_others_get_no_socket(client: Client, origin: str) -> None:
    refused = await refusal(client, origin=origin)

    assert refused.response.status_code == 403


async def test_a_foreign_host_gets_no_socket(client: Client) -> None:
    """DNS rebinding."""
    reply = await client.request(
        "GET",
        "/ws",
        headers={
            "Host": "evil.example",
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        },
    )
    assert reply.status == 403


async def test_a_page_of_this_server_gets_one(client: Client) -> None:
    async with listening(client, origin=f"http://127.0.0.1:{client.port}") as socket:
        task = await client.submit()
        assert await states(socket, task["id"], until="QUEUED")


async def test_a_socket_needs_a_token_that_may_read(serve: Serve) -> None:
    async with serve(auth=True) as served:
        for headers in (None, {"Authorization": "Bearer nonsense"}):
            refused = await refusal(served.client, headers=headers)
            assert refused.response.status_code == 401
            assert json.loads(refused.response.body or b"").keys() == {"detail"}
        secret = (await served.service.tokens.create("me", "read")).token
        async with listening(served.client, headers={"Authorization": f"Bearer {secret}"}):
            pass


async def test_one_too_many(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets and streams together."""
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    async with served.client.stream() as stream, listening(served.client):
        assert stream.status == 200
        refused = await refusal(served.client)
        assert refused.response.status_code == 429
        assert refused.response.headers["retry-after"]


async def test_a_slow_reader_is_disconnected_and_delays_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "MAX_BUFFERED_BYTES", 2_000_000)
    client = served.client
    slow_reader, slow_writer = await client.send(
        "GET",
        "/ws",
        headers={
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        },
    )
    assert b"101" in await slow_reader.readline()
    slow_writer.transport.pause_reading()  # type: ignore[attr-defined]
    async with listening(client) as quick:
        both = set(served.server.officeplane.updates._listeners)
        assert len(both) == 2
        text = "x" * 100_000
        while len(served.server.officeplane.updates._listeners) == 2:
            task = await client.submit(spec={"text": text})
            assert await states(quick, task["id"], until="QUEUED")
        (lost,) = both - served.server.officeplane.updates._listeners
        assert lost.lost.is_set()
        assert lost._size == 0
        task = await client.submit()
        assert await states(quick, task["id"], until="QUEUED"), "the other goes on"
    slow_writer.transport.abort()


async def test_the_server_stops_with_open_sockets(serve: Serve) -> None:
    async with serve() as served, listening(served.client) as socket:
        await served.stop()
        with pytest.raises(ConnectionClosed) as closed:
            await states(socket, "none", until="never")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012


async def test_the_feed_goes_on_after_the_database_was_away(
    served: Served, connection: psycopg.Connection
) -> None:
    async with listening(served.client) as socket:
        task = await served.client.submit()
        await states(socket, task["id"], until="QUEUED")
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            # Only a superuser may end autovacuum.
            " AND backend_type = 'client backend'"
        )
        while (await served.client.get("/readyz")).status != 200:
            pass
        while (reply := await served.client.post("/v1/tasks", {"type": "x"})).status != 201:
            pass
        assert await states(socket, reply.json["id"], until="QUEUED")


async def test_nothing_is_read_without_listeners(served: Served) -> None:
    client = served.client
    async with listening(client):
        telling = served.server.officeplane.updates._sending
        assert telling is not None
    await asyncio.wait({telling})
    async with listening(client) as socket:
        task = await client.submit()
        assert await states(socket, task["id"], until="QUEUED")


async def test_messages_continue_after_an_unexpected_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "AGAIN_AFTER_SEC", 0.01)
    client, updates_ = served.client, served.server.officeplane.updates
    real = updates_._tasks

    async def failing(_: Any) -> Any:
        monkeypatch.setattr(updates_, "_tasks", real)
        raise psycopg.errors.UndefinedTable("the table is elsewhere just now")

    async with asyncio.timeout(60), listening(client) as socket:
        monkeypatch.setattr(updates_, "_tasks", failing)
        task = await client.submit()

        assert await states(socket, task["id"], until="QUEUED") == ["QUEUED"]
