"""Artifacts over HTTP, on a folder and on S3."""

import asyncio
import hashlib
import json
import os
import urllib.request
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask, Snooze, TaskContext
from lineshaft.artifacts.store import content_key
from tests.artifact_stores import place
from tests.server.client import Client, Reply, read_reply
from tests.server.conftest import Serve, Served, until

__all__ = ["place"]

LARGE = os.urandom(3 << 20)


@pytest.fixture
async def served(serve: Serve, place: str) -> AsyncIterator[Served]:
    async with serve(artifacts=place, max_body_bytes=1 << 20, max_artifact_bytes=5 << 20) as found:
        yield found


async def upload(client: Client, data: bytes, name: str = "report.txt", **query: Any) -> Any:
    reply = await client.request("POST", "/v1/artifacts", query=query, headers={"X-Filename": name}, raw=data)
    assert reply.status == 201, reply
    return reply.json


async def read(client: Client, made: Any, **headers: str) -> Reply:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.request("GET", f"/v1/artifacts/{made['id']}/content", headers=sent)


async def test_an_upload_larger_than_other_bodies_is_read_back(client: Client) -> None:
    task = (await client.post("/v1/tasks", {"type": "research"})).json
    made = await upload(client, LARGE, task_id=task["id"])

    digest = hashlib.sha256(LARGE).hexdigest()
    assert made.keys() == {*("id", "ref", "name", "size", "sha256", "content_type", "task_id", "created_at")}
    assert made["ref"] == f"artifact:{made['id']}"
    assert (made["size"], made["sha256"], made["task_id"]) == (len(LARGE), digest, task["id"])
    assert (await client.get(f"/v1/artifacts/{made['id']}")).json == made
    assert (await client.get("/v1/artifacts", task_id=task["id"])).json["items"] == [made]
    reply = await read(client, made)
    assert (reply.status, reply.body) == (200, LARGE)
    assert reply.headers["etag"] == f'"{digest}"'


async def test_ranges_and_etags(client: Client) -> None:
    data = bytes(range(256))
    made = await upload(client, data)
    etag = f'"{made["sha256"]}"'

    part = await read(client, made, Range="bytes=10-19")
    assert (part.status, part.body, part.headers["content-range"]) == (206, data[10:20], "bytes 10-19/256")
    assert (await read(client, made, Range="bytes=250-")).body == data[250:]
    assert (await read(client, made, Range="bytes=-6")).body == data[250:]
    assert (await read(client, made, Range="bytes=0-999")).body == data
    assert (await read(client, made, Range="bytes=0-1", If_Range=etag)).status == 206
    for whole in ("bytes=5-1", "bytes=0-1,5-6", "bytes=-", "lines=0-1", f"bytes={'9' * 50}-"):
        assert (await read(client, made, Range=whole)).body == data, whole
    assert (await read(client, made, Range="bytes=0-1", If_Range='"other"')).status == 200
    outside = await read(client, made, Range="bytes=256-")
    assert (outside.status, outside.headers["content-range"]) == (416, "bytes */256")
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        assert (await read(client, made, If_None_Match=known)).status == 304, known
    assert (await read(client, made, If_None_Match='"other"')).status == 200
    head = await client.request("HEAD", f"/v1/artifacts/{made['id']}/content")
    assert (head.status, head.headers["content-length"]) == (200, "256")


@pytest.mark.parametrize(
    ("name", "shown", "file_name"),
    [
        ("../../etc/passwd", "../../etc/passwd", "passwd"),
        ("%2e%2e/%00x%0d%0aSet-Cookie:%20a=b.html", None, None),
        ("x" * 5_000, "x" * 1_000, "x" * 200),
        ("home/.bashrc", "home/.bashrc", "_.bashrc"),
        ("Bericht%20%C3%BC%22.html", 'Bericht ü".html', "Bericht _'.html"),
    ],
)
async def test_hostile_names_and_html_are_served_harmlessly(
    client: Client, name: str, shown: str | None, file_name: str | None
) -> None:
    page = b"<html><script>alert(document.cookie)</script>"
    reply = await client.request(
        "POST", "/v1/artifacts", headers={"X-Filename": name, "Content-Type": "text/html"}, raw=page
    )
    made = reply.json
    if shown is not None:
        assert made["name"] == shown

    served = await read(client, made)
    assert served.body == page
    assert served.headers["x-content-type-options"] == "nosniff"
    assert served.headers["content-security-policy"] == "default-src 'none'; sandbox"
    disposition = served.headers["content-disposition"]
    assert disposition.startswith('attachment; filename="')
    assert "set-cookie" not in served.headers
    assert "/" not in disposition.split("''")[0]
    if file_name is not None and "ü" not in made["name"]:
        assert f'filename="{file_name}"' in disposition


