"""The event feed over HTTP: page by page, and as it happens."""

import asyncio
import json
from typing import Any

import psycopg
import pytest

from lineshaft.server.framework import streams
from tests.server.client import Client
from tests.server.conftest import Serve, Served


async def test_pages_go_on_for_ever(client: Client) -> None:
    task = await client.submit()

    first = (await client.get("/v1/events", limit=1)).json
    rest = (await client.get("/v1/events", after=first["next_cursor"])).json
    nothing = (await client.get("/v1/events", after=rest["next_cursor"])).json
    await client.post(f"/v1/tasks/{task['id']}/cancel", {"reason": "x"})
    news = (await client.get("/v1/events", after=nothing["next_cursor"])).json

    kinds = [e["kind"] for e in first["items"] + rest["items"]]
    assert kinds == ["task.created", "task.ready", "dag.created"]
    assert nothing["items"] == []
    assert nothing["next_cursor"]
    event, of_dag = news["items"]
    assert (of_dag["kind"], of_dag["data"]) == ("dag.cancelled", {"single": True})
    assert (event["kind"], event["task_id"]) == ("task.cancelled", task["id"])
    assert event["data"] == {"reason": "x", "actor": "this machine"}
    again = (await client.get("/v1/events", after=event["cursor"])).json
    assert again["items"] == [of_dag]


async def test_filters_of_the_feed(client: Client) -> None:
    one, two = await client.submit(), await client.submit()
    tasks = [{"key": "a", "type": "x"}, {"key": "b", "type": "x"}]
    dag = (await client.post("/v1/dags", {"title": "d", "tasks": tasks})).json["dag"]

    async def read(**query: Any) -> list[tuple[str, str]]:
        items = (await client.get("/v1/events", **query)).json["items"]
        return [(item["kind"], item["task_id"]) for item in items]

    assert await read(task_id=two["id"]) == [("task.created", two["id"]), ("task.ready", two["id"])]
    assert await read(kind="task.ready", task_id=one["id"]) == [("task.ready", one["id"])]
    assert {kind for kind, _ in await read(dag_id=dag["id"])} == {"dag.created", "task.created", "task.ready"}
    of_one = await read(dag_id=one["dag_id"])
    assert of_one == [("task.created", one["id"]), ("task.ready", one["id"]), ("dag.created", None)]
    assert len(await read(kind=["task.created", "dag.created"])) == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cursor_that_is_none(client: Client, stream: bool) -> None:
    headers = {"Accept": "text/event-stream"} if stream else {}

    reply = await client.request("GET", "/v1/events", query={"after": "rubbish"}, headers=headers)

    assert (reply.status, reply.code) == (422, "invalid_input")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cursor_that_retention_has_passed(
    client: Client, connection: psycopg.Connection, stream: bool
) -> None:
    await client.submit()
    cursor = (await client.get("/v1/events")).json["next_cursor"]
    connection.execute(
        "INSERT INTO lineshaft.event_horizon (xid, at) SELECT pg_snapshot_xmax(pg_current_snapshot()), now()"
    )
    headers = {"Accept": "text/event-stream"} if stream else {}

    reply = await client.request("GET", "/v1/events", query={"after": cursor}, headers=headers)

    assert (reply.status, reply.code) == (410, "cursor_expired")


async def test_a_stream_from_now_on(client: Client) -> None:
    await client.submit()
    async with client.stream() as stream:
        assert stream.status == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["cache-control"] == "no-cache"
        task = await client.submit()

        created = await stream.event()

        item = json.loads(created["data"])
        assert created["event"] == item["kind"] == "task.created"
        assert created["id"] == item["cursor"]
        assert item["task_id"] == task["id"]
        assert (await stream.event())["event"] == "task.ready"


async def test_a_stream_goes_on_where_another_stopped(client: Client) -> None:
    """No event missed, none doubled: whatever happened in between comes first."""
    seen: list[tuple[str, str]] = []
    made = [(await client.submit())["dag_id"] for _ in range(3)]
    last = {"id": (await client.get("/v1/events", limit=1)).json["next_cursor"]}
    async with client.stream(after=last["id"]) as stream:
        for _ in range(3):
            last = await stream.event()
            seen.append((last["event"], json.loads(last["data"])["dag_id"]))
    made += [(await client.submit())["dag_id"] for _ in range(3)]
    async with client.stream(last_event_id=last["id"], after="ignored") as stream:
        made.append((await client.submit())["dag_id"])
        while len(seen) < 3 * len(made) - 1:
            event = await stream.event()
            seen.append((event["event"], json.loads(event["data"])["dag_id"]))

    kinds = ("task.created", "task.ready", "dag.created")
    expected = [(kind, name) for name in made for kind in kinds]
    assert seen == expected[1:]


