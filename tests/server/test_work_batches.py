"""The worker protocol in batches: one result per item, in order, whatever the others are."""

import asyncio
from typing import Any

import pytest

from tests.server.client import Client
from tests.server.conftest import Served


async def batch(client: Client, call: str, *items: Any, **beside: Any) -> list[Any]:
    reply = await client.post(f"/v1/work/{call}", {"items": items, **beside})
    assert reply.status == 200, reply
    found: list[Any] = reply.json["items"]
    return found


async def held(client: Client, number: int, **fields: Any) -> list[dict[str, str]]:
    """Running tasks: their ids and claim tokens."""
    agent = await client.register()
    for _ in range(number):
        await client.submit(**fields)
    item = {"agent_id": agent["id"], "incarnation": agent["incarnation"], "limit": number, "start": True}
    (claimed,) = await batch(client, "claim", item)
    assert [each["task"]["status"] for each in claimed["tasks"]] == ["RUNNING"] * number
    return [{"id": each["task"]["id"], "claim_token": each["claim_token"]} for each in claimed["tasks"]]


#: Not too many characters, but too many bytes for an index; and not all the same, or it would be compressed.
TOO_LONG = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(1_000))

BODIES: dict[str, dict[str, Any]] = {
    "start": {},
    "complete": {"output": {"data": 1}, "cost_usd": 0.5},
    "fail": {"error": "it broke"},
    "release": {"cost_usd": 0.1},
    "cancel": {"reason": "enough", "cost_usd": 0.1},
}
STATUSES = {
    "start": "RUNNING",
    "complete": "COMPLETED",
    "fail": "RETRYING",
    "release": "READY",
    "cancel": "CANCELLED",
}


@pytest.mark.parametrize("call", BODIES)
async def test_an_invalid_item_affects_no_other(client: Client, call: str) -> None:
    one, two = await held(client, 2)
    body = BODIES[call]
    items = [
        {**one, **body},
        {**one, **body, "claim_token": "nonsense"},
        {**one, **body, "mispelt": 1},
        "not even an object",
        {"id": "task_unknown", "claim_token": "1.task_unknown", **body},
        {"id": "not\0storable", "claim_token": "1.not\0storable", **body},
        {**two, **body},
    ]

    found = await batch(client, call, *items)

    assert [item.get("status") if "problem" not in item else item["problem"]["code"] for item in found] == [
        *(STATUSES[call], "stale_claim", "invalid_input", "invalid_input", "not_found", "invalid_input"),
        STATUSES[call],
    ]
    assert found[2]["problem"]["errors"] == [{"loc": "mispelt", "msg": "unknown field"}]
    shown = await client.task(one["id"])
    assert found[0] | {"effective_priority": 0} == shown | {"effective_priority": 0}, (
        "the single call's answer"
    )


@pytest.mark.parametrize("call", BODIES)
async def test_a_worker_may_ask_for_less(client: Client, call: str) -> None:
    (task,) = await held(client, 1)

    (found,) = await batch(client, call, {**task, **BODIES[call]}, view="work")

    # Why an attempt failed, and how long the task waits, is shown too.
    assert (found.pop("retry_in_sec", 0) > 0) is (call == "fail")
    assert found.pop("failure_reason", None) == ("it broke" if call == "fail" else None)
    assert found == {"id": task["id"], "status": STATUSES[call]}


async def test_a_claim_for_workers_has_what_they_need(client: Client) -> None:
    await client.submit(spec={"n": 1}, max_cost_usd=2, tags=["x"])
    agent = await client.register()
    item = {"agent_id": agent["id"], "incarnation": agent["incarnation"], "start": True}

    ((claimed,),) = [found["tasks"] for found in await batch(client, "claim", item, view="work")]

    task = claimed["task"]
    assert (task["spec"], task["max_cost_usd"], task["started"]) == ({"n": 1}, 2, True)
    assert {"limit_sec", "heartbeat_interval_sec", "attempts", "epoch"} <= task.keys()
    assert not {"tags", "failure_history"} & task.keys()
    full = await client.task(task["id"])
    assert full["status"] == "RUNNING"
    done = await batch(client, "complete", {"id": task["id"], "claim_token": claimed["claim_token"]})
    assert done[0]["status"] == "COMPLETED"


async def test_progress_in_batches(client: Client) -> None:
    one, two = await held(client, 2)

    steps = await batch(
        client,
        "steps",
        {**one, "name": "a", "data": [1], "cost_usd": 0.2, "step_cost_usd": 0.1},
        {**one, "name": "a", "data": [2]},
        {**two, "name": "", "data": 1},
        {**two, "name": "b", "data": 1},
        {"id": "\0", "claim_token": "x", "name": "b", "data": 1},
        {**two, "name": TOO_LONG, "data": 1},
    )
    assert [item.get("data") for item in steps] == [[1], [1], None, 1, None, None]
    assert steps[5]["problem"]["code"] == "invalid_input"
    assert steps[2]["problem"]["code"] == "invalid_input"
    assert steps[0]["remaining_usd"] == {"task": None, "agent": None, "dag": None}
    saved = await batch(
        client,
        "checkpoint",
        {**one, "data": {"page": 7}},
        {**two, "claim_token": "x", "data": 1},
        {**two, "id": "\0", "data": 1},
    )
    assert saved[0] == {"data": {"page": 7}}
    assert saved[1]["problem"]["code"] == "stale_claim"
    spawned = await batch(
        client,
        "spawn",
        {**one, "key": "k", "tasks": [{"type": "child"}], "wait": True},
        {**two, "key": "k", "tasks": [{"type": "child", "surface": {}}]},
        {**two, "key": "k", "tasks": [{"type": "child"}]},
        {**two, "key": TOO_LONG, "tasks": [{"type": "child"}]},
    )
    assert spawned[3]["problem"]["errors"][0]["loc"] == "key"
    assert (spawned[0]["paused"], spawned[2]["paused"]) == (True, False)
    assert spawned[1]["problem"]["code"] == "invalid_input"
    assert [item["id"] for item in spawned[2]["items"]] == [child["id"] for child in spawned[2]["children"]]
    assert (await client.task(one["id"]))["status"] == "PENDING"


