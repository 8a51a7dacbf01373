"""`/hooks/{name}`: deliveries create work once, and everything else is refused and explained."""

import asyncio
import hashlib
import hmac
import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from lineshaft.clock import MovableClock
from tests.server.client import Client, Reply
from tests.server.conftest import Serve, Served

SECRET = "a-secret-that-stays-secret"
PULL_REQUEST = {
    "action": "opened",
    "number": 7,
    "pull_request": {"title": "Fix typo", "diff_url": "https://example.org/7.diff", "user": {"login": "ann"}},
    "repository": {"full_name": "acme/site"},
}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINESHAFT_HOOK_SECRET", SECRET)


def source(scheme: str, **fields: Any) -> dict[str, Any]:
    verify = (
        {"scheme": scheme} if scheme == "none" else {"scheme": scheme, "secret_env": "LINESHAFT_HOOK_SECRET"}
    )
    template = {"task": {"type": "review", "title": "${event.repository.full_name}#${event.number}"}}
    return {"kind": "webhook", "verify": verify, "template": template, **fields}


def signed(body: bytes, delivery: str = "d1", event: str = "pull_request") -> dict[str, str]:
    digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    return {
        "X-Hub-Signature-256": f"sha256={digest}",
        "X-GitHub-Delivery": delivery,
        "X-GitHub-Event": event,
        "Content-Type": "application/json",
    }


async def deliver(client: Client, name: str, body: bytes, headers: dict[str, str]) -> Reply:
    return await client.request("POST", f"/hooks/{name}", raw=body, headers=headers)


async def count(client: Client) -> int:
    return len((await client.get("/v1/tasks")).json["items"])


async def test_a_delivery_becomes_a_task_that_can_be_claimed_at_once(client: Client) -> None:
    await client.put("/v1/sources/github", source("github"))
    agent = (await client.post("/v1/agents", {"id": "a", "types": ["review"]})).json
    waiting = asyncio.create_task(
        client.post("/v1/agents/a/claim", {"incarnation": agent["incarnation"], "wait_sec": 30})
    )
    body = json.dumps(PULL_REQUEST).encode()
    began = time.monotonic()

    reply = await deliver(client, "github", body, signed(body))
    (claimed,) = (await waiting).json["tasks"]

    assert (reply.status, reply.json["outcome"], reply.json["dag_id"]) == (202, "created", None)
    assert claimed["task"]["id"] == reply.json["task_ids"][0]
    assert (claimed["task"]["title"], claimed["task"]["created_by"]) == ("acme/site#7", "event:github")
    assert time.monotonic() - began < 25, "it doesn't wait for the next poll, which is after 30 s"


async def test_a_repeated_delivery_creates_nothing(client: Client) -> None:
    await client.put("/v1/sources/github", source("github"))
    body = json.dumps(PULL_REQUEST).encode()

    first = await deliver(client, "github", body, signed(body))
    again = await deliver(client, "github", body, signed(body))
    # The same body under another id is another event: a workflow that is started twice by hand.
    other = await deliver(client, "github", body, signed(body, delivery="d2"))

    outcomes = [reply.json["outcome"] for reply in (first, again, other)]
    assert outcomes == ["created", "duplicate", "created"]
    assert {reply.status for reply in (first, again, other)} == {202}
    assert await count(client) == 2


async def test_a_known_body_is_a_replay_within_the_window_of_its_source(serve: Serve) -> None:
    clock = MovableClock(datetime(2026, 2, 8, 9, tzinfo=UTC))
    body = json.dumps(PULL_REQUEST).encode()
    async with serve(clock=clock) as served:
        await served.client.put("/v1/sources/github", source("github", replay_window_sec=3_600))

        async def outcome(delivery: str) -> str:
            reply = await deliver(served.client, "github", body, signed(body, delivery=delivery))
            return str(reply.json["outcome"])

        assert [await outcome("d1"), await outcome("d2")] == ["created", "duplicate"]
        clock.advance(3_601)
        assert [await outcome("d3"), await outcome("d4")] == ["created", "duplicate"]


async def test_a_delivery_that_two_servers_get_at_once_creates_one_task(serve: Serve) -> None:
    """With the same id, and with other ids but the same body."""
    async with serve() as one, serve() as two:
        await one.client.put("/v1/sources/github", source("github", replay_window_sec=60))
        replies = []
        for n in range(5):
            body = json.dumps({**PULL_REQUEST, "number": n}).encode()
            replies += await asyncio.gather(
                *(
                    deliver(served.client, "github", body, signed(body, delivery=f"{n}.{m // 2}"))
                    for m in range(4)
                    for served in (one, two)
                )
            )

        assert {reply.status for reply in replies} == {202}
        outcomes = sorted(reply.json["outcome"] for reply in replies)
        assert outcomes == ["created"] * 5 + ["duplicate"] * 35
        assert await count(one.client) == 5