async def test_a_stream_with_a_filter(client: Client) -> None:
    watched, other = await client.submit(), await client.submit()
    async with client.stream(task_id=watched["id"], kind="task.cancelled") as stream:
        for task in (other, watched):
            await client.post(f"/v1/tasks/{task['id']}/cancel", {})

        event = await stream.event()

        assert (event["event"], json.loads(event["data"])["task_id"]) == ("task.cancelled", watched["id"])


async def test_streams_end_when_the_server_stops(serve: Serve) -> None:
    async with serve() as served, served.client.stream() as one, served.client.stream() as two:
        began = asyncio.get_running_loop().time()

        await served.stop()

        for stream in (one, two):
            with pytest.raises(EOFError):
                await stream.event()
        assert asyncio.get_running_loop().time() - began < 30


async def test_there_are_no_more_streams_than_a_server_can_serve(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 1)
    async with client.stream():
        reply = await client.request("GET", "/v1/events", headers={"Accept": "text/event-stream"})

    assert (reply.status, reply.code) == (429, "rate_limited")
    assert reply.headers["retry-after"]


async def test_a_quiet_stream_keeps_the_line_open(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its place moves on, though nothing fits its filter: another starts there, not at the beginning."""
    monkeypatch.setattr(streams, "PING_EVERY_SEC", 0.01)
    before = (await client.get("/v1/events")).json["next_cursor"]
    async with client.stream(kind="dag.failed", after=before) as stream:
        await client.submit()
        place = before
        while place == before or (await client.get("/v1/events", after=place)).json["items"]:
            line = await stream.line()
            if line.startswith("id: "):
                place = line.removeprefix("id: ")


async def test_a_client_that_leaves_frees_its_place(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_EVERY_SEC", 0.01)
    async with served.client.stream():
        assert served.service.tail.watchers == 1
    while served.service.tail.watchers:
        await served.client.get("/healthz")


async def test_the_first_stream_hears_what_happens_while_the_tail_finds_its_place(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, may_read = served.service.tail, asyncio.Event()
    real = served.service.events

    class Slow:
        async def read(self, *args: Any, **options: Any) -> Any:
            await may_read.wait()
            return await real.read(*args, **options)

    monkeypatch.setattr(tail, "_events", Slow())
    # The next ping would be later than this.
    async with asyncio.timeout(60), served.client.stream() as stream:
        task = await served.client.submit()
        may_read.set()

        assert json.loads((await stream.event())["data"])["task_id"] == task["id"]


async def test_streams_continue_after_an_unexpected_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "AGAIN_AFTER_SEC", 0.01)
    tail, failed = served.service.tail, asyncio.Event()
    real = served.service.events

    class Failing:
        async def read(self, *_: Any, **__: Any) -> Any:
            monkeypatch.setattr(tail, "_events", real)
            failed.set()
            raise psycopg.errors.UndefinedTable("the table is elsewhere just now")

    # The next ping would be later than this.
    async with asyncio.timeout(60), served.client.stream() as stream:
        monkeypatch.setattr(tail, "_events", Failing())
        await failed.wait()
        task = await served.client.submit()

        assert json.loads((await stream.event())["data"])["task_id"] == task["id"]


async def test_what_is_rare_is_looked_for_in_parts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one call would go through all of a long feed, also for a client that has left."""
    client = served.client
    monkeypatch.setattr(served.service.events, "_span", 1)
    for _ in range(3):
        await client.post("/v1/tasks/batch", {"tasks": [{"type": "x"}] * 9})
    task = await client.submit()
    await client.post(f"/v1/tasks/{task['id']}/cancel", {"reason": "rare"})

    first = (await client.get("/v1/events", kind="task.cancelled")).json
    assert (first["items"], first["caught_up"]) == ([], False)

    page = first
    async with asyncio.timeout(60):
        while not page["items"]:
            page = (await client.get("/v1/events", kind="task.cancelled", after=page["next_cursor"])).json
    assert [event["task_id"] for event in page["items"]] == [task["id"]]
