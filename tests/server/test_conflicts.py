"""`on_conflict` over HTTP: statuses, rights and events."""

from typing import Any

import pytest

from tests.server.client import Client
from tests.server.conftest import Serve
from tests.server.test_claim_tokens import operator


async def send(client: Client, n: int = 1, how: str = "replace_waiting", **fields: Any) -> Any:
    body = {"type": "code", "spec": {"n": n}, "idempotency_key": "k", "on_conflict": how, **fields}
    return await client.post("/v1/tasks", body)


async def test_a_waiting_task_is_replaced(client: Client) -> None:
    """200 with `replaced`; 201 for the first one."""
    first = await send(client, 1, debounce_sec=60)

    second = await send(client, 2, priority=3)
    by_header = await client.post(
        "/v1/tasks", {"type": "code", "on_conflict": "replace_waiting"}, headers={"Idempotency-Key": "k"}
    )

    assert [reply.status for reply in (first, second, by_header)] == [201, 200, 200]
    assert "replaced" not in first.json
    assert first.json["status"] == "PENDING"
    found = second.json
    assert (found["id"], found["replaced"], found["spec"]) == (first.json["id"], True, {"n": 2})
    assert (found["priority"], found["status"], "duplicate" in found) == (3, "READY", False)
    assert (by_header.json["replaced"], by_header.json["spec"]) == (True, {})
    assert "replaced" not in (await client.get(f"/v1/tasks/{found['id']}")).json
    events = (await client.get("/v1/events", kind="task.replaced")).json["items"]
    assert [event["data"]["actor"] for event in events] == ["this machine"] * 2
    assert events[0]["data"]["changed"] == ["priority", "run_at", "spec"]


async def test_what_runs_is_returned_or_cancelled(client: Client) -> None:
    first = (await send(client, 1)).json
    await client.hold(await client.register())

    returned = await send(client, 2)
    made = await send(client, 2, "cancel_running")

    assert (returned.status, returned.json["duplicate"], returned.json["mismatch"]) == (200, True, True)
    assert (made.status, made.json["spec"]) == (201, {"n": 2})
    old = (await client.get(f"/v1/tasks/{first['id']}")).json
    assert (old["status"], old["cancel_reason"]) == ("CANCELLED", "replaced")


async def test_reject_and_wrong_fields(client: Client) -> None:
    await send(client, 1, "reject")

    again = await send(client, 1, "reject")
    without_key = await client.post("/v1/tasks", {"type": "code", "on_conflict": "reject"})
    unknown = await send(client, 1, "ignore")
    needless = await send(client, 1, "cancel_running", debounce_sec=1)

    assert (again.status, again.code) == (409, "already_exists")
    for reply, name in ((without_key, "on_conflict"), (unknown, "on_conflict"), (needless, "debounce_sec")):
        assert (reply.status, reply.json["errors"][0]["loc"]) == (422, name)


async def test_a_batch_with_a_key_of_the_request(client: Client) -> None:
    """Each task has a key that is derived from it."""
    tasks = [{"type": "code", "spec": {"n": n}, "on_conflict": "replace_waiting"} for n in (1, 2)]
    headers = {"Idempotency-Key": "nightly"}

    first = (await client.post("/v1/tasks/batch", {"tasks": tasks}, headers=headers)).json["items"]
    again = (await client.post("/v1/tasks/batch", {"tasks": tasks}, headers=headers)).json["items"]

    assert [item["replaced"] for item in first] == [False, False]
    assert [(item["id"], item["replaced"]) for item in again] == [(item["id"], True) for item in first]


async def test_a_task_of_a_dag_is_not_one_that_others_replace(client: Client) -> None:
    task = {"type": "code", "key": "a", "idempotency_key": "k", "on_conflict": "replace_waiting"}

    reply = await client.post("/v1/dags", {"title": "a DAG", "tasks": [task]})

    assert (reply.status, reply.json["errors"][0]["loc"]) == (422, "tasks[0].on_conflict")


@pytest.mark.parametrize("how", ["replace_waiting", "cancel_running"])
async def test_tokens(serve: Serve, how: str) -> None:
    """Only the token that submitted a task may replace it, whatever the scope of another; agents neither."""
    async with serve(auth=True) as served:
        boss, tokens = await operator(served), served.service.tokens
        mine = Client(served.client.port, (await tokens.create("mine", "submit")).token)
        other = Client(served.client.port, (await tokens.create("other", "agent")).token)
        first = (await send(mine)).json

        for stranger in (other, boss):
            reply = await send(stranger, 2, how)
            assert (reply.status, reply.code) == (403, "forbidden")
        found = await send(mine, 3, how)

        assert (found.json["id"], found.json["replaced"]) == (first["id"], True)
        (event,) = (await boss.get("/v1/events", kind="task.replaced")).json["items"]
        assert event["data"]["actor"] == "mine"