async def test_one_idempotency_key_for_children_of_several_tasks(client: Client) -> None:
    one, two = await held(client, 2)
    body = {"items": [{**each, "tasks": [{"type": "child"}]} for each in (one, two)]}

    async def spawn() -> list[str]:
        reply = await client.post("/v1/work/spawn", body, headers={"Idempotency-Key": "k"})
        return [child["id"] for item in reply.json["items"] for child in item["items"]]

    spawned = await spawn()

    parents = [(await client.task(child))["parent_id"] for child in spawned]
    assert parents == [one["id"], two["id"]], "each has a child of its own"
    assert await spawn() == spawned


async def test_one_heartbeat_for_a_whole_process(client: Client) -> None:
    one, two = await held(client, 2)
    other = await client.register("other", max_concurrent_tasks=4)
    await client.post(f"/v1/tasks/{two['id']}/cancel", {})

    first, second, unknown, old, invalid = await batch(
        client,
        "heartbeat",
        {"agent_id": "a1", "incarnation": 1, "tasks": [{**one, "progress": {"n": 1}, "cost_usd": 0.1}, two]},
        {"agent_id": "other", "incarnation": other["incarnation"]},
        {"agent_id": "unknown", "incarnation": 1},
        {"agent_id": "a1", "incarnation": 7},
        {"agent_id": "\0", "incarnation": 1},
    )

    assert first["tasks"] == {one["id"]: "continue", two["id"]: "cancel"}
    assert first["status"] == "active"
    assert (second["tasks"], second["max_concurrent_tasks"]) == ({}, 4)
    assert unknown["problem"]["code"] == "not_found"
    assert old["problem"]["code"] == "superseded"
    assert invalid["problem"]["code"] == "invalid_input"
    assert (await client.task(one["id"]))["progress"] == {"n": 1}


async def test_a_batch_has_at_most_a_thousand_items(client: Client) -> None:
    reply = await client.post("/v1/work/start", {"items": [{}] * 1001})

    assert (reply.status, reply.code) == (422, "invalid_input")
    assert (await client.post("/v1/work/start", {"items": []})).json == {"items": []}


async def test_one_run_of_maintenance_serves_all_concurrent_callers(served: Served) -> None:
    replies = await asyncio.gather(*(served.client.post("/v1/work/maintain", {}) for _ in range(20)))

    assert {reply.status for reply in replies} == {200}
    assert served.service.on_demand.runs < 20


NONE_DUE = {"due_sec": None, "count": 0}


async def test_when_the_next_retry_is_due(client: Client) -> None:
    (task,) = await held(client, 1, retry={"strategy": "fixed", "initial_delay_sec": 60, "jitter": False})
    assert (await client.get("/v1/work/retries", type=["code"], within_sec=90)).json == NONE_DUE
    await batch(client, "fail", {**task, "error": "it broke"})

    due = (await client.get("/v1/work/retries", type=["code", "other"], within_sec=90)).json
    assert (50 < due["due_sec"] <= 60, due["count"]) == (True, 1)
    assert (await client.get("/v1/work/retries", type=["code"], within_sec=9)).json == NONE_DUE


async def test_what_is_left_behind(client: Client) -> None:
    nothing = {"retrying": 0, "retry_sec": None, "scheduled": 0, "scheduled_sec": None, "waiting": 0}
    assert (await client.get("/v1/work/left-behind", type=["code"])).json == nothing | {
        "held": 0,
        "lease_sec": None,
        "ready": 0,
        "ready_id": None,
    }
    ready = (await client.submit())["id"]
    left = (await client.get("/v1/work/left-behind", type=["code"])).json
    assert (left["ready"], left["ready_id"]) == (1, ready)
    await client.post(f"/v1/tasks/{ready}/cancel", {})
    (task,) = await held(client, 1, retry={"strategy": "fixed", "initial_delay_sec": 60, "jitter": False})
    left = (await client.get("/v1/work/left-behind", type=["code"])).json
    assert (left["held"], 0 < left["lease_sec"] <= 90) == (1, True)
    await batch(client, "fail", {**task, "error": "it broke"})

    left = (await client.get("/v1/work/left-behind", type=["code"])).json
    assert (left["retrying"], 50 < left["retry_sec"] <= 60, left["held"]) == (1, True, 0)
    assert (await client.get("/v1/work/left-behind", type=["other"])).json["retrying"] == 0


async def test_an_output_is_checked_at_once(client: Client) -> None:
    """R-093: the check of a decision report doesn't wait for a validator."""
    one, two = await held(client, 2, preset="loki")
    report = {"why": "asked for", "what": "a page", "tradeoffs": "none"}

    found = await batch(
        client, "complete", {**one, "output": {"data": 1, "decision_report": report}}, two, view="work"
    )

    assert [item["status"] for item in found] == ["COMPLETED", "RETRYING"]