async def test_what_is_refused(client: Client) -> None:
    assert (await client.get("/v1/artifacts/artifact_unknown")).code == "not_found"
    assert (await client.get("/v1/artifacts/artifact_unknown/content")).code == "not_found"
    assert (await client.request("DELETE", "/v1/artifacts/artifact_unknown")).code == "not_found"
    unknown = await client.request("POST", "/v1/artifacts", query={"task_id": "task_x"}, raw=b"x")
    assert unknown.code == "invalid_input"
    large = await client.request("POST", "/v1/artifacts", raw=bytes(6 << 20))
    assert large.code == "payload_too_large"
    assert "LINESHAFT_MAX_ARTIFACT_BYTES" in large.json["detail"]
    # Other calls keep their limit.
    assert (await client.post("/v1/tasks", {"type": "x" * (2 << 20)})).code == "payload_too_large"


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(client: Client, served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    head = "POST /v1/artifacts HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked", "Connection: close"
    writer.write("\r\n".join([*head, "", ""]).encode())
    chunk = bytes(64 << 10)
    for _ in range(96):
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    writer.write(b"0\r\n\r\n")

    reply = await read_reply(reader)
    writer.close()
    assert reply.code == "payload_too_large"
    assert (await served.service.engine.read.stats()).artifacts.contents == 0


async def test_a_sender_that_disappears_leaves_nothing(client: Client, served: Served) -> None:
    _, writer = await client.send(
        "POST", "/v1/artifacts", headers={"Content-Length": str(4 << 20)}, raw=LARGE
    )
    writer.transport.abort()
    made = await upload(client, b"after")

    page = (await client.get("/v1/artifacts")).json
    assert page["items"] == [made]
    store = served.service.engine.artifacts._store
    for _ in range(600):
        if not await store.old_temporary(timedelta(days=-1)):
            break
        await asyncio.sleep(0.05)
    assert await store.old_temporary(timedelta(days=-1)) == []


async def test_scopes(serve: Serve, place: str) -> None:
    async with serve(auth=True, artifacts=place) as served:
        tokens = {}
        for scope in ("read", "submit", "agent"):
            tokens[scope] = (await served.service.tokens.create(scope, scope)).token
        clients = {scope: Client(served.client.port, token) for scope, token in tokens.items()}

        assert (await served.client.request("POST", "/v1/artifacts", raw=b"x")).code == "unauthorized"
        assert (await clients["submit"].request("POST", "/v1/artifacts", raw=b"x")).code == "forbidden"
        made = await upload(clients["agent"], b"x")
        assert (await read(clients["read"], made)).body == b"x"
        path = f"/v1/artifacts/{made['id']}"
        assert (await clients["submit"].request("DELETE", path)).code == "forbidden"
        assert (await clients["agent"].request("DELETE", path)).status == 204
        assert (await clients["read"].get(path)).code == "not_found"


async def test_a_token_of_an_agent_uploads_for_tasks_that_the_agent_holds(serve: Serve, place: str) -> None:
    async with serve(auth=True, artifacts=place) as served:
        tokens = served.service.tokens
        boss = Client(served.client.port, (await tokens.create("boss", "admin")).token)
        bound = Client(served.client.port, (await tokens.create("ann", "agent", agent_id="ann")).token)
        held = (await boss.post("/v1/tasks", {"type": "research"})).json["id"]
        _, claim = await bound.hold(await bound.register("ann"))
        other = (await boss.post("/v1/tasks", {"type": "research"})).json["id"]

        made = await upload(bound, b"x", task_id=held)
        free = await upload(bound, b"x")
        not_own = await upload(boss, b"y", task_id=other)
        refused = await bound.request("POST", "/v1/artifacts", query={"task_id": other}, raw=b"z")
        assert (refused.status, refused.code) == (403, "forbidden")
        assert f"bound to agent 'ann', and task '{other}' is held by no agent" in refused.json["detail"]
        unknown = await bound.request("POST", "/v1/artifacts", query={"task_id": "task_x"}, raw=b"z")
        assert unknown.code == "forbidden"
        _, others_claim = await boss.hold(await boss.register("bob"))
        taken = await bound.request("POST", "/v1/artifacts", query={"task_id": other}, raw=b"z")
        assert "is held by agent 'bob'" in taken.json["detail"]
        assert (await bound.request("DELETE", f"/v1/artifacts/{not_own['id']}")).code == "forbidden"
        assert (await bound.request("DELETE", f"/v1/artifacts/{free['id']}")).code == "forbidden", (
            "of no task"
        )

        output = {"claim_token": claim, "output": {"data": 1, "artifacts": [made["ref"]]}}
        assert (await bound.post(f"/v1/tasks/{held}/complete", output)).json["status"] == "COMPLETED"
        assert (await bound.request("DELETE", f"/v1/artifacts/{made['id']}")).code == "forbidden"
        assert len((await boss.get("/v1/artifacts")).json["items"]) == 3
        assert others_claim


async def test_an_agent_with_its_own_token_stores_large_data(serve: Serve) -> None:
    agent = Agent("ann")

    @agent.task("make")
    async def make(ctx: TaskContext) -> str:
        if not ctx.state:
            await ctx.step("search", lambda: "s" * (2 << 20))
            await ctx.put_artifact("report", b"x")
            ctx.state["text"] = "t" * (2 << 20)
            raise Snooze(0)
        return str(ctx.steps["search"] + ctx.state["text"])

    async with serve(auth=True) as served:
        tokens = served.service.tokens
        url = f"http://127.0.0.1:{served.client.port}"
        bound = (await tokens.create("ann", "agent", agent_id="ann")).token
        boss = (await tokens.create("boss", "operate")).token
        async with Lineshaft(url, token=bound) as own, Lineshaft(url, token=boss) as shaft:
            handle = await shaft.submit(NewTask("make"))
            await agent.run(own, until_idle=True, handle_signals=False)
            assert await handle.result(timeout=60) == "s" * (2 << 20) + "t" * (2 << 20)


async def test_a_server_with_another_store_says_so(serve: Serve, tmp_path: Path) -> None:
    own, wrong = tmp_path / "own", tmp_path / "wrong"
    async with serve(artifacts=str(own)) as right, serve(artifacts=str(wrong)) as other:
        made = await upload(right.client, b"x")

        replies = [
            await other.client.request("POST", "/v1/artifacts", raw=b"y"),
            await read(other.client, made),
            await other.client.request("DELETE", f"/v1/artifacts/{made['id']}"),
        ]

        for reply in replies:
            assert (reply.status, reply.code) == (503, "unavailable")
            detail = reply.json["detail"]
            assert f"{wrong}, has no id; the database belongs to the store store_" in detail
            assert f"first used as the folder {own}. Set LINESHAFT_ARTIFACTS" in detail
        assert (await read(right.client, made)).body == b"x"
    assert not wrong.exists()


async def test_a_redirect_needs_no_token_on_s3(client: Client, place: str) -> None:
    made = await upload(client, LARGE)

    reply = await client.get(f"/v1/artifacts/{made['id']}/content", redirect="1")

    if not place.startswith("s3:"):
        assert (reply.status, reply.body) == (200, LARGE)
        return
    assert reply.status == 307
    location = reply.headers["location"]

    def fetch(url: str) -> bytes:
        with urllib.request.urlopen(url) as response:  # noqa: S310 - our own server
            return bytes(response.read())

    assert await asyncio.to_thread(fetch, location) == LARGE


async def test_a_content_that_was_changed_ends_too_early(client: Client, served: Served) -> None:
    made = await upload(client, LARGE)
    store = served.service.engine.artifacts._store
    key = content_key(made["sha256"])
    await store.delete([key])
    missing = await read(client, made)
    assert missing.status == 500
    assert "missing" in missing.json["detail"]
    await store.create(key, LARGE[:-1] + bytes([LARGE[-1] ^ 1]))

    reader, writer = await client.send("GET", f"/v1/artifacts/{made['id']}/content")
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.read()
    writer.close()
    assert b"200 OK" in head
    assert len(body) < len(LARGE)


async def test_a_large_object_is_deleted_and_its_path_is_unknown_then(client: Client, served: Served) -> None:
    made = await upload(client, LARGE)
    assert f"artifact_store_bytes {len(LARGE)}\n" in (await client.get("/metrics")).body.decode()

    assert (await client.request("DELETE", f"/v1/artifacts/{made['id']}")).status == 204

    assert (await read(client, made)).code == "not_found"
    assert (await served.service.engine.read.stats()).artifacts.bytes == 0


async def test_a_reader_that_disappears_ends_the_download(client: Client, served: Served) -> None:
    made = await upload(client, LARGE)
    _, writer = await client.send("GET", f"/v1/artifacts/{made['id']}/content")
    writer.transport.abort()

    await until(lambda: not served.server._uvicorn.server_state.tasks)


async def test_the_document_describes_the_upload(client: Client) -> None:
    document = (await client.get("/openapi.json")).json
    post = document["paths"]["/v1/artifacts"]["post"]

    assert "application/octet-stream" in post["requestBody"]["content"]
    assert json.dumps(post["parameters"]).count("X-Filename") == 1
    assert Path(post["responses"]["201"]["content"]["application/json"]["schema"]["$ref"]).name == "Artifact"