async def test_how_long_a_repeated_delivery_is_recognised(serve: Serve) -> None:
    """By its id for 30 days; without one, by its body for a day. Then nothing of it is kept."""
    clock = MovableClock(datetime(2026, 2, 8, 9, tzinfo=UTC))
    body = json.dumps(PULL_REQUEST).encode()
    digest = {"X-Signature-256": signed(body)["X-Hub-Signature-256"].removeprefix("sha256=")}
    deliveries = {
        "github": signed(body),
        "gitlab": {"X-Gitlab-Token": SECRET, "X-Gitlab-Event-UUID": "e1"},
        "hmac-sha256": {**digest, "X-Delivery-Id": "e1"},
        "token": {"X-Webhook-Token": SECRET, "X-Delivery-Id": "e1"},
        "none": {"X-Delivery-Id": "e1"},
    }
    without_id = {
        "github": {**signed(body), "X-GitHub-Delivery": ""},
        "gitlab": {"X-Gitlab-Token": SECRET},
        "hmac-sha256": digest,
        "token": {"X-Webhook-Token": SECRET},
        "none": {},
    }
    async with serve(clock=clock) as served:
        client = served.client

        async def outcomes(which: dict[str, dict[str, str]]) -> list[str]:
            replies = [await deliver(client, name, body, headers) for name, headers in which.items()]
            return [reply.json["outcome"] for reply in replies]

        for scheme in deliveries:
            await client.put(f"/v1/sources/{scheme}", source(scheme))
        assert await outcomes(deliveries) == ["created"] * 5
        assert await outcomes(without_id) == ["created"] * 5
        clock.advance(23 * 3_600)
        assert await outcomes(without_id) == ["duplicate"] * 5
        clock.advance(2 * 3_600)
        assert await outcomes(without_id) == ["created"] * 5
        clock.advance(28 * 86_400)
        assert await outcomes(deliveries) == ["duplicate"] * 5
        clock.advance(61 * 86_400)
        await served.service.engine.sources.forget(86_400, 100)
        async with served.service.engine.database.connection() as connection:
            (left,) = await (await connection.execute("SELECT count(*) FROM lineshaft.source_key")).fetchone()  # type: ignore[misc]
        assert left == 0


async def test_what_isnt_authentic_is_refused_and_logged_without_the_secret(served: Served) -> None:
    client = served.client
    await client.put("/v1/sources/github", source("github"))
    await client.put("/v1/sources/off", {**source("github"), "enabled": False})
    await client.put("/v1/sources/tick", {"kind": "schedule", "every_sec": 60, "template": {"goal": "x"}})
    body = json.dumps(PULL_REQUEST).encode()
    changed = body.replace(b"typo", b"typa")

    with structlog.testing.capture_logs() as logs:
        replies = [
            await deliver(client, "github", changed, signed(body)),
            await deliver(client, "github", body, {"X-GitHub-Event": "push"}),
            await deliver(client, "github", b"", {}),
            await deliver(client, "nope", body, signed(body)),
            await deliver(client, "off", body, signed(body)),
            await deliver(client, "tick", body, signed(body)),
            await deliver(client, "github", b"not json", signed(b"not json")),
            await deliver(client, "github", b"[" * 101 + b"]" * 101, signed(b"[" * 101 + b"]" * 101)),
            await deliver(client, "github", b"x" * ((1 << 20) + 1), {}),
        ]

    statuses = [reply.status for reply in replies]
    assert statuses == [401, 401, 401, 401, 401, 401, 422, 422, 413]
    codes = {reply.code for reply in replies}
    assert codes == {"unauthorized", "invalid_input", "payload_too_large"}
    details = {
        reply.json["detail"].replace(name, "NAME")
        for reply in replies[:6]
        for name in ("nope", "off", "tick", "github")
        if f"'{name}'" in reply.json["detail"]
    }
    assert len(details) == 1, "a stranger can't tell an unknown name from a wrong signature"
    assert await count(client) == 0
    reasons = [entry["reason"] for entry in logs if entry["event"] == "Webhook refused"]
    assert reasons == [
        "the signature doesn't match",
        "the header x-hub-signature-256 is missing",
        "the header x-hub-signature-256 is missing",
        "unknown or disabled source",
        "unknown or disabled source",
        "unknown or disabled source",
        "body: not valid JSON",
        "is nested more than 100 levels deep",
    ]
    assert SECRET not in str(logs) + str(replies)


async def test_an_old_time_stamp_is_refused(serve: Serve) -> None:
    clock = MovableClock(datetime(2026, 2, 8, 9, tzinfo=UTC))
    async with serve(clock=clock) as served:
        await served.client.put("/v1/sources/slack", source("slack", template={"goal": "${event.text}"}))
        body = b"command=%2Ftask&text=Build+a+page&trigger_id=1.2.3"
        stamp = str(int(clock.now().timestamp()))
        digest = hmac.new(SECRET.encode(), b"v0:" + stamp.encode() + b":" + body, hashlib.sha256).hexdigest()
        headers = {
            "X-Slack-Signature": f"v0={digest}",
            "X-Slack-Request-Timestamp": stamp,
            "Content-Type": "application/x-www-form-urlencoded",
        }

        made = await deliver(served.client, "slack", body, headers)
        again = await deliver(served.client, "slack", body, headers)
        clock.advance(301)
        old = await deliver(served.client, "slack", body, headers)

        assert (made.status, made.json["outcome"], again.json["outcome"]) == (200, "created", "duplicate")
        assert made.json["response_type"] == "ephemeral"
        assert made.json["text"] == f"On it: {made.json['task_ids'][0]}"
        assert (old.status, old.code) == (401, "unauthorized")
        (task,) = (await served.client.get("/v1/tasks")).json["items"]
        assert (task["type"], task["spec"]) == ("goal", {"goal": "Build a page"})


async def test_tests_of_the_connection_are_answered(client: Client) -> None:
    await client.put("/v1/sources/github", source("github"))
    await client.put("/v1/sources/slack", source("slack"))
    ping = b'{"zen": "Keep it logically awesome."}'
    reply = await deliver(client, "github", ping, signed(ping, event="ping"))
    assert (reply.status, reply.json["outcome"], reply.json["task_ids"]) == (200, "filtered", [])
    (firing,) = (await client.get("/v1/sources/github/firings")).json["items"]
    assert firing["error"] == "GitHub's ping"

    body = json.dumps({"type": "url_verification", "challenge": "abc", "token": "x"}).encode()
    stamp = str(int(time.time()))
    digest = hmac.new(SECRET.encode(), b"v0:" + stamp.encode() + b":" + body, hashlib.sha256).hexdigest()
    headers = {"X-Slack-Signature": f"v0={digest}", "X-Slack-Request-Timestamp": stamp}
    reply = await deliver(client, "slack", body, headers)
    assert (reply.status, reply.json) == (200, {"challenge": "abc"})
    assert await count(client) == 0


async def test_a_delivery_comes_through_a_proxy_by_any_name_without_a_token(serve: Serve) -> None:
    async with serve(auth=True) as served:
        token = (await served.service.tokens.create("admin", "admin")).token
        admin = Client(served.client.port, token)
        await admin.put("/v1/sources/github", source("github"))
        body = json.dumps(PULL_REQUEST).encode()
        foreign = {
            "Host": "hooks.example.org",
            "Origin": "https://github.example",
            "Sec-Fetch-Site": "cross-site",
            "X-Forwarded-For": "203.0.113.9",
            "Via": "1.1 proxy",
        }

        reply = await deliver(served.client, "github", body, signed(body) | foreign)

        assert (reply.status, reply.json["outcome"]) == (202, "created")
        assert (await served.client.request("GET", "/v1/tasks", headers=foreign)).code == "forbidden"
        task = (await admin.get(f"/v1/tasks/{reply.json['task_ids'][0]}")).json
        assert task["created_by_token"] is None


async def test_without_its_secret_a_source_accepts_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.put("/v1/sources/github", source("github"))
    await client.put("/v1/sources/open", source("none"))
    monkeypatch.delenv("LINESHAFT_HOOK_SECRET")
    body = json.dumps(PULL_REQUEST).encode()

    refused = await deliver(client, "github", body, signed(body))
    made = await deliver(client, "open", body, {})
    again = await deliver(client, "open", body, {})

    unknown = await deliver(client, "nope", body, signed(body))
    assert (refused.status, refused.code) == (401, "unauthorized")
    assert refused.json["detail"].replace("github", "nope") == unknown.json["detail"]
    assert [reply.json["outcome"] for reply in (made, again)] == ["created", "duplicate"]
